"""Train a copy of a trainer for some steps; the trainer, its loaders, files and random streams stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zae import random_state
from zae.addon import AddOnBase, replaces
from zae.compose.composition import compose
from zae.compose.introspect import is_engine_slot, slots_of
from zae.compose.leave_out import leave_out
from zae.data.position import LoaderPosition
from zae.errors import ConfigError
from zae.loop.progress import ProgressChecker
from zae.loop.step_output import StepOutput
from zae.tuning.copies import CannotCopyError, borrow, copy_trainer

__all__ = ["trial", "trial_loader"]

_LEFT_OUT = ("state", "observe")  # The layers of add-ons that save and log.


class TrialAddon(AddOnBase):
    """Call the functions of a trial around each step; only the trial ends the run."""

    layer = "observe"
    before_step: Callable[[Any], None] | None = None
    after_step: Callable[[Any, Sequence[StepOutput]], bool] | None = None

    def on_step_begin(self, batch: Any) -> None:
        """Let the trial prepare the step."""
        super().on_step_begin(batch)
        if self.before_step is not None:
            self.before_step(self)

    def on_step_end(self, outputs: Sequence[StepOutput]) -> None:
        """Let the trial look at the step, and end the run if it has seen enough."""
        super().on_step_end(outputs)
        if self.after_step is not None and self.after_step(self, outputs):
            super().stop("the trial has seen enough")

    @replaces
    def stop(self, reason: str = "stop() was called") -> None:
        """Ignore what other add-ons say, early stopping for instance."""


def trial(trainer: Any, caller: str, *add_ons: Any) -> Any:
    """Return a copy of a trainer at the beginning of a run, without schedules and without add-ons that write.

    Parameters
    ----------
    trainer : Trainer
        It is not changed.
    what : str
        The name of the function, for errors.
    *more : type
        Add-ons that the copy has too; the caller sets their options.

    Returns
    -------
    Trainer
        The copy, with `TrialAddon`.

    Raises
    ------
    ConfigError
        The trainer is for evaluation, or for several processes, or cannot be copied.
    """
    if trainer.mode != "train":
        raise ConfigError(
            f"{caller} trains a copy, and this trainer has mode='test'; write trainer.toggle('train') first"
        )
    trainer.optimization.check_present()
    if trainer.world_size > 1 or any(map(is_engine_slot, slots_of(type(trainer)))):
        raise ConfigError(
            f"{caller} works in one process, and {type(trainer).__name__} is for several; call it with the trainer "
            "without its parallel add-on, and give the result to each process"
        )
    try:
        twin = copy_trainer(trainer, compose(leave_out(type(trainer), _LEFT_OUT), [*add_ons, TrialAddon]))
    except CannotCopyError as reason:
        raise ConfigError(f"{caller} cannot train a copy of {type(trainer).__name__}: {reason}") from reason
    twin.optimization.scheduler = None
    twin.log_bar = False
    twin.optimization.index_by_name()
    twin.nonfinite.policy = "skip"
    twin.progress_checker, twin.loader_position = ProgressChecker(), LoaderPosition(trainer.loader_position.is_fast)
    return twin


@contextmanager
def trial_loader(loader: Any, caller: str) -> Iterator[Any]:
    """Yield a loader with the batches of another one; put that one and all random streams back when the block ends."""
    with random_state.isolated():
        try:
            with borrow(loader) as own_loader:
                yield own_loader
        except CannotCopyError as reason:
            raise ConfigError(f"{caller}: {reason}; give a DataLoader, or a list of batches") from reason
