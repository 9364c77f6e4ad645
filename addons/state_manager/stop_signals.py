"""Signals that ask a run to end: it finishes its step and saves first, and aborts a validation."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

from zae.data.workers import keep_from_workers, mute_workers, unmute_workers
from zae.errors import exit_status

__all__ = ["StopSignals"]

_log = logging.getLogger("zae")
_NAMES = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
_HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none.


class StopSignals:
    """Record SIGTERM, SIGUSR1, SIGHUP and Ctrl-C during a run, so that the loop can end after its step.

    The same signal a second time, or Ctrl-C after any, ends the process at once: the previous handlers are back by
    then, and what is saved is valid at every moment. Only SIGHUP may come twice, from a closed terminal and from its
    shell. In a rank any signal may: a cluster signals all processes, and the launcher passes its own one on to the
    ranks. It kills those that do not end. Ignored signals stay ignored, as nohup needs. Python allows handlers in the
    main thread only; elsewhere none is installed, with a warning.

    Workers of loaders that start during a run leave these signals to this process.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self._may_repeat = self._is_ending = False
        self._pid = 0
        self._listens = False
        self._before: dict[int, Any] = {}  # After `restore`: those that another handler covers.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_listens": False, "_before": {}, "noted": []}  # Handlers belong to a process.

    @property
    def first(self) -> int | None:
        """The first signal that came."""
        return self.noted[0] if self.noted else None

    def install(self) -> list[int]:
        """Install the handlers, and return the list ``noted``."""
        if self._listens:
            return self.noted
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "this run is not in the main thread, where alone Python can catch SIGTERM and other signals: one of "
                "them ends the process without a save; call run() in the main thread, or write save_on_signal=False"
            )
            return self.noted
        self.noted.clear()
        self._is_ending = False
        self._pid = os.getpid()
        handlers = {number: _previous_handler(signal.getsignal(number), number) for number in _numbers()}
        # None: a handler that Python cannot put back.
        self._before = {
            number: handler for number, handler in handlers.items() if handler is not None and handler != signal.SIG_IGN
        }
        self._listens = bool(self._before)
        self._may_repeat = "RANK" in os.environ  # Of a launcher, or of the process that has started this rank.
        for number in self._before:
            signal.signal(number, self._note)
        keep_from_workers(id(self), self._before)
        return self.noted

    def restore(self) -> None:
        """Restore the previous handlers, except over one that was installed in between."""
        if not self._listens:
            return
        self._listens = False
        keep_from_workers(id(self), ())
        if self.noted:
            unmute_workers()
        for number in list(self._before):
            if signal.getsignal(number) in (self._note, signal.SIG_DFL):
                signal.signal(number, _previous_handler(self._before.pop(number), number))

    def end(self, number: int) -> NoReturn:
        """Call the previous handler of this signal, and end the process; restore the handlers before, but in a rank.

        It raises KeyboardInterrupt for Ctrl-C, else SystemExit with status 129 for SIGHUP and 143 for the others.
        """
        before = _previous_handler(self._before.get(number), number)
        self._is_ending = True
        if not self._may_repeat:  # Else teardown does it: a repeated signal must not end a save in the background.
            self.restore()
        self.noted.clear()
        if callable(before) and before is not signal.default_int_handler:
            before(number, None)
        if number == signal.SIGINT:
            raise _without_traceback(KeyboardInterrupt())
        raise SystemExit(exit_status(number))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._listens:  # A handler that was installed over this one calls it, or has restored it.
            handler = _previous_handler(self._note, number)
            if callable(handler):
                handler(number, frame)
            elif handler == signal.SIG_DFL:
                signal.signal(number, handler)
                signal.raise_signal(number)
            return
        if os.getpid() != self._pid:
            self._pass_on(number)
            return
        if not self._may_repeat:
            # Python runs no handler within a long call of C; the default action of the system interrupts it.
            for key in ({number, int(signal.SIGINT)} - {_HANGUP}) & self._before.keys():
                signal.signal(key, signal.SIG_DFL)
        if not self.noted and not self._is_ending:
            self.noted.append(number)
            mute_workers(expected=True)  # The signal may have gone to them too.

    def _pass_on(self, number: int) -> None:
        """In a forked worker of a loader: leave Ctrl-C to the main process."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _without_traceback(error: BaseException) -> BaseException:
    """Return an error that a script ends by in one line: where it was raised tells nothing."""
    shown_before = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: Any) -> None:
        if value is error:
            value.__traceback__ = traceback = None
        shown_before(kind, value, traceback)

    sys.excepthook = show
    return error


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def _previous_handler(handler: Any, number: int) -> Any:
    """Return the handler of a signal below the handlers of runs that are over."""
    passed: list[Any] = []
    while getattr(handler, "__func__", None) is StopSignals._note and not handler.__self__._listens:
        passed.append(handler)
        handler = handler.__self__._before.get(number, signal.SIG_DFL)
        if handler in passed:  # Two runs, each started again while the other was running.
            return signal.SIG_DFL
    return handler
