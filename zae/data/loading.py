"""How a loader is walked: from its beginning, or exactly from where an interrupted epoch stood."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from zae.common import random_state
from zae.data.gather import batches_of
from zae.data.loader_state import (
    as_begun,
    begins_again,
    capture_parts,
    changes_of,
    facts_of,
    global_streams,
    restore_parts,
)
from zae.data.reshard import padded, place_of, why_not_again
from zae.data.workers import deaths_expected, mute_workers, part_from_workers, unmute_workers
from zae.errors import CheckpointMismatch, LoaderError

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["Position", "check_loader", "describe", "gives_pinned", "length_of", "own_batch_sampler"]

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


def gives_pinned(loader: Any) -> bool:
    """Say whether each batch of a loader is pinned memory of its own, whose copy to a GPU nobody has to wait for.

    Parameters
    ----------
    loader : object
        Any loader.

    Returns
    -------
    bool
        True for a DataLoader with ``pin_memory=True`` and workers: what they send is pinned anew for each batch.
        Batches of anything else may be one buffer that is filled again while its copy goes on.

    Examples
    --------
    >>> gives_pinned(DataLoader([1, 2]))
    False
    """
    return isinstance(loader, DataLoader) and bool(loader.pin_memory) and loader.num_workers > 0


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
            f"{name} is a dict ({', '.join(map(str, loader))}), but only valid_loader may be a dict; give one loader"
        )
    if isinstance(loader, (list, tuple)) and loader and isinstance(loader[0], DataLoader):
        raise LoaderError(f"{name} is a {type(loader).__name__} of loaders; give a dict: valid_loader={{name: loader}}")
    if length_of(loader) == 0:
        raise LoaderError(f"{name} has 0 batches ({describe(loader)}); give it data, or drop_last=False")


class Position:
    """Where the training data stands: the random state at the open epoch's beginning, and the present one.

    Restarting the epoch with the state of its beginning gives the same order of samples; those that were used are
    passed over in the sampler, so that the dataset is not asked for them; then the present state is put back.
    """

    def __init__(self, fast: bool = True) -> None:
        self.loader: Any = None
        self.pinned = False  # Whether the batches of the open epoch are copied to a GPU without waiting.
        self.is_evaluating = False  # Whether weights and random streams are those of an evaluation at this moment.
        self._fast = fast
        self._begin: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._first: dict[str, Any] | None = None  # The state as an iterator began, in this epoch or in an earlier one.
        # After how many batches of the open epoch a None was passed over, and how many were before this epoch.
        self._absent: list[int] = []
        self._absent_before = 0
        self._another = False  # Whether the loader that goes on is another one than the state is of.
        self._ended_with: Any = None  # The loader of the call of `run` that the state is of, where that call is over.
        self._expected: int | None = None  # The batches of an open epoch, where their number may be another in each.
        self._kept: Any = None  # The loader's own state, where it was asked for the last time.
        self._is_copied = False  # Whether a copy of the loader is walked: the loader's own state is another then.
        # Whether the workers of the loader go on in the next epoch, and whether they did so in the open one.
        self._persists = self._persisted = False
        self._ended_at: int | None = None  # Batches in all when an iterator has ended; it may begin again.
        self._pad = 0  # What stands before the open epoch's order, since it was dealt anew.
        self._padded: tuple[Any, Any] = (None, None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the loader behind, which need not be picklable: a copy goes on as one that has loaded this state."""
        twin = self
        if self._resume is None and self.loader is not None:
            twin = Position(self._fast)
            twin.load_state_dict(self.state_dict())
        return {**twin.__dict__, "loader": None, "_ended_with": None, "_padded": (None, None),
                "is_evaluating": self.is_evaluating}  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data and of every random stream, at this moment."""
        if self._resume is not None:
            return {key: value for key, value in self._resume.items() if key != "may_deal_anew"}
        absent: dict[str, Any] = {"absent": list(self._absent), "absent_before": self._absent_before}
        if self._persists if self._begin is None else self._persisted:
            absent["persists"] = True
        state = {"begin": self._begin, "present": self._capture(), "loader": None, "pad": self._pad, **absent}
        state["facts"] = {} if self.loader is None else facts_of(self.loader)
        if isinstance(self.loader, Iterator):
            state["first"] = self._first
        if _is_stateful(self.loader) and not self._is_copied:
            state["loader"] = self.loader.state_dict() if self._kept is None else self._kept
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position over; it is restored when the next epoch, or the rest of this one, begins.

        Parameters
        ----------
        state : mapping
            What `state_dict` returned. ``"may_deal_anew": True`` in it lets another batch size, or another number of
            ranks (``"ranks"`` says of how many it is), go on with the samples that are left.
        """
        made, absent = dict(state), list(state["absent"])  # What may fail comes before anything is changed.
        self._pad, self._absent_before = int(state.get("pad", 0)), int(state["absent_before"])
        self._resume, self._absent = made, absent

    def dealt(self, loader: Any) -> Any:
        """Return the loader to train on: in an epoch that was dealt anew, one with what was used before the rest."""
        if self._pad and self._padded[0] is not loader:
            self._padded = (loader, padded(loader, self._pad))
        return self._padded[1] if self._pad else loader

    def deal_anew(self, trainer: Trainer, given: Any) -> None:
        """Go on, where that is allowed, with another batch size or number of ranks: each sample left comes once.

        Parameters
        ----------
        trainer : Trainer
            Its place in the open epoch becomes that of the new batches.
        given : iterable
            The loader that the user gave.

        Raises
        ------
        CheckpointMismatch
            It is another dataset or sampler, or a stream.
        """
        resume, progress, world = self._resume, trainer.progress_checker, trainer.world_size
        if resume is None or not resume.get("may_deal_anew") or not resume["facts"]:
            return
        before, ranks = resume["facts"], (resume.get("ranks", world), world)
        if ranks[0] == world and all(
            before.get(key) == facts_of(given).get(key) for key in ("batch_size", "drop_last")
        ):
            return
        reasons = why_not_again(given, before, ranks, self._pad, progress.epoch_batch)
        if progress.epoch_batch and resume["loader"] is not None:
            reasons.append(f"a {type(given).__name__} keeps its own position, counted in the batches of before")
        if reasons:
            raise CheckpointMismatch(
                f"reshard=True cannot reshard the rest of the epoch: {'; '.join(reasons)}. Build the loader as it "
                "was, or add mid_epoch='restart': the epoch then begins again"
            )
        if progress.epoch_batch:
            used = progress.epoch_batch + sum(after <= progress.epoch_batch for after in self._absent)
            self._pad, progress.epoch_batch = place_of(given, before, used, ranks, self._pad)
            wrapped = trainer.wrap_loader(given, True)
            steps, batches = trainer.steps_in(wrapped) or 0, length_of(wrapped) or 1
            progress.epoch_step = -(-steps * progress.epoch_batch // batches)
            _log.info("the rest of epoch %d is resharded: every unused sample comes once",
                      progress.epoch + 1)  # fmt: skip
        kept = {key: value for key, value in resume.items() if key not in ("may_deal_anew", "ranks")}
        self._resume = {**kept, "facts": {}, "loader": None, "pad": self._pad, "absent": []}
        self._absent = []

    def restart(self, used_before: int) -> None:
        """Begin the open epoch again at its first batch, from the present random state; an iterator, where it stands.

        Parameters
        ----------
        used_before : int
            Batches that were used in all.
        """
        self._absent, self._absent_before, self._pad = [], -used_before, 0
        if self._resume is not None:
            absent, present = {"absent": [], "absent_before": -used_before}, self._resume["present"]
            begin = self._resume["begin"] or present
            present = {**present, "parts": as_begun(present["parts"], begin["parts"])}
            anew = {"begin": None, "first": None, "loader": None, "pad": 0}
            self._resume = {**self._resume, **anew, "present": present, **absent}

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
        if new_run and self._ended_with is not None and self._ended_with is not loader:
            changes.append("it is another object")
        if self._resume is not None and "ranks" in self._resume:
            changes.append(f"it was of {self._resume['ranks']} ranks")
        if self._resume is None or not changes:
            return
        if not new_run:
            if not _may_vary(before, changes):
                raise _another_loader(changes)
            self._expected = before["number of batches"] if self._resume["begin"] else None
            return
        present = {"random": self._resume["present"]["random"], "generators": None, "parts": {}}
        anew = {"begin": None, "first": None, "loader": None, "persists": False}
        self._resume = {**self._resume, **anew, "present": present}
        self._another = True

    def note_loader(self, loader: Any) -> None:
        """Note the loader of the call of ``run`` that the state is of, as it is made again: the next may have another.

        Parameters
        ----------
        loader : iterable
            The loader, after ``wrap_loader``.
        """
        self._ended_with = None if self._resume is None else loader

    def restore_random(self) -> None:
        """Put the global random streams to what they were, after whatever a resume itself has drawn."""
        if self._resume is not None:
            random_state.restore(self._resume["present"]["random"])

    def forget(self) -> None:
        """Begin the next epoch at its first batch."""
        self.pinned = False
        self._begin = self._resume = None
        self._pad, self._padded = 0, (None, None)
        self._absent_before += len(self._absent)
        if self._ended_at is not None:  # What gives batches again after its end begins from its first one.
            self._absent_before, self._ended_at, self._first = -self._ended_at, None, None
        self._absent = []

    @property
    def is_restored(self) -> bool:
        """Whether a state was loaded that nothing has gone on from yet."""
        return self._resume is not None

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
        resume, self._resume, self._another, self._ended_with = self._resume, None, False, None
        self._note_workers(loader, used, resume)
        self._kept, self._first = None, self._first if self.loader is loader else (resume or {}).get("first")
        self.loader, self.pinned, self._is_copied, self._ended_at = loader, gives_pinned(loader), False, None
        unmute_workers()
        once = isinstance(loader, Iterator)  # It need not start again: it stands where it was left.
        if resume is None and (once or not used):
            self._begin = self._begin if used else self._capture()
            self._first = self._first or self._begin
            iterator = loader if used else self._open(loader, 0)
            return self._present(_on(iterator) if once else iterator, used, used_before - used)
        present = self._capture() if resume is None else resume["present"]
        begin = self._begin if resume is None else resume["begin"]
        skip = used + sum(after <= used for after in self._absent)
        earlier = used_before - used + self._absent_before if once else 0  # Of epochs since the iterator began.
        if once and skip + earlier:
            _log.info("the first %d batches of the iterator are passed over", skip + earlier)
        if resume is not None and _is_stateful(loader) and resume["loader"] is not None:
            iterator = self._of_stateful(loader, resume["loader"], present, used)
        elif earlier:
            if self._first is not None:
                self._rewind(self._first)
            iterator = self._open(loader, skip + earlier)
        else:
            self._rewind(begin if used and begin is not None else present)
            begin = begin if used and begin is not None else self._capture()
            self._first = self._first or begin
            iterator = self._open(loader, skip)
        expected, self._expected = self._expected, None
        if expected is not None and length_of(loader) != expected:
            raise _another_loader([f"number of batches was {expected} and is {length_of(loader)}"])
        self._begin = begin
        if used or earlier:
            # The workers' first batches may have been asked for already: what they draw is theirs, not ours.
            self._restore(present)
        return self._present(_on(iterator) if once else iterator, used, used_before - used)

    def _of_stateful(self, loader: Any, state: Any, present: Mapping[str, Any], used: int) -> Iterator[Any]:
        """Walk a loader from what it said of its place."""
        self._restore(present)
        loader.load_state_dict(state)
        iterator = iter(loader)
        if used or not isinstance(loader, DataLoader) or loader.persistent_workers:
            return iterator
        # It began where it had ended, and then again, with draws that an uninterrupted run makes once.
        self._restore(present)
        return iter(loader)

    def _note_workers(self, loader: Any, used: int, resume: Mapping[str, Any] | None) -> None:
        """Note whether workers would go on here in a run that was not interrupted: they were given their seed then."""
        if resume is not None:
            self._persisted = bool(resume.get("persists"))
        elif not used:
            self._persisted = self._persists and self.loader is loader
        self._persists = bool(getattr(loader, "persistent_workers", False))

    def _open(self, loader: Any, count: int) -> Iterator[Any]:
        """Begin to walk a loader after its first batches, with no other draw than where its workers go on."""
        if not self._persisted or (not count and getattr(loader, "_iterator", None) is not None):
            iterator, self._is_copied = _skip(loader, count, self._fast)
            return iterator
        own, loader.generator = loader.generator, torch.Generator()  # The workers' seed is drawn from it.
        try:
            iterator, self._is_copied = _skip(loader, count, self._fast)
        finally:
            loader.generator = own
        return iterator

    def _present(self, iterator: Iterator[Any], given: int, before: int) -> Iterator[Any]:
        """Pass over batches that are None; refuse a loader that gives more of them than of others."""
        try:
            for batch in iterator:
                if batch is None:
                    self._absent.append(given)
                    continue
                given += 1
                yield batch
        except Exception:
            mute_workers()  # Until the run has dealt with it: it may be the first sign of a worker that has died.
            raise
        finally:
            if deaths_expected():
                if _is_stateful(self.loader) and not self._is_copied:
                    self._kept = self.loader.state_dict()  # Parted from its workers, it would tell of its beginning.
                part_from_workers(iterator, self.loader)
        if isinstance(self.loader, Iterator):
            self._ended_at = before + given
        absent = len(self._absent)
        if absent > given:
            raise LoaderError(
                f"{absent} of {absent + given} batches were None ({describe(self.loader)}); fix the collate_fn"
            )
        if absent:
            _log.warning("%d of %d batches were None and passed over", absent, absent + given)

    def _capture(self) -> dict[str, Any]:
        generators = None if self.loader is None else random_state.capture_generators(self.loader)
        parts = {} if self.loader is None else capture_parts(self.loader)
        return {"random": random_state.capture(), "generators": generators, "parts": parts}

    def _restore(self, state: Mapping[str, Any], only_streams: bool = False) -> None:
        random_state.restore(state["random"])
        if state["generators"] is not None:
            random_state.restore_generators(self.loader, state["generators"])
        restore_parts(self.loader, state["parts"], only_streams)

    def _rewind(self, state: Mapping[str, Any]) -> None:
        """Restore the beginning of an epoch, also where a sampler still stood at the end of the one before."""
        self._restore(state)
        again = begins_again(self.loader)
        if again is not None:
            self._restore(state, only_streams=again)


def own_batch_sampler(facts: Mapping[str, Any]) -> str:
    """Name the batch sampler of a loader that is none of torch's; else an empty string.

    Parameters
    ----------
    facts : mapping
        What `zae.data.loader_state.facts_of` returned.

    Returns
    -------
    str
        Its class.

    Examples
    --------
    >>> own_batch_sampler({"batch sampler": "ByLength"}), own_batch_sampler({"batch sampler": "BatchSampler"})
    ('ByLength', '')
    """
    name = facts.get("batch sampler") or "BatchSampler"
    return "" if name in ("BatchSampler", "SampleShards") else str(name)


def _may_vary(before: Mapping[str, Any], changes: Sequence[str]) -> bool:
    """Whether only the number of batches differs, of a batch sampler that may make another one in each epoch."""
    return bool(own_batch_sampler(before)) and [change.startswith("number of batches") for change in changes] == [True]


def _another_loader(changes: Sequence[str]) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"the loader is not the one that this run was saved with: {'; '.join(changes)}. Build it as it was, "
        "write reshard=True (an option of StateManagerAddon) to distribute the remaining samples again, or begin "
        "a new run from the weights alone: apply_weights(path)"
    )


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class _SkipFirst:
    """A batch sampler (or sampler) without its first entries."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip
        self._rest: Iterator[Any] | None = None
        self._turn = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        # A DataLoader draws its base seed after this call and before the sampler's first entry; so do we.
        self._rest = iter(self._sampler)
        return self._walk()

    def _walk(self) -> Iterator[Any]:
        self.skip()
        assert self._rest is not None
        yield from self._rest

    @property
    def has_begun(self) -> bool:
        """Whether the loader has begun to walk it."""
        return self._rest is not None

    def skip(self) -> None:
        """Pass the first entries over now, while the random state is that of the epoch's beginning."""
        assert self._rest is not None
        with self._turn:  # The loader may fetch its batches in a thread, which has come first then.
            count, self._skip = self._skip, 0
            _pass_over(self._rest, count, f"sampler {type(getattr(self._sampler, 'sampler', self._sampler)).__name__}")

    def __len__(self) -> int:
        return len(self._sampler) - self._skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


