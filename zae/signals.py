"""Signals that ask a run to end: the step is finished and saved first."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

from zae.workers import mute_workers, unmute_workers

__all__ = ["StopSignals"]

_NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")


class StopSignals:
    """Notes SIGTERM, SIGUSR1 and Ctrl-C while a run goes on, so that the loop can end after its step.

    The same signal a second time, or Ctrl-C after any, ends the process at once: the system's own action is back in
    place by then, and what is saved is whole at every instant. Signals that are ignored stay so. Python allows this in
    the main thread only; elsewhere nothing is installed.

    Attributes
    ----------
    received : int or None
        The first signal that came.

    Examples
    --------
    >>> signals = StopSignals()
    >>> signals.install()
    >>> signal.raise_signal(signal.SIGTERM)
    >>> signals.received == signal.SIGTERM
    True
    >>> signals.restore()
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._pid = 0
        self._before: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before": {}, "received": None}  # Handlers belong to a process.

    def install(self) -> None:
        """Begin to note."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self.received, self._pid = None, os.getpid()
        for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
            before = signal.getsignal(number)
            if before is not None and before != signal.SIG_IGN:  # None: a handler that Python cannot put back.
                self._before[number] = before
                signal.signal(number, self._note)

    def restore(self) -> None:
        """Put the handlers that were there before back, but not over one that was installed meanwhile."""
        before, self._before = self._before, {}
        if self.received is not None:
            unmute_workers()
        for number, handler in before.items():
            if signal.getsignal(number) in (self._note, signal.SIG_DFL):
                signal.signal(number, handler)

    def end(self, number: int) -> NoReturn:
        """Put the handlers back, call the one that was there for a signal, and leave.

        Parameters
        ----------
        number : int
            The signal that asked for the end; on another rank it may have been.

        Raises
        ------
        KeyboardInterrupt
            For Ctrl-C; Python ends with status 130 then.
        SystemExit
            With status 143, for the others.
        """
        before = self._before.get(number)
        self.restore()
        self.received = None
        if callable(before) and before is not signal.default_int_handler:
            before(number, None)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._pass_on(number)
            return
        # What cannot be interrupted at once in Python, a long call of C, can be by the system.
        for each in {number, int(signal.SIGINT)} & self._before.keys():
            signal.signal(each, signal.SIG_DFL)
        if self.received is None:
            self.received = number
            mute_workers(expected=True)  # The signal may have gone to them too.

    def _pass_on(self, number: int) -> None:
        """In a loader's worker, forked with this handler: Ctrl-C is the main process's to deal with."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
