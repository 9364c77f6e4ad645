"""Which checkpoint a run resumes from, whether it is whole and of this run, and when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zae.addons.state_manager.checkpointer import Checkpointer, Content
from zae.addons.state_manager.checkpoints import Checkpoints
from zae.addons.state_manager.crash import EXACT, warn_of_lost_ranks
from zae.addons.state_manager.start_from import Start
from zae.arguments.paths import check_partial
from zae.checkpoint.folder import newest_valid, refuse_links
from zae.checkpoint.manifest import Manifest, check_progress
from zae.data.loaders import has_order
from zae.data.position import LoaderPosition
from zae.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, did_you_mean
from zae.loop.progress import ProgressChecker, RunCalls

if TYPE_CHECKING:
    from zae.loop.run import Run

__all__ = ["Resumption", "find", "newest_whole", "read"]

_log = logging.getLogger("zae")
_Shards = Mapping[str, Tensor]
_NONE: _Shards = MappingProxyType({})
_NEWEST = "write resume=True for the newest checkpoint in save_path, or 'auto' to start a new run where there is none"
_PLACES = {
    "latest": _NEWEST,
    "last": _NEWEST,
    "newest": _NEWEST,
    "best": "a run resumes from the newest checkpoint (resume=True), or from the path of one; restore_best() loads the "
    "weights of the best",
}
"""What other trainers, and people, write for a checkpoint that is not named."""

# -------------------------------------------------------------------------------------------------- which checkpoint


def find(
    checkpoints: Checkpoints,
    resume: bool | str | Path,
    allow_partial: Collection[str] = (),
    local_shards: _Shards = _NONE,
) -> tuple[Path, Content] | None:
    """Find the checkpoint that the option ``resume`` means, and read it as `read` does.

    Returns
    -------
    path, content : tuple, or None
        The checkpoint, and what `read` returned for it; None to start from scratch.

    Raises
    ------
    CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
        There is none, all are damaged, or a newer zae wrote the newest.
    """
    if resume is False:
        return None
    checkpointer = checkpoints.checkpointer
    folder = checkpoints.folder if resume in (True, "auto") else Path(resume).expanduser()  # type: ignore[arg-type]
    paths = checkpointer.list_saved(folder)
    if folder != checkpoints.folder and not paths:
        return folder, read(checkpointer, folder, allow_partial, local_shards)
    newest_checkpoint = newest_valid(folder, partial(read, checkpointer, local_shards=local_shards), paths)
    refuse_links(folder, newest_checkpoint[0] if newest_checkpoint else None)
    newest = None if newest_checkpoint is None else newest_checkpoint[1][0]
    failed = _exact_crash(checkpointer, folder, newest, local_shards)
    if failed is not None:
        _log.info("resuming from %s: a failed run has saved it between two steps", failed[0])
        return failed
    if newest_checkpoint is None:
        crashed = next(iter(checkpointer.list_saved(folder, "crash")), None)
        hint = f"; resume={str(crashed)!r} resumes from what a failed run has saved" if crashed else ""
        if resume == "auto":
            level = logging.WARNING if hint else logging.INFO
            _log.log(level, "no checkpoint in %s: a new run begins%s", folder, hint)
            return None
        raise CheckpointNotFound(
            f"resume={resume!r}, but {folder} contains no checkpoint; write resume='auto' to start a new run in "
            f"that case{hint}"
        )
    path, content, passed_over = newest_checkpoint
    checkpoints.passed_over = {damaged.name for damaged, _ in passed_over}
    return path, content


def _exact_crash(
    checkpointer: Checkpointer, folder: Path, newest: Manifest | None, local_shards: _Shards
) -> tuple[Path, Content] | None:
    """Return the exact state of a failed run that is newer than the newest checkpoint, and of its run."""
    for path in checkpointer.list_saved(folder, "crash"):
        try:
            manifest = checkpointer.load_manifest(path)
            if newest is not None and manifest["step"] <= newest["step"]:
                return None
            is_of_run = newest is None or manifest["run_id"] == newest["run_id"]
            if is_of_run and manifest["info"].get(EXACT) is True:
                return path, read(checkpointer, path, local_shards=local_shards)
        except (CheckpointDamaged, CheckpointNotFound) as error:
            _log.warning("passed over %s, which is damaged (%s)", path, error)
    return None


def newest_whole(
    checkpointer: Checkpointer, path: Path, allow_partial: Collection[str], local_shards: _Shards
) -> tuple[Path, Content]:
    """Read a checkpoint as `read` does, or the newest whole one in a folder of them."""
    newest = newest_valid(path, partial(read, checkpointer, local_shards=local_shards), checkpointer.list_saved(path))
    return (path, read(checkpointer, path, allow_partial, local_shards)) if newest is None else newest[:2]


def read(
    checkpointer: Checkpointer, path: Path, allow_partial: Collection[str] = (), local_shards: _Shards = _NONE
) -> Content:
    """Read a checkpoint, and warn if other ranks have lost their part of it.

    ``local_shards`` names the tensors of which this rank holds a part, and needs no more of the checkpoint.
    """
    manifest, model, state = checkpointer.load(path, allow_partial, local_shards)
    check_progress(path, manifest, state)
    warn_of_lost_ranks(path, manifest)
    return manifest, model, state


# ------------------------------------------------------------------------------------------------------------- resume


class Resumption:
    """The options of a resume, the checkpoint that it found, and when it is due.

    A script that is started again makes all its calls of ``run``. Those that were over when its state was saved do
    nothing, but what stands between them is executed again, ``restore_best()`` or another learning rate for instance:
    on the state of a later call. Before that call continues, the state is loaded again.
    """

    def __init__(
        self, resume: bool | str | Path, mid_epoch: str, reshard: bool, allow_partial: Collection[str], start: Start
    ) -> None:
        if not isinstance(resume, (bool, str, Path)) or resume == "":
            raise ConfigError(f"resume={resume!r}; it must be False, True, 'auto' or the path of a checkpoint")
        name = resume if isinstance(resume, str) else ""
        hint = "" if name == "auto" else did_you_mean(name, ("auto", "True", "False"))
        if name in _PLACES:
            hint = f"; {_PLACES[name]}"
        if hint and not Path(name).expanduser().exists():
            hint = hint.replace("'True'", "True").replace("'False'", "False")
            raise ConfigError(f"resume={resume!r} is not the path of a checkpoint{hint}")
        self.allow_partial = check_partial(allow_partial)
        if self.allow_partial and resume in (False, True, "auto"):
            raise ConfigError("allow_partial is for one checkpoint that is known to be damaged; give resume=<its path>")
        self.reshard = reshard
        self.resume = resume
        self.mid_epoch = mid_epoch
        self.start = start
        self.path: Path | None = None  # The checkpoint that was resumed from.
        self.news = ""  # What is still to be said as a run begins.
        self._calls = 0  # Calls of run in the state that was resumed from.
        self._is_done = False  # Whether a checkpoint was looked for.
        self._is_left = False  # Whether the script may have changed the trainer since it was resumed.

    def begin_from(self, resume: bool | str | Path) -> None:
        """Resume from a checkpoint when the trainer is set up, as with the option ``resume``."""
        if self._is_done and resume is not False:
            raise ConfigError(
                f"resume from {resume!r} comes after a call of run(), which has begun already; make a new trainer, or "
                "load the state: load_state(path)"
            )
        self.resume = resume

    def is_due(self, calls: RunCalls, is_seeded: bool) -> bool:
        """Return whether to look for a checkpoint: once, as the trainer is set up for the first time."""
        # Calls that other processes have made for this one count; what they resumed from is not known here.
        is_begun = self._is_done or (is_seeded and calls.index > 0 and not calls.must_replay)
        self._is_done = True
        return not is_begun

    def note_resumed(self, path: Path, calls: RunCalls) -> None:
        """Note the checkpoint that was resumed from, with the calls of ``run`` in its state."""
        self.path = path
        self._calls = len(calls.starts)

    def take_news(self, run: Run, shown: Callable[[Path], str]) -> str:
        """Return what to say as a call of ``run`` begins: where it continues, or that it is finished already.

        Each sentence is returned once; ``shown`` returns a path as it is shown.
        """
        news = self.news
        self.news = ""
        progress = run.trainer.progress_checker
        calls = progress.run_calls
        if self.path is None or calls.index > self._calls:  # A new call.
            return news
        if calls.must_replay:
            return f"call {calls.index} of run() was finished before; nothing to train"
        is_regular = self.path.name.startswith("step-")
        place = shown(self.path.parent if is_regular else self.path)
        if progress.pending_validation or run.has_more_epochs():
            return f"resumed from {run.place} of {place}"
        because = f", stopped: {progress.stop_reason}" if progress.stop_reason else ""
        return f"already finished; nothing to train: {place} is at {run.place}{because}"

    def belongs_to_later_call(self, calls: RunCalls) -> bool:
        """Return whether the state belongs to a call of ``run`` that the script has not made yet."""
        return self.path is not None and calls.must_replay

    def leave(self, calls: RunCalls) -> None:
        """Note, as the trainer is torn down, that the script may change it from now on."""
        self._is_left = self.belongs_to_later_call(calls)

    def must_reload(self, calls: RunCalls) -> Path | None:
        """Return the checkpoint if the script may have changed its state before the call of ``run`` that continues."""
        if not self._is_left or calls.must_replay:
            return None
        self._is_left = False
        return self.path

    def skip_save(self) -> Path:
        """Return the checkpoint that a save between two calls of ``run`` would overwrite with an earlier state."""
        assert self.path is not None
        _log.info("not saved: %s holds the state of a later call of run(), and is loaded again for it", self.path)
        return self.path

    def restart_epoch(self, progress: ProgressChecker, position: LoaderPosition) -> None:
        """With ``mid_epoch="restart"``, begin an open epoch again at its first batch, from the present weights."""
        if self.mid_epoch != "restart" or not progress.epoch_batch:
            return
        _log.warning(
            "epoch %d begins again at its first batch (mid_epoch='restart'): the %d batches that were used come a "
            "second time",
            progress.epoch + 1,
            progress.epoch_batch,
        )
        position.restart(progress.batch)
        progress.epoch_step = 0
        progress.epoch_batch = 0

    def warn_of_order(self, loader: Any) -> None:
        """Warn, as a run begins, where no state within an epoch can be continued."""
        if self.mid_epoch == "restart" or has_order(loader):
            return
        _log.warning(
            "%s has in_order=False and num_workers=%d: what is saved within an epoch cannot be resumed there, since "
            "the order of the batches is not known; write in_order=True, or mid_epoch='restart' (an option of "
            "StateManagerAddon) to begin such an epoch again",
            type(loader).__name__,
            loader.num_workers,
        )
