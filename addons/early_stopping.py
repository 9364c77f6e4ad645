"""Early stopping: end the run when the monitored metric has not improved for a while."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NoReturn

from zae.addon import AddOnBase, Description
from zae.arguments import Count, CountOrZero, NonNegative
from zae.errors import MonitorError

__all__ = ["EarlyStoppingAddon"]


class EarlyStoppingAddon(AddOnBase):
    """Stop when ``monitor`` has not improved by more than ``delta`` in ``patience`` consecutive validations.

    Without a ``valid_loader``, epochs of training are counted. A resume continues the count, and a new call of ``run``
    resets it. NaN is never an improvement.

    Parameters
    ----------
    patience : int
        The run ends after so many consecutive validations without an improvement.
    delta : float
        The smallest change that counts as an improvement.
    min_epochs : int
        The run does not end before so many of its epochs, whatever the metric is; validations are counted from the
        first one. Other ends, by ``max_steps``, ``max_time``, ``stop`` or a signal, do not wait for it.
    early_stopper : callable, optional
        ``early_stopper(step, score) -> bool`` decides instead: True stops.

    Raises
    ------
    ConfigError
        A number is out of its range.
    MonitorError
        At the first validation, when no metric has the name ``monitor``.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> from zae.addons import EarlyStoppingAddon
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).square().mean()}
    ...     def test_step(self, batch):
    ...         return {"loss": 1.0}
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Task.add_on(EarlyStoppingAddon)(model, "cpu", optimizer=optimizer, patience=2)
    >>> train, valid = [torch.ones(8, 2)], [torch.zeros(8, 2)]
    >>> metrics = trainer.run(100, train, valid)
    >>> metrics["epoch"], metrics["stop_reason"]
    (3, 'loss has not improved on 1 for 2 validations')
    """

    layer = "control"
    state_attributes = ("_best", "_waited", "_runs")
    slot = "early_stopping"

    def __init__(
        self,
        *args: Any,
        patience: Count = 3,
        delta: NonNegative = 0.0,
        min_epochs: CountOrZero = 0,
        early_stopper: Annotated[Callable[[int, float], bool], "a function (step, score) -> bool"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.patience = patience
        self.delta = delta
        self.min_epochs = min_epochs
        self.early_stopper = early_stopper
        self._best: float | None = None
        self._waited = 0
        self._runs = 0

    def on_run_begin(self) -> None:
        """Reset the count, unless a run is resumed."""
        super().on_run_begin()
        runs = len(self.progress_checker.run_starts)
        if runs != self._runs:
            self._best = None
            self._waited = 0
            self._runs = runs

    def check_better(self, metrics: Mapping[str, float]) -> bool:
        """Count this validation, and stop the run when patience is used up."""
        better = super().check_better(metrics)
        score = self.score_of(metrics)
        if score is None:
            self._refuse_monitor(metrics)
        if self.early_stopper is not None:
            if self.early_stopper(self.progress_checker.step, score):
                self._end(f"early_stopper said so at step {self.progress_checker.step} ({self.monitor} {score:g})")
        elif self._improves(score):
            self._best = score
            self._waited = 0
        else:
            self._waited += 1
            if self._waited >= self.patience:
                best = "NaN" if self._best is None else f"{self._best:.4g}"
                self._end(f"{self.monitor} has not improved on {best} for {self._waited} validations")
        return better

    def _refuse_monitor(self, metrics: Iterable[str]) -> NoReturn:
        """Refuse a monitor that no step returns."""
        raise MonitorError(
            f"early stopping monitors {self.monitor!r}, which no step returns; available: {', '.join(metrics)}; "
            "give monitor=..."
        )

    def _end(self, reason: str) -> None:
        """End the run, unless this call of ``run`` has fewer than ``min_epochs`` epochs yet."""
        first_epoch, _ = self.progress_checker.run_calls.present_start
        if self.progress_checker.epoch - first_epoch >= self.min_epochs:
            self.stop(reason)

    def _improves(self, score: float) -> bool:
        if math.isnan(score):
            return False
        if self._best is None:
            return True
        gain = self._best - score if self.history.direction == "min" else score - self._best
        return gain > self.delta

    def describe(self) -> list[Description]:
        """Tell when the run may end earlier."""
        condition = f"after {self.patience} consecutive validations without a better {self.monitor}"
        condition += f", not before {self.min_epochs} epochs" if self.min_epochs else ""
        return [*super().describe(), Description("may end earlier", condition, where="check_better")]

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Reset the count where another metric is monitored than in the saved run."""
        super().load_state_dict(state, strict)
        if not self.history.has_criterion_of(state["records"]):
            self._best = None
            self._waited = 0
