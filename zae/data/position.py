"""The position of a run in its training data, and how an epoch is resumed from it."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zae import random_state
from zae.data.batch_digests import FirstBatches
from zae.data.loader_checks import check_ended
from zae.data.loader_parts import LoaderParts, changes_of, own_batch_sampler
from zae.data.loader_state import as_begun
from zae.data.loader_values import LoaderValues, values_in
from zae.data.loaders import describe, has_order, has_pinned_batches, length_of
from zae.data.reading import SampledPosition, position_of
from zae.data.seeded import seed_streams_of
from zae.data.streams import LoaderStreams
from zae.data.workers import (
    abandon_workers,
    check_epoch_of_workers,
    deaths_expected,
    mute_workers,
    unmute_workers,
)
from zae.errors import CheckpointMismatch, LoaderError

if TYPE_CHECKING:
    from zae.data.batch_limits import BatchLimits
    from zae.trainer import Trainer

__all__ = ["LoaderPosition"]

_log = logging.getLogger("zae")
_OF_PROCESS = ("is_restored", "is_rewound")
"""What this process has done with a loaded state: it has restored the global random streams as a call of ``run`` began,
and the streams of the loader before the hooks that begin the epoch."""
_NOT_SAVED = ("may_reshard", "is_of_another", *_OF_PROCESS)
"""What a loaded state has beside what was saved: how it was loaded, and that the run has another loader."""


class LoaderPosition:
    """The position of a run in its training loader: the random states at the beginning of the epoch, and now.

    To resume an epoch, the state of its beginning is restored, so that the order of samples is the same; the used
    samples are skipped, in the way that the loader allows (`zae.data.reading`); and the present state is restored.

    Attributes
    ----------
    is_fast : bool
        Whether the exact data path may be taken (`zae.data.gather`).
    loader : iterable or None
        The loader of the epoch.
    pinned : bool
        Whether the batches of the epoch are copied to a GPU without waiting.
    failed_at : int or None
        The batch of the epoch for which the loader raised an error.
    view : tuple
        The loader of the last call of ``run``, its limits, and its view.
    """

    def __init__(self, fast: bool = True, values: LoaderValues | None = None) -> None:
        self.is_fast = fast
        self.pinned = False
        self.failed_at: int | None = None
        self.view: tuple[Any, Any, Any] = (None, None, None)
        self._values = values or LoaderValues()  # What has changed once is saved with the next loader too.
        self._streams = LoaderStreams(None, self._values)
        self._reading: SampledPosition | None = None  # Of the loader of the epoch.
        self._first_batches = FirstBatches()  # Of its epochs.
        self._loaded: dict[str, Any] | None = None  # A state from which nothing has continued yet.
        self._absent: list[int] = []  # After how many batches of this epoch a None was skipped.
        self._pad = 0  # How many entries an epoch that was resharded begins with, as placeholders for used ones.
        self._padded: tuple[Any, Any] = (None, None)  # The loader that was padded last, and what came of it.
        self._ended_with: Any = None  # The loader of the call of `run` that was saved, if that call has ended.

    def __getstate__(self) -> dict[str, Any]:
        """Leave the loader out, which may not be picklable: a copy resumes as after loading this state."""
        twin = self.fresh()
        if self.loader is not None or self._loaded is not None:
            state = self._loaded or self.state_dict()
            twin.load_state_dict({key: value for key, value in state.items() if key not in _OF_PROCESS})
        return vars(twin)

    @property
    def loader(self) -> Any:
        return self._streams.loader

    def fresh(self) -> LoaderPosition:
        """Return a position before the first batch, without a loader."""
        return LoaderPosition(self.is_fast, self._values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader and of every random stream."""
        if self._loaded is not None:
            return {key: value for key, value in self._loaded.items() if key not in _NOT_SAVED}
        of_reading = {} if self._reading is None else self._reading.state_dict()
        state: dict[str, Any] = {
            **self._streams.state_dict(),
            "loader": None,
            "pad": self._pad,
            "absent": list(self._absent),
            "absent_before": 0,
        }
        if not has_order(self.loader):
            state["has_no_order"] = True
        return state | of_reading | self._first_batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, which is restored when the next epoch, or the rest of this one, begins.

        With ``"may_reshard": True``, another batch size or another number of ranks (it was saved by ``"ranks"``) may
        continue with the samples that are left.
        """
        # Any of these may fail: nothing is changed before all are read.
        loaded = dict(state)
        absent = list(state["absent"])
        pad = int(state["pad"])
        int(state["absent_before"])
        self._values.note(LoaderParts(self.loader))  # What has changed since is not taken for the script's.
        for moment in ("begin", "present"):
            self._values.note_saved(state[moment])
        self._loaded = loaded
        self._absent = absent
        self._pad = pad
        self._padded = (None, None)

    def view_of(self, loader: Any, limits: BatchLimits) -> Any:
        """Return the view of a training loader; in the next call of ``run`` with both the same one, to continue it."""
        last_loader, last_limits, view = self.view
        is_changed = isinstance(view, (list, tuple)) and not all(map(operator.is_, view, loader))
        is_same = last_loader is loader and last_limits == limits and not is_changed
        return view if is_same else limits.of_training(loader)

    def pad_loader(self, loader: Any) -> Any:
        """Return the loader to train on; in an epoch that was resharded, its order begins with the used entries."""
        if self._pad and self._padded[0] is not loader:
            from zae.data.reshard import with_placeholders

            self._padded = (loader, with_placeholders(loader, self._pad))
        return self._padded[1] if self._pad else loader

    def reshard(self, trainer: Trainer, loader: Any) -> None:
        """Continue, where that is allowed, with another batch size or number of ranks: each remaining sample once."""
        if self._loaded is not None and self._loaded.get("may_reshard") and self._loaded["facts"]:
            from zae.data.reshard import reshard

            reshard(self._loaded, trainer, loader)

    def restart(self, used_before: int) -> None:
        """Begin the epoch again at its first batch, with the present random state; an iterator continues."""
        self._absent = []
        self._pad = 0
        if self._loaded is None:
            return
        present = self._loaded["present"]
        begin = self._loaded["begin"] or present
        # Datasets and samplers begin the epoch as they began it; the random streams go on from where they are.
        values = [*values_in(present), *values_in(begin)]  # The later ones are put back last.
        present = {**present, "parts": as_begun(present["parts"], begin["parts"]), "values": {"values": values}}
        unset = dict.fromkeys(("begin", "first", "loader", "last_batch"))
        begun = {"pad": 0, "absent": [], "absent_before": -used_before}
        self._loaded = {**self._loaded, **unset, **begun, "present": present}

    def check(self, loader: Any, new_run: bool) -> None:
        """Refuse to resume with another loader, after ``wrap_loader``, than the run was saved with.

        A new call of ``run``, which had not begun when the state was saved, takes any loader. What the loader holds,
        and how it was before ranks or limits, is compared by the record of the run.
        """
        if self._loaded is None:
            return
        before = dict(self._loaded["facts"])
        before.pop("dataset fingerprint", None)  # In a state of an older version; now it is in the record of the run.
        changes = changes_of(before, LoaderParts(loader).facts()) if before else []
        if new_run and self._ended_with is not None and self._ended_with is not loader:
            changes.append("it is another object")
        if "ranks" in self._loaded:
            changes.append(f"it was shared by {self._loaded['ranks']} ranks")
        if changes and new_run:
            # Another loader begins anew: of the state, the global random streams alone are for it.
            present = {"random": self._loaded["present"]["random"], "generators": None, "parts": {}, "values": {}}
            self._loaded = {**self._loaded, "begin": None, "present": present, "is_of_another": True}
        elif changes:
            has_other_number_alone = len(changes) == 1 and changes[0].startswith("number of batches")
            if not (has_other_number_alone and own_batch_sampler(before)):  # It may change the number in each epoch.
                raise _another_loader(changes)

    def _check_order(self, loader: Any) -> None:
        """Refuse to continue an open epoch whose batches came in no known order."""
        state = self._continued_state
        is_in_order = has_order(loader) if state is None else not state.get("has_no_order")
        if not is_in_order:
            raise (LoaderError if state is None else CheckpointMismatch)(
                "an epoch is open, and its batches came as the workers finished them (in_order=False, with several "
                "workers), so that it is not known which samples were used: to continue would use some twice and "
                "others never. Write in_order=True, and resume from a checkpoint of the end of an epoch; or begin the "
                "epoch again: mid_epoch='restart' (an option of StateManagerAddon); or give another loader, which "
                "begins the next epoch"
            )

    def note_loader(self, loader: Any) -> None:
        """Note the loader of a finished call of ``run`` that is repeated; the next call may have another one."""
        self._ended_with = None if self._loaded is None else loader

    def begin_values(self, loader: Any, trainer: Trainer) -> None:
        """Mark the values in the parts of a loader as a run begins, and put back those of a state.

        It comes before the hooks that begin an epoch, which win at the end of one, as in a run that is not interrupted.
        """
        self._values.begin(loader, trainer)
        state = self._continued_state
        if state is not None:
            self._values.put_back(loader, state["present"])
        is_between_epochs = not trainer.progress_checker.epoch_batch
        if self._loaded is not None and is_between_epochs and "is_rewound" not in self._loaded:
            # What these hooks draw, or seed, counts for the epoch as well.
            LoaderStreams(loader, self._values).rewind(self._loaded["present"], with_values=False)
            self._loaded = {**self._loaded, "is_rewound": True}

    def restore_random(self) -> None:
        """Restore the global random streams, from which a resume itself may have drawn.

        Where the call of ``run`` before has restored them, and has trained nothing, the streams go on from what the
        script has drawn between the two.
        """
        if self._loaded is None:
            return
        present = self._loaded["present"]
        if "is_restored" in self._loaded:
            self._loaded["present"] = {**present, "random": random_state.capture()}
        else:
            random_state.restore(present["random"])
            self._loaded["is_restored"] = True

    def start_next_epoch(self, used_in_all: int) -> None:
        """Begin the next epoch at its first batch; so many batches were used before it."""
        self.pinned = False
        if self._reading is not None:
            self._reading.start_next_epoch(used_in_all, len(self._absent))
        self._streams.begin = None
        self._loaded = None
        self._pad = 0
        self._absent = []

    @property
    def absent_count(self) -> int:
        """How many batches of the present epoch were None, and were skipped."""
        return len(self._absent)

    @property
    def is_restored(self) -> bool:
        """Whether a state was loaded from which no epoch has continued yet."""
        return self._loaded is not None

    @property
    def _continued_state(self) -> dict[str, Any] | None:
        """The state whose batches the next ones continue: one that was loaded, unless the run has another loader."""
        if self._loaded is None or "is_of_another" in self._loaded:
            return None
        return self._loaded

    def is_of(self, loader: Any) -> bool:
        """Return whether this loader can continue the epoch."""
        return self._continued_state is not None or self.loader is loader

    def batches(self, loader: Any, used: int, used_in_all: int) -> Iterator[Any]:
        """Iterate over the batches that are left in the epoch, without batches that are None.

        ``used`` of them were used in this epoch, and ``used_in_all`` with those of the epochs before.
        """
        if used:
            self._check_order(loader)
        else:
            check_epoch_of_workers(loader, 1)
            self._absent = []
        state = self._loaded
        reading = self._open_reading(loader, used_in_all - used)
        self.pinned = has_pinned_batches(loader)
        self.failed_at = None
        unmute_workers()
        seed_streams_of(loader)
        skipped = used + sum(after <= used for after in self._absent)
        present = None if state is None else state["present"]
        if state is not None and "is_rewound" in state:
            present = self._streams.capture()
        iterator = reading.batches(skipped, present)
        if state is not None and state["begin"] is not None:
            _check_number(state["facts"], loader)
        return self._without_absent(reading, iterator, used)

    def _open_reading(self, loader: Any, used_before: int) -> SampledPosition:
        """Return how the loader is read; what was loaded is taken into it."""
        is_another = self.loader is not loader
        if is_another:
            self._first_batches = FirstBatches()
        if is_another or self._reading is None or self._loaded is not None:
            self._streams = LoaderStreams(loader, self._values)
            self._reading = position_of(loader, self._streams, self.is_fast, used_before)
        state = self._continued_state
        if state is not None:
            self._streams.begin = state["begin"]
            self._reading.load_state_dict(state)
            self._first_batches.load_state_dict(state)
        self._loaded = None
        self._ended_with = None
        return self._reading

    def _without_absent(self, reading: SampledPosition, iterator: Iterator[Any], used: int) -> Iterator[Any]:
        """Skip batches that are None; refuse a loader of which more batches are None than not."""
        is_first = not used
        try:
            for batch in iterator:
                if batch is None:
                    self._absent.append(used)
                    continue
                if is_first and reading.may_begin_again:
                    self._first_batches.note(batch, type(self.loader).__name__)
                is_first = False
                used += 1
                reading.note_used(batch)
                yield batch
        except Exception:
            self.failed_at = used + 1
            mute_workers()  # Until the run has handled the error: a worker may have died.
            raise
        finally:
            if deaths_expected():
                reading.end_workers()
                abandon_workers(iterator, self.loader)
        absent = len(self._absent)
        check_ended(self.loader, used + absent)
        if absent > used:
            raise LoaderError(
                f"{absent} of {absent + used} batches were None ({describe(self.loader)}); fix the collate_fn"
            )
        if absent:
            _log.warning("%d of %d batches were None and were skipped", absent, absent + used)


def _check_number(facts: Mapping[str, Any], loader: Any) -> None:
    """Refuse an epoch with another number of batches, once its sampler is where it was: it may change the number."""
    before = facts.get("number of batches")
    if before is not None and length_of(loader) != before:
        raise _another_loader([f"number of batches was {before} and is {length_of(loader)}"])


def _another_loader(changes: Sequence[str]) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"the loader is not the one that this run was saved with: {'; '.join(changes)}. Build it as it was; "
        "give each run its own save_path, also when you try several batch sizes; or begin a new run from the weights "
        "alone: apply_weights(path)"
    )
