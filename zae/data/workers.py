"""The workers of a loader that die: torch must not raise for one just anywhere, nor wait for what one took with it."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import getattr_static
from typing import Any

from zae.common.torch_private import shut_down_workers

__all__ = ["dead_workers", "deaths_expected", "mute_workers", "part_from_workers", "undisturbed", "unmute_workers"]

_CHILD: Any = getattr(signal, "SIGCHLD", None)  # Windows has none.
_PATIENCE = 1.0
_muted: list[Any] = []
_expected = False


def mute_workers(expected: bool = False) -> None:
    """Keep torch from raising, wherever Python is just then, that a worker of a loader has died.

    That is for an error which is on its way already, and may well come of that death: a second one in the midst of
    dealing with it would take its place. A loader that waits for a dead worker finds out by itself, within seconds.

    Parameters
    ----------
    expected : bool
        Whether all workers may be about to die: a signal that asks for the end may have gone to them too.
    """
    global _expected
    _expected = _expected or expected
    handler = None if _CHILD is None else signal.getsignal(_CHILD)
    is_torch_s = getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"
    if is_torch_s and threading.current_thread() is threading.main_thread():
        _muted[:] = [handler]  # First kept, then replaced: the call itself raises what is waiting.
        signal.signal(_CHILD, signal.SIG_DFL)


def unmute_workers() -> None:
    """Put back what `mute_workers` took away, but not over a handler that was installed meanwhile."""
    global _expected
    _expected = False
    if _muted and threading.current_thread() is threading.main_thread():
        handler = _muted.pop()
        if signal.getsignal(_CHILD) == signal.SIG_DFL:
            signal.signal(_CHILD, handler)


def deaths_expected() -> bool:
    """Say whether all workers may be about to die."""
    return _expected


def part_from_workers(iterator: Any, loader: Any = None) -> None:
    """Tell the workers of a torch iterator to end, without waiting for a lock that a killed one holds for ever.

    torch does so itself when the iterator is freed; there it waits for the lock of the event without an end. The
    system kills a worker wherever it is, while it asks for that event too. What torch does afterwards stays as it is.

    Parameters
    ----------
    iterator : object
        What ``iter(loader)`` returned; anything but an iterator of torch with workers is left alone.
    loader : object, optional
        Whose iterator it is: with ``persistent_workers=True`` it would ask the workers that are told to end here for
        its next epoch, and wait for ever.
    """
    event = getattr(iterator, "_workers_done_event", None)
    lock, flag = getattr(event, "_cond", None), getattr(event, "_flag", None)
    if lock is None or flag is None:
        return
    if lock.acquire(True, _PATIENCE):
        flag.acquire(False)  # As multiprocessing.Event.set does; nobody waits for it, it is only asked.
        flag.release()
        lock.release()
    iterator._workers_done_event = _Told()
    if getattr(loader, "_iterator", None) is iterator:
        loader._iterator = None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep torch from raising for a dead worker of a loader while another error is handled."""
    mute_workers()
    try:
        yield
    finally:
        unmute_workers()


def dead_workers(error: Exception) -> str:
    """Describe the dead workers of the loader that raised; the error itself may only name a broken connection."""
    # Read without __getattr__: an object whose creation was interrupted may answer with any error.
    selves: list[Any] = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [getattr_static(each, "_workers", None) for each in selves]
    dead = []
    for index, worker in enumerate(next((each for each in found if isinstance(each, list)), [])):
        worker.join(1.0 if index == 0 else 0.1)  # It may still be ending.
        if worker.exitcode:
            how = f"killed by signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit status {worker.exitcode}"
            dead.append(f"; DataLoader worker {index} (pid {worker.pid}) is dead: {how}")
    if dead:  # End the other workers, so that torch does not raise for this one again when they end.
        for iterator in selves:
            if getattr_static(iterator, "_shutdown_workers", None) is not None:
                part_from_workers(iterator)
                with suppress(Exception):
                    shut_down_workers(iterator)
    return "".join(dead)


class _Told:
    """In the place of an event that was set, as far as that was possible."""

    def set(self) -> None:
        """Do nothing."""

    def is_set(self) -> bool:
        """Say so."""
        return True
