"""Sink, the interface that loggers write records to; ClientSink, that of a service; JSONLSink, a file of JSON lines."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from zae.errors import ConfigError, did_you_mean
from zae.values.redact import redact, secrets_in
from zae.values.walk import flatten, json_safe

__all__ = ["ClientSink", "JSONLSink", "RunInfo", "Sink"]

_log = logging.getLogger("zae")
# A line that is no record has a dict there; the last two are of older files.
_KEYS_OF_OTHER_LINES = ("run", "image", "histogram")


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
        The step of the state that was loaded, None where none was: records of later steps will be written again.
    records : int or None
        How many records had been logged when that state was saved: those after them will be written again. Of a logger
        that was added later, these are more than its file has, and ``resumed_at`` says what to keep.
    timeout : float
        Seconds that opening, flushing and closing may take.
    config : mapping
        The options of the trainer, without secrets.
    explain : str
        The text of ``explain()``.
    environment : mapping
        The versions and the device that the run has.

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
    explain: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flat_config(self) -> dict[str, bool | int | float | str]:
        """The config without nested values, ``{"optimizer/lr": 0.1}``."""
        flat = flatten(self.config, "/")
        return {name: v if isinstance(v, (bool, int, float, str)) else str(v) for name, v in flat.items()}


class Sink:
    """A destination of records; subclass it for another client.

    Its methods are called in sequence, all but ``load`` in a separate thread, so that training continues when they
    block or fail. With ``has_queue`` records are written in the training thread. A `zae.ZaeError` raised by ``load`` or
    ``open`` is a user error, and ends the run.

    Attributes
    ----------
    name : str
        Used in messages, and in the name of the local file.
    remedy : str
        What to do when it fails, as the end of a sentence.
    has_queue : bool
        Whether the client itself puts records into a queue or a file, so that a write does not wait for a network.
    logged_at : float
        When the record that is being written was logged, in seconds since 1970; `write` itself may be called later.
    client : object
        What the library of the destination has returned for this run, while it is open: see ``LoggerAddon.clients``.

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
    has_queue: ClassVar[bool] = False
    logged_at: float = 0.0
    client: Any = None

    def load(self) -> None:
        """Import the client, in the main thread; the time limit does not apply."""

    def open(self, info: RunInfo) -> None:
        """Begin a run, or continue it."""

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
        """End the run, which may be continued later; ``failed`` says whether an exception ended it."""


class ClientSink(Sink):
    """A run that the client of a service begins with the entries of ``web_logger``.

    Parameters
    ----------
    entries : mapping
        The keyword arguments of ``function``.

    Attributes
    ----------
    function : str
        The function that begins a run, as "package.name"; `load` imports it, and refuses entries that it does not take.
    accepted : tuple of str
        Entries that are accepted beside the arguments of the function.
    needed : tuple of str
        Entries of which one must be given.
    shown : tuple of str
        Entries that the service shows; `public_entries` hides secrets in them.
    requires_client : bool
        Whether a trainer is refused when the package is not installed.

    Examples
    --------
    >>> class PrinterSink(ClientSink):
    ...     name, function = "printer", "builtins.print"
    ...     def write(self, metrics, step):
    ...         print(step, metrics, **self.entries)
    >>> sink = PrinterSink({"end": "."})
    >>> sink.load()
    >>> sink.write({"train/loss": 0.5}, 10)
    10 {'train/loss': 0.5}.
    """

    function: ClassVar[str]
    accepted: ClassVar[tuple[str, ...]] = ()
    needed: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[tuple[str, ...]] = ("name", "tags")
    requires_client: ClassVar[bool] = True

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = dict(entries)

    @classmethod
    def check(cls, entries: Mapping[str, Any]) -> None:
        """Refuse entries with which no run can begin; called when a trainer is made, without importing the client."""

    def load(self) -> None:
        """Import the client, and refuse entries that its function does not take."""
        package, _, name = self.function.rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(package), name)).parameters
        self.refuse_unknown(self.entries, {*parameters, *self.accepted}, self.function)

    @classmethod
    def refuse_unknown(cls, entries: Iterable[str], known: Collection[str], taker: str) -> None:
        """Raise ConfigError for the first entry that is not known to its taker."""
        for name in entries:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise ConfigError(
                    f'web_logger["{cls.name}"] has an entry {redact(name)!r} that {taker} does not take{hint}'
                )

    def public_entries(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return those entries that the service shows, without secrets."""
        shown = {key: entries[key] for key in self.shown if key in entries}
        public: dict[str, Any] = redact(shown, secrets_in(self.entries))
        return public


class JSONLSink(Sink):
    """A file with one JSON object a line; NaN and the infinities are the texts "nan", "inf" and "-inf".

    Before its first record, a new run and a resumed one write a line that describes the run, with the key "run" and the
    step from which it continues. Each record has the time when it was written, in seconds since 1970. Every line is
    flushed. After a resume, lines that are newer than the loaded state, and incomplete ones, are removed, so that each
    record is in the file once.
    """

    name = "jsonl"
    has_queue = True
    remedy = "free some space, or give another jsonl_path"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._header: dict[str, Any] | None = None  # Not written yet.

    def open(self, info: RunInfo) -> None:
        """Create the file, or remove the lines after the position of the run."""
        path = self.path.resolve()
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not info.continued:
            _move_aside(path)
        elif info.resumed_at is not None:
            _keep_lines(path, info.records, info.resumed_at)
        self._file = path.open("a", encoding="utf-8", newline="\n")
        if info.resumed_at is not None or not self._file.tell():
            about = {"id": info.id, "config": info.config, "explain": info.explain, "environment": info.environment}
            self._header = {"step": info.resumed_at or 0, "run": about}

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append a line."""
        header = self._header
        self._header = None
        if header is not None:
            self._append(header)
        self._append({"step": step, **{key: value for key, value in metrics.items() if key != "step"}})

    def _append(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        time_entry = {"unix_time": round(self.logged_at or time.time(), 6)}
        self._file.write(json.dumps(json_safe({**line, **time_entry}), allow_nan=False) + "\n")
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


def _keep_lines(path: Path, records: int | None, step: int | None) -> None:
    """Keep the complete lines up to a step among the first ``records`` records; the file is replaced atomically."""
    if not path.exists():
        return
    staging = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    count = 0
    size = 0
    try:
        with path.open("rb") as source, staging.open("xb") as target:
            for line in source:
                at, is_record = _place_of(line)
                if is_record and records is not None and count >= records:
                    break
                count += is_record
                if at is not None and (step is None or at <= step):
                    size += target.write(line)
            target.flush()
            os.fsync(target.fileno())
        if size != path.stat().st_size:
            staging.chmod(path.stat().st_mode & 0o777)
            os.replace(staging, path)
    finally:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)


def _place_of(line: bytes) -> tuple[float | None, bool]:
    """Return the step of a complete line, else None, and whether it is a record, not a description of the run."""
    try:
        row: Any = json.loads(line) if line.endswith(b"\n") else None
        step = row["step"]
        is_other = any(isinstance(row.get(key), dict) for key in _KEYS_OF_OTHER_LINES)
        return (step if isinstance(step, (int, float)) else None), not is_other
    except (ValueError, TypeError, LookupError, RecursionError):
        return None, True
