"""Workers of a loader: random numbers that do not depend on them, signals that are not for them, and workers that die.

For dead workers, torch is kept from raising in the wrong place, and from waiting for their locks.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from inspect import getattr_static
from multiprocessing.process import BaseProcess
from operator import index as as_index
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from zae.arguments import Seed, checked
from zae.data.loader_parts import datasets_in, datasets_with_epoch, parts_of_dataset
from zae.data.loader_state import streams_of
from zae.errors import ConfigError, LoaderError, kind_of
from zae.random_state import STREAMS, isolated, read_stream, write_stream
from zae.torch_private import end_by_kill, shut_down_workers
from zae.values.walk import search

__all__ = [
    "SeededDataset",
    "abandon_workers",
    "add_to_text",
    "check_epoch_of_workers",
    "dead_workers",
    "deaths_expected",
    "ignore_dead_workers",
    "is_seeded",
    "iterate",
    "keep_from_workers",
    "mute_workers",
    "seed_streams_of",
    "unmute_workers",
]

_CHILD: Any = getattr(signal, "SIGCHLD", None)  # Windows has none.
_PATIENCE = 1.0
_muted: list[Any] = []
_expected = False
_kept: dict[int, frozenset[int]] = {}  # The signals that each run handles, and that workers must survive.


class SeededDataset(Dataset[Any]):
    """A dataset whose random numbers depend on the seed, the epoch and the index of a sample alone.

    Before each sample, the random streams of Python, NumPy and torch are seeded, and so are the generators that the
    dataset and its transforms hold, and in workers those of the ``collate_fn``. Samples are then the same with any
    number of workers, on any number of ranks, and after a resume in the middle of an epoch. In the main process, the
    streams of training are restored after each sample. This takes some 20 microseconds for each sample in a worker, and
    0.4 milliseconds in the main process.

    The trainer calls ``set_epoch``; in a loop of your own, call it before each epoch.

    Parameters
    ----------
    dataset : Dataset
        What is read, by index.
    seed : int
        Another one gives other random numbers.

    Raises
    ------
    ConfigError
        The dataset cannot be read by index.

    Examples
    --------
    >>> import torch
    >>> from zae.data import SeededDataset
    >>> class Noisy(torch.utils.data.Dataset):
    ...     def __len__(self):
    ...         return 8
    ...     def __getitem__(self, index):
    ...         return index + torch.rand(())
    >>> data = SeededDataset(Noisy(), seed=1)
    >>> bool(data[3] == data[3]), bool(data[3] - 3 == data[4] - 4)
    (True, False)
    >>> before = data[3]
    >>> data.set_epoch(1)
    >>> bool(data[3] == before)
    False
    """

    @checked
    def __init__(self, dataset: Any, seed: Seed = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"SeededDataset reads a dataset by index, and this is {kind_of(dataset)}; draw in a stream from a "
                "generator that its state_dict contains"
            )
        self.dataset, self.seed = dataset, seed
        self._epoch = torch.tensor(0).share_memory_()  # Workers that persist see the next epoch.
        self._passed_on = 0  # The epoch that the datasets within have, in this process.
        self._streams: list[Any] | None = None
        self.streams_of_loader: list[Any] = []  # Those that its collate_fn holds, for instance.

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0.

        Parameters
        ----------
        epoch : int
            Each has its own random numbers.
        """
        self._epoch.fill_(epoch)
        self._pass_on(epoch)

    def _pass_on(self, epoch: int) -> None:
        """Set the epoch of the datasets within."""
        self._passed_on = epoch
        for dataset in datasets_with_epoch(self.dataset).values():
            dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if get_worker_info() is not None:  # Streams of a worker serve nothing else.
            return self._sample(index)
        states = [(generator, read_stream(generator)) for generator in self._generators()]
        try:
            with isolated():
                return self._sample(index)
        finally:
            for stream, state in states:
                write_stream(stream, state)

    def _sample(self, index: Any) -> Any:
        with suppress(TypeError):  # A key may be a string.
            index = as_index(index)
        epoch = int(self._epoch)
        if epoch != self._passed_on:  # In a worker that persists, whose copies within are of an earlier epoch.
            self._pass_on(epoch)
        key = f"{self.seed} {epoch} {index!r}"
        seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # Not those of devices, which samples do not use.
        for number, stream in enumerate(self._generators(), start=1):
            _seed_stream(stream, (seed + number) % 2**64)
        return self.dataset[index]

    def _generators(self) -> list[Any]:
        """Return the generators that the dataset holds, once they were looked for in this process."""
        if self._streams is None:
            closed = (torch.Tensor, np.ndarray, type, ModuleType)
            generators = [stream for _, stream in search(self.dataset, "dataset", STREAMS, closed=closed)]
            known_ids = set(map(id, generators))
            self._streams = generators + [stream for stream in self.streams_of_loader if id(stream) not in known_ids]
        return self._streams

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_streams": None}  # A copy has generators of its own.


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


