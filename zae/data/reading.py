"""How an epoch is read, and continued after its first batches: one class for each kind of loader.

    SampledPosition    a DataLoader over samples with an index, or a list: the sampler is moved on, no sample is read
    StatefulPosition   a loader with a state of its own: it says itself where it continues
    ReplayPosition     a stream, or a loader of another class: its batches are read again, and the last one is compared
    IteratorPosition   an iterator: it goes on over the epochs, and a new process reads it again from where it began

Each has `batches`, `state_dict` and `load_state_dict`. The random streams are not theirs: `zae.data.streams` captures
those, once for an epoch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from zae import random_state
from zae.data.batch_digests import LastBatch, is_comparable
from zae.data.gather import batches_of
from zae.data.loaders import Proxy, copy_with, is_stateful, iterates_as_torch, takes_samples
from zae.data.seeded import is_seeded
from zae.data.streams import LoaderStreams, State
from zae.data.workers import iterate
from zae.errors import CheckpointMismatch

__all__ = ["SampledPosition", "position_of"]

_log = logging.getLogger("zae")
_REMEDY = (
    "Let each call of its __iter__ begin a new epoch; where it draws random numbers, seed them there, or draw from a "
    "generator of its own. Where its batches depend on the model, as those that a policy collects, make it a class "
    "with state_dict and load_state_dict, which says where it stands"
)


class SampledPosition:
    """The sampler is moved on, and no sample is read.

    Attributes
    ----------
    may_begin_again : bool
        Whether the loader itself says where an epoch begins, which may be the first one in each process.
    """

    may_begin_again = False

    def __init__(self, loader: Any, streams: LoaderStreams, is_fast: bool) -> None:
        self.loader = loader
        self.streams = streams
        self.is_fast = is_fast
        self._last_digest: str | None = None  # Of the batch that was used last, in a loaded state.
        self._keeps_workers = False  # Whether the workers come from an earlier epoch, in an uninterrupted run.

    def batches(self, used: int, present: State | None) -> Iterator[Any]:
        """Iterate over what is left of an epoch of which so many batches were used; ``present`` is of a loaded state.

        The order of the samples is drawn again, from the state of the epoch's begin.
        """
        streams = self.streams
        if not used:
            if present is not None:
                self._warn_of_new_workers()
                streams.rewind(present, with_values=False)  # They were put back before the hooks that begin an epoch.
            streams.mark_begin()
            return self._open(0)
        present = present or streams.capture()
        streams.rewind(streams.begin or present)
        if streams.begin is None:
            streams.mark_begin()
        iterator = self._open(used)
        streams.restore(present)  # Workers that have begun their first batches have their own random streams.
        return iterator

    def note_used(self, batch: Any) -> None:
        """Note the batch that is used next."""

    def start_next_epoch(self, used_in_all: int, absent: int) -> None:
        """Note that an epoch has ended, after so many batches in all, and with so many that were None."""
        self._keeps_workers = bool(getattr(self.loader, "persistent_workers", False))

    def end_workers(self) -> None:
        """Keep what is lost with the workers."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the random streams."""
        return {"persists": True} if self._keeps_workers else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved."""
        self._keeps_workers = bool(state.get("persists"))
        self._last_digest = state.get("last_batch")

    def _warn_of_new_workers(self) -> None:
        if self._keeps_workers:
            _warn_of_workers(
                self.loader,
                "resuming with persistent_workers=True: the workers of the run that was saved had come from earlier "
                "epochs, and random numbers that the dataset draws in them, or what it keeps there, are not exact",
                ", or write persistent_workers=False",
            )

    def _open(self, count: int) -> Iterator[Any]:
        """Iterate over the loader without its first batches; no seed is drawn for workers that have one."""
        has_seed = not count and getattr(self.loader, "_iterator", None) is not None
        if not self._keeps_workers or has_seed:
            return self._skip(count)
        generator = self.loader.generator
        self.loader.generator = torch.Generator()  # The workers' seed is drawn from it, and not from the loader's own.
        try:
            return self._skip(count)
        finally:
            self.loader.generator = generator

    def _skip(self, count: int) -> Iterator[Any]:
        """Skip the first entries of a sampler before anything is loaded; any other loader is read."""
        if not count:
            return batches_of(self.loader, self.is_fast)
        remaining = _skip_entries(self.loader, count, self.is_fast) if takes_samples(self.loader) else None
        return self._read_again(count) if remaining is None else remaining

    def _read_again(self, count: int) -> Iterator[Any]:
        """Load the first batches and drop them, and refuse to go on where the last of them is another one."""
        loader = self.loader
        name = f"loader {type(loader).__name__}"
        if isinstance(loader, DataLoader) and not takes_samples(loader):
            name = f"dataset {type(loader.dataset).__name__}"
        if not isinstance(loader, Sequence):
            level = logging.WARNING if isinstance(loader, DataLoader) else logging.INFO
            text = "resuming in the middle of an epoch of the %s: the first %d batches are loaded and dropped"
            _log.log(level, text, name, count)
        iterator = iterate(loader)
        last, has_drawn = _drop(iterator, count)
        is_compared = last is not None and is_comparable(self._last_digest)
        if has_drawn and not is_compared:
            _warn_of_draws(name)
        if is_compared and LastBatch(last).digest() != self._last_digest:
            raise CheckpointMismatch(
                f"the {name} yields other batches when it is read again: the last one that was used, batch {count}, is "
                f"another one now, so that to continue would use some samples twice and others never. {_REMEDY}. With "
                "mid_epoch='restart' (an option of StateManagerAddon) nothing is read again, and the epoch begins anew"
            )
        return iterator


class ReplayPosition(SampledPosition):
    """The used batches are read again, and the last of them is compared with the one that was used."""

    may_begin_again = True

    def __init__(self, loader: Any, streams: LoaderStreams, is_fast: bool) -> None:
        super().__init__(loader, streams, is_fast)
        self._last: LastBatch | None = None

    def note_used(self, batch: Any) -> None:
        self._last = LastBatch(batch)

    def start_next_epoch(self, used_in_all: int, absent: int) -> None:
        super().start_next_epoch(used_in_all, absent)
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        digest = None if self._last is None else self._last.digest()
        return super().state_dict() | ({} if digest is None else {"last_batch": digest})


class IteratorPosition(ReplayPosition):
    """An iterator goes on, from epoch to epoch; a new process reads it again from where it began.

    Parameters
    ----------
    used_before : int
        The batches that were used before its first one.
    """

    def __init__(self, loader: Any, streams: LoaderStreams, is_fast: bool, used_before: int) -> None:
        super().__init__(loader, streams, is_fast)
        self._first: State | None = None  # The streams as it began, in this epoch or in an earlier one.
        self._skipped = -used_before  # The batches that were None, less those of other loaders.
        self._used_before = used_before
        self._has_ended = False

    def batches(self, used: int, present: State | None) -> Iterator[Any]:
        """Go on; from a loaded state, read all that it has yielded since it began."""
        streams = self.streams
        count = 0 if present is None else used + self._used_before + self._skipped
        if count:
            _log.info("the first %d batches of the iterator are skipped", count)
            streams.rewind(self._first or streams.begin or present)  # type: ignore[arg-type]
        elif present is not None:
            streams.rewind(present, with_values=False)
        if not used:
            streams.mark_begin()
        self._first = self._first or streams.begin
        iterator = self.loader if used and present is None else self._open(count)
        if count and present is not None:
            streams.restore(present)
            if not used:
                streams.begin = present
        return self._go_on(iterator)

    def start_next_epoch(self, used_in_all: int, absent: int) -> None:
        """Note where it stands; one that yields batches again, after it has ended, begins at its first one."""
        if self._has_ended:
            self._skipped = -used_in_all
            self._first = None
            self._has_ended = False
        else:
            self._skipped += absent
        self._used_before = used_in_all

    def state_dict(self) -> dict[str, Any]:
        first = self.streams.values.without_unchanged(self._first)
        return {**super().state_dict(), "first": first, "absent_before": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._first = state.get("first")
        self._skipped = int(state["absent_before"])

    def _go_on(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the rest of an iterator, and note its end."""
        yield from _rest_of(iterator)
        self._has_ended = True


