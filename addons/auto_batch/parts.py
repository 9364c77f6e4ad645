"""Compute a batch in parts that fit in memory: which models allow it, and where a step begins again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zae.common import random_state
from zae.common.torch_private import version_of
from zae.errors import ConfigError, StepError
from zae.loop.step_output import read_output

__all__ = ["StepStart", "check_layers", "check_mean", "largest_part"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_SHOWN = 5
_TOLERANCE = 1e-3  # Of a loss in float32; rows of a matrix product may be rounded otherwise in another batch.
_COARSE = 5e-2  # In half precision.


def check_layers(model: nn.Module) -> None:
    """Refuse layers that normalize over the samples of a batch, or count the batches they have seen."""
    found = []
    for name, each in model.named_modules():
        mixes = isinstance(each, _BATCH_NORMS) and (each.training or not each.track_running_stats)
        counts = isinstance(each, _INSTANCE_NORMS) and each.training and each.track_running_stats
        if mixes or counts or (type(each).__name__ == "_SpectralNorm" and each.training):
            found.append(f"{name or 'the model itself'} ({type(each).__name__})")
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            "AutoBatchAddon may compute a batch in parts, and the result of these layers depends on all samples of "
            f"their input, or on how often they are called: {', '.join(found[:_SHOWN])}{more}. Use GroupNorm or "
            "LayerNorm, put them into evaluation mode, or leave AutoBatchAddon out"
        )


class StepStart:
    """What the gradients of a step start from, so that they can be computed again.

    Parameters
    ----------
    trainer : Trainer
        Its random streams and gradients are noted.
    generators : Generators
        Those of its add-ons.
    """

    def __init__(self, trainer: Any, generators: Any) -> None:
        self._trainer = trainer
        self._generators = generators
        self._rewind = random_state.rewind()
        self._drawn = generators.state_dict()
        kept = {id(each): each for each in (*trainer.unwrap().parameters(), *trainer.parameters)}
        self._gradients = [(each, None if each.grad is None else each.grad.clone()) for each in kept.values()]
        self._versions: list[tuple[Tensor, int]] = []

    def begin(self) -> None:
        """Note weights and buffers before the first forward, when ranks have exchanged theirs."""
        if not self._versions:
            held = (*(each for each, _ in self._gradients), *self._trainer.unwrap().buffers())
            self._versions = [(each, version_of(each)) for each in held]

    def restore(self) -> None:
        """Put random streams and gradients back; refuse to go on where weights or buffers are others now."""
        self.check("memory ran out after train_step had changed")
        self._rewind()
        self._generators.load_state_dict(self._drawn)
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()

    def check(self, what: str) -> None:
        """Refuse weights and buffers that a forward or a backward has changed."""
        model = self._trainer.unwrap()
        kept = {id(each) for each, version in self._versions if version_of(each) == version}
        held = {id(each) for each, _ in self._versions}
        named = [*model.named_parameters(), *model.named_buffers()]
        names = [name for name, each in named if id(each) not in kept]  # Changed, or another tensor now.
        if names or len(kept) < len(held):
            shown = ", ".join(names[:_SHOWN]) or "a parameter outside of the model"
            raise StepError(
                f"{what} {shown}: computed in parts, a batch would change it several times. Change it once for each "
                "step, in on_step_end for instance, or leave AutoBatchAddon out"
            )


def check_mean(trainer: Any, batches: Sequence[Any]) -> None:
    """Refuse a step whose loss over some samples is not the mean of their losses, weighted by its targets.

    Parameters
    ----------
    trainer : Trainer
        Its step is called with each batch, in evaluation mode and without gradients.
    batches : sequence
        The samples together, and then each of them.
    """
    model = trainer.unwrap()
    with _in_evaluation(model), random_state.isolated(), torch.no_grad():
        before = _streams()
        (whole, _), *found = [_loss_of(trainer, each) for each in batches]
        if _streams() != before:
            return  # It draws other numbers each time.
    total = sum(weight for _, weight in found)
    mean = sum(loss * weight for loss, weight in found if weight) / total if total else whole
    dtypes = {each.dtype for each in model.parameters()}
    is_coarse = bool(dtypes & {torch.float16, torch.bfloat16}) or trainer.precision_part.name != "fp32"
    scale = max(abs(whole), *(abs(loss) for loss, _ in found))
    if abs(whole - mean) > (_COARSE if is_coarse else _TOLERANCE) * scale + 1e-6:
        raise StepError(
            f"{type(trainer).__name__}.train_step has a loss of {whole:.6g} for {len(found)} samples together, and of "
            f"{mean:.6g} in the mean of each: computed in parts, a batch would train something else. Return "
            "'num_targets', the number that the loss is the mean over; a loss that compares samples with each other "
            "cannot be computed in parts: leave AutoBatchAddon out"
        )


def _loss_of(trainer: Any, batch: Any) -> tuple[float, float]:
    """Return the loss of a step, the sum of several, and what it weighs."""
    with trainer.forward_context():
        out = trainer.train_step(batch)
    values, weight = read_output(out, batch, trainer.sample_weight, type(trainer), trainer.mode, trainer.count_targets)
    loss = values["loss"]
    targets = values.get("num_targets")
    total = sum(map(float, loss.values())) if isinstance(loss, dict) else float(loss)
    return total, float(weight if targets is None else targets)


def _streams() -> tuple[Any, ...]:
    """Return the states of the random streams in a form that can be compared."""
    devices = [each.tolist() for states in random_state.of_devices().values() for each in states]
    return (*random_state.comparable(), devices)


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode for the block."""
    modes: list[tuple[nn.Module, bool]] = [(each, each.training) for each in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def largest_part(sizes: list[int]) -> int:
    """Return how many samples to compute at once where those of these sizes did not fit on some ranks."""
    return min(-(-size // 2) for size in sizes if size)
