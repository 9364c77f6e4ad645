"""Read the records of a run into series: from a file of JSON lines, or from the history of a trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zae.errors import ConfigError

__all__ = ["THROUGHPUT", "Records", "Run", "find_log", "metrics_of", "read_log", "split_key"]

THROUGHPUT = "steps_per_s"
"""The name of the series that is computed from the times of the records."""

_SPLITS = ("train", "valid", "val", "eval", "test")
_PLACE = ("step", "epoch", "batch", "unix_time")
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LAST = ("lr", "grad_norm", THROUGHPUT)
_LARGEST = 2**53  # Larger steps are not exact as numbers of JavaScript.


@dataclass
class Series:
    """The values of one metric; steps increase, times are seconds since 1970 or NaN."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, step: int, value: float, time: float) -> None:
        """Append a point; points of this step and of later ones are from before a resume, and are removed."""
        while self.steps and self.steps[-1] >= step:
            del self.steps[-1], self.values[-1], self.times[-1]
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)


@dataclass
class Records:
    """What a log contains.

    Attributes
    ----------
    series : dict of str to Series
        By metric, in the order of their first records.
    epochs : Series
        The step at which each epoch was first seen.
    sessions : list of dict
        The descriptions of the run, one for each process that logged: "step", "unix_time", "config", "explain" and
        "environment".

    Examples
    --------
    >>> records = Records.of([{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": "nan", "lr": 0.1}])
    >>> records.series["train/loss"].values, records.series["lr"].steps
    ([0.5, nan], [2])
    """

    series: dict[str, Series] = field(default_factory=dict)
    epochs: Series = field(default_factory=Series)
    sessions: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Records:
        """Sort rows into series; a row that is not a record is passed over."""
        records = cls()
        rate = Series()
        before: tuple[int, float] | None = None  # The last record of training in this session.
        for row in rows:
            step = row.get("step") if isinstance(row, Mapping) else None
            if not isinstance(step, int) or not 0 <= step < _LARGEST:
                continue
            time = _number(row.get("unix_time"))
            time = math.nan if time is None or not math.isfinite(time) else time
            if isinstance(row.get("run"), Mapping):
                records.sessions.append({**row["run"], "step": step, "unix_time": time})
                before = step, time
                continue
            records._add(row, step, time)
            if any(key.startswith("train/") for key in row):
                if before is not None and step > before[0] and time > before[1]:
                    rate.add(step, (step - before[0]) / (time - before[1]), time)
                before = step, time
        if rate.steps and THROUGHPUT not in records.series:
            records.series[THROUGHPUT] = rate
        return records

    def _add(self, row: Mapping[str, Any], step: int, time: float) -> None:
        epoch = row.get("epoch")
        if isinstance(epoch, int) and (not self.epochs.values or self.epochs.values[-1] != epoch):
            self.epochs.add(step, epoch, time)
        for key, value in row.items():
            number = None if key in _PLACE else _number(value)
            if number is not None:
                self.series.setdefault(str(key), Series()).add(step, number, time)

    @property
    def about(self) -> dict[str, Any]:
        """The latest description of the run; empty for a log without one."""
        return self.sessions[-1] if self.sessions else {}

    @property
    def began(self) -> float:
        """The time of the first description or record, or NaN."""
        times = [session["unix_time"] for session in self.sessions]
        times += [time for one_series in self.series.values() for time in one_series.times[:1]]
        return min((time for time in times if not math.isnan(time)), default=math.nan)

    def description_of(self, name: str) -> dict[str, Any]:
        """Return a part of the latest description: "config" or "environment"."""
        description = self.about.get(name)
        return dict(description) if isinstance(description, Mapping) else {}


@dataclass
class Run:
    """A run as a report shows it.

    Attributes
    ----------
    name : str
        How the page calls it; unique among the runs of a page.
    records : Records
        Its log.
    checkpoints : list of dict
        What ``python -m zae doctor --json`` reports of each folder of checkpoints.
    composition : list of str
        The names of its add-ons, where its log does not tell them.
    """

    name: str
    records: Records
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    composition: list[str] = field(default_factory=list)


def split_key(key: str) -> tuple[str, str]:
    """Split ``valid/loss`` into the metric and the split; other names have no split."""
    split, _, metric = key.partition("/")
    return (metric, split) if split in _SPLITS and metric else (key, "")


def metrics_of(runs: Iterable[Run]) -> list[str]:
    """List the metrics of runs: the loss and others that have a split first, then the rest."""
    keys = dict.fromkeys(key for run in runs for key in run.records.series)
    metrics = dict.fromkeys(split_key(key)[0] for key in keys)
    has_split = {split_key(key)[0] for key in keys if split_key(key)[1]}

    def place(metric: str) -> tuple[bool, bool, int]:
        return metric != "loss", metric not in has_split, _LAST.index(metric) if metric in _LAST else -1

    return sorted(metrics, key=place)


def read_log(path: Path) -> Records:
    """Read a file of JSON lines; what a killed process left of a line is passed over.

    Parameters
    ----------
    path : Path
        What `zae.addons.JSONLLoggerAddon` wrote, by this version or an earlier one.

    Raises
    ------
    ConfigError
        The file cannot be read, or contains no records.
    """
    try:
        if not path.is_file():
            raise FileNotFoundError(2, "is not a file")
        lines = path.read_text(encoding="utf-8", errors="backslashreplace").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the folder of a run, or a file of JSON lines") from None
    records = Records.of(_parse(line) for line in lines if line.strip())
    if not records.series:
        raise ConfigError(f"{path} contains no records; give a file that JSONLLoggerAddon wrote")
    return records


def find_log(folder: Path) -> Path | None:
    """Return the file of JSON lines in a folder; None where there is none.

    Raises
    ------
    ConfigError
        There are several, and nothing says which one is meant.
    """
    logs = [path for path in sorted(folder.glob("*.jsonl")) if _is_log(path)]
    # name.1.jsonl is the file of an earlier run, which a new one moved aside.
    latest = [path for path in logs if path.with_name(f"{path.stem.rpartition('.')[0]}.jsonl") not in logs]
    if len(latest) > 1:
        names = ", ".join(path.name for path in latest)
        raise ConfigError(f"{folder} contains several logs: {names}; give one of these files")
    return latest[0] if latest else None


def _is_log(path: Path) -> bool:
    """Return whether the first line of a file is a record, or describes a run; that of a ledger is neither."""
    try:
        with path.open(encoding="utf-8", errors="backslashreplace") as file:
            row = _parse(file.readline(1 << 20))
    except OSError:
        return False
    return "step" in row and "stages" not in row


def _parse(line: str) -> dict[str, Any]:
    """Return the object of a line; an empty one where the line is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _number(value: Any) -> float | None:
    """Return the number that a record holds, else None."""
    if isinstance(value, str):
        return _SPECIAL.get(value)
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf
