"""What add-ons and callbacks ask of a run between two steps, and the hooks that decide what is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zae.compose.introspect import is_overridden
from zae.errors import ConfigError
from zae.loop.progress import SIGNALED
from zae.loop.recording import log_training
from zae.loop.validation import validate

if TYPE_CHECKING:
    from zae.loop.run import Run
    from zae.trainer import Trainer

__all__ = ["Requests"]

_ACTIONS = ("log", "validate", "save", "end_epoch")
_DECISIONS = ("should_validate", "should_checkpoint")


class Requests:
    """The requests of one call of `Trainer.run`, and its decisions.

    Attributes
    ----------
    actions : set of str
        What `Trainer.request` asked for, as all ranks know it; `serve` does it.
    logged_at : int
        The step after which training was logged last.
    signals : list of int
        Signals that ask for the end, as they come in.
    """

    def __init__(self) -> None:
        self.actions: set[str] = set()
        self.logged_at = -1
        self.signals: list[int] = []
        self._decisions: list[str] | None = None  # The decision hooks that the class, or the trainer, overrides.

    def add(self, action: str) -> None:
        """Note what is to be done after this step; all ranks call it."""
        if action not in _ACTIONS:
            raise ConfigError(f"request({action!r}); write 'log', 'validate', 'save' or 'end_epoch'")
        self.actions.add(action)

    def serve(self, run: Run) -> None:
        """Log, validate and end the epoch where that was asked for and not done at this step; leave "save"."""
        trainer = run.trainer
        progress = trainer.progress_checker
        actions = self.actions
        validations = trainer.history.valid
        if "log" in actions and self.logged_at != progress.step:
            log_training(run)
        if "validate" in actions and (not validations or validations[-1]["step"] != progress.step):
            validate(run, "step")
            if progress.pending_validation:  # The signal that has ended it came to all ranks.
                progress.stop_reason = SIGNALED
        if "end_epoch" in actions and progress.epoch_batch:
            run.extent.end_epoch_here()
        self.actions = actions & {"save"}

    def clear(self) -> None:
        """Leave out what was asked for, or done, since a state that the run goes back to."""
        self.actions.clear()
        self.logged_at = -1

    def decide(self, trainer: Trainer, name: str, is_due: bool) -> bool:
        """Ask a hook whether to do what is due, or not due; of several ranks, the answer of rank 0 counts."""
        if self._decisions is None:
            self._decisions = [decision for decision in _DECISIONS if is_overridden(trainer, decision)]
        if name not in self._decisions:
            return is_due
        # Ranks may differ, by a clock for instance. They would wait for each other in a validation that one leaves out.
        return bool(trainer.gather(bool(getattr(trainer, name)(is_due)))[0])
