"""How a loader is walked: from its beginning, or exactly from where an interrupted epoch stood."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from zae import rng
from zae.errors import LoaderError
from zae.fast_data import batches_of

__all__ = ["Position", "check_loader", "describe", "length_of"]

_log = logging.getLogger("zae")


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None when it does not say.

    Parameters
    ----------
    loader : iterable
        Any loader.

    Returns
    -------
    int or None
        ``len(loader)`` where there is one.
    """
    try:
        return len(loader)
    except TypeError:
        return None


def describe(loader: Any) -> str:
    """Describe a loader in an error: its class, its dataset's length, batch size and ``drop_last``."""
    parts = [type(loader).__name__]
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        size = length_of(dataset)
        name = "dataset" if type(dataset).__name__.lower() == "dataset" else f"dataset {type(dataset).__name__}"
        parts.append(f"{name} of unknown length" if size is None else f"{name} of length {size}")
    for name in ("batch_size", "drop_last"):
        if getattr(loader, name, None) is not None:
            parts.append(f"{name}={getattr(loader, name)}")
    return ", ".join(parts)


def check_loader(loader: Any, name: str = "loader") -> None:
    """Refuse what is no loader, or one that is empty for certain.

    Parameters
    ----------
    loader : object
        What the user gave.
    name : str
        The argument's name.

    Raises
    ------
    LoaderError
        With what was found and what to write.
    """
    is_dataset = isinstance(loader, torch.utils.data.Dataset)
    if is_dataset or not isinstance(loader, Iterable):
        got = "a dataset" if is_dataset else "not iterable"
        example = f"torch.utils.data.DataLoader({name}, batch_size=32, shuffle=True)"
        raise LoaderError(f"{name} is {got} ({type(loader).__name__}); give batches, for instance {example}")
    if isinstance(loader, (str, bytes, torch.Tensor)):
        raise LoaderError(f"{name} is a {type(loader).__name__}, not batches; give a DataLoader or a list of batches")
    if length_of(loader) == 0:
        raise LoaderError(f"{name} has 0 batches ({describe(loader)}); give it data, or drop_last=False")


class Position:
    """Where the training data stands: the random state at the open epoch's beginning, and the present one.

    Restarting the epoch with the state of its beginning gives the same order of samples; those that were used are
    passed over in the sampler, so that the dataset is not asked for them; then the present state is put back.
    """

    def __init__(self, fast: bool = True) -> None:
        self.loader: Any = None
        self._fast = fast
        self._begin: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "loader": None}  # A loader seldom travels to another process, and never has to.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data and of every random stream, at this moment."""
        if self._resume is not None:
            return self._resume
        state = {"begin": self._begin, "present": self._capture(), "loader": None}
        if _is_stateful(self.loader):
            state["loader"] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position over; it is restored when the next epoch, or the rest of this one, begins."""
        self._resume = dict(state)

    def restore_random(self) -> None:
        """Put the global random streams to what they were, after whatever a resume itself has drawn."""
        if self._resume is not None:
            rng.restore(self._resume["present"]["random"])

    def forget(self) -> None:
        """Begin the next epoch at its first batch."""
        self._begin = self._resume = None

    def is_of(self, loader: Any) -> bool:
        """Whether the open epoch can be gone on with by this loader."""
        return self._resume is not None or self.loader is loader

    def batches(self, loader: Any, used: int, used_before: int) -> Iterator[Any]:
        """Walk a loader.

        Parameters
        ----------
        loader : iterable
            The loader, after ``wrap_loader``.
        used : int
            Batches of the open epoch that were used already.
        used_before : int
            Batches that were used in all; what an iterator that cannot start again has to pass over.

        Yields
        ------
        object
            Batches; those that are None are passed over.
        """
        resume, self._resume = self._resume, None
        self.loader = loader
        if resume is None and not used:
            self._begin = self._capture()
            yield from _present(batches_of(loader, self._fast), loader)
            return
        present = self._capture() if resume is None else resume["present"]
        begin = self._begin if resume is None else resume["begin"]
        if _is_stateful(loader) and resume is not None and resume["loader"] is not None:
            self._restore(present)
            loader.load_state_dict(resume["loader"])
            iterator = iter(loader)
        elif used and begin is not None:
            self._restore(begin)
            iterator = _skip(loader, used, self._fast)
        else:
            self._restore(present)
            begin = self._capture()
            skipped = used_before if resume is not None and iter_once(loader) else used
            iterator = _skip(loader, skipped, self._fast)
        self._begin = begin
        if used:
            # The workers' first batches may have been asked for already: what they draw is theirs, not ours.
            self._restore(present)
        yield from _present(iterator, loader)

    def _capture(self) -> dict[str, Any]:
        return {"random": rng.capture(), "generators": rng.capture_generators(self.loader)}

    def _restore(self, state: Mapping[str, Any]) -> None:
        rng.restore(state["random"])
        rng.restore_generators(self.loader, state["generators"])


def iter_once(loader: Any) -> bool:
    """Whether a loader is an iterator or a generator, which does not start again."""
    return isinstance(loader, Iterator)


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _present(iterator: Iterator[Any], loader: Any) -> Iterator[Any]:
    """Pass over batches that are None; refuse a loader that gives more of them than of others."""
    absent = given = 0
    for batch in iterator:
        if batch is None:
            absent += 1
            continue
        given += 1
        yield batch
    if absent > given:
        raise LoaderError(f"{absent} of {absent + given} batches were None ({describe(loader)}); mend the collate_fn")
    if absent:
        _log.warning("%d of %d batches were None and passed over", absent, absent + given)


class _SkipFirst:
    """A batch sampler (or sampler) without its first entries."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip
        self._rest: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader draws its base seed after this call and before the sampler's first entry; so do we.
        self._rest = iter(self._sampler)
        return self._walk()

    def _walk(self) -> Iterator[Any]:
        self.skip()
        assert self._rest is not None
        yield from self._rest

    def skip(self) -> None:
        """Pass the first entries over now, while the random state is that of the epoch's beginning."""
        assert self._rest is not None
        for _ in range(self._skip):
            next(self._rest, None)
        self._skip = 0

    def __len__(self) -> int:
        return len(self._sampler) - self._skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


def _skip(loader: Any, count: int, fast: bool) -> Iterator[Any]:
    """Begin a loader after its first batches; a DataLoader over a sampler does not load them."""
    if not count:
        return batches_of(loader, fast)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if isinstance(loader, DataLoader):
            _log.warning("resuming in the middle of an epoch of an IterableDataset: %d batches are read again and "
                         "passed over", count)  # fmt: skip
        iterator = iter(loader)
        for _ in range(count):
            next(iterator, None)
        return iterator
    rest = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = _SkipFirst(getattr(loader, name), count)
    # DataLoader forbids setting these after its construction, for the sake of its own iterators; this copy has none.
    object.__setattr__(rest, name, sampler)
    object.__setattr__(rest, "_iterator", None)
    iterator = batches_of(rest, fast)
    sampler.skip()
    return iterator
