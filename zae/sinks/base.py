"""Sink, the interface that loggers write records to, and JSONLSink, a file of JSON lines."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

__all__ = ["JSONLSink", "RunInfo", "Sink"]

_log = logging.getLogger("zae")


@dataclass(frozen=True)
class RunInfo:
    """Information about the run that a sink is opened for.

    Attributes
    ----------
    id : str
        The id of the run; a resumed run, and a second call of ``run``, keep it.
    continued : bool
        Whether records of this run were written before.
    resumed_at : int or None
        The step of the state that was loaded: records of later steps will be written again.
    records : int or None
        How many records had been logged when that state was saved.
    timeout : float
        Seconds that opening and closing may take.
    config : mapping
        The options of the trainer, without secrets.

    Examples
    --------
    >>> RunInfo(id="0123456789abcdef").continued
    False
    """

    id: str
    continued: bool = False
    resumed_at: int | None = None
    records: int | None = None
    timeout: float = 5.0
    config: Mapping[str, Any] = field(default_factory=dict)


class Sink:
    """A destination of records; subclass it for another client.

    Its methods are called in sequence, all but ``load`` in a separate thread, so that training continues when they
    block or fail. A `zae.ZaeError` raised by ``load`` or ``open`` is a mistake of the user, and ends the run.

    Attributes
    ----------
    name : str
        Used in messages, and in the name of the local file.
    remedy : str
        What to do when it fails, as the end of a sentence.

    Examples
    --------
    >>> class ListSink(Sink):
    ...     name = "list"
    ...     def open(self, info):
    ...         self.rows = []
    ...     def write(self, metrics, step):
    ...         self.rows.append((step, metrics))
    """

    name: ClassVar[str] = "sink"
    remedy: ClassVar[str] = "see the message above"

    def load(self) -> None:
        """Import the client, in the main thread; the time limit does not apply."""

    def open(self, info: RunInfo) -> None:
        """Begin a run, or continue it.

        Parameters
        ----------
        info : RunInfo
            The run.
        """

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write one record.

        Parameters
        ----------
        metrics : mapping
            Plain numbers (and short texts) by name; "epoch" and "batch" are among them.
        step : int
            Their optimizer step. It never decreases, except after a state is loaded.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Write buffered records to the disk; called before a state is saved."""

    def close(self, failed: bool) -> None:
        """End the run, which may be continued later.

        Parameters
        ----------
        failed : bool
            Whether an exception ended it.
        """


class JSONLSink(Sink):
    """A file with one JSON object a line; NaN and the infinities are the texts "nan", "inf" and "-inf".

    Every line is flushed. After a resume, lines that are newer than the loaded state, and incomplete ones, are removed,
    so that each record is in the file once.
    """

    name = "jsonl"
    remedy = "free some space, or give another jsonl_path"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def open(self, info: RunInfo) -> None:
        """Create the file, or remove the lines after the position of the run."""
        path = self.path = self.path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not info.continued:
            _move_aside(path)
        elif info.resumed_at is not None:
            _keep_lines(path, info.records, info.resumed_at)
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append a line."""
        assert self._file is not None
        plain = {key: _strict(value) for key, value in metrics.items() if key != "step"}
        self._file.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Wait until the lines are on the disk, as a checkpoint relies on them after a loss of power."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self, failed: bool) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _move_aside(path: Path) -> None:
    """Rename the file of another run."""
    if not path.exists() or not path.stat().st_size:
        return
    for number in itertools.count(1):
        aside = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if not aside.exists():
            path.rename(aside)
            _log.info("%s holds the records of another run; moved to %s", path, aside.name)
            return


def _strict(value: Any) -> Any:
    # float(): a float64 of NumPy has another repr.
    return repr(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _keep_lines(path: Path, records: int | None, step: int | None) -> None:
    """Keep the complete lines up to a step among the first ``records`` lines; the file is replaced atomically."""
    if not path.exists():
        return
    staging = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    count, kept = 0, 0
    try:
        with path.open("rb") as source, staging.open("xb") as target:
            for line in source:
                if records is not None and count >= records:
                    break
                count += 1
                at = _step_of(line)
                if at is not None and (step is None or at <= step):
                    kept += target.write(line)
            target.flush()
            os.fsync(target.fileno())
        if kept != path.stat().st_size:
            staging.chmod(path.stat().st_mode & 0o777)
            os.replace(staging, path)
    finally:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)


def _step_of(line: bytes) -> float | None:
    """Return the step of a complete line, else None."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return step if isinstance(step, (int, float)) else None
