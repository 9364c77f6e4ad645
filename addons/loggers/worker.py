"""Call sinks so that none of them fails a run or holds it up: a queue with a thread, and a local file for records."""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zae.addons.loggers.base import JSONLSink, RunInfo, Sink
from zae.errors import LoggerError, ZaeError
from zae.values.redact import redact

__all__ = ["SinkGroup"]

_log = logging.getLogger("zae")
_NOISE = re.compile(r"(?:\x1b\[[0-9;]*m|[\x00-\x1f\x7f\s])+")
_MAX_ERROR_LENGTH = 400


@dataclass(frozen=True)
class Call:
    """A call of one method of a sink, and when it was submitted, in seconds since 1970."""

    sink: GuardedSink
    name: str
    arguments: tuple[Any, ...]
    submitted_at: float


class CallQueue:
    """Make the calls of all sinks in one thread, in their order.

    A call that does not return while the run waits for it makes its sink fail, and another thread makes the rest.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.lock = threading.Condition()  # It protects the calls, and whether a sink has failed.
        self._calls: deque[Call] = deque()  # The first one is being made.
        self._thread: threading.Thread | None = None

    def submit(self, call: Call) -> None:
        """Append a call, without waiting."""
        with self.lock:
            self._calls.append(call)
            if self._thread is None:
                self._start_thread()
            self.lock.notify_all()

    def wait(self) -> None:
        """Wait until all calls have returned, or their sinks have failed."""
        with self.lock:
            while not self.lock.wait_for(lambda: not self._calls, self.timeout):
                call = self._calls[0]
                self._thread = None
                call.sink.fail(f"its {call.name}() has not returned within {self.timeout:g} s", is_blocked=True)
                if self._calls:
                    self._start_thread()

    def remove(self, sink: GuardedSink) -> list[Call]:
        """Remove the calls of a sink, and return them."""
        removed = [call for call in self._calls if call.sink is sink]
        self._calls = deque(call for call in self._calls if call.sink is not sink)
        self.lock.notify_all()
        return removed

    def end(self) -> None:
        """End the thread, unless a call blocks it."""
        with self.lock:
            thread = self._thread
            self._thread = None
            self.lock.notify_all()
        if thread is not None:
            thread.join(self.timeout)

    def _start_thread(self) -> None:
        # A daemon: a client that blocks forever does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="zae-loggers", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        thread = threading.current_thread()
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self._calls or self._thread is not thread)
                if self._thread is not thread:  # The queue has ended, or another thread makes the rest.
                    return
                call = self._calls[0]
            call.sink.make(call)
            with self.lock:
                if self._thread is thread and self._calls and self._calls[0] is call:
                    self._calls.popleft()
                self.lock.notify_all()


class GuardedSink:
    """A sink whose failure costs one warning, and no record: from then on they go to a local file."""

    def __init__(
        self,
        sink: Sink,
        info: RunInfo,
        folder: Path,
        queue: CallQueue,
        required: bool,
        secrets: Iterable[str],
        has_failed: bool,
    ) -> None:
        self.sink = sink
        self.info = info
        self.path = folder / f"{sink.name}-{info.id}.jsonl"
        self.has_failed = has_failed
        self._queue = queue
        self._required = required
        self._secrets = tuple(secrets)
        self._has_begun = False  # Whether the client may have to be closed.
        self._is_blocked = False
        self._error: ZaeError | None = None
        self._local: JSONLSink | None = None
        self._kept = 0
        self._dropped = 0

    def open(self) -> None:
        """Import the client, and submit that it is opened; ``queue.wait`` waits for that."""
        if self.has_failed:
            return
        try:
            self.sink.load()
        except Exception as error:
            self.fail(self._describe(error), error)
        else:
            self._has_begun = True
            self.submit("open", self.info)

    def write(self, record: Mapping[str, Any], step: int) -> None:
        """Write a record, which must not change afterwards."""
        if self.sink.has_queue and not self.has_failed:
            self.make(Call(self, "write", (record, step), time.time()))
        else:
            self.submit("write", record, step)
            if self._required:
                self._queue.wait()
        self.raise_error()

    def submit(self, name: str, *arguments: Any) -> None:
        """Submit a call; where the sink has failed, a record goes to the local file."""
        call = Call(self, name, arguments, time.time())
        with self._queue.lock:
            if not self.has_failed:
                self._queue.submit(call)
            elif name == "write":
                self._keep(call)

    def make(self, call: Call) -> None:
        """Make a call; an exception makes the sink fail."""
        self.sink.logged_at = call.submitted_at
        try:
            getattr(self.sink, call.name)(*call.arguments)
        except (Exception, SystemExit) as error:
            self.fail(self._describe(error), error if call.name == "open" else None, call)

    def raise_error(self) -> None:
        """Raise the error of a required sink that has failed, or what the user must mend, once."""
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def begin_close(self, run_failed: bool) -> None:
        """Submit that the client is closed, also after an exception of it."""
        if self.has_failed and self._has_begun and not self._is_blocked:
            self._queue.submit(Call(self, "close", (True,), time.time()))
        self.submit("close", run_failed)

    def report(self) -> None:
        """Close the local file, and log how many records it has."""
        if self._local is not None:
            self._local.close(False)
        if self._kept or self._dropped:
            lost = f"; {self._dropped} more could not be written" if self._dropped else ""
            _log.warning("%d records of %s were kept in %s%s", self._kept, self.sink.name, self.path, lost)

    def fail(
        self,
        reason: str,
        error: BaseException | None = None,
        call: Call | None = None,
        is_blocked: bool = False,
    ) -> None:
        """Warn once, and write the records that the sink has not confirmed to the local file.

        A ZaeError of ``load`` and ``open`` is a mistake of the user, and is raised.
        """
        with self._queue.lock:
            if self.has_failed:
                return
            self.has_failed = True
            self._is_blocked = is_blocked
            unconfirmed = self._queue.remove(self)
            if call is not None and call not in unconfirmed:  # It was made directly.
                unconfirmed.append(call)
            name, remedy = self.sink.name, self.sink.remedy
            if isinstance(error, ZaeError):
                self._error = error
                return
            if self._required:
                self._error = LoggerError(
                    f"the logger {name} failed: {reason}; {remedy}; or give logger_required=False, which keeps the "
                    "records in a local file and trains on"
                )
                return
            text = "the logger %s failed: %s. Training continues, and its records go to %s. To fix it, %s"
            _log.warning(text, name, reason, self.path, remedy)
            for row in unconfirmed:
                if row.name == "write":
                    self._keep(row)

    def _keep(self, call: Call) -> None:
        """Write one record to the local file."""
        if self._required:
            return
        if self._dropped:
            self._dropped += 1
            return
        try:
            if self._local is None:
                self._local = JSONLSink(self.path)
                self._local.open(replace(self.info, continued=True, records=None))
            self._local.logged_at = call.submitted_at
            self._local.write(*call.arguments)
            self._kept += 1
        except Exception as error:
            self._dropped = 1
            _log.warning("the records of %s cannot be kept in %s: %s", self.sink.name, self.path, self._describe(error))

    def _describe(self, error: BaseException) -> str:
        """Return an exception as one line, without colours and secrets."""
        text = redact(_NOISE.sub(" ", str(error)).strip(), self._secrets)
        return f"{type(error).__name__}: {text[:_MAX_ERROR_LENGTH]}" if text else type(error).__name__


class SinkGroup:
    """The sinks of a run: open all, write each record to all, and close all, also as the process ends."""

    def __init__(
        self,
        sinks: Iterable[Sink],
        info: RunInfo,
        folder: Path,
        *,
        required: bool = False,
        secrets: Iterable[str] = (),
        failed_names: Collection[str] = (),
    ) -> None:
        self._queue = CallQueue(info.timeout)
        self._process = os.getpid()
        self._is_closed = False
        self.sinks = [
            GuardedSink(sink, info, folder, self._queue, required, secrets, sink.name in failed_names) for sink in sinks
        ]

    def open(self) -> None:
        """Open all sinks; raise the error of a required one, and a mistake of the user."""
        atexit.register(self._close_at_exit)
        for sink in self.sinks:
            sink.open()
        self._wait()

    def write(self, record: Mapping[str, Any], step: int) -> None:
        """Write a record to each sink."""
        for sink in self.sinks:
            sink.write(record, step)

    def flush(self) -> None:
        """Wait until all sinks have written what they were given."""
        for sink in self.sinks:
            sink.submit("flush")
        self._wait()

    def close(self, run_failed: bool) -> None:
        """Close all sinks; raise the first error of a required one."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        for sink in self.sinks:
            sink.begin_close(run_failed)
        self._queue.wait()
        self._queue.end()
        for sink in self.sinks:
            sink.report()
        self._raise_first()

    @property
    def failed_names(self) -> set[str]:
        return {sink.sink.name for sink in self.sinks if sink.has_failed}

    @property
    def clients(self) -> dict[str, Any]:
        """What the libraries have opened, by the names of the sinks."""
        clients = {sink.sink.name: sink.sink.client for sink in self.sinks}
        return {name: client for name, client in clients.items() if client is not None}

    def _wait(self) -> None:
        self._queue.wait()
        self._raise_first()

    def _raise_first(self) -> None:
        for sink in self.sinks:
            sink.raise_error()

    def _close_at_exit(self) -> None:
        if self._process == os.getpid():  # A forked process has no such thread.
            self.close(False)
