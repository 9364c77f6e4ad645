"""Step optimizers with their fused kernels, where that is exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.optim import SGD, Adam, AdamW, Optimizer

from zae.common.optim import leaves_kernel_open, parameters_of

__all__ = ["WITH_KERNEL", "fits_kernel", "fused_kernels", "is_fusible"]

_FUSED = (SGD, Adam, AdamW)  # The fused kernels that tests compare with the plain optimizer.
WITH_KERNEL = tuple(kind.__name__ for kind in _FUSED)
"""The names of the optimizers that step with their fused kernel."""


def is_fusible(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can use its fused kernel, on the CPU, and was made without choosing another one."""
    return type(optimizer) in _FUSED and all(
        leaves_kernel_open(group) and all(parameter.is_cpu for parameter in group["params"])
        for group in optimizer.param_groups
    )


def fits_kernel(optimizer: Optimizer) -> bool:
    """Return whether the fused kernel accepts the current gradients: dense ones, and momentum of all or of none."""
    held = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    if any(gradient.is_sparse for _, gradient in held):
        return False
    if type(optimizer) is not SGD:
        return True
    # Its state is a defaultdict: indexing would add an entry.
    return len({optimizer.state.get(parameter, {}).get("momentum_buffer") is None for parameter, _ in held}) < 2


@contextmanager
def fused_kernels(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let optimizers step with their fused kernels within a context, where these accept the current gradients."""
    groups = [group for each in optimizers if fits_kernel(each) for group in each.param_groups]
    before = [(group["fused"], group["foreach"]) for group in groups]
    for group in groups:
        group["fused"], group["foreach"] = True, False
    try:
        yield
    finally:
        for group, kept in zip(groups, before):
            group["fused"], group["foreach"] = kept
