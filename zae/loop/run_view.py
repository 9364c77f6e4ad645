"""What a display asks a run for: how far it is, its numbers, and what there is to say at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zae.compose.introspect import slots_of
from zae.display.text import number
from zae.loop.limits import remaining
from zae.loop.progress import NO_LIMIT

if TYPE_CHECKING:
    from zae.loop.metric_rows import MetricsDict
    from zae.loop.run import Run

__all__ = ["Position", "RunView"]


class Position(NamedTuple):
    """How far a run is: its epoch and the last one, the steps of the epoch, all steps, and the steps to come."""

    epoch: int
    last_epoch: int | None
    epoch_step: int
    epoch_steps: int | None
    step: int
    steps_left: int | None

    @property
    def title(self) -> str:
        """The epoch, of how many."""
        return f"epoch {self.epoch}" + (f"/{self.last_epoch}" if self.last_epoch else "")


class RunView:
    """What a display asks a run for."""

    def __init__(self, run: Run, loader: Any = None) -> None:
        self._run = run
        self._trainer = run.trainer
        self._wrapped_loader = run.activity.loader if loader is None else loader

    def position(self) -> Position:
        """Return how far the run is, in its open epoch."""
        progress = self._trainer.progress_checker
        extent = self._run.extent
        steps_in_epoch = extent.steps_per_epoch(self._wrapped_loader)
        steps_left = None
        if self._run.is_call:
            _, steps_left = remaining(progress, extent.last_epoch, extent.last_step, steps_in_epoch)
        last_epoch = None if extent.last_epoch == NO_LIMIT else extent.last_epoch
        return Position(progress.epoch + 1, last_epoch, progress.epoch_step, steps_in_epoch, progress.step, steps_left)

    def current(self) -> dict[str, float]:
        """Return the means of the open epoch, and the learning rates."""
        return {**self._trainer.log_train.means(), **self._trainer.optimization.learning_rates()}

    def last_row(self) -> tuple[dict[str, Any], str]:
        """Return the row of the last epoch with its validation, and whether it, or a validation within, is the best."""
        history = self._trainer.history
        row = dict(history.train[-1])
        if history.valid and history.valid[-1]["step"] == row["step"]:
            row.update(history.valid[-1])
        before = history.train[-2]["step"] if len(history.train) > 1 else 0
        is_within = before < history.best.get("step", 0) < row["step"]
        return row, "(best)" if is_within else self._mark_of(row)

    def last_validation(self) -> tuple[dict[str, Any], str]:
        """Return the row of the last validation, and whether it is the best."""
        row = dict(self._trainer.history.valid[-1])
        return row, self._mark_of(row)

    def _mark_of(self, row: Mapping[str, Any]) -> str:
        return "best" if self._trainer.history.best.get("step") == row["step"] else ""

    def metrics(self) -> MetricsDict:
        """Return the history so far, as ``Trainer.run`` returns it."""
        return self._trainer.metrics

    def ending(self) -> list[str]:
        """Return what there is to say at the end: the best epoch, why the run stopped, and its last checkpoint."""
        best = self._trainer.history.best
        best_text = ""
        if "score" in best:
            best_text = f"{self._trainer.monitor} {number(best['score'])} in epoch {best['epoch']}"
            if all(row["step"] != best["step"] for row in self._trainer.history.train):
                best_text += f", at step {best['step']}"
        saves = "state" in slots_of(type(self._trainer))
        texts = {
            "best": best_text,
            "stopped": self._trainer.progress_checker.stop_reason,
            "saved": self._trainer.last_path if saves else None,
        }
        return [f"{name}: {text}" for name, text in texts.items() if text]
