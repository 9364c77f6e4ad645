"""Workers of a loader: signals that are not for them, workers that die, and epochs that they do not see.

For dead workers, torch is kept from raising in the wrong place, and from waiting for their locks.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from inspect import getattr_static
from multiprocessing.process import BaseProcess
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from zae.data.loader_parts import datasets_with_epoch
from zae.errors import LoaderError
from zae.torch_private import end_by_kill, shut_down_workers
from zae.values.walk import search

__all__ = [
    "abandon_workers",
    "add_to_text",
    "check_epoch_of_workers",
    "dead_workers",
    "deaths_expected",
    "ignore_dead_workers",
    "iterate",
    "keep_from_workers",
    "mute_workers",
    "unmute_workers",
]

_SIGCHLD: Any = getattr(signal, "SIGCHLD", None)  # Windows has none.
_LOCK_TIMEOUT_S = 1.0
_MAX_SHARED = 16  # Elements of a shared tensor that may be an epoch; a larger one holds data.

_muted_handlers: list[Any] = []
_deaths_expected = False
_run_signals: dict[int, frozenset[int]] = {}  # Those that each run handles, and that workers must survive.


def check_epoch_of_workers(loader: Any, new_epochs: int) -> None:
    """Refuse to begin so many epochs where the dataset has ``set_epoch``, and workers would stay in the first one.

    Workers that persist keep the copy of the dataset that they began with. Every epoch would have the samples of the
    first one, and a resumed run, whose workers are new, other ones.
    """
    if not (getattr(loader, "num_workers", 0) and getattr(loader, "persistent_workers", False)):
        return
    have_begun = getattr(loader, "_iterator", None) is not None
    if new_epochs < 1 or (new_epochs == 1 and not have_begun):
        return
    for place, dataset in datasets_with_epoch(getattr(loader, "dataset", None), "loader.dataset").items():
        if not _has_shared_value(dataset):
            raise LoaderError(
                f"{place} ({type(dataset).__name__}) has set_epoch, and persistent_workers=True: each worker keeps its "
                "own copy of the dataset, which set_epoch does not reach, so that every epoch would be the first one, "
                "and another one after a resume. Write persistent_workers=False, or keep the epoch where workers see "
                "it: self.epoch = torch.tensor(0).share_memory_() in __init__, and self.epoch.fill_(epoch) in set_epoch"
            )


def _has_shared_value(dataset: Any) -> bool:
    """Return whether a dataset holds a number that other processes see, in the ways in which Python and torch do it."""
    # Imported here: few runs come here, and torch does not import them either.
    from ctypes import _SimpleCData
    from multiprocessing.managers import BaseProxy
    from multiprocessing.shared_memory import SharedMemory
    from multiprocessing.sharedctypes import SynchronizedBase

    kinds = (torch.Tensor, SynchronizedBase, BaseProxy, _SimpleCData, SharedMemory)
    closed = (np.ndarray, type, ModuleType, Iterator)
    return any(
        not isinstance(entry, torch.Tensor) or (entry.is_cpu and entry.is_shared() and entry.numel() <= _MAX_SHARED)
        for _, entry in search(dataset, "dataset", kinds, closed=closed)
    )


def keep_from_workers(owner: int, numbers: Collection[int]) -> None:
    """Let workers that start from now on survive these signals, which ask the run of ``owner`` to save and end.

    A launcher, a cluster or a terminal signals a whole process group. The run needs another batch then: its ranks
    agree to stop one step later. It ends its workers itself.
    """
    _run_signals.pop(owner, None)
    if numbers and hasattr(signal, "pthread_sigmask"):  # Windows has no signals to a group.
        _run_signals[owner] = frozenset(numbers)


def iterate(loader: Any) -> Iterator[Any]:
    """Return an iterator over a loader, whose workers survive the signals of `keep_from_workers`."""
    numbers = frozenset[int]().union(*_run_signals.values())
    if not numbers or not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    user_init = loader.worker_init_fn
    loader.worker_init_fn = _SurviveSignals(user_init, numbers)
    # A worker inherits what is blocked, so that no signal hits it before it can handle one.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        iterator = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        loader.worker_init_fn = user_init
    for worker in getattr(iterator, "_workers", ()):
        end_by_kill(worker)
    _mute_at_exit()
    return iterator


class _SurviveSignals:
    """The ``worker_init_fn`` of workers that leave signals to the main process, as long as there is one."""

    def __init__(self, user_init: Any, numbers: Collection[int]) -> None:
        self._user_init = user_init
        self._numbers = sorted(numbers)

    def __call__(self, worker_id: int) -> None:
        self._parent = os.getppid()
        # Handlers in Python: a program that the dataset starts would inherit that a signal is ignored.
        for number in self._numbers:
            signal.signal(number, self._survive)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        if self._user_init is not None:
            self._user_init(worker_id)

    def _survive(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent:
            os._exit(128 + number)


@cache
def _mute_at_exit() -> None:
    """Keep torch from raising for the workers that Python ends as it exits."""
    atexit.register(mute_workers)


def mute_workers(expected: bool = False) -> None:
    """Keep the signal handler of torch from raising that a worker of a loader has died.

    Called while an error is handled that the death may have caused, which a second error would replace. A loader that
    waits for a dead worker raises within seconds in any case.
    """
    global _deaths_expected
    _deaths_expected = _deaths_expected or expected
    if _SIGCHLD is None or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(_SIGCHLD)
    if getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
        _muted_handlers[:] = [handler]  # Stored first: signal.signal raises for a pending signal.
        signal.signal(_SIGCHLD, signal.SIG_DFL)


def unmute_workers() -> None:
    """Restore the signal handler, unless another one was installed since `mute_workers`."""
    global _deaths_expected
    _deaths_expected = False
    if _muted_handlers and threading.current_thread() is threading.main_thread():
        handler = _muted_handlers.pop()
        if signal.getsignal(_SIGCHLD) == signal.SIG_DFL:
            signal.signal(_SIGCHLD, handler)


def deaths_expected() -> bool:
    """Return whether all workers may be about to die."""
    return _deaths_expected


def abandon_workers(iterator: Any, loader: Any = None) -> None:
    """Signal the workers of a DataLoader iterator to end, without waiting for a lock that a killed worker may hold.

    When the iterator is freed, torch signals the same and waits for the lock of the event without a time limit.
    """
    event = getattr(iterator, "_workers_done_event", None)
    lock = getattr(event, "_cond", None)
    flag = getattr(event, "_flag", None)
    if lock is None or flag is None:
        return
    if lock.acquire(True, _LOCK_TIMEOUT_S):
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
    worker_lists = [getattr_static(owner, "_workers", None) for owner in owners]
    workers: list[Any] = next((workers for workers in worker_lists if _are_processes(workers)), [])
    dead = []
    for index, worker in enumerate(workers):
        worker.join(1.0 if index == 0 else 0.1)  # It may still be ending.
        if worker.exitcode:
            cause = f"killed by signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit status {worker.exitcode}"
            if worker.exitcode == 1 and getattr(worker, "_start_method", "fork") != "fork":
                cause += ", as where it executes the script again: train under if __name__ == '__main__':"
            dead.append(f"; DataLoader worker {index} (pid {worker.pid}) is dead: {cause}")
    if dead:  # End the other workers, so that torch does not raise for this one again when they end.
        for iterator in owners:
            if getattr_static(iterator, "_shutdown_workers", None) is not None:
                abandon_workers(iterator)
                with suppress(Exception):
                    shut_down_workers(iterator)
    return "".join(dead)


def _are_processes(workers: Any) -> bool:
    return isinstance(workers, list) and all(isinstance(worker, BaseProcess) for worker in workers)


def add_to_text(error: Exception, text: str) -> bool:
    """Add to the message of an exception, where it has one; return whether it is there."""
    if "killed by signal" in f"{error} {text}":
        text = f"{text}; a system that runs out of memory kills processes"
    if isinstance(error, OSError) and error.strerror:
        error.strerror = f"{error.strerror} ({text})"
    elif isinstance(error, (RuntimeError, EOFError, OSError)) and len(error.args) <= 1:
        error.args = (f"{str(error).strip()} ({text})".strip(),)
    return text in str(error)