def _pass_over(iterator: Iterator[Any], count: int, what: str) -> None:
    """Take the first entries, and say where the others may depend on random numbers that were drawn between them."""
    before = None
    for _ in range(count):
        next(iterator, None)
        before = before or global_streams()  # The first entry may draw all numbers of the epoch at once.
    if count and before != global_streams():
        _log.warning(
            "the %s draws from the global random streams as it goes: the order of the samples may not be exactly that "
            "of an uninterrupted run; give it a generator of its own", what,
        )  # fmt: skip


def _on(iterator: Iterator[Any]) -> Iterator[Any]:
    """Walk an iterator without asking for it again: some begin anew each time."""
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def _skip(loader: Any, count: int, fast: bool) -> tuple[Iterator[Any], bool]:
    """Begin a loader, or a copy of it, after its first batches; a DataLoader over a sampler does not load them."""
    if not count:
        return batches_of(loader, fast), False
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    rest = _without_first(loader, count, fast) if is_map else None
    if rest is not None:
        return rest, True
    if isinstance(loader, DataLoader):
        what = f"a {type(loader).__name__}, which overrides __iter__" if is_map else "an IterableDataset"
        _log.warning("resuming in the middle of an epoch of %s: %d batches are read again and passed over", what, count)
    elif not isinstance(loader, Sequence):
        _log.info("%d batches of %s are read again and passed over", count, type(loader).__name__)
    iterator = iter(loader)
    _pass_over(iterator, count, f"{'dataset' if isinstance(loader, DataLoader) else 'loader'} "
               f"{type(getattr(loader, 'dataset', loader)).__name__}")  # fmt: skip
    return iterator, False


def _without_first(loader: DataLoader[Any], count: int, fast: bool) -> Iterator[Any] | None:
    """Begin a copy of a loader whose sampler passes over its first entries; None where it does not ask the sampler."""
    rest = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = _SkipFirst(getattr(loader, name), count)
    # DataLoader forbids setting these after its construction, for the sake of its own iterators; this copy has none.
    object.__setattr__(rest, name, sampler)
    object.__setattr__(rest, "_iterator", None)
    iterator = batches_of(rest, fast)
    if not sampler.has_begun:  # A generator, say: what it walks is not known, and when.
        return None
    if loader.num_workers:
        _log.warning("going on in the middle of an epoch with num_workers=%d: the samples are the same, but random "
                     "numbers that the dataset draws in its workers are not exact", loader.num_workers)  # fmt: skip
    sampler.skip()
    return iterator
