"""How a loader is walked: from its beginning, or exactly from where an interrupted epoch stood."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from zae import rng
from zae.data_state import capture_parts, changes_of, facts_of, global_streams, restore_parts
from zae.errors import CheckpointMismatch, LoaderError
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
    except (TypeError, NotImplementedError):
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
        example = f": torch.utils.data.DataLoader({name}, batch_size=32)" if is_dataset else " or a list of batches"
        got = "a dataset" if is_dataset else "not iterable"
        raise LoaderError(f"{name} is {got} ({type(loader).__name__}); give a DataLoader{example}")
    if isinstance(loader, (str, bytes, torch.Tensor)):
        raise LoaderError(f"{name} is a {type(loader).__name__}, not batches; give a DataLoader or a list of batches")
    if isinstance(loader, Mapping):
        raise LoaderError(
            f"{name} is a dict ({', '.join(map(str, loader))}), and only valid_loader can be several; give one loader"
        )
    if isinstance(loader, (list, tuple)) and loader and isinstance(loader[0], DataLoader):
        raise LoaderError(f"{name} is a {type(loader).__name__} of loaders; give valid_loader a dict: {{name: loader}}")
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
        # After how many batches of the open epoch a None was passed over, and how many were before this epoch.
        self._absent: list[int] = []
        self._absent_before = 0
        self._another = False  # Whether the loader that goes on is another one than the state is of.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "loader": None}  # A loader seldom travels to another process, and never has to.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data and of every random stream, at this moment."""
        if self._resume is not None:
            return self._resume
        absent = {"absent": list(self._absent), "absent_before": self._absent_before}
        state = {"begin": self._begin, "present": self._capture(), "loader": None, **absent}
        state["facts"] = {} if self.loader is None else facts_of(self.loader)
        if _is_stateful(self.loader):
            state["loader"] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position over; it is restored when the next epoch, or the rest of this one, begins."""
        self._resume = dict(state)
        self._absent, self._absent_before = list(state["absent"]), int(state["absent_before"])

    def check(self, loader: Any, new_run: bool) -> None:
        """Refuse to go on with another loader than the one that the state is of.

        Parameters
        ----------
        loader : iterable
            The loader, after ``wrap_loader``.
        new_run : bool
            Whether it is given to a call of ``run`` that had not begun then: it may be any loader.

        Raises
        ------
        CheckpointMismatch
            With what it was and is.
        """
        before = {} if self._resume is None else self._resume["facts"]
        changes = changes_of(before, facts_of(loader)) if before else []
        if self._resume is None or not changes:
            return
        if not new_run:
            raise CheckpointMismatch(
                f"the loader is not the one that this run was saved with: {'; '.join(changes)}. Build it as it was, or "
                "begin a new run from the weights alone: apply_weights(path)"
            )
        present = {"random": self._resume["present"]["random"], "generators": None, "parts": {}}
        self._resume = {**self._resume, "begin": None, "present": present, "loader": None}
        self._another = True

    def restore_random(self) -> None:
        """Put the global random streams to what they were, after whatever a resume itself has drawn."""
        if self._resume is not None:
            rng.restore(self._resume["present"]["random"])

    def forget(self) -> None:
        """Begin the next epoch at its first batch."""
        self._begin = self._resume = None
        self._absent_before += len(self._absent)
        self._absent = []

    def is_of(self, loader: Any) -> bool:
        """Whether the open epoch can be gone on with by this loader."""
        return (self._resume is not None and not self._another) or self.loader is loader

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

        Returns
        -------
        iterator
            Batches; those that are None are passed over.
        """
        resume, self._resume, self._another = self._resume, None, False
        self.loader = loader
        once = isinstance(loader, Iterator)  # It does not start again: it stands where it was left.
        if resume is None and (once or not used):
            self._begin = self._begin if used else self._capture()
            return self._present(batches_of(loader, self._fast), used)
        present = self._capture() if resume is None else resume["present"]
        begin = self._begin if resume is None else resume["begin"]
        skip = used + sum(after <= used for after in self._absent)
        if resume is not None and _is_stateful(loader) and resume["loader"] is not None:
            self._restore(present)
            loader.load_state_dict(resume["loader"])
            iterator = iter(loader)
        elif once:
            skip += used_before - used + self._absent_before
            _log.info("the first %d batches of the iterator are passed over", skip)
            iterator = _skip(loader, skip, self._fast)
        elif used and begin is not None:
            self._restore(begin)
            iterator = _skip(loader, skip, self._fast)
        else:
            self._restore(present)
            begin = self._capture()
            iterator = _skip(loader, skip, self._fast)
        self._begin = begin
        if used or once:
            # The workers' first batches may have been asked for already: what they draw is theirs, not ours.
            self._restore(present)
        return self._present(iterator, used)

    def _present(self, iterator: Iterator[Any], given: int) -> Iterator[Any]:
        """Pass over batches that are None; refuse a loader that gives more of them than of others."""
        for batch in iterator:
            if batch is None:
                self._absent.append(given)
                continue
            given += 1
            yield batch
        absent = len(self._absent)
        if absent > given:
            raise LoaderError(
                f"{absent} of {absent + given} batches were None ({describe(self.loader)}); mend the collate_fn"
            )
        if absent:
            _log.warning("%d of %d batches were None and passed over", absent, absent + given)

    def _capture(self) -> dict[str, Any]:
        generators = None if self.loader is None else rng.capture_generators(self.loader)
        parts = {} if self.loader is None else capture_parts(self.loader)
        return {"random": rng.capture(), "generators": generators, "parts": parts}

    def _restore(self, state: Mapping[str, Any]) -> None:
        rng.restore(state["random"])
        if state["generators"] is not None:
            rng.restore_generators(self.loader, state["generators"])
        restore_parts(self.loader, state["parts"])


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


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
        before = None
        for _ in range(self._skip):
            next(self._rest, None)
            before = before or global_streams()  # The first entry may draw all numbers of the epoch at once.
        if before != global_streams() and self._skip:
            _log.warning(
                "the sampler %s draws from the global random streams as it goes: the order of the samples may not be "
                "exactly that of an uninterrupted run; give it a generator of its own",
                type(getattr(self._sampler, "sampler", self._sampler)).__name__,
            )  # fmt: skip
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
        elif not isinstance(loader, Sequence):
            _log.info("%d batches of %s are read again and passed over", count, type(loader).__name__)
        iterator = iter(loader)
        for _ in range(count):
            next(iterator, None)
        return iterator
    if loader.num_workers:
        _log.warning("going on in the middle of an epoch with num_workers=%d: the samples are the same, but random "
                     "numbers that the dataset draws in its workers are not exact", loader.num_workers)  # fmt: skip
    rest = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = _SkipFirst(getattr(loader, name), count)
    # DataLoader forbids setting these after its construction, for the sake of its own iterators; this copy has none.
    object.__setattr__(rest, name, sampler)
    object.__setattr__(rest, "_iterator", None)
    iterator = batches_of(rest, fast)
    sampler.skip()
    return iterator