class StatefulPosition(SampledPosition):
    """The loader continues from its own state, where it has all of it; else as one without a state."""

    may_begin_again = True

    def __init__(self, loader: Any, streams: LoaderStreams, is_fast: bool) -> None:
        super().__init__(loader, streams, is_fast)
        self._loaded: Any = None  # A state that was loaded, and from which nothing has continued yet.
        self._last_state: Any = None  # The last state of a loader whose workers are gone.
        self._is_skipped = False  # Whether this epoch does not read the loader from its own state.

    def batches(self, used: int, present: State | None) -> Iterator[Any]:
        state = self._loaded
        self._loaded = None
        self._last_state = None
        self._is_skipped = bool(used) and (state is None or _lacks_place(state))
        if state is None or present is None or self._is_skipped:
            return super().batches(used, present)
        return self._continue_epoch(state, present) if used else self._begin_epoch(state, present)

    def _continue_epoch(self, state: Any, present: State) -> Iterator[Any]:
        self.streams.restore(present)
        iterator = self._from_state(state)
        _warn_of_workers(self.loader)
        self.streams.restore(present)
        return iterator

    def _begin_epoch(self, state: Any, present: State) -> Iterator[Any]:
        """Begin an epoch where the loader stood at the end of the one before."""
        loader = self.loader
        self._warn_of_new_workers()
        # The values were put back already, and since then the epoch was set.
        self.streams.restore(present, with_values=False)
        iterator = self._from_state(state)
        if isinstance(loader, DataLoader) and not loader.persistent_workers:
            # The loader ended, and started again, with draws that an uninterrupted run makes once.
            self.streams.restore(present, with_values=False)
            self.streams.mark_begin()
            return iterate(loader)
        if isinstance(loader, DataLoader) and self._keeps_workers:
            random_state.restore(present["random"])  # The workers of an uninterrupted run have their seed already.
        self.streams.begin = present
        return iterator

    def _from_state(self, state: Any) -> Iterator[Any]:
        self.loader.load_state_dict(state)
        try:
            return iterate(self.loader)
        except AssertionError as error:  # Of torchdata, with any text or none.
            workers = getattr(self.loader, "num_workers", 0)
            reason = str(error) or "refused"
            raise CheckpointMismatch(
                f"the state of the {type(self.loader).__name__} does not fit num_workers={workers} ({reason}); give as "
                "many workers as it was saved with, or begin the epoch again: mid_epoch='restart', an option of "
                "StateManagerAddon"
            ) from error

    def _read_again(self, count: int) -> Iterator[Any]:
        self._is_skipped = False  # It is the loader itself that is read.
        return super()._read_again(count)

    def end_workers(self) -> None:
        if not self._is_skipped:
            self._last_state = self.loader.state_dict()  # Without its workers, it would return its initial state.

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self._is_skipped:
            state["loader"] = self.loader.state_dict() if self._last_state is None else self._last_state
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded = state["loader"]


