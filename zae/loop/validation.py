"""The validation of a run, after a step or an epoch, and the evaluation that a run in mode "test" is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from zae.compose.introspect import is_overridden
from zae.errors import TaskError, kind_of
from zae.loop.evaluation import EvaluationAborted
from zae.loop.recording import record_validation, update_best
from zae.loop.run_view import RunView
from zae.loop.step_output import check_metrics

if TYPE_CHECKING:
    from zae.loop.run import Run

__all__ = ["run_test_epoch", "validate"]


def validate(run: Run, moment: str) -> None:
    """Validate; a signal that asks for the end leaves it pending, with the state as before it."""
    trainer = run.trainer
    progress = trainer.progress_checker
    if run.valid_loader is None:
        progress.pending_validation = ""
        return
    progress.pending_validation = moment
    trainer.user_state.keep_over_validation(trainer)
    # After a signal it stays pending, and is in the state that is saved: the resumed run begins with it.
    with suppress(EvaluationAborted):
        trainer.on_validation_begin()
        metrics = trainer.validate()
        if is_overridden(trainer, "validate"):  # Its numbers may be of this rank alone.
            numbers = check_metrics(f"{type(trainer).__name__}.validate", metrics)
            metrics = trainer.gather(numbers)[0]
        record_validation(run, metrics)
        update_best(run, "valid", metrics)
        if moment == "step":  # That of an epoch is in the line of the epoch.
            run.display.validation(RunView(run))
        trainer.on_validation_end(metrics)
        trainer.user_state.release()


def run_test_epoch(run: Run) -> None:
    """Evaluate the loader of a call in mode "test", and record the metrics."""
    run.trainer.on_validation_begin()
    metrics = run.trainer.run_epoch(run.loader)
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"run_epoch returned {kind_of(metrics)} in mode 'test'; return the metrics of the evaluation: return "
            "super().run_epoch(loader), or self.evaluate(loader)"
        )
    record_validation(run, metrics)
    run.trainer.on_validation_end(metrics)
