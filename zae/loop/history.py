"""The history of a trainer: the logs of its open epoch, the rows that were recorded, and the best of them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zae.errors import ConfigError, MonitorError, did_you_mean, printable
from zae.loop.epoch_log import EpochLog, merge_logs
from zae.loop.metric_rows import Metrics, MetricsDict, split_prefix
from zae.loop.step_output import check_metrics
from zae.parts import gather_dp

if TYPE_CHECKING:
    from zae.loop.progress import ProgressChecker
    from zae.parts import SingleProcess

__all__ = ["History", "direction_of"]

_log = logging.getLogger("zae")
_SMALLER_IS_BETTER = """loss error mse mae rmse mape perplexity ppl wer cer eer fid nll distance bits divergence kl
regret brier"""
_LARGER_IS_BETTER = """acc accuracy f1 auc auroc precision recall iou miou bleu rouge meteor map mcc r2 psnr ssim dice
score reward return corr correlation spearman pearson kappa sensitivity specificity hit ndcg mrr top1 top5
elbo likelihood"""


def direction_of(monitor: str, mode: str = "auto") -> str:
    """Return "min" if a smaller value of a metric is better, else "max"."""
    if not isinstance(monitor, str) or not monitor:
        raise ConfigError(f"monitor={monitor!r}; it must be the name of a metric, for instance 'loss'")
    if mode != "auto":
        return mode
    words = monitor.lower().replace("/", "_").replace("-", "_").replace("@", "_").split("_")
    for word in reversed(words):
        if word in _SMALLER_IS_BETTER.split():
            return "min"
        if word in _LARGER_IS_BETTER.split():
            return "max"
    hint = did_you_mean(words[-1], [*_SMALLER_IS_BETTER.split(), *_LARGER_IS_BETTER.split()], cutoff=0.75)
    raise ConfigError(
        f"monitor={monitor!r}: its name does not say whether smaller or larger is better; write monitor_mode='min' or "
        f"monitor_mode='max'{hint}"
    )


class History:
    """What a trainer has recorded: the logs of the open epoch, a row for each epoch and validation, and the best.

    Attributes
    ----------
    direction : str
        Whether the best has the smallest or the largest ``monitor``: "min" or "max".
    log_train, log_test : EpochLog
        What the steps of the open epoch, and of the last evaluation, returned.
    train_metrics, test_metrics, best : Metrics
        Of the last epoch, of the last validation, and of the best epoch.
    train, valid, log : list
        The rows: one for each epoch, each validation, and each call of ``Trainer.log``.

    Examples
    --------
    >>> history = History("loss")
    >>> history.record("valid", {"loss": 0.5}, {"epoch": 1, "step": 10})
    >>> history.is_better(0.4), history.valid[-1]["valid_loss"]
    (True, 0.5)
    """

    def __init__(
        self,
        monitor: str,
        mode: str = "auto",
        *,
        keep_train_outputs: bool = False,
        keep_test_outputs: bool = True,
        owner: str = "Trainer",
    ) -> None:
        self.monitor = monitor
        self.direction = direction_of(monitor, mode)
        self._owner = owner
        self.log_train = EpochLog("log_train", keeps=keep_train_outputs)
        self.log_test = EpochLog("log_test", keeps=keep_test_outputs)
        self.train_metrics = Metrics()
        self.test_metrics = Metrics()
        self.best = Metrics()
        self.train: list[Metrics] = []
        self.valid: list[Metrics] = []
        self.log: list[dict[str, Any]] = []
        self._remarked: set[str] = set()

    # ------------------------------------------------------------------------------------------------ recording

    def record(
        self,
        split: str,
        metrics: Mapping[str, float],
        place: Mapping[str, int],
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Add the row of an epoch ("train"), or of a validation ("valid"): its means, its place, and learning rates."""
        row = Metrics({**_row(split, metrics, place), **(more or {})})
        if split == "train":
            self.train_metrics = Metrics(metrics)
            self.train.append(row)
        else:
            self.test_metrics = Metrics(metrics)
            self.valid.append(row)

    def summarize(self, split: str, engine: SingleProcess, further: Callable[[], Mapping[str, Any]]) -> Metrics:
        """Return the means of ``log_train`` or ``log_test`` over all ranks, with the further metrics computed from it.

        ``further`` is `Trainer.metric_on_epoch_end`: all ranks use what it returns on rank 0, to decide by the same.
        """
        name = f"log_{split}"
        log: EpochLog = getattr(self, name)
        if engine.dp_world_size > 1:
            log.read()
            setattr(self, name, merge_logs(gather_dp(engine, log)))
        try:
            means = getattr(self, name).means()
            own_metrics = self.further_metrics(split, further)
            return Metrics({**means, **gather_dp(engine, own_metrics)[0]})
        finally:
            # The log of all ranks was for these metrics; this rank goes on recording in its own.
            if split == "train":
                self.log_train = log

    def further_metrics(self, split: str, further: Callable[[], Mapping[str, Any]]) -> dict[str, float]:
        """Compute further metrics on this rank; none if they read what the log of the other mode does not have yet."""
        try:
            return check_metrics(f"{self._owner}.metric_on_epoch_end", further())
        except MonitorError as error:
            if getattr(error, "is_lost", False):
                _log.warning("metric_on_epoch_end adds nothing here: %s", error.args[0])
                return {}
            other_log = self.log_test if split == "train" else self.log_train
            if len(other_log) or getattr(error, "log", None) is not other_log:
                raise
            return {}

    def is_first_remark(self, about: str) -> bool:
        """Return whether nothing was said about this entry of the steps before."""
        is_first = about not in self._remarked
        self._remarked.add(about)
        return is_first

    # ------------------------------------------------------------------------------------------------- the best

    @property
    def watches_training(self) -> bool:
        """Whether the monitor is one of training's own metrics, which are known at the end of an epoch."""
        return split_prefix(self.monitor)[0] == "train"

    def score_of(self, metrics: Mapping[str, float]) -> float | None:
        """Return the monitored metric of a row, under its own name or without a split before it.

        None is only for the default monitor, where no step returns a loss.
        """
        prefix, bare = split_prefix(self.monitor)
        source = self.train_metrics if prefix == "train" and self.monitor not in list(metrics) else metrics
        for name in (self.monitor, bare):
            if name in source:
                return float(source[name])
        if self.monitor == "loss":
            return None
        not_numbers = self.log_train.not_numbers | self.log_test.not_numbers
        if bare in not_numbers:
            raise MonitorError(f"monitor={self.monitor!r}: a step returned {not_numbers[bare].text(bare)}")
        hint = did_you_mean(bare, source)
        available = f"{hint} Available" if hint else "; available"
        raise MonitorError(
            f"unknown metric {self.monitor!r} in monitor{available}: "
            f"{', '.join(source) or 'none'}; give one of these, or return it from the step"
        )

    def score_at(self, step: int, has_validation: bool) -> float | None:
        """Return the monitored metric if it was measured at this step, else None.

        Without any validation, training is measured at the end of an epoch.
        """
        if self.watches_training or not (self.valid or has_validation):
            rows, metrics = self.train, self.train_metrics
        else:
            rows, metrics = self.valid, self.test_metrics
        is_measured = bool(rows) and rows[-1]["step"] == step
        return self.score_of(metrics) if is_measured else None

    def is_better(self, score: float | None) -> bool:
        """Return whether a score is better than the best so far; NaN never is."""
        best = self.best.get("score")
        if score is None or score != score:
            return False
        if best is None:
            return True
        return bool(score < best) if self.direction == "min" else bool(score > best)

    def check_split(self, split: str, metrics: Mapping[str, float]) -> None:
        """Refuse a monitor of the validation where only training's metrics are known."""
        prefix, bare = split_prefix(self.monitor)
        if split == "train" and prefix not in ("", "train") and self.monitor not in list(metrics):
            raise MonitorError(
                f"monitor={self.monitor!r} is a metric of the validation, and nothing is validated; give run() a "
                f"valid_loader, or write monitor={bare!r}"
            )

    def update_best(
        self, split: str, metrics: Mapping[str, float], score: float | None, place: Mapping[str, int]
    ) -> None:
        """Keep these metrics as the best so far."""
        self.best = _best_row(split, metrics, score, place)

    def recompute_best(self) -> None:
        """Find the best in the rows by the present monitor, after a state that was saved with another one."""
        sign = 1 if self.direction == "min" else -1
        scored = [row for row in self.scores_by_step().values() if row["score"] == row["score"]]  # Not those of NaN.
        self.best = min(scored, key=lambda row: sign * row["score"], default=Metrics())

    def scores_by_step(self) -> dict[int, Metrics]:
        """Map each step with a value of the present monitor to a row as ``best`` is one."""
        _, bare = split_prefix(self.monitor)
        split, rows = "valid", self.valid
        if self.watches_training or not self.valid:
            split, rows = "train", self.train
        scores = {}
        for row in rows:
            metrics = {}
            for key, value in row.items():
                if key.startswith(f"{split}_"):
                    metrics[key.removeprefix(f"{split}_")] = value
            score = metrics.get(self.monitor)
            if score is None:
                score = metrics.get(bare)
            if score is not None:
                place = {"epoch": row["epoch"], "step": row["step"]}
                scores[row["step"]] = _best_row(split, metrics, score, place)
        return scores

    # ------------------------------------------------------------------------------------------------- reading

    def as_metrics(self, progress: ProgressChecker) -> MetricsDict:
        """Return the history so far, with a row for what there is of an open epoch."""
        rows = list(self.train)
        if progress.epoch_batch:
            rows.append(_row("train", self.log_train.means(), progress.place))
        return MetricsDict(
            best_valid=self.best if self.best.get("split") == "valid" else Metrics(),
            best_train=self.best if self.best.get("split") == "train" else Metrics(),
            train_metrics_history=rows,
            valid_metrics_history=list(self.valid),
            epoch=progress.epoch,
            step=progress.step,
            skipped_steps=progress.skipped_steps,
            nonfinite_steps=progress.nonfinite_steps,
            stop_reason=progress.stop_reason,
        )

    # ------------------------------------------------------------------------------------------------- its state

    @property
    def criterion(self) -> str:
        """The monitor and its direction, as a checkpoint keeps them."""
        return f"{self.monitor!r} ({self.direction!r})"

    def has_criterion_of(self, records: Mapping[str, Any]) -> bool:
        """Return whether saved scores compare with those of now: same monitor, same direction.

        A state without a monitor, which a script may have made, is treated as matching.
        """
        return records.get("monitor") in (None, self.criterion)

    @property
    def rows(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        """The rows by their names in a state; a row that was recorded never changes."""
        return {"train_history": self.train, "valid_history": self.valid, "log_history": self.log}

    def state_dict(self, is_open: bool = True, has_rows: bool = True) -> dict[str, Any]:
        """Return the records; ``is_open`` says whether the rest of an epoch, or its validation, needs the log."""
        histories = self.rows if has_rows else {}
        return {
            "log_train": self.log_train.state_dict(is_open),
            "train_metrics": dict(self.train_metrics),
            "test_metrics": dict(self.test_metrics),
            **{name: [dict(row) for row in rows] for name, rows in histories.items()},
            "best": dict(self.best),
            "monitor": self.criterion,
        }

    def with_records(self, records: Mapping[str, Any]) -> History:
        """Return a new history with the settings of this history and the records of a state."""
        copied = copy.copy(self)
        copied.log_train = self.log_train.empty_copy()
        copied.log_train.load_state_dict(records["log_train"])
        copied.train_metrics = Metrics(records["train_metrics"])
        copied.test_metrics = Metrics(records["test_metrics"])
        copied.best = Metrics(records["best"])
        copied.train = [Metrics(row) for row in records["train_history"]]
        copied.valid = [Metrics(row) for row in records["valid_history"]]
        copied.log = [dict(row) for row in records["log_history"]]
        if not self.has_criterion_of(records):
            copied.recompute_best()
            _log.warning(
                "the state was saved with monitor=%s, and here it is %s: the best epoch so far is determined again by "
                "it",
                printable(str(records["monitor"])),
                self.criterion,
            )
        return copied


def _row(split: str, metrics: Mapping[str, float], place: Mapping[str, int]) -> Metrics:
    """Return one row: where it was recorded, and the metrics with their split."""
    row = Metrics(place)
    for key, value in metrics.items():
        row[f"{split}_{key}"] = value
    return row


def _best_row(split: str, metrics: Mapping[str, float], score: float | None, place: Mapping[str, int]) -> Metrics:
    """Return the row of the best: its metrics, score and place; a metric called like these gets its split before it."""
    row = {"score": score, "split": split, **place}
    hidden = {f"{split}_{key}": value for key, value in metrics.items() if row.get(key, value) is not value}
    return Metrics({**hidden, **metrics, **row})