def position_of(loader: Any, streams: LoaderStreams, is_fast: bool, used_before: int) -> SampledPosition:
    """Return how a loader is read that is met after so many batches of epochs before."""
    if isinstance(loader, Iterator):
        return IteratorPosition(loader, streams, is_fast, used_before)
    if is_stateful(loader) and not _begins_anew(loader):
        return StatefulPosition(loader, streams, is_fast)
    if isinstance(loader, Sequence) or iterates_as_torch(loader):
        return SampledPosition(loader, streams, is_fast)
    return ReplayPosition(loader, streams, is_fast)


def _begins_anew(loader: Any) -> bool:
    """Return whether a StatefulDataLoader has a sampler without a state, whose order it does not restore.

    It begins such a sampler anew in the middle of the epoch, with the random state of that moment.
    """
    if not takes_samples(loader):
        return False
    if loader.num_workers and is_stateful(loader.dataset):  # That state is in the workers, and the loader has it.
        return False
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(order, BatchSampler):
        order = order.sampler
    is_restored = is_stateful(order) or type(order).__module__.startswith("torchdata.")  # Its iterators have a state.
    return not is_restored and type(order) is not SequentialSampler


def _lacks_place(state: Any) -> bool:
    """Return whether a StatefulDataLoader has saved no state of its IterableDataset, and of no iterator over it.

    It skips batches then, and counts those that it skips a second time in the state that it saves next.
    """
    places = [*_values_under(state, ("dataset_state", "dataset_iter_state"))]
    return bool(places) and all(place is None for place in places) and any(_values_under(state, ("fetcher_state",)))


