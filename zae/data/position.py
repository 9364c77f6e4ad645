"""The position of a run in its training data, and how an epoch is resumed from it."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from zae.common import random_state
from zae.data.loader_state import (
    as_begun,
    capture_parts,
    changes_of,
    facts_of,
    is_exhausted,
    restore_parts,
)
from zae.data.loaders import check_ended, describe, has_order, has_pinned_batches, is_stateful, length_of
from zae.data.part_values import PartValues
from zae.data.skip import LastBatch, is_read_again, iterate_on, skip_batches, warn_of_workers
from zae.data.workers import (
    abandon_workers,
    check_epoch_of_workers,
    deaths_expected,
    is_seeded,
    iterate,
    mute_workers,
    seed_streams_of,
    unmute_workers,
)
from zae.errors import CheckpointMismatch, LoaderError

if TYPE_CHECKING:
    from zae.data.loaders import BatchLimits
    from zae.trainer import Trainer

__all__ = ["LoaderPosition"]

_log = logging.getLogger("zae")
_NO_ORDER = (
    "its batches came as the workers finished them (in_order=False, with several workers), so that it is not known "
    "which samples were used: to continue would use some twice and others never"
)

_DRAW_FIRST = (SequentialSampler, RandomSampler, SubsetRandomSampler)  # Whole epochs, unless with replacement.


class LoaderPosition:
    """The position of a run in its training loader: the random states at the beginning of the epoch, and now.

    To resume an epoch, the state of its beginning is restored, so that the order of samples is the same; the used
    samples are skipped, in the sampler where possible; and the present state is restored. ``fast`` says whether the
    exact data path may be taken (`zae.data.gather`).

    Of the states that it keeps, ``_resume`` is one that was loaded and from which nothing has continued yet; the others
    are of the epoch that runs. A loader is read in one of three ways: from its beginning, with the used batches
    skipped; from its own state (a StatefulDataLoader); or, as an iterator, which cannot start again, on from where it
    is.
    """

    def __init__(self, fast: bool = True) -> None:
        self.loader: Any = None
        self.pinned = False  # Whether the batches of the epoch are copied to a GPU without waiting.
        self.failed_at: int | None = None  # The batch of the epoch for which the loader raised an error.
        self.is_fast = fast
        self.values = PartValues()
        self._begin: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._first: dict[str, Any] | None = None  # The state as an iterator began, in this epoch or in an earlier one.
        # After how many batches of this epoch a None was skipped, and how many were skipped before this epoch.
        self._absent: list[int] = []
        self._absent_before = 0
        self._another = False  # Whether the run continues with another loader than that of the checkpoint.
        self._ended_with: Any = None  # The loader of the call of `run` that was saved, if that call has ended.
        self._expected: int | None = None  # The batches of the epoch, for a sampler that may change their number.
        self._kept: Any = None  # The last state of a loader whose workers are gone.
        self._is_copied = False  # Whether a copy of the loader is in use, so that the loader's own state does not fit.
        # Whether the workers persist in the next epoch, and whether they persisted in this one.
        self._persists = False
        self._persisted = False
        self._ended_at: int | None = None  # The total number of batches when an iterator ended; it may begin again.
        self._last: LastBatch | None = None  # The batch that was used last, of a loader that a resume reads again.
        self._is_read_again = False
        self._pad = 0  # Entries before the order of this epoch, since it was resharded.
        self._padded: tuple[Any, Any] = (None, None)  # The loader that was padded last, and what came of it.
        self.view: tuple[Any, Any, Any] = (None, None, None)  # The loader of the last call, its limits, its view.

    def __getstate__(self) -> dict[str, Any]:
        """Leave the loader out, which may not be picklable: a copy resumes as after loading this state."""
        twin = self
        if self._resume is None and self.loader is not None:
            twin = self.fresh()
            twin.load_state_dict(self.state_dict())
        unset = {"loader": None, "_ended_with": None, "_last": None}
        return {**vars(twin), **unset, "_padded": (None, None), "view": (None, None, None)}

    def fresh(self) -> LoaderPosition:
        """Return a position before the first batch, without a loader."""
        position = LoaderPosition(self.is_fast)
        position.values = self.values
        return position

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader and of every random stream."""
        if self._resume is not None:
            return {key: value for key, value in self._resume.items() if key != "may_reshard"}
        keeps_workers = self._persists if self._begin is None else self._persisted
        last_batch = None if self._last is None else self._last.digest()
        present = self._capture()
        state: dict[str, Any] = {
            "begin": self._with_changed(self._begin),
            "present": self._with_changed(present),
            "loader": None,
            "pad": self._pad,
            "absent": list(self._absent),
            "absent_before": self._absent_before,
        }
        if keeps_workers:
            state["persists"] = True
        if not has_order(self.loader):
            state["has_no_order"] = True
        if last_batch is not None:
            state["last_batch"] = last_batch
        state["facts"] = {} if self.loader is None else facts_of(self.loader)
        if isinstance(self.loader, Iterator):
            state["first"] = self._with_changed(self._first)
        if is_stateful(self.loader) and not self._is_copied:
            state["loader"] = self.loader.state_dict() if self._kept is None else self._kept
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, which is restored when the next epoch, or the rest of this one, begins.

        With ``"may_reshard": True``, another batch size or another number of ranks (it was saved by ``"ranks"``) may
        continue with the samples that are left.
        """
        # Any of these may fail: nothing is changed before all are read.
        resume = dict(state)
        absent = list(state["absent"])
        pad = int(state["pad"])
        absent_before = int(state["absent_before"])
        if self.loader is not None:
            self.values.note(self.loader)  # What has changed since is not taken for the script's.
        for moment in ("begin", "present"):
            self.values.take((state[moment] or {}).get("values", {}))
        self._resume = resume
        self._absent = absent
        self._pad = pad
        self._absent_before = absent_before

    def view_of(self, loader: Any, limits: BatchLimits) -> Any:
        """Return the view of a training loader; in the next call of ``run`` with both the same one, to continue it."""
        last_loader, last_limits, view = self.view
        is_changed = isinstance(view, (list, tuple)) and not all(map(operator.is_, view, loader))
        is_same = last_loader is loader and last_limits == limits and not is_changed
        return view if is_same else limits.of_training(loader)

    def pad_loader(self, loader: Any) -> Any:
        """Return the loader to train on; in an epoch that was resharded, its order begins with the used entries."""
        if not self._pad:
            return loader
        if self._padded[0] is not loader:
            from zae.data.reshard import pad_order

            self._padded = (loader, pad_order(loader, self._pad))
        return self._padded[1]

    def reshard(self, trainer: Trainer, given: Any) -> None:
        """Continue, where that is allowed, with another batch size or number of ranks: each remaining sample once.

        The progress in the epoch is counted in the new batches from here on.
        """
        resume = self._resume
        progress = trainer.progress_checker
        world = trainer.engine.dp_world_size
        if resume is None or not resume.get("may_reshard") or not resume["facts"]:
            return
        before = resume["facts"]
        world_before = resume.get("ranks", world)
        now = facts_of(given)
        has_same_batches = all(before.get(key) == now.get(key) for key in ("batch_size", "drop_last"))
        if world_before == world and has_same_batches:
            return
        from zae.data.reshard import place_of, why_not_reshard

        ranks = (world_before, world)
        reasons = why_not_reshard(given, before, ranks, self._pad, progress.epoch_batch)
        if progress.epoch_batch and resume["loader"] is not None:
            reasons.append(f"a {type(given).__name__} has its own position, counted in the previous batches")
        if reasons:
            raise CheckpointMismatch(
                f"reshard=True cannot reshard the rest of the epoch: {'; '.join(reasons)}. Build the loader as it "
                "was, or add mid_epoch='restart' to begin the epoch again"
            )
        present = resume["present"]
        if progress.epoch_batch:
            if world_before != world:
                # Several ranks draw the whole order at once, one process the end of it at the end.
                present = {**present, "generators": None}
            absent = sum(after <= progress.epoch_batch for after in self._absent)
            used = progress.epoch_batch + absent
            self._pad, progress.epoch_batch = place_of(given, before, used, ranks, self._pad)
            wrapped_loader = trainer.wrap_loader(given, True)
            steps = trainer.steps_per_epoch(wrapped_loader) or 0
            batches = length_of(wrapped_loader) or 1
            progress.epoch_step = -(-steps * progress.epoch_batch // batches)  # Rounded up.
            _log.info("epoch %d is resharded: each remaining sample is used once", progress.epoch + 1)
        kept = {key: value for key, value in resume.items() if key not in ("may_reshard", "ranks")}
        self._resume = {**kept, "present": present, "facts": {}, "loader": None, "pad": self._pad, "absent": []}
        self._absent = []

    def restart(self, used_before: int) -> None:
        """Begin the epoch again at its first batch, with the present random state; an iterator continues."""
        self._absent = []
        self._absent_before = -used_before
        self._pad = 0
        if self._resume is None:
            return
        present = self._resume["present"]
        begin = self._resume["begin"] or present
        # Datasets and samplers begin the epoch as they began it; the random streams go on from where they are.
        values = [*_values_in(present), *_values_in(begin)]  # The later ones are put back last.
        present = {**present, "parts": as_begun(present["parts"], begin["parts"]), "values": {"values": values}}
        unset = {"begin": None, "first": None, "loader": None, "pad": 0, "last_batch": None}
        absent = {"absent": [], "absent_before": -used_before}
        self._resume = {**self._resume, **unset, "present": present, **absent}

    def check(self, loader: Any, new_run: bool) -> None:
        """Refuse to resume with another loader, after ``wrap_loader``, than the run was saved with.

        A new call of ``run``, which had not begun when the state was saved, takes any loader.
        """
        before = {} if self._resume is None else dict(self._resume["facts"])
        now = facts_of(loader)
        before.pop("dataset fingerprint", None)  # In a state of an older version; now it is in the record of the run.
        changes = changes_of(before, now) if before else []
        if new_run and self._ended_with is not None and self._ended_with is not loader:
            changes.append("it is another object")
        if self._resume is not None and "ranks" in self._resume:
            changes.append(f"it was shared by {self._resume['ranks']} ranks")
        if self._resume is None or not changes:
            return
        if not new_run:
            if not _may_vary(before, changes):
                raise _another_loader(changes)
            self._expected = before["number of batches"] if self._resume["begin"] else None
            return
        # Another loader begins anew: of the state, the global random streams alone are for it.
        present = {"random": self._resume["present"]["random"], "generators": None, "parts": {}, "values": {}}
        unset = {"begin": None, "first": None, "loader": None, "persists": False}
        self._resume = {**self._resume, **unset, "present": present}
        self._another = True

    def check_order(self, loader: Any) -> None:
        """Refuse to continue an open epoch whose batches came in no known order."""
        if self._resume is not None and not self._another:
            if self._resume.get("has_no_order"):
                raise CheckpointMismatch(
                    f"the state was saved within an epoch, and {_NO_ORDER}. Resume from a checkpoint of the end of an "
                    "epoch, or write mid_epoch='restart' (an option of StateManagerAddon) to begin the epoch again"
                )
        elif self.loader is loader and not has_order(loader):
            raise LoaderError(
                f"an epoch is open, and {_NO_ORDER}. Write in_order=True, let each call of run() end with an epoch, or "
                "give another loader, which begins the next epoch"
            )

    def warn_of_order(self, loader: Any) -> None:
        """Warn, as a run begins, where no state within an epoch can be continued."""
        if not has_order(loader):
            _log.warning(
                "%s has in_order=False and num_workers=%d: what is saved within an epoch cannot be resumed there, "
                "since the order of the batches is not known; write in_order=True, or mid_epoch='restart' (an option "
                "of StateManagerAddon) to begin such an epoch again",
                type(loader).__name__,
                loader.num_workers,
            )

    def note_loader(self, loader: Any) -> None:
        """Note the loader of a finished call of ``run`` that is repeated; the next call may have another one."""
        self._ended_with = None if self._resume is None else loader

    def begin_values(self, loader: Any) -> None:
        """Mark the values in the parts of a loader as a run begins, and put back those of a state.

        It comes before the hooks that begin an epoch, which win at the end of one, as in a run that is not interrupted.
        """
        self.values.begin(loader)
        if self._resume is not None and not self._another:
            self.values.restore(loader, self._resume["present"].get("values", {}), {})

    def restore_random(self) -> None:
        """Restore the global random streams, from which a resume itself may have drawn."""
        if self._resume is not None:
            random_state.restore(self._resume["present"]["random"])

    def forget(self) -> None:
        """Begin the next epoch at its first batch."""
        self.pinned = False
        if not isinstance(self.loader, Iterator):  # It is read on in the next epoch.
            self._last = None
        self._begin = None
        self._resume = None
        self._pad = 0
        self._padded = (None, None)
        self._absent_before += len(self._absent)
        if self._ended_at is not None:  # An iterator that yields batches again begins at its first one.
            self._absent_before = -self._ended_at
            self._ended_at = None
            self._first = None
        self._absent = []

    @property
    def absent_count(self) -> int:
        """How many batches of the present epoch were None, and were skipped."""
        return len(self._absent)

    @property
    def is_restored(self) -> bool:
        """Whether a state was loaded from which no epoch has continued yet."""
        return self._resume is not None

    @property
    def has_drawn_for_failed(self) -> bool:
        """Whether this process may have drawn random numbers for a batch that the loader failed to give.

        It has not where workers read the samples, in an order that was drawn as the epoch began.
        """
        loader: Any = self.loader
        if self.failed_at is None or not isinstance(loader, DataLoader) or not loader.num_workers:
            return True
        if type(loader.batch_sampler) is not BatchSampler or is_stateful(loader):
            return True
        sampler: Any = loader.batch_sampler.sampler
        return type(sampler) not in _DRAW_FIRST or getattr(sampler, "replacement", False) is True

    def is_of(self, loader: Any) -> bool:
        """Return whether this loader can continue the epoch."""
        return (self._resume is not None and not self._another) or self.loader is loader

    def batches(self, loader: Any, used: int, used_before: int) -> Iterator[Any]:
        """Iterate over the batches that are left in the epoch, without batches that are None.

        ``used`` of them were used in this epoch, and ``used_before`` in all: an iterator, which cannot start again,
        skips as many.
        """
        if used:
            self.check_order(loader)
        else:
            check_epoch_of_workers(loader, 1)
        resume = self._resume
        self._resume = None
        self._another = False
        self._ended_with = None
        self._note_workers(loader, used, resume)
        self._begin_loader(loader, resume)
        once = isinstance(loader, Iterator)  # It cannot start again.
        if resume is None and (once or not used):
            iterator = self._begin_or_go_on(loader, used)
        else:
            iterator = self._skip_to(loader, used, used_before, resume)
        return self._present(iterate_on(iterator) if once else iterator, used, used_before - used)

    def _begin_loader(self, loader: Any, resume: Mapping[str, Any] | None) -> None:
        """Note the loader of the epoch, and forget what was of another one."""
        if self.loader is not loader:
            self._first = None if resume is None else resume.get("first")
        self.loader = loader
        self.pinned = has_pinned_batches(loader)
        self.failed_at = None
        self._kept = None
        self._is_copied = False
        self._ended_at = None
        self._is_read_again = is_read_again(loader)
        unmute_workers()
        seed_streams_of(loader)

    def _begin_or_go_on(self, loader: Any, used: int) -> Iterator[Any]:
        """Iterate over a loader from its beginning, or over an iterator from where it is."""
        if not used:
            self._begin = self._capture()
        self._first = self._first or self._begin
        return loader if used else self._open(loader, 0)

    def _skip_to(self, loader: Any, used: int, used_before: int, resume: Mapping[str, Any] | None) -> Iterator[Any]:
        """Iterate over what is left of an epoch that was begun: in this process, or in the one of a loaded state."""
        present = self._capture() if resume is None else resume["present"]
        begin = self._begin if resume is None else resume["begin"]
        last_batch = None if resume is None else resume.get("last_batch")
        skip = used + sum(after <= used for after in self._absent)
        earlier = 0  # Batches that an iterator has yielded in epochs before this one, since it began.
        if isinstance(loader, Iterator):
            earlier = used_before - used + self._absent_before
            if skip + earlier:
                _log.info("the first %d batches of the iterator are skipped", skip + earlier)
        state = None if resume is None or not is_stateful(loader) else resume["loader"]
        if used and state is not None and (_begins_anew(loader) or _lacks_place(state)):
            state = None
        if state is not None:
            iterator = self._of_stateful(loader, state, present, used)
        elif earlier:
            if self._first is not None:
                self._rewind(self._first)
            iterator = self._open(loader, skip + earlier, last_batch)
        elif used and begin is not None:
            self._rewind(begin)
            self._first = self._first or begin
            iterator = self._open(loader, skip, last_batch)
        else:
            self._rewind(present, with_values=False)  # They were put back before the hooks that begin an epoch.
            begin = self._capture()
            self._first = self._first or begin
            iterator = self._open(loader, skip, last_batch)
        expected = self._expected
        self._expected = None
        if expected is not None and length_of(loader) != expected:
            raise _another_loader([f"number of batches was {expected} and is {length_of(loader)}"])
        self._begin = begin
        if used or earlier:
            # Workers that have begun their first batches have their own random streams.
            self._restore(present)
        return iterator

    def _of_stateful(self, loader: Any, state: Any, present: Mapping[str, Any], used: int) -> Iterator[Any]:
        """Iterate over a loader from its own state."""
        self._restore(present)
        loader.load_state_dict(state)
        try:
            iterator = iterate(loader)
        except AssertionError as error:  # Of torchdata, with any text or none.
            workers = getattr(loader, "num_workers", 0)
            why = str(error) or "refused"
            raise CheckpointMismatch(
                f"the state of the {type(loader).__name__} does not fit num_workers={workers} ({why}); give as many "
                "workers as it was saved with, or begin the epoch again: mid_epoch='restart', an option of "
                "StateManagerAddon"
            ) from error
        if used and getattr(loader, "num_workers", 0) and not is_seeded(getattr(loader, "dataset", None)):
            warn_of_workers(loader)
        if used or not isinstance(loader, DataLoader):
            return iterator
        if loader.persistent_workers:
            if self._persisted and not _begins_anew(loader):
                random_state.restore(present["random"])  # The workers of an uninterrupted run have their seed already.
            return iterator
        # The loader ended, and started again, with draws that an uninterrupted run makes once.
        self._restore(present)
        return iterate(loader)

    def _note_workers(self, loader: Any, used: int, resume: Mapping[str, Any] | None) -> None:
        """Note whether the workers of an uninterrupted run would persist here, and have their seed already."""
        if resume is not None:
            self._persisted = bool(resume.get("persists"))
            if self._persisted and not used and not is_seeded(getattr(loader, "dataset", None)):
                _log.warning(
                    "resuming with persistent_workers=True: the workers of the run that was saved had come from "
                    "earlier epochs, and random numbers that the dataset draws in them, or what it keeps there, are "
                    "not exact; write SeededDataset(dataset) of zae.data for the dataset of the loader, or "
                    "persistent_workers=False"
                )
        elif not used:
            self._persisted = self._persists and self.loader is loader
        self._persists = bool(getattr(loader, "persistent_workers", False))

    def _open(self, loader: Any, count: int, last: str | None = None) -> Iterator[Any]:
        """Skip the first batches of a loader, without drawing a seed for persistent workers, which have one."""
        has_seed = not count and getattr(loader, "_iterator", None) is not None
        if not self._persisted or has_seed:
            iterator, self._is_copied = skip_batches(loader, count, self.is_fast, last)
            return iterator
        own = loader.generator
        loader.generator = torch.Generator()  # The workers' seed is drawn from it, and not from the loader's own.
        try:
            iterator, self._is_copied = skip_batches(loader, count, self.is_fast, last)
        finally:
            loader.generator = own
        return iterator

    def _present(self, iterator: Iterator[Any], given: int, before: int) -> Iterator[Any]:
        """Skip batches that are None; refuse a loader of which more batches are None than not."""
        try:
            for batch in iterator:
                if batch is None:
                    self._absent.append(given)
                    continue
                given += 1
                if self._is_read_again:
                    self._last = LastBatch(batch)
                yield batch
        except Exception:
            self.failed_at = given + 1
            mute_workers()  # Until the run has handled the error: a worker may have died.
            raise
        finally:
            if deaths_expected():
                if is_stateful(self.loader) and not self._is_copied:
                    self._kept = self.loader.state_dict()  # Without its workers, it would return its initial state.
                abandon_workers(iterator, self.loader)
        if isinstance(self.loader, Iterator):
            self._ended_at = before + given
        absent = len(self._absent)
        check_ended(self.loader, given + absent)
        if absent > given:
            raise LoaderError(
                f"{absent} of {absent + given} batches were None ({describe(self.loader)}); fix the collate_fn"
            )
        if absent:
            _log.warning("%d of %d batches were None and were skipped", absent, absent + given)

    def _capture(self) -> dict[str, Any]:
        generators = None if self.loader is None else random_state.capture_generators(self.loader)
        parts = {} if self.loader is None else capture_parts(self.loader)
        values = {} if self.loader is None else self.values.capture(self.loader)
        return {"random": random_state.capture(), "generators": generators, "parts": parts, "values": values}

    def _with_changed(self, state: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return a captured state with those values alone that training has changed."""
        if state is None:
            return None
        rest = {key: each for key, each in state.items() if key != "values"}
        changed = self.values.changed_in(state.get("values", {}))
        return {**rest, "values": changed} if changed["values"] else rest

    def _restore(self, state: Mapping[str, Any], only_streams: bool = False, with_values: bool = True) -> bool:
        """Restore a captured state, and return whether a part has loaded a state of its own."""
        random_state.restore(state["random"])
        if state["generators"] is not None:
            random_state.restore_generators(self.loader, state["generators"])
        values = state.get("values", {}) if with_values else {}
        marks = self.values.marks(self.loader) if values else {}
        has_loaded = restore_parts(self.loader, state["parts"], only_streams)
        if values:
            self.values.restore(self.loader, values, marks)
        return has_loaded

    def _rewind(self, state: Mapping[str, Any], with_values: bool = True) -> None:
        """Restore the beginning of an epoch, also where a sampler loads a state of the end of the previous one."""
        if self._restore(state, with_values=with_values):
            at_end = is_exhausted(self.loader)
            if at_end is not None:
                self._restore(state, only_streams=at_end, with_values=with_values and not at_end)


