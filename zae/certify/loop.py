"""The loop as one writes it by hand, which the promise "your loop" is tried with. It imports nothing of zae."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Recipe", "Uncovered", "train"]


class Uncovered(Exception):
    """What this loop does not do; the message names it."""


@dataclass(frozen=True)
class Recipe:
    """What a run is made of."""

    n_epoch: int | None
    max_steps: int | None = None
    accumulate: int = 1
    """Batches of one optimizer step."""
    clip: float = 0.0
    """The largest norm of the gradients; 0 does not clip."""
    precision: str = "fp32"
    """The type that autocast computes in; "fp16" has a loss scale."""
    loss_scale: tuple[float, float] = (2.0**16, 1.0)
    """The first loss scale, and the smallest one."""


def train(
    step: Callable[[Any], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    recipe: Recipe,
    *,
    per_step: Iterable[Any] = (),
    per_epoch: Iterable[Any] = (),
    with_epoch: Iterable[Any] = (),
) -> None:
    """Train a model in place.

    ``step`` is the user's ``train_step``. ``per_step`` and ``per_epoch`` are the schedulers by when they are stepped,
    ``with_epoch`` what has ``set_epoch``, such as a DistributedSampler.
    """
    device = next(model.parameters()).device
    scaler = None
    if recipe.precision == "fp16":
        scaler = torch.amp.GradScaler(device.type, init_scale=recipe.loss_scale[0])
    steps = 0
    for epoch in itertools.count() if recipe.n_epoch is None else range(recipe.n_epoch):
        if not model.training:
            model.train()
        for each in with_epoch:
            each.set_epoch(epoch)
        for window in windows(loader, recipe.accumulate):
            accumulate(step, model, window, scaler, recipe, device)
            stepped = update(model, optimizer, scaler, recipe)
            for scheduler in per_step if stepped else ():
                scheduler.step()
            model.zero_grad(set_to_none=True)
            steps += 1
            if steps == recipe.max_steps:
                return
        for scheduler in per_epoch:
            scheduler.step()


def windows(loader: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield the batches of each optimizer step; the last step of an epoch has what is left."""
    batches = iter(loader)
    while window := list(itertools.islice(batches, size)):
        yield window


def accumulate(
    step: Callable[[Any], Any],
    model: nn.Module,
    window: list[Any],
    scaler: Any,
    recipe: Recipe,
    device: torch.device,
) -> None:
    """Add up the gradients of a window: of the mean of its losses, or by targets where the step counts them."""
    targets = 0.0
    for batch in window:
        with autocast(recipe.precision, device):
            output = step(to_device(batch, device))
        output = output if isinstance(output, Mapping) else {"loss": output}
        loss, count = output["loss"], output.get("num_targets")
        if not isinstance(loss, Tensor):
            raise Uncovered("a loss for each of several optimizers")
        if not torch.isfinite(loss):
            raise Uncovered(f"a loss that is {loss.item()}")
        if len(window) > 1:
            loss = loss / len(window) if count is None else loss * count
        targets += float(count or 0.0)
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()
    if len(window) > 1 and targets:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(targets)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, recipe: Recipe) -> bool:
    """Unscale, clip and step; return whether the step took place."""
    if scaler is not None:
        scaler.unscale_(optimizer)
    if recipe.clip:
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        if scaler is None and not torch.isfinite(norm):
            raise Uncovered(f"a gradient norm that is {norm.item()}")
    if scaler is None:
        optimizer.step()
        return True
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    stepped = bool(scaler.get_scale() >= before)  # It lowers the scale where a gradient has overflowed.
    if scaler.get_scale() < recipe.loss_scale[1]:
        scaler.update(recipe.loss_scale[1])
    return stepped


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(each, device) for key, each in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(to_device(each, device) for each in batch)
    if device.type == "cpu":
        return batch
    raise Uncovered(f"a batch of {type(batch).__name__} on {device.type}")
