"""Rows of metrics, whose names may have "train" or "valid" before them, and the history of a run that prints them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zae.display.text import columns_of, table
from zae.errors import ConfigError, MonitorError, did_you_mean

__all__ = ["Metrics", "MetricsDict", "split_prefix"]

_PREFIXES = ("train", "valid", "val", "eval", "test")


class Metrics(dict[str, Any]):
    """One row of numbers; a name is found with or without ``train``, ``valid``, ``eval`` or ``test`` before it.

    Examples
    --------
    >>> row = Metrics({"loss": 0.5, "epoch": 3})
    >>> row["eval_loss"], row["valid/loss"], row["loss"]
    (0.5, 0.5, 0.5)
    """

    def __missing__(self, key: str) -> Any:
        near = _find(self, key)
        if near is None:
            names = "none: no epoch (or no validation) has returned the monitored metric"
            if self:
                names = f"{', '.join(self)}; use one of these"
            bare_names = [split_prefix(name)[1] for name in self]
            hint = did_you_mean(key, [*bare_names, *self])
            available = f"{hint} Available" if hint else "; available"
            raise MonitorError(f"unknown metric {key!r}{available}: {names}")
        return self[near]

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or (isinstance(key, str) and _find(self, key) is not None)


def _find(row: dict[str, Any], key: str) -> str | None:
    """Return the key of a row that a name with another prefix means."""
    prefix, bare = split_prefix(key)
    names = [bare]
    if prefix:
        names += _with_prefixes(bare, [prefix])
        names += _with_prefixes(key, _PREFIXES)  # A step may return "val_loss".
    else:
        names += _with_prefixes(bare, _PREFIXES)
    return next((name for name in names if dict.__contains__(row, name)), None)


def _with_prefixes(name: str, prefixes: Iterable[str]) -> list[str]:
    """Return a name with each of these before it, in both spellings."""
    names = []
    for prefix in prefixes:
        names += [f"{prefix}_{name}", f"{prefix}/{name}"]
    return names


def split_prefix(key: str) -> tuple[str, str]:
    """Split ``"valid/loss"`` or ``"valid_loss"`` into the split and the metric; no split is an empty string."""
    for prefix in _PREFIXES:
        if key.startswith((prefix + "_", prefix + "/")) and len(key) > len(prefix) + 1:
            return prefix, key[len(prefix) + 1 :]
    return "", key


class MetricsDict(dict[str, Any]):
    """What ``run`` returns: the history of a run, printed as a table.

    Keys are ``"best_valid"`` and ``"best_train"`` (the metrics of the best epoch, and of it ``"score"``, which is the
    monitored one, ``"split"``, ``"epoch"`` and ``"step"``; a metric called so stands there as ``"valid_score"``),
    ``"train_metrics_history"`` and ``"valid_metrics_history"`` (a row for each epoch, and for each validation),
    ``"epoch"``, ``"step"``, ``"skipped_steps"``, ``"nonfinite_steps"`` and ``"stop_reason"``.

    Examples
    --------
    >>> history = [Metrics(epoch=1, step=10, train_loss=0.5), Metrics(epoch=2, step=20, train_loss=0.25)]
    >>> metrics = MetricsDict(best_valid={}, train_metrics_history=history, valid_metrics_history=[])
    >>> metrics["train_metrics_history"][-1]["train_loss"]
    0.25
    >>> print(metrics)
    epoch  step  train_loss
        1    10      0.5000
        2    20      0.2500
    """

    def __missing__(self, key: str) -> Any:
        meant = [f"metrics[{name!r}]" for name in self if name.startswith(f"{key}_")]
        for name in ("valid_metrics_history", "train_metrics_history"):
            if self.get(name) and key in self[name][-1]:
                meant.append(f"metrics[{name!r}][-1][{key!r}]")
        hint = f"write {' or '.join(meant)}. Available" if meant else "available"
        raise MonitorError(f"the history of a run has no {key!r}; {hint}: {', '.join(self)}")

    def __str__(self) -> str:
        rows = self.rows()
        return table(rows, self.marks(rows)) if rows else "no epoch has been trained"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from zae.display.html import block, is_shown_above, metrics_html

        if is_shown_above(str(self)):  # ``trainer.run(...)`` is the last line of a cell.
            return block("The result of this run is shown above.")
        rows = self.rows()
        return block(metrics_html(rows, self.marks(rows)))

    def to_frame(self) -> Any:
        """Return the table as a ``pandas.DataFrame``, with a row for each epoch and for each other validation.

        Returns
        -------
        pandas.DataFrame
            Columns are "epoch", "step" and the metrics, ``train_loss`` for instance; what is missing is NaN.

        Raises
        ------
        ConfigError
            pandas is not installed.

        Examples
        --------
        >>> history = [Metrics(epoch=1, step=10, train_loss=0.5), Metrics(epoch=2, step=20, train_loss=0.25)]
        >>> metrics = MetricsDict(train_metrics_history=history, valid_metrics_history=[])
        >>> float(metrics.to_frame()["train_loss"].min())
        0.25
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("to_frame() needs pandas, which is not installed: pip install pandas") from error
        rows = self.rows()
        return pandas.DataFrame(rows, columns=columns_of(rows) or ["epoch", "step"])

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each step with metrics, of training and of validation together; each has all columns."""
        rows: dict[int, dict[str, Any]] = {}
        for row in [*self.get("train_metrics_history", []), *self.get("valid_metrics_history", [])]:
            rows.setdefault(row["step"], {}).update(row)
        columns = columns_of(rows.values())
        return [{name: rows[step].get(name) for name in columns} for step in sorted(rows)]

    def marks(self, rows: list[dict[str, Any]]) -> list[str]:
        """Return "best" for the best of these rows, and an empty text for each other one."""
        best = self.get("best_valid") or self.get("best_train") or {}
        return ["best" if row["step"] == best.get("step") else "" for row in rows]
