"""Compare, as it ends, the first epoch of a run with what its loader has said, and with the weights before it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zae.data.loaders import describe, length_of
from zae.optim import parameters_of
from zae.torch_private import version_of
from zae.values.walk import local_part

if TYPE_CHECKING:
    from zae.loop.run import Run
    from zae.trainer import Trainer

__all__ = ["FirstEpoch"]

_log = logging.getLogger("zae")
_SAMPLE_SIZE = 16  # Numbers of each parameter that are kept for an epoch.
_MODE_DEPENDENT = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
)


class FirstEpoch:
    """Compares, as it ends, the first epoch of a run with what its loader has said and with the weights before it."""

    def __init__(self) -> None:
        self._weights: dict[str, list[_WeightSample]] = {}  # Of each optimizer.
        self._skipped_steps = 0
        self._length: int | None = None  # That of the loader as the first epoch of the training began.

    def open(self, run: Run, wrapped_loader: Any) -> None:
        """Note what there is as an epoch begins, or continues."""
        trainer = run.trainer
        progress = trainer.progress_checker
        is_begin = not progress.epoch_batch
        if is_begin:
            self._length = None if progress.epoch else length_of(wrapped_loader)
        self._weights = _weight_samples(trainer) if run.setup.watches_next_step and is_begin else {}
        if self._weights and trainer.is_main:
            _warn_of_evaluation_mode(trainer)
        self._skipped_steps = progress.skipped_steps

    def close(self, run: Run, wrapped_loader: Any, is_complete: bool) -> None:
        """Warn of another number of batches, and of weights that no step has changed."""
        trainer = run.trainer
        progress = trainer.progress_checker
        if is_complete:
            self._warn_of_length(run, wrapped_loader)
        if progress.skipped_steps - self._skipped_steps < progress.epoch_step:
            _warn_of_unmoved(trainer, self._weights)
        self._weights = {}

    def _warn_of_length(self, run: Run, wrapped_loader: Any) -> None:
        """Warn, in the first epoch, of a loader that yields another number of batches than its length says."""
        trainer = run.trainer
        progress = trainer.progress_checker
        length = self._length
        count = progress.epoch_batch + trainer.loader_position.absent_count
        self._length = None
        if length in (None, count) or run.extent.epoch_ends_at or not trainer.is_main:
            return
        _log.warning(
            "the loader has a length of %d, by which schedules are made, and yielded %d batches in the first epoch "
            "(%s): let __len__ return the number of batches, or write steps_per_epoch=...",
            length,
            count,
            describe(wrapped_loader),
        )


def _warn_of_evaluation_mode(trainer: Trainer) -> None:
    """Warn of parts that are trained in evaluation mode, in which ``from_pretrained`` returns a model.

    A layer alone, a BatchNorm for instance, is in evaluation mode on purpose.
    """
    trained = set(map(id, trainer.optimization.parameters))
    names: list[str] = []
    for name, part in trainer.unwrap().named_modules():
        if part.training or not part._modules or any(name.startswith(f"{outer}.") for outer in names):
            continue
        is_trained = any(id(weight) in trained and weight.requires_grad for weight in part.parameters())
        if is_trained and any(isinstance(layer, _MODE_DEPENDENT) for layer in part.modules()):
            names.append(name)
    if names:
        _log.warning(
            "%s is trained in evaluation mode, in which from_pretrained() returns a model: without dropout, and with "
            "fixed statistics of BatchNorm. Write model.train() before the run, or requires_grad_(False) for what is "
            "not to be trained",
            ", ".join(names),
        )


def _warn_of_unmoved(trainer: Trainer, before: Mapping[str, list[_WeightSample]]) -> None:
    """Warn of optimizers that have changed none of their weights in the epoch that ends."""
    names = []
    for name, samples in before.items():
        if samples and not any(sample.has_moved for sample in samples):
            names.append(name)
    if not names or not trainer.is_main:
        return
    several = ""
    remedy = ""
    if len(trainer.optimizers) > 1:
        several = f" of optimizer {', '.join(map(repr, names))}"
        remedy = ", and return a loss for each: {'loss': {name: loss, ...}}"
    _log.warning(
        "epoch %d has changed no weight%s in %d steps: compute the loss from self.model(...), let optimizer_step() "
        "step the optimizers, and a learning rate be above 0%s",
        trainer.progress_checker.epoch + 1,
        several,
        trainer.progress_checker.epoch_step,
        remedy,
    )


def _weight_samples(trainer: Trainer) -> dict[str, list[_WeightSample]]:
    """Return the first numbers of what each optimizer trains on this rank, to compare them later."""
    weights = {}
    for name, optimizer in trainer.optimizers.items():
        weights[name] = [_WeightSample.of(parameter) for parameter in _trained_parameters(optimizer)]
    return weights


def _trained_parameters(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer trains and of which this rank has plain numbers."""
    parameters = []
    for parameter in parameters_of(optimizer):
        if not parameter.requires_grad or is_lazy(parameter) or parameter.is_meta:
            continue
        local = local_part(parameter.data)
        if type(local) is Tensor and local.numel():
            parameters.append(parameter)
    return parameters


class _WeightSample(NamedTuple):
    """The first numbers of a parameter, to see later whether it has changed."""

    parameter: Tensor
    version: int
    numbers: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> _WeightSample:
        """Return the sample of a parameter as it is now."""
        return cls(parameter, version_of(parameter), _first_numbers(parameter).clone())

    @property
    def has_moved(self) -> bool:
        """Whether the parameter was written to, or these numbers differ: a fused kernel may not count as a write."""
        return version_of(self.parameter) != self.version or not _first_numbers(self.parameter).equal(self.numbers)


def _first_numbers(parameter: Tensor) -> Tensor:
    return local_part(parameter.data).reshape(-1)[:_SAMPLE_SIZE]
