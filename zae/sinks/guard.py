"""What stands between training and a sink: a thread, a deadline, and a local file that takes over when it fails."""

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

from zae.errors import LoggerError, ZaeError
from zae.sinks.base import JSONLSink, RunInfo, Sink
from zae.sinks.redact import redact

__all__ = ["Guard"]

_log = logging.getLogger("zae")
_NOISE = re.compile(r"(?:\x1b\[[0-9;]*m|[\x00-\x1f\x7f\s])+")
_LONGEST = 400


class Guard:
    """Hand calls to one sink, in a thread of its own, and keep its records in a local file when it fails.

    A call that raises, or that does not return before a deadline, gives one warning. From then on every record goes to
    the local file, beginning with the first that the sink has not taken for certain; the sink is not called again.

    Parameters
    ----------
    sink : Sink
        Where the records are to go.
    info : RunInfo
        What the sink is opened with.
    folder : Path
        Where the local file ``<sink>-<run id>.jsonl`` is made, if need be.
    required : bool
        Raise instead of keeping the records locally.
    secrets : iterable of str
        What must not occur in a message.
    lost : bool
        The sink has failed in an earlier run: every record goes to the local file, and nothing is waited for again.

    Examples
    --------
    >>> class ListSink(Sink):
    ...     rows = []
    ...     def write(self, metrics, step):
    ...         self.rows.append((step, metrics["loss"]))
    >>> guard = Guard(ListSink(), RunInfo(id="a"), Path("zae-offline"))
    >>> guard.start()
    >>> guard.write({"loss": 0.5}, 1)
    >>> guard.close(failed=False)
    >>> ListSink.rows
    [(1, 0.5)]
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
        self.sink, self.info = sink, info
        self.path = folder / f"{sink.name}-{info.id}.jsonl"
        self._required, self._secrets = required, tuple(secrets)
        self._change = threading.Condition()  # Its lock protects everything below.
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()  # Not finished yet, the oldest first.
        self._given_up, self._closed = lost, False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._blocked = False  # Whether a call has not returned that was waited for long enough.
        self._left = False  # Whether the guard was closed without it.
        self._ended = threading.Event()
        self._error: ZaeError | None = None
        self._local: JSONLSink | None = None
        self._kept = self._dropped = 0

    @property
    def failed(self) -> bool:
        """Whether the sink was given up."""
        return self._given_up

    def start(self) -> None:
        """Import the sink's client, and begin to open it; ``settle`` waits for it."""
        atexit.register(self.close, False)
        if self._given_up:
            return
        try:
            self.sink.load()
        except Exception as error:
            self._fail(error)
            return
        self._calls.append(("open", (self.info,)))
        # A daemon: a client that blocks for ever does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"zae-{self.sink.name}", daemon=True)
        self._thread.start()

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Hand one record over; it does not wait, unless the sink is required.

        Parameters
        ----------
        metrics : mapping
            Plain values; they must not change afterwards.
        step : int
            The optimizer step.
        """
        self._submit("write", metrics, step)
        if self._required:
            self.settle()

    def settle(self, deadline: float | None = None, *, flush: bool = False) -> None:
        """Wait until the sink has taken every call, or give it up.

        Parameters
        ----------
        deadline : float, optional
            A value of ``time.monotonic``; by default, as long as ``info.timeout`` from now.
        flush : bool
            Ask the sink to flush, too.

        Raises
        ------
        LoggerError
            It has failed, and is required.
        """
        if flush:
            self._submit("flush")
        deadline = time.monotonic() + self.info.timeout if deadline is None else deadline
        with self._change:
            self._change.wait_for(lambda: not self._calls or self._given_up, max(0.0, deadline - time.monotonic()))
            if self._calls and not self._given_up:
                self._blocked = True
                self._give_up(f"its {self._calls[0][0]}() has not returned within {self.info.timeout:g} s")
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, failed: bool, deadline: float | None = None) -> None:
        """End the sink's run, and tell once how many records were kept locally.

        Parameters
        ----------
        failed : bool
            Whether an exception ended the run.
        deadline : float, optional
            As for ``settle``.

        Raises
        ------
        LoggerError
            It has failed since the last call, and is required.
        """
        if self._closed or self._process != os.getpid():  # A forked process has no part in it, nor the thread.
            return
        self._closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + self.info.timeout if deadline is None else deadline
        self._submit("close", failed)
        try:
            self.settle(deadline)
        finally:
            with self._change:
                self._left = self._blocked
            self._ended.set()
            if self._thread is not None and not self._left:
                self._thread.join(max(0.0, deadline - time.monotonic()))
            self._tell()

    def _submit(self, name: str, *args: Any) -> None:
        with self._change:
            if not self._given_up:
                self._calls.append((name, args))
                self._change.notify_all()
            elif name == "write":
                self._keep(*args)

    def _work(self) -> None:
        """Make the calls, in their order, until the sink is closed or given up."""
        while (call := self._next()) is not None:
            name, args = call
            try:
                getattr(self.sink, name)(*args)
            except BaseException as error:
                self._fail(error, beginning=name == "open")
            if self._is_done() and name == "close":
                return
        with self._change:
            self._blocked = False
        # What it has opened is closed with the guard, not now: a client may draw random numbers where training does.
        # One that comes back later still finds another training there, maybe, and is left as it is.
        self._ended.wait()
        if not self._left:
            with contextlib.suppress(BaseException):
                self.sink.close(True)

    def _next(self) -> tuple[str, tuple[Any, ...]] | None:
        """Wait for a call; None when the sink was given up."""
        with self._change:
            self._change.wait_for(lambda: self._calls or self._given_up)
            return None if self._given_up else self._calls[0]

    def _is_done(self) -> bool:
        """Take the call that has returned off the list, unless the sink was given up meanwhile."""
        with self._change:
            if not self._given_up:
                self._calls.popleft()
                self._change.notify_all()
            return not self._given_up

    def _fail(self, error: BaseException, beginning: bool = True) -> None:
        """Take what a call raised: at the beginning, what zae refuses is the user's to mend."""
        self._give_up(self._in_words(error), error if beginning and isinstance(error, ZaeError) else None)

    def _give_up(self, reason: str, error: ZaeError | None = None) -> None:
        """Say why, once, and take over what the sink has not taken."""
        with self._change:
            if self._given_up:
                return
            self._given_up = True
            name, remedy = self.sink.name, self.sink.remedy
            if error is not None or self._required:
                self._error = error or LoggerError(
                    f"the logger {name} failed: {reason}; {remedy}; or give logger_required=False, which keeps the "
                    "records in a local file and trains on"
                )
            else:
                text = "the logger %s failed: %s. Training continues, and its records go to %s. To fix it, %s"
                _log.warning(text, name, reason, self.path, remedy)
                for call, args in self._calls:
                    if call == "write":
                        self._keep(*args)
            self._calls.clear()
            self._change.notify_all()

    def _keep(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write one record to the local file."""
        if self._required or self._dropped:
            self._dropped += 1
            return
        try:
            if self._local is None:
                self._local = JSONLSink(self.path)
                self._local.open(replace(self.info, continued=True, records=None))
            self._local.write(metrics, step)
            self._kept += 1
        except Exception as error:
            self._dropped = 1
            _log.warning("the records of %s cannot be kept in %s: %s", self.sink.name, self.path, self._in_words(error))

    def _tell(self) -> None:
        """Close the local file, and say what is in it."""
        with self._change:
            if self._local is not None:
                self._local.close(False)
            lost = f"; {self._dropped} more could not be written" if self._dropped else ""
            if self._given_up and not self._required and (self._kept or self._dropped):
                _log.warning("%d records of %s were kept in %s%s", self._kept, self.sink.name, self.path, lost)
            self._kept = self._dropped = 0

    def _in_words(self, error: BaseException) -> str:
        """An exception as one line, without colours and secrets."""
        text = redact(_NOISE.sub(" ", str(error)).strip(), self._secrets)
        return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__