def _values_under(state: Any, keys: Sequence[str]) -> Iterator[Any]:
    """Yield what is under some keys in nested dicts."""
    if not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if key in keys:
            yield value
        yield from _values_under(value, keys)


# ----------------------------------------------------------------------------- the first entries, which are skipped


class _SkipFirst(Proxy):
    """A batch sampler (or sampler) without its first entries."""

    def __init__(self, sampler: Any, skip: int) -> None:
        super().__init__(sampler)
        self._skip = skip
        self.iterator: Iterator[Any] | None = None  # Once the loader iterates over it.
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        # Nothing is skipped here: a DataLoader draws its base seed after this call and before the first entry.
        self.iterator = iter(self.passed)
        return self._entries()

    def _entries(self) -> Iterator[Any]:
        self.skip()
        assert self.iterator is not None
        yield from _rest_of(self.iterator)

    def skip(self) -> None:
        """Drop the first entries now, while the random state is that of the beginning of the epoch."""
        assert self.iterator is not None
        with self._lock:  # A loader may fetch its batches in a thread.
            count = self._skip
            self._skip = 0
            sampler = getattr(self.passed, "sampler", self.passed)
            _, has_drawn = _drop(self.iterator, count)
            if has_drawn:
                _warn_of_draws(f"sampler {type(sampler).__name__}")

    def __len__(self) -> int:
        return super().__len__() - self._skip


def _skip_entries(loader: Any, count: int, is_fast: bool) -> Iterator[Any] | None:
    """Iterate over a copy of a loader whose sampler skips its first entries; None if the loader does not use it."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = _SkipFirst(getattr(loader, name), count)
    iterator = batches_of(copy_with(loader, **{name: sampler}), is_fast)
    if sampler.iterator is None:  # The __iter__ of a subclass is a generator, for example.
        return None
    _warn_of_workers(loader)
    sampler.skip()
    return iterator


def _rest_of(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the rest of an iterator, without calling ``iter()``, which restarts some iterators."""
    while True:
        try:
            entry = next(iterator)
        except StopIteration:
            return
        yield entry


def _drop(iterator: Iterator[Any], count: int) -> tuple[Any, bool]:
    """Drop the first entries; return the last one, and whether global random streams were drawn from between them.

    Training uses these streams too, so that the entries may be others than those that were used.
    """
    before = None
    last = None
    for _ in range(count):
        entry = next(iterator, None)
        if entry is not None:
            last = entry
        if before is None:  # After the first entry, which may draw all numbers of the epoch at once.
            before = random_state.comparable()
    return last, count > 0 and before != random_state.comparable()


def _warn_of_draws(reader: str) -> None:
    _log.warning(
        "the %s draws from the global random streams while it is iterated: the order of the samples may differ from "
        "that of an uninterrupted run; give it its own generator",
        reader,
    )


def _warn_of_workers(loader: Any, text: str = "", further: str = "") -> None:
    """Warn that what a dataset draws in new workers is not what it would have drawn; that of a SeededDataset is."""
    workers = getattr(loader, "num_workers", 0)
    if not workers or is_seeded(loader.dataset):
        return
    remedy = "write SeededDataset(dataset) of zae.data for the dataset of the loader"
    if isinstance(loader.dataset, IterableDataset):
        remedy = "let its dataset draw from a generator that its state_dict contains"
    text = text or (
        f"resuming in the middle of an epoch with num_workers={workers}: the samples are the same, but random numbers "
        "that the dataset draws in its workers are not exact"
    )
    _log.warning("%s; %s%s", text, remedy, further)
