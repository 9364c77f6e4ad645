"""How long one call of `Trainer.run` trains: its arguments, and the epoch and step where they make it end."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from zae.arguments import Count, NonNegative, check_argument, checked
from zae.compose.instance_checks import without_test_step
from zae.compose.introspect import owners_of
from zae.data.batch_limits import BatchLimits
from zae.data.loader_checks import check_loader, check_repeatable
from zae.data.loaders import length_of
from zae.errors import ConfigError, LoaderError
from zae.loop.cadence import Every
from zae.loop.progress import NO_LIMIT, ProgressChecker
from zae.optim.schedule_checks import Span

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["Extent", "RunLimits", "remaining"]


class RunLimits:
    """The arguments of ``run`` and ``plan`` beside the loaders: how long a call trains, and when it validates."""

    @checked
    def __init__(
        self,
        n_epoch: Count | None = None,
        max_steps: Count | None = None,
        valid_every: Every | int | None = None,
        steps_per_epoch: Count | None = None,
        max_time: float | timedelta | None = None,
        limit_batches: int | tuple[int | None, int | None] | None = None,
        overfit_batches: Count | None = None,
    ) -> None:
        seconds = max_time.total_seconds() if isinstance(max_time, timedelta) else max_time
        if seconds is not None:
            check_argument("max_time", seconds, NonNegative)
        self.max_time = seconds
        self.n_epoch = n_epoch
        self.max_steps = max_steps
        self.steps_per_epoch = steps_per_epoch
        self.valid_every = Every.parse(valid_every, "valid_every", Every(epochs=1))
        self.batches = _parse_batch_limits(limit_batches, overfit_batches)

    def check(self, cls: type, loader: Any, valid_loader: Any) -> None:
        """Refuse a call that would not end, and loaders that it cannot iterate over, limit, or evaluate."""
        if self.n_epoch is None and self.max_steps is None and self.max_time is None:
            raise ConfigError(
                "n_epoch is None, so the run would not end; give a number of epochs, max_steps=... or max_time=..."
            )
        if valid_loader is not None and not (owners_of(cls, "test_step") or owners_of(cls, "validate")):
            raise without_test_step(cls)
        check_loader(loader)
        if not isinstance(valid_loader, Mapping):
            if valid_loader is not None:
                check_loader(valid_loader, "valid_loader", takes_dict=True)
        elif not valid_loader:
            raise LoaderError("valid_loader is an empty dict; give loaders by name, or None")
        else:
            for name, part in valid_loader.items():
                if part is not None:
                    check_loader(part, f"valid_loader[{name!r}]")
        self.batches.check(loader, valid_loader)
        self._check_repeatable(loader, valid_loader)

    def _check_repeatable(self, loader: Any, valid_loader: Any) -> None:
        """Refuse loaders that can be read once, where it is certain that the run reads them more often."""
        ends_by_epochs = self.max_steps is None and self.max_time is None
        epochs = self.n_epoch if self.n_epoch is not None and ends_by_epochs else 1
        check_repeatable(loader, "loader", 1 if self.steps_per_epoch else epochs)
        due = [*islice(filter(self.valid_every.due_at_epoch, range(1, epochs + 1)), 2)]
        for part in valid_loader.values() if isinstance(valid_loader, Mapping) else [valid_loader]:
            check_repeatable(part, "valid_loader", len(due))

    def total_steps(self, steps_in_epoch: int | None) -> int | None:
        """Return the optimizer steps of the whole call, of epochs with so many steps; None is unknown."""
        if self.n_epoch is None or steps_in_epoch is None:
            return self.max_steps
        in_all_epochs = self.n_epoch * steps_in_epoch
        return in_all_epochs if self.max_steps is None else min(in_all_epochs, self.max_steps)


def _parse_batch_limits(limit: Any, overfit: int | None) -> BatchLimits:
    """Return the limits that ``limit_batches`` and ``overfit_batches`` set."""
    pair = limit if isinstance(limit, (tuple, list)) else (limit, limit)
    if len(pair) != 2:
        raise ConfigError(f"limit_batches={limit!r}; write one number of batches, or (training, validation)")
    train, valid = (check_argument("limit_batches", count, Count | None) for count in pair)
    if overfit is not None and train is not None:
        raise ConfigError(
            f"limit_batches={limit!r} and overfit_batches={overfit} both limit the training batches; write "
            f"limit_batches=(None, {valid}) to limit those of the validation alone"
        )
    return BatchLimits(overfit if train is None else train, valid, overfit is not None)


class Extent:
    """Where one call of `Trainer.run` ends, and how many optimizer steps its epochs have.

    Attributes
    ----------
    is_call : bool
        Whether it is a call of ``run``.
    began : float
        When the call began, by ``time.monotonic``.
    last_epoch, last_step : int
        Where the call ends at the latest; ``NO_LIMIT`` where no argument says it, and before the call has begun.
    steps_in_epoch : int or None
        Optimizer steps of an epoch, where that is known, once the call has begun.
    epoch_ends_at : int
        The optimizer step within the open epoch after which the epoch ends; 0 lets the loader end it.
    """

    def __init__(self, trainer: Trainer, loader: Any, limits: RunLimits | None) -> None:
        self._trainer: Any = weakref.proxy(trainer)
        self._loader = loader
        self.is_call = limits is not None
        self.began = time.monotonic()
        self._limits = limits or RunLimits()
        self.last_epoch = NO_LIMIT
        self.last_step = NO_LIMIT
        self.steps_in_epoch: int | None = None
        self.reset_epoch()

    @property
    def _progress(self) -> ProgressChecker:
        """The counters of the trainer, which are another object once a state was loaded."""
        progress: ProgressChecker = self._trainer.progress_checker
        return progress

    # ------------------------------------------------------------------------------------------- the whole call

    def update_end(self) -> None:
        """Find where the call ends, from the counters as they are now."""
        self.last_epoch, self.last_step = self.end_of_call()

    def end_of_call(self) -> tuple[int, int]:
        """Return the epoch and the step at which this call ends at the latest; ``NO_LIMIT`` means no limit."""
        calls = self._progress.run_calls
        if calls.is_completed:
            # Where the next call began, which may be earlier than the arguments say: that call may have been stopped.
            epoch, step = calls.starts[calls.index + 1]
            return epoch, step
        first_epoch, first_step = self._start_of_call()
        limits = self._limits
        last_epoch = NO_LIMIT if limits.n_epoch is None else first_epoch + limits.n_epoch
        last_step = NO_LIMIT if limits.max_steps is None else first_step + limits.max_steps
        return last_epoch, last_step

    def _start_of_call(self) -> tuple[int, int]:
        """Return the epoch and the step at which this call began, or begins now."""
        progress = self._progress
        calls = progress.run_calls
        if not calls.must_replay:
            return progress.epoch, progress.step
        epoch, step = calls.starts[calls.index]
        return epoch, step

    @property
    def is_reached(self) -> bool:
        """Whether the counters are at the end of the call."""
        return self._progress.epoch >= self.last_epoch or self._progress.step >= self.last_step

    @property
    def is_time_up(self) -> bool:
        """Whether ``max_time`` has passed."""
        max_time = self._limits.max_time
        return max_time is not None and time.monotonic() - self.began >= max_time

    def total_steps(self) -> int | None:
        """Return the steps that the last call of ``run`` was planned to take; None for a loader without a length."""
        trainer = self._trainer
        calls = self._progress.run_calls
        if self.is_call and trainer.mode == "train":
            steps_in_epoch = self.steps_per_epoch(trainer.wrap_loader(self._loader, True))
            calls.planned_steps = self._limits.total_steps(steps_in_epoch)
        if calls.planned_steps is ...:
            raise ConfigError(
                "the scheduler's factory takes total_steps, the number of optimizer steps of the run, which "
                "is known only within run() in mode 'train'; call run(n_epoch, loader) first (resume=... loads a "
                "state within it), or give a factory that takes only the optimizer: scheduler=lambda optimizer: ..."
            )
        planned: int | None = calls.planned_steps
        return planned

    def spans(self, steps_in_epoch: int | None) -> tuple[Span, Span]:
        """Return how far this call is, in epochs and in optimizer steps."""
        progress = self._progress
        first_epoch, first_step = self._start_of_call()
        last_epoch, last_step = self.end_of_call()
        epochs_left, steps_left = remaining(progress, last_epoch, last_step, steps_in_epoch)
        epochs = Span(first_epoch, progress.epoch, epochs_left)
        steps = Span(first_step, progress.step, steps_left)
        return epochs, steps

    # ------------------------------------------------------------------------------------------------ its epochs

    def steps_per_epoch(self, wrapped_loader: Any) -> int | None:
        """Return the optimizer steps of an epoch over a loader that ``wrap_loader`` returned; None is unknown."""
        limit = self._limits.steps_per_epoch
        length: int | None = self._trainer.steps_per_epoch(wrapped_loader)
        if limit is None or length is None:
            return length if limit is None else limit
        return min(limit, length)

    def reset_epoch(self) -> None:
        """Let the next epoch end where the arguments say."""
        self.epoch_ends_at = self._limits.steps_per_epoch or 0

    def end_epoch_here(self) -> None:
        """End the open epoch after the step that was made last."""
        self.epoch_ends_at = self._progress.epoch_step

    @property
    def is_epoch_cut(self) -> bool:
        """Whether `end_epoch_here` was called in the open epoch."""
        return self._progress.epoch_batch > 0 and self.epoch_ends_at != (self._limits.steps_per_epoch or 0)

    @property
    def is_epoch_end(self) -> bool:
        """Whether the open epoch ends after the step that was made last, whatever the loader still has."""
        return self._progress.epoch_step == self.epoch_ends_at

    def is_epoch_full(self, wrapped_loader: Any) -> bool:
        """Return whether the open epoch has all of its steps, or batches."""
        used = self._progress.epoch_batch
        return used > 0 and (self.is_epoch_end or used == length_of(wrapped_loader))


def remaining(
    progress: ProgressChecker, last_epoch: int, last_step: int, steps_in_epoch: int | None
) -> tuple[int | None, int | None]:
    """Return the remaining epochs and optimizer steps of a call, of epochs with so many steps; None is unknown."""
    epochs = None if last_epoch == NO_LIMIT else max(0, last_epoch - progress.epoch)
    steps = None if last_step == NO_LIMIT else max(0, last_step - progress.step)
    if not steps_in_epoch:
        return epochs, steps
    if epochs is not None:
        steps_of_epochs = max(0, steps_in_epoch * epochs - progress.epoch_step)
        steps = steps_of_epochs if steps is None else min(steps_of_epochs, steps)
    if steps is None:  # Only ``max_time`` ends the run.
        return None, None
    return (steps + progress.epoch_step) // steps_in_epoch, steps
