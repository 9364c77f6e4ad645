"""The gradients of a step: their norm, and their mean over the targets of its batches on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zae.errors import ConfigError, StepError

__all__ = ["gradient_norm", "normalize", "total_targets"]


def normalize(
    counts: list[Any], parameters: Iterable[Tensor], reduce: Callable[[Tensor], Tensor], world_size: int
) -> None:
    """Divide the gradients by the number of targets in the window, over all ranks.

    The gradient of a window is then ``sum(n_i * g_i) / sum(n_i)``: every target has the same weight, in any
    micro-batch and rank. Ranks average their gradients, so the total is divided by the world size too.
    """
    if len(counts) == 1 and world_size == 1:  # A single loss is a mean over its targets.
        return
    total = total_targets(counts, reduce, world_size)
    if total is None:
        return
    for parameter in parameters:  # One by one, as a loop by hand: torch's kernel for many tensors rounds otherwise.
        if parameter.grad is not None:
            parameter.grad.div_(total / world_size)


def total_targets(counts: list[Any], reduce: Callable[[Tensor], Tensor], world_size: int) -> float | None:
    """Return the number of targets in the window, over all ranks; None where the steps count none."""
    missing = sum(count is None for count in counts)
    if missing == len(counts):
        return None
    if missing:
        raise StepError(
            f"train_step returned 'num_targets' for {len(counts) - missing} of the {len(counts)} batches of a window; "
            "return it in all of them, or in none"
        )
    on_device = [count.reshape(()) for count in counts if isinstance(count, Tensor) and not count.is_cpu]
    if len(on_device) == len(counts):  # One wait for the device in a window.
        are_integers = not any(count.is_floating_point() for count in on_device)
        # Float64 adds up as Python does; MPS has none.
        dtype = None if are_integers or on_device[0].is_mps else torch.float64
        counts = [torch.stack(on_device).sum(dtype=dtype)]
    total = float(sum(float(count) for count in counts))
    if world_size > 1:
        total = float(reduce(torch.tensor(total, dtype=torch.float64)))
    if not total > 0:
        raise StepError(
            f"the steps of a window counted {total:g} targets ('num_targets'); return a positive number, and leave "
            "batches without a target out of the data, for instance documents of one token"
        )
    return total


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of the gradients of parameters, as ``clip_grad_norm_`` computes it."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    try:
        return nn.utils.get_total_norm(gradients)
    except NotImplementedError as error:
        sparse = next((gradient for gradient in gradients if gradient.layout is not torch.strided), None)
        if sparse is None:
            raise
        raise ConfigError(
            f"gradient_clip computes the norm of the gradients, and torch has none for a sparse one (of shape "
            f"{tuple(sparse.shape)}); write sparse=False where the embedding is made, or gradient_clip=0"
        ) from error
