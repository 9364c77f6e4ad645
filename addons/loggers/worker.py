"""Call a sink in a thread, with a deadline, and write its records to a local file when it fails."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zae.addons.loggers.base import JSONLSink, RunInfo, Sink
from zae.common.redact import redact
from zae.errors import LoggerError, ZaeError

__all__ = ["SinkWorker"]

_log = logging.getLogger("zae")
_NOISE = re.compile(r"(?:\x1b\[[0-9;]*m|[\x00-\x1f\x7f\s])+")
_LONGEST = 400


class SinkWorker:
    """Call one sink in its own thread, and write its records to a local file when it fails.

    A call that raises, or that does not return before a deadline, causes one warning. From then on every record goes to
    the local file, starting with the first that the sink has not confirmed; the sink is not called again.
    """

    def __init__(
        self,
        sink: Sink,
        info: RunInfo,
        folder: Path,
        *,
        required: bool = False,
        secrets: Iterable[str] = (),
        lost: bool = False,
    ) -> None:
        self.sink = sink
        self.info = info
        self.path = folder / f"{sink.name}-{info.id}.jsonl"
        self._required, self._secrets = required, tuple(secrets)
        self._change = threading.Condition()  # Its lock protects everything below.
        self._calls: deque[tuple[str, tuple[Any, ...], float]] = deque()  # Pending, each with its time.
        self._given_up = lost
        self._closed = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._blocked = False  # Whether a call has exceeded its deadline and not returned.
        self._left = False  # Whether the worker was closed during such a call.
        self._ended = threading.Event()
        self._error: ZaeError | None = None
        self._local: JSONLSink | None = None
        self._kept = 0
        self._dropped = 0

    @property
    def failed(self) -> bool:
        """Whether the sink has failed."""
        return self._given_up

    def start(self) -> None:
        """Import the sink's client and begin to open it; `wait` waits for that."""
        atexit.register(self.close, False)
        if self._given_up:
            return
        try:
            self.sink.load()
        except Exception as error:
            self._fail(error)
            return
        self._calls.append(("open", (self.info,), time.time()))
        # A daemon: a client that blocks forever does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"zae-{self.sink.name}", daemon=True)
        self._thread.start()

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Submit one record, without waiting, unless the sink is required; ``metrics`` must not change afterwards."""
        self.call("write", metrics, step)

    def call(self, name: str, *args: Any) -> None:
        """Submit a call of a method whose name begins with "write"; see `write`."""
        self._submit(name, *args)
        if self._required:
            self.wait()

    def wait(self, deadline: float | None = None, *, flush: bool = False) -> None:
        """Wait until the sink has finished every call, at most until a deadline, after which it has failed.

        The deadline is a value of ``time.monotonic``, by default ``info.timeout`` seconds from now. Raise LoggerError
        if a required sink has failed.
        """
        if flush:
            self._submit("flush")
        deadline = time.monotonic() + self.info.timeout if deadline is None else deadline
        with self._change:
            self._change.wait_for(lambda: not self._calls or self._given_up, max(0.0, deadline - time.monotonic()))
            if self._calls and not self._given_up:
                self._blocked = True
                self._give_up(f"its {self._calls[0][0]}() has not returned within {self.info.timeout:g} s")
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def close(self, failed: bool, deadline: float | None = None) -> None:
        """Close the sink, and log how many records are in the local file; ``failed`` says how the run has ended.

        Raise LoggerError if a required sink has failed since the last call.
        """
        if self._closed or self._process != os.getpid():  # A forked process has no such thread.
            return
        self._closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + self.info.timeout if deadline is None else deadline
        self._submit("close", failed)
        try:
            self.wait(deadline)
        finally:
            with self._change:
                self._left = self._blocked
            self._ended.set()
            if self._thread is not None and not self._left:
                self._thread.join(max(0.0, deadline - time.monotonic()))
            self._report()

    def _submit(self, name: str, *args: Any) -> None:
        with self._change:
            if not self._given_up:
                self._calls.append((name, args, time.time()))
                self._change.notify_all()
            elif name.startswith("write"):
                self._keep(time.time(), name, *args)

    def _work(self) -> None:
        """Make the calls in their order, until the sink is closed or has failed."""
        while (call := self._next()) is not None:
            name, args, self.sink.logged_at = call
            try:
                getattr(self.sink, name)(*args)
            except BaseException as error:
                self._fail(error, beginning=name == "open")
            if self._is_done() and name == "close":
                return
        with self._change:
            self._blocked = False
        # The sink is closed when the worker is, not now: a client may draw from the random streams of training. A call
        # that returns after that stays as it is, because another run may have begun.
        self._ended.wait()
        if not self._left:
            with contextlib.suppress(BaseException):
                self.sink.close(True)

    def _next(self) -> tuple[str, tuple[Any, ...], float] | None:
        """Wait for a call; return None when the sink has failed."""
        with self._change:
            self._change.wait_for(lambda: self._calls or self._given_up)
            return None if self._given_up else self._calls[0]

    def _is_done(self) -> bool:
        """Remove the call that has returned, unless the sink has failed in the meantime."""
        with self._change:
            if not self._given_up:
                self._calls.popleft()
                self._change.notify_all()
            return not self._given_up

    def _fail(self, error: BaseException, beginning: bool = True) -> None:
        """Fail by an exception; a ZaeError of ``open`` is a mistake of the user, and is raised."""
        self._give_up(self._in_words(error), error if beginning and isinstance(error, ZaeError) else None)

    def _give_up(self, reason: str, error: ZaeError | None = None) -> None:
        """Warn once, and write the pending records to the local file."""
        with self._change:
            if self._given_up:
                return
            self._given_up = True
            name = self.sink.name
            remedy = self.sink.remedy
            if error is not None or self._required:
                self._error = error or LoggerError(
                    f"the logger {name} failed: {reason}; {remedy}; or give logger_required=False, which keeps the "
                    "records in a local file and trains on"
                )
            else:
                text = "the logger %s failed: %s. Training continues, and its records go to %s. To fix it, %s"
                _log.warning(text, name, reason, self.path, remedy)
                for call, args, at in self._calls:
                    if call.startswith("write"):
                        self._keep(at, call, *args)
            self._calls.clear()
            self._change.notify_all()

    def _keep(self, at: float, call: str, *args: Any) -> None:
        """Write one record, image or histogram to the local file."""
        if self._required or self._dropped:
            self._dropped += 1
            return
        try:
            if self._local is None:
                self._local = JSONLSink(self.path)
                self._local.open(replace(self.info, continued=True, records=None))
            self._local.logged_at = at
            getattr(self._local, call)(*args)
            self._kept += 1
        except Exception as error:
            self._dropped = 1
            _log.warning("the records of %s cannot be kept in %s: %s", self.sink.name, self.path, self._in_words(error))

    def _report(self) -> None:
        """Close the local file, and log how many records it has."""
        with self._change:
            if self._local is not None:
                self._local.close(False)
            lost = f"; {self._dropped} more could not be written" if self._dropped else ""
            if self._given_up and not self._required and (self._kept or self._dropped):
                _log.warning("%d records of %s were kept in %s%s", self._kept, self.sink.name, self.path, lost)
            self._kept = 0
            self._dropped = 0

    def _in_words(self, error: BaseException) -> str:
        """Return an exception as one line, without colours and secrets."""
        text = redact(_NOISE.sub(" ", str(error)).strip(), self._secrets)
        return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__
