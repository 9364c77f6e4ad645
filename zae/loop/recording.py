"""What a run records: the rows of its history, the best of them, and what loggers get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zae.loop.metric_rows import Metrics
from zae.loop.step_remarks import report_not_numbers
from zae.metrics.reductions import means_of, merge_sums
from zae.parts import gather_dp

if TYPE_CHECKING:
    from zae.loop.run import Run

__all__ = ["log_training", "record_epoch", "record_validation", "update_best"]


def record_epoch(run: Run) -> Metrics:
    """Record the metrics of a complete epoch, step its schedulers, and count it."""
    trainer = run.trainer
    progress = trainer.progress_checker
    history = trainer.history
    # metric_on_epoch_end is called for training here, and must find no entries of a validation within the epoch.
    trainer.log_test.clear()
    metrics = history.summarize("train", trainer.engine, trainer.metric_on_epoch_end)
    # The rates that the epoch had: its schedulers step below.
    history.record("train", metrics, progress.place, trainer.optimization.learning_rates())
    if trainer.log_every.due_at_epoch(progress.epoch + 1):
        log_training(run, trainer.train_metrics)
    trainer.scheduler_step("epoch")
    progress.close_epoch()
    run.extent.reset_epoch()
    trainer.loader_position.start_next_epoch(progress.batch)
    report_not_numbers(run, trainer.log_train, "train_step")
    recorded: Metrics = history.train_metrics
    return recorded


def record_validation(run: Run, metrics: Mapping[str, float]) -> None:
    """Record and log the metrics of a validation."""
    trainer = run.trainer
    progress = trainer.progress_checker
    progress.pending_validation = ""
    trainer.history.record("valid", metrics, progress.place)
    trainer.log({f"valid/{key}": value for key, value in metrics.items()}, progress.step)


def update_best(run: Run, split: str, metrics: Mapping[str, float]) -> None:
    """Keep the best metrics, and step the schedulers that wait for a metric."""
    trainer = run.trainer
    history = trainer.history
    # A metric of training is known at the end of its epoch, where this method is called with "train".
    if split == "valid" and history.watches_training and history.monitor not in metrics:
        return
    history.check_split(split, metrics)
    score = trainer.score_of(metrics)
    if trainer.check_better(metrics):
        history.update_best(split, metrics, score, trainer.progress_checker.place)
    trainer.optimization.step_plateaus(score, history.monitor, metrics)


def log_training(run: Run, means: Mapping[str, float] | None = None) -> None:
    """Log learning rates, gradient norm, and the means of an epoch or of the steps since the last record."""
    trainer = run.trainer
    progress = trainer.progress_checker
    optimization = trainer.optimization
    run.requests.logged_at = progress.step
    if means is None:
        trainer.nonfinite.read_pending(progress, trainer)
    # Also where the means of an epoch are logged: the next record begins after this one.
    since_last_record = means_of(merge_sums(gather_dp(trainer.engine, trainer.log_train.take_sums())))
    record = {f"train/{key}": value for key, value in (means or since_last_record).items()}
    record |= optimization.learning_rates()
    if trainer.grad_norm is not None:
        record["grad_norm"] = float(trainer.grad_norm)
        for name, norm in optimization.grad_norms.items():
            record[f"grad_norm/{name}"] = float(norm)
    if progress.skipped_steps:
        record["skipped_steps"] = float(progress.skipped_steps)
    if progress.nonfinite_steps:
        record["nonfinite_steps"] = float(progress.nonfinite_steps)
    trainer.log(record, progress.step)