_SMALL = 16  # Elements of a shared tensor that may be an epoch; a larger one holds data.


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
        not isinstance(entry, torch.Tensor) or (entry.is_cpu and entry.is_shared() and entry.numel() <= _SMALL)
        for _, entry in search(dataset, "dataset", kinds, closed=closed)
    )


def seed_streams_of(loader: Any) -> None:
    """Let the `SeededDataset` of a loader seed the generators of its ``collate_fn`` too, by the last sample of a batch.

    In this process their states are saved, as those of the dataset are; workers have copies, which cannot be read.
    """
    for dataset in datasets_in(getattr(loader, "dataset", None)).values():
        if isinstance(dataset, SeededDataset):
            dataset.streams_of_loader = []  # Of an earlier loader over it.
            dataset.streams_of_loader = streams_of(loader)
            dataset._streams = None


def is_seeded(dataset: Any) -> bool:
    """Return whether all samples of a dataset come from a `SeededDataset`, through classes that draw nothing."""
    if isinstance(dataset, SeededDataset):
        return True
    parts = parts_of_dataset(dataset).values()
    return type(dataset) in (Subset, ConcatDataset) and bool(parts) and all(map(is_seeded, parts))


def _seed_stream(stream: Any, seed: int) -> None:
    """Seed a generator of one of the kinds in `STREAMS`."""
    if isinstance(stream, torch.Generator):
        stream.manual_seed(seed)
    elif isinstance(stream, np.random.Generator):
        kind: Any = type(stream.bit_generator)
        stream.bit_generator.state = kind(seed).state
    elif isinstance(stream, np.random.RandomState):
        stream.seed(seed % 2**32)
    else:
        stream.seed(seed)


def keep_from_workers(owner: int, numbers: Collection[int]) -> None:
    """Let workers that start from now on survive these signals, which ask the run of ``owner`` to save and end.

    A launcher, a cluster or a terminal signals a whole process group. The run needs another batch then: its ranks
    agree to stop one step later. It ends its workers itself.
    """
    _kept.pop(owner, None)
    if numbers and hasattr(signal, "pthread_sigmask"):  # Windows has no signals to a group.
        _kept[owner] = frozenset(numbers)


def iterate(loader: Any) -> Iterator[Any]:
    """Return an iterator over a loader, whose workers survive the signals of `keep_from_workers`."""
    numbers = frozenset[int]().union(*_kept.values())
    if not numbers or not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    own_init = loader.worker_init_fn
    loader.worker_init_fn = _SurviveSignals(own_init, numbers)
    # A worker inherits what is blocked, so that no signal hits it before it can handle one.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        iterator = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        loader.worker_init_fn = own_init
    for worker in getattr(iterator, "_workers", ()):
        end_by_kill(worker)
    _mute_at_exit()
    return iterator


class _SurviveSignals:
    """The ``worker_init_fn`` of workers that leave signals to the main process, as long as there is one."""

    def __init__(self, own_init: Any, numbers: Collection[int]) -> None:
        self._own_init, self._numbers = own_init, sorted(numbers)

    def __call__(self, worker_id: int) -> None:
        self._parent = os.getppid()
        # Handlers in Python: a program that the dataset starts would inherit that a signal is ignored.
        for number in self._numbers:
            signal.signal(number, self._survive)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        if self._own_init is not None:
            self._own_init(worker_id)

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
    lock = getattr(event, "_cond", None)
    flag = getattr(event, "_flag", None)
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
    worker_lists = [getattr_static(owner, "_workers", None) for owner in owners]
    dead = []
    for index, worker in enumerate(next((workers for workers in worker_lists if _are_processes(workers)), [])):
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
