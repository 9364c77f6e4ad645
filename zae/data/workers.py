"""Handle dead workers of a loader: keep torch from raising in the wrong place, and from waiting for their locks."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import getattr_static
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

from zae.common.torch_private import shut_down_workers

__all__ = [
    "abandon_workers",
    "add_to_text",
    "dead_workers",
    "deaths_expected",
    "ignore_dead_workers",
    "mute_workers",
    "unmute_workers",
]

_CHILD: Any = getattr(signal, "SIGCHLD", None)  # Windows has none.
_PATIENCE = 1.0
_muted: list[Any] = []
_expected = False


def mute_workers(expected: bool = False) -> None:
    """Keep the signal handler of torch from raising that a worker of a loader has died.

    Called while an error is handled that the death may have caused, which a second error would replace. A loader that
    waits for a dead worker raises within seconds in any case.
    """
    global _expected
    _expected = _expected or expected
    handler = None if _CHILD is None else signal.getsignal(_CHILD)
    is_torch_s = getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"
    if is_torch_s and _CHILD is not None and threading.current_thread() is threading.main_thread():
        _muted[:] = [handler]  # Stored first: signal.signal raises for a pending signal.
        signal.signal(_CHILD, signal.SIG_DFL)


def unmute_workers() -> None:
    """Restore the signal handler, unless another one was installed since `mute_workers`."""
    global _expected
    _expected = False
    if _muted and threading.current_thread() is threading.main_thread():
        handler = _muted.pop()
        if signal.getsignal(_CHILD) == signal.SIG_DFL:
            signal.signal(_CHILD, handler)


def deaths_expected() -> bool:
    """Return whether all workers may be about to die."""
    return _expected


def abandon_workers(iterator: Any, loader: Any = None) -> None:
    """Signal the workers of a DataLoader iterator to end, without waiting for a lock that a killed worker may hold.

    When the iterator is freed, torch signals the same and waits for the lock of the event without a time limit.
    """
    event = getattr(iterator, "_workers_done_event", None)
    lock, flag = getattr(event, "_cond", None), getattr(event, "_flag", None)
    if lock is None or flag is None:
        return
    if lock.acquire(True, _PATIENCE):
        flag.acquire(False)  # As multiprocessing.Event.set does; nobody waits for the event.
        flag.release()
        lock.release()
    iterator._workers_done_event = SimpleNamespace(set=lambda: None, is_set=lambda: True)
    if getattr(loader, "_iterator", None) is iterator:
        loader._iterator = None


@contextmanager
def ignore_dead_workers() -> Iterator[None]:
    """Keep torch from raising for a dead worker of a loader while another error is handled."""
    mute_workers()
    try:
        yield
    finally:
        unmute_workers()


def dead_workers(error: Exception) -> str:
    """Describe the dead workers of the loader that raised; its error may name a broken connection only."""
    # Read without __getattr__, which may raise any error in an object whose creation was interrupted.
    owners: list[Any] = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [getattr_static(each, "_workers", None) for each in owners]
    dead = []
    for index, worker in enumerate(next((each for each in found if _are_processes(each)), [])):
        worker.join(1.0 if index == 0 else 0.1)  # It may still be ending.
        if worker.exitcode:
            how = f"killed by signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit status {worker.exitcode}"
            dead.append(f"; DataLoader worker {index} (pid {worker.pid}) is dead: {how}")
    if dead:  # End the other workers, so that torch does not raise for this one again when they end.
        for iterator in owners:
            if getattr_static(iterator, "_shutdown_workers", None) is not None:
                abandon_workers(iterator)
                with suppress(Exception):
                    shut_down_workers(iterator)
    return "".join(dead)


def _are_processes(workers: Any) -> bool:
    return isinstance(workers, list) and all(isinstance(each, BaseProcess) for each in workers)


def add_to_text(error: Exception, text: str) -> bool:
    """Add to the message of an exception, where it has one; return whether it is there."""
    text = f"{text}; a system that runs out of memory kills processes"
    if isinstance(error, OSError) and error.strerror:
        error.strerror = f"{error.strerror} ({text})"
    elif isinstance(error, (RuntimeError, EOFError, OSError)) and len(error.args) <= 1:
        error.args = (f"{str(error).strip()} ({text})".strip(),)
    return text in str(error)