def _values_in(state: Mapping[str, Any]) -> list[Any]:
    return list(state.get("values", {}).get("values", ()))


def _begins_anew(loader: Any) -> bool:
    """Return whether a StatefulDataLoader has a sampler without a state, whose order it does not restore.

    It begins such a sampler anew in the middle of the epoch, with the random state of that moment.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
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
    places = [*_entries(state, ("dataset_state", "dataset_iter_state"))]
    return bool(places) and all(place is None for place in places) and any(_entries(state, ("fetcher_state",)))


def _entries(state: Any, keys: Sequence[str]) -> Iterator[Any]:
    """Yield what is under some keys in nested dicts."""
    if not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if key in keys:
            yield value
        yield from _entries(value, keys)


def _may_vary(before: Mapping[str, Any], changes: Sequence[str]) -> bool:
    """Return whether only the number of batches differs, and the batch sampler may change it in each epoch."""
    from zae.data.reshard import own_batch_sampler

    return bool(own_batch_sampler(before)) and len(changes) == 1 and changes[0].startswith("number of batches")


def _another_loader(changes: Sequence[str]) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"the loader is not the one that this run was saved with: {'; '.join(changes)}. Build it as it was; "
        "give each run its own save_path, for each batch size that is tried as well; or begin a new run from the "
        "weights alone: apply_weights(path)"
    )
