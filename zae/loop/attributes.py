"""The public attributes of a trainer that its parts hold: optimizers, records and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from zae.loop.epoch_log import EpochLog
from zae.loop.history import History, Metrics, MetricsDict

if TYPE_CHECKING:
    from zae.loop.progress import ProgressChecker

__all__ = ["Attributes"]


def _of(part: str, name: str, doc: str) -> Any:
    """Return a property for a public attribute of a trainer that one of its parts holds."""

    def read(trainer: Any) -> Any:  # Not an attrgetter, which torch.compile cannot trace.
        return getattr(getattr(trainer, part), name)

    return property(read, lambda trainer, value: setattr(getattr(trainer, part), name, value), doc=doc)


class Attributes:
    """What a trainer shows of its optimization, its history and its position in the data."""

    if TYPE_CHECKING:
        history: History
        progress_checker: ProgressChecker

    optimizer: Any = _of("optimization", "optimizer", "What was given; once set up, with what the factories made.")
    scheduler: Any = _of("optimization", "scheduler", "What was given; once set up, with what the factories made.")
    optimizers: dict[str, Optimizer] = _of("optimization", "optimizers", "The optimizers by name; an only one is '0'.")
    schedulers: dict[str, Any] = _of("optimization", "schedulers", "The schedulers by name; an only one is '0'.")
    parameters: list[Tensor] = _of("optimization", "parameters", "What is trained, of the model and the optimizers.")
    gradient_clip: float = _of("optimization", "gradient_clip", "The largest gradient norm; 0 does not clip.")
    grad_norm: Tensor | None = _of("optimization", "grad_norm", "The norm of the gradients before the last clip.")
    scheduler_step_on_batch: bool = _of("optimization", "scheduler_step_on_batch", "Step schedulers after each step.")
    monitor: str = _of("history", "monitor", "The metric that decides which epoch is the best.")
    fast_data: bool = _of("loader_position", "is_fast", "Whether batches may be gathered from tensors in memory.")
    keep_train_outputs: bool = _of("log_train", "keeps", "Whether what steps return beside numbers is kept.")
    log_train: EpochLog = _of("history", "log_train", "What the steps of the open epoch returned.")
    log_test: EpochLog = _of("history", "log_test", "What the steps of the last evaluation returned.")
    train_metrics: Metrics = _of("history", "train_metrics", "The metrics of the last epoch.")
    test_metrics: Metrics = _of("history", "test_metrics", "The metrics of the last validation.")
    best: Metrics = _of("history", "best", "The metrics of the best epoch, with its score and place.")
    train_history: list[Metrics] = _of("history", "train", "A row for each epoch of training.")
    valid_history: list[Metrics] = _of("history", "valid", "A row for each validation.")
    log_history: list[dict[str, Any]] = _of("history", "log", "A row for each call of ``log``.")

    @property
    def metrics(self) -> MetricsDict:
        """The history so far, as ``run`` returns it."""
        return self.history.as_metrics(self.progress_checker)

    def get_loss_history(self, mode: str = "train") -> list[float]:
        """Return the mean loss of each epoch ("train"), or of each validation ("test")."""
        return self.history.losses_of(mode)

    def print_log(self) -> None:
        """Write the history to standard output, as a table."""
        self.metrics.write()

    def log_reset(self) -> None:
        """Forget what the open epoch has logged."""
        self.log_train.clear()
        self.log_test.clear()

    def score_of(self, metrics: Mapping[str, float]) -> float | None:
        """Look the monitored metric up.

        Parameters
        ----------
        metrics : mapping
            The metrics of a validation, or of an epoch of training.

        Returns
        -------
        float or None
            None only for the default monitor, where no step returns a loss.

        Raises
        ------
        MonitorError
            With the names there are.
        """
        return self.history.score_of(metrics)
