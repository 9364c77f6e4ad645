"""The state of a failed run, which is saved apart from its checkpoints: ``crash-00000012``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from zae.checkpoint import filesystem
from zae.checkpoint.names import has_checkpoint_name
from zae.data.loaders import iterates_as_torch
from zae.data.position import LoaderPosition
from zae.errors import CheckpointError
from zae.loop.progress import ProgressChecker

__all__ = ["EXACT", "CrashSaver", "crashes_in", "forget_claims", "warn_of_lost_ranks"]

_log = logging.getLogger("zae")

EXACT = "exact"
"""Where the manifest of a failed run says whether a resume from it is bitwise the run without the failure."""

_CLAIM = ".crash-"
_IN_PARTS = "the state lies in parts on the ranks, and one alone cannot save it"
_HALF_STEPPED = "the state is that of no step, and is not saved"
_DRAW_FIRST = (SequentialSampler, RandomSampler, SubsetRandomSampler)  # Whole epochs, unless with replacement.


def crashes_in(folder: Path) -> list[Path]:
    """List the states of failed runs in a folder, the highest step first; copies under other names are left out."""
    paths = (path for path in folder.glob("crash-*") if has_checkpoint_name(path.name))
    return sorted((path for path in paths if path.is_dir() and not path.is_symlink()), reverse=True)


class CrashSaver:
    """Note whether a run is within a step, and save the state of a failed one beside the checkpoints.

    Of several ranks the first one to fail saves, without the others: weights, optimizer and counters are the same on
    all of them, but the random streams of the others are lost, and the manifest says so.
    """

    def __init__(self, folder: Path, list_saved: Callable[[Path, str], list[Path]]) -> None:
        self.folder = folder
        self._list_saved = list_saved
        self._token = ""  # The same on every rank, and another in every run.
        self._began_at = -1  # Batches that were used when the run began; -1 outside of a run.
        self._rested_at = -1  # Batches that were used when it was last between two steps.
        self._rested_moment: tuple[int, int, str] | None = None

    def begin(self, progress: ProgressChecker, token: str) -> None:
        """Note that a run begins."""
        self._began_at = progress.batch
        self._rested_at = -1
        self._token = token

    def rest(self, progress: ProgressChecker) -> None:
        """Note that the run is between two steps."""
        self._rested_at = progress.batch
        self._rested_moment = progress.moment

    def end(self) -> None:
        """Note that the run has ended."""
        self._began_at = -1
        self._rested_at = -1

    def was_in_step(self, progress: ProgressChecker, has_batch: bool) -> bool | None:
        """Return whether the run failed between a step's forward and its checkpoint; None before the first step."""
        has_rested = self._rested_at >= 0
        last = self._rested_at if has_rested else self._began_at
        if last < 0:  # No run has begun.
            return None
        in_step = progress.batch != last or has_batch
        return in_step if in_step or has_rested else None

    def is_exact(self, progress: ProgressChecker, position: LoaderPosition) -> bool:
        """Return whether a run that resumes from this state ends bitwise as if nothing had failed.

        It does if a validation has failed, which it repeats: the random numbers of a validation are not those of
        training. It does if the next batch of an open epoch has failed, and this process has drawn nothing for it.
        """
        if progress.pending_validation:
            return True
        is_between_steps = (self._rested_at, self._rested_moment) == (progress.batch, progress.moment)
        return is_between_steps and progress.epoch_batch > 0 and not _may_have_drawn(position)

    def save(
        self, step: int, rank: int, world_size: int, write: Callable[..., None] | None, error: BaseException
    ) -> None:
        """Save the state of the failed run; what fails here is only logged.

        ``write`` is called with the folder, the older ones that it replaces, and entries for the manifest. None
        is that of a rank which has only a part of the state, or whose state is that of no step.
        """
        if not step:
            return
        if write is None:
            self._decline(error, _IN_PARTS if world_size > 1 else _HALF_STEPPED)
            return
        target = self.folder / f"crash-{step:08d}"
        name = type(error).__name__
        info: dict[str, Any] = {"error": name}
        regular = ""
        try:
            regular = self._regular()
            if world_size > 1:  # A directory can be made once: the first rank to fail makes it.
                filesystem.disk.mkdir(self.folder / f"{_CLAIM}{step:08d}-{self._token}")
                info["rank"] = rank
            older = [path for path in self._list_saved(self.folder, "crash") if path != target]
            write(target, older, info)
        except FileExistsError:  # Another rank was here first.
            return
        except Exception as second:
            _log.warning("%s: the state could not be saved in %s (%s); %s", name, target, second, regular)
            return
        by = f" by rank {rank} of {world_size} alone" if world_size > 1 else ""
        _log.warning("%s: the state is saved in %s%s; %s", name, target, by, regular)

    def _decline(self, error: BaseException, reason: str) -> None:
        """Say that the state of the failed run is not saved."""
        with contextlib.suppress(OSError, CheckpointError):
            text = f"{reason}; {self._regular()}"
            error.add_note(f"zae: {text}")
            _log.warning("%s: %s", type(error).__name__, text)

    def _regular(self) -> str:
        newest = next(iter(self._list_saved(self.folder, "step")), None)
        return f"the newest regular checkpoint is {newest}" if newest else "there is no regular checkpoint"


def _may_have_drawn(position: LoaderPosition) -> bool:
    """Return whether this process may have drawn random numbers for a batch that the loader failed to give.

    It has not where workers read the samples, in an order that was drawn as the epoch began.
    """
    loader = position.loader
    if position.failed_at is None or not iterates_as_torch(loader) or not loader.num_workers:
        return True
    if type(loader.batch_sampler) is not BatchSampler:
        return True
    sampler = loader.batch_sampler.sampler
    return type(sampler) not in _DRAW_FIRST or getattr(sampler, "replacement", False) is True


def forget_claims(folder: Path) -> None:
    """Remove the marks of ranks that failed in an earlier run."""
    for path in folder.glob(f"{_CLAIM}*"):
        with contextlib.suppress(OSError):
            filesystem.disk.remove_directory(path)


def warn_of_lost_ranks(path: Path, manifest: Mapping[str, Any]) -> None:
    """Warn that a state which one of several ranks has saved alone cannot be resumed exactly."""
    rank = manifest["info"].get("rank")
    world = manifest["world_size"]
    if rank is not None and world > 1:
        _log.warning(
            "%s was saved by rank %d of %d alone, as it failed: weights, optimizer and counters are those of that "
            "step, but the random streams and the records of the other ranks are lost, and the rest of the epoch may "
            "have another order; the end is not exactly that of an uninterrupted run",
            path,
            rank,
            world,
        )
