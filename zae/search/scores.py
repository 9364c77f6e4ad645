"""The score of a trial: of one validation, and of all that its run has recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zae.common.argument_checks import describe_value
from zae.errors import ConfigError
from zae.loop.history import History, Metrics, MetricsDict, split_prefix

__all__ = ["OtherDirectionError", "Score"]


class OtherDirectionError(Exception):
    """The monitor of a trainer has another direction than the search."""

    def __init__(self, direction: str) -> None:
        super().__init__(direction)
        self.direction = direction


def _direction_of(history: History) -> str:
    return "minimize" if history.direction == "min" else "maximize"


@dataclass
class Score:
    """How trials are compared.

    Attributes
    ----------
    objective : callable or None
        Returns the score of metrics, or one for each direction; None is the monitored metric.
    directions : list of str
        "minimize" or "maximize".
    """

    objective: Callable[[Any], Any] | None
    directions: list[str]

    def of_metrics(self, metrics: Mapping[str, float], monitored: Callable[[Any], float | None]) -> float:
        """Return the score of one validation, of a search in one direction."""
        found = monitored(metrics) if self.objective is None else self.objective(Metrics(metrics))
        return math.nan if found is None else self._checked(found)[0]

    def of_run(self, result: Any, history: History) -> list[float]:
        """Return the scores of a trial that has ended: what ``run`` returned, if that is numbers, else the best.

        A dict that ``run`` returned has the metrics of an evaluation, which are scored; what `Trainer.run` returned is
        the history. With several directions it is the last score, because there is not one best.
        """
        if isinstance(result, (int, float)) or (isinstance(result, (list, tuple)) and result):
            return self._checked(result)
        if isinstance(result, Mapping) and not isinstance(result, MetricsDict):
            score = history.score_of if self.objective is None else self.objective
            return self._checked(score(Metrics(result)))
        if self.objective is None and len(self.directions) == 1:
            has_rows = history.train or history.valid
            return self._checked(history.best["score"] if history.best else math.nan if has_rows else None)
        scores = [self._checked(self.objective(row)) for row in _rows(history)] if self.objective else []
        if len(self.directions) > 1 or not scores:
            return scores[-1] if scores else self._checked(None)
        numbers = [each for (each,) in scores if not math.isnan(each)] or [math.nan]
        return [min(numbers) if self.directions == ["minimize"] else max(numbers)]

    def check_monitor(self, history: History) -> None:
        """Refuse a direction that contradicts the monitor of a trainer."""
        if self.objective is None and len(self.directions) == 1 and self.directions != [_direction_of(history)]:
            raise OtherDirectionError(_direction_of(history))

    def contradiction(self, history: History) -> ConfigError:
        """Return the error of a direction that contradicts the monitor of a trainer."""
        wanted = _direction_of(history)
        return ConfigError(
            f"direction={self.directions[0]!r}, and the trainer has monitor={history.monitor!r}, where the "
            f"{'smallest' if wanted == 'minimize' else 'largest'} is best; write direction={wanted!r}, or leave it "
            "out, or choose another monitor, or objective=... for another score; for one that run returns, give the "
            f"trainer monitor_mode={'max' if wanted == 'minimize' else 'min'!r}"
        )

    def _checked(self, found: Any) -> list[float]:
        """Return a score as a list; ConfigError if it is not one."""
        values: Sequence[Any] = found if isinstance(found, (list, tuple)) else [found]
        if len(values) == len(self.directions) and all(isinstance(each, (int, float)) for each in values):
            return [float(each) for each in values]
        many = len(self.directions) > 1
        raise ConfigError(
            f"the score of a trial is {describe_value(found)}; it must be "
            f"{f'{len(self.directions)} numbers, one for each direction' if many else 'a number'}: let run train with "
            "a validation, or return the score from run, or give objective=..., a function of the metrics"
        )


def _rows(history: History) -> list[Metrics]:
    """Return the metrics of each validation, or of each epoch where nothing was validated."""
    rows, wanted = (history.valid, "valid") if history.valid else (history.train, "train")
    found = []
    for row in rows:
        named = {split_prefix(key): value for key, value in row.items()}
        found.append(Metrics({name: value for (prefix, name), value in named.items() if prefix == wanted}))
    return found
