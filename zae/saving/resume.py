"""What a run finds in its folder: a checkpoint to go on from, or those of another run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from zae.common.argument_checks import check_partial
from zae.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, ConfigError, DistributedError
from zae.loop import addon_state
from zae.saving.crash import crashes_in, say_what_it_lacks
from zae.saving.unsaved import Unsaved
from zae.storage.checkpoint import list_checkpoints, load_checkpoint, newest_valid
from zae.storage.manifest import Manifest, check_progress, read_manifest
from zae.storage.names import original_name, step_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = [
    "Resumed",
    "check_places",
    "check_ranks",
    "check_resume",
    "find_checkpoint",
    "foreign_checkpoints",
    "load_from",
    "restart_epoch",
]

Content: TypeAlias = "tuple[Manifest, dict[str, Tensor], dict[Any, Any]]"
_log = logging.getLogger("zae")


class Resumed:
    """What a trainer has resumed from, and what its script has done since.

    A script that starts again makes all its calls of ``run``. Those that were over when its state was saved do nothing
    now, but what stands between them is executed again, ``restore_best()`` or another learning rate for instance: on a
    state of a later call. Before that call continues, the state is loaded again.

    Attributes
    ----------
    path : Path or None
        The checkpoint.
    unsaved : Unsaved
        What it lacks.

    Examples
    --------
    >>> Resumed().path is None
    True
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.unsaved = Unsaved()
        self._is_done = self._is_left = False

    def __bool__(self) -> bool:
        """Whether a checkpoint was looked for."""
        return self._is_done

    def is_due(self, trainer: Trainer) -> bool:
        """Whether to look for a checkpoint: as a trainer is set up for the first time; asked before that."""
        # The calls that ranks have made, which have ended since, count; what they resumed from is not known here.
        calls = trainer.progress_checker.run_calls
        is_begun = self._is_done or (trainer.is_seeded and calls.made > 0 and not calls.is_behind)
        self._is_done = True
        return not is_begun

    @contextlib.contextmanager
    def strictly(self, trainer: Trainer) -> Iterator[None]:
        """Say of a state that is refused for its add-ons how to load it: a resume is always strict."""
        made = trainer.progress_checker.run_calls.made
        try:
            yield
            trainer.progress_checker.run_calls.made = made  # By this script, not by the one that saved.
        except CheckpointMismatch as error:
            if "strict=False" in str(error):
                error.add_note("zae: with resume=False, call trainer.load_state(strict=False) before run(), which then "
                               "trains all of its epochs")  # fmt: skip
            raise

    def leave(self, trainer: Trainer) -> None:
        """Note, as a trainer is torn down, that its script has it from now on."""
        self._is_left = self.is_ahead(trainer)

    def is_ahead(self, trainer: Trainer) -> bool:
        """Whether the state is of a call of ``run`` that the script has yet to make."""
        return self.path is not None and trainer.progress_checker.run_calls.is_behind

    def keep(self) -> Path:
        """Return the checkpoint that a save between two calls of ``run`` would overwrite with an earlier state."""
        assert self.path is not None
        _log.info("not saved: %s holds the state of a later call of run(), and is loaded again for it", self.path)
        return self.path

    def put_back(self, trainer: Trainer, load: Callable[[Path], None]) -> None:
        """Load the state again, where a call of ``run`` continues that others came before; name what the state lacks.

        Where the run stands, and its place in the data, stay as the beginning of this call has checked them.
        """
        self.unsaved.begin(trainer)
        if self.path is None or not self._is_left or trainer.progress_checker.run_calls.is_behind:
            return
        self._is_left = False
        progress, position = trainer.progress_checker, dict(vars(trainer.loader_position))
        with self.strictly(trainer):
            load(self.path)
        progress.pending_validation = trainer.progress_checker.pending_validation
        trainer.progress_checker = progress
        vars(trainer.loader_position).update(position)


def load_from(
    manager: Any, found: Path, strict: bool = True, resuming: bool = False, content: Content | None = None
) -> None:
    """Load a checkpoint into a trainer with the state manager: everything, or on an error nothing.

    Parameters
    ----------
    manager : StateManagerAddon
        Whose ``allow_partial`` names what may be absent.
    found : Path
        The checkpoint.
    strict : bool
        As for ``load_state_dict``.
    resuming : bool
        Whether a run continues from it: with as many ranks, unless ``reshard`` is set.
    content : tuple, optional
        What ``load_checkpoint`` returned for it, where it has been read.
    """
    manifest, model, state = content or load_checkpoint(found, allow_partial=manager.allow_partial)
    if resuming:
        check_ranks(found, manifest["world_size"], manager.world_size, manager.reshard)
    check_progress(found, manifest, state)
    say_what_it_lacks(found, manifest)
    if manager.allow_partial and not (model and state):
        _log.warning("%s is damaged: %s starts a new run", found, "all but the weights" if model else "the model")
    if not state and manager.allow_partial:
        manager.apply_weights(model, strict)
        return
    if manager.reshard:
        state["position"] = {**state["position"], "may_reshard": True}
    addon_state.load_for_rank(manager, {"model": model or manager.model_state(), **state}, strict)
    manager.run_id = manifest["run_id"]
    manager._retention.add(found, manager.save_path)
    progress = manager.progress_checker
    manager._saved_at = (progress.epoch, progress.step, progress.pending_validation)
    _log.info("loaded %s (step %d)", found, manager.progress_checker.step)


def check_resume(
    resume: object, on_save_error: object, allow_partial: Collection[str], mid_epoch: object = "skip"
) -> None:
    """Refuse options of the state manager that cannot be meant.

    Parameters
    ----------
    resume, on_save_error, allow_partial, mid_epoch : object
        As they were given.

    Raises
    ------
    ConfigError
        With what may be given.

    Examples
    --------
    >>> check_resume("auto", "raise", ())
    """
    if not isinstance(resume, (bool, str, Path)) or resume == "":
        raise ConfigError(f"resume={resume!r}; it must be False, True, 'auto' or the path of a checkpoint")
    if on_save_error not in ("raise", "warn"):
        raise ConfigError(f"on_save_error={on_save_error!r}; it must be 'raise' or 'warn'")
    if mid_epoch not in ("skip", "restart"):
        raise ConfigError(f"mid_epoch={mid_epoch!r}; it must be 'skip' or 'restart'")
    if check_partial(allow_partial) and resume in (False, True, "auto"):
        raise ConfigError("allow_partial is for one checkpoint that is known to be damaged; give resume=<its path>")


def find_checkpoint(resume: bool | str | Path, save_path: Path) -> tuple[Path | None, Content | None, set[str]]:
    """Find the checkpoint that ``resume`` means, and read it where that is how it was found.

    Parameters
    ----------
    resume : bool, "auto", str or Path
        What the user asked for.
    save_path : Path
        Where the run saves.

    Returns
    -------
    path, content, passed_over : tuple
        The checkpoint, None to start from scratch; what ``load_checkpoint`` returned for it, None for one that was
        named by its path; and the names of newer ones that are damaged.

    Raises
    ------
    CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
        There is none, none that is whole, or the newest is of a newer zae.

    Examples
    --------
    >>> find_checkpoint("auto", Path("runs/no-such-run"))
    (None, None, set())
    """
    if resume is False:
        return None, None, set()
    folder = save_path if resume in (True, "auto") else Path(resume).expanduser()  # type: ignore[arg-type]
    if folder != save_path and not list_checkpoints(folder):
        return folder, None, set()
    found = newest_valid(folder, load_checkpoint)
    _refuse_links(folder, found[0] if found else None)
    if found is None:
        crashed = next(iter(crashes_in(folder)), None)
        hint = f"; resume={str(crashed)!r} resumes from what a failed run has saved" if crashed else ""
        if resume == "auto":
            _log.log(logging.WARNING if hint else logging.INFO, "no checkpoint in %s: a new run begins%s", folder, hint)
            return None, None, set()
        raise CheckpointNotFound(
            f"resume={resume!r}, but {folder} contains no checkpoint; write resume='auto' to start a new run in that "
            f"case{hint}"
        )
    path, content, passed_over = found
    for damaged, why in passed_over:
        _log.warning("passed over %s, which is damaged (%s); resuming from %s", damaged, why, path)
    return path, content, {damaged.name for damaged, _ in passed_over}


def _refuse_links(folder: Path, found: Path | None) -> None:
    """Refuse to begin afresh, or at an older place, where links stand for checkpoints: no link is followed."""
    steps = {path: step_of(path.name) or 0 for path in folder.glob("step-*") if path.is_symlink()}
    newest = max(steps, key=lambda path: steps[path], default=None)
    if newest is not None and steps[newest] > (step_of(found.name) or 0 if found else -1):
        raise CheckpointNotFound(
            f"{newest} is a link, and only folders are taken for checkpoints; write "
            f"resume={os.path.realpath(newest)!r}, give the folder that they are in as save_path, or remove the link"
        )


def foreign_checkpoints(
    save_path: Path, known: Collection[str], overwrite: bool, run_id: str = "", step: int = 0
) -> list[Path]:
    """List the checkpoints of another run in a folder, and refuse to mix two runs unless that was asked for.

    What the run itself has left behind is not among them: an older checkpoint that it has not removed, or one before
    its present step that is damaged.

    Parameters
    ----------
    save_path : Path
        Where the run saves.
    known : collection of str
        The names of its own checkpoints.
    overwrite : bool
        Whether the others may be replaced.
    run_id : str
        The run.
    step : int
        Where it stands.

    Returns
    -------
    list of Path
        What is to be removed once the run has a checkpoint of its own.

    Raises
    ------
    ConfigError
        There are some, and they may not be replaced.

    Examples
    --------
    >>> foreign_checkpoints(Path("runs/no-such-run"), (), overwrite=False)
    []
    """
    others = [
        path
        for path in list_checkpoints(save_path)
        if path.name not in known and not (known and _is_left_over(path, run_id, step))
    ]
    if others and not overwrite:
        raise ConfigError(
            f"save_path={str(save_path)!r} contains {len(others)} checkpoints of another run, or newer than this "
            f"one (newest: {others[0].name}); write resume='auto' to resume from it, give another save_path, or "
            "overwrite=True to replace them"
        )
    return others


def _is_left_over(path: Path, run_id: str, step: int) -> bool:
    """Whether a checkpoint of a step before the present one is of this run, or damaged."""
    if (step_of(original_name(path.name)) or 0) > step:
        return False
    try:
        return read_manifest(path)["run_id"] == run_id
    except (CheckpointDamaged, CheckpointNotFound):
        return True


def check_ranks(found: Path, saved: int, present: int, reshard: bool) -> None:
    """Refuse a checkpoint of another number of ranks, unless the data may be dealt anew.

    Parameters
    ----------
    found : Path
        The checkpoint.
    saved, present : int
        The ranks that it is of, and those of this run.
    reshard : bool
        Whether that may differ.

    Raises
    ------
    CheckpointMismatch
        With both numbers.

    Examples
    --------
    >>> check_ranks(Path("runs/a/step-00000001"), 2, 2, reshard=False)
    """
    if saved != present and not reshard:
        raise CheckpointMismatch(
            f"checkpoint {found} was saved by {saved} processes; this run has {present}; use as many "
            "processes, write reshard=True to reshard the rest of the epoch, or load only the weights: "
            "apply_weights(path)"
        )


def check_places(places: Sequence[tuple[int, int, int]]) -> None:
    """Refuse to begin a run with ranks that do not stand at the same place.

    Parameters
    ----------
    places : sequence of (int, int, int)
        The epoch, the step and the batch of each rank.

    Raises
    ------
    DistributedError
        With where they stand.

    Examples
    --------
    >>> check_places([(1, 8, 0), (1, 8, 0)])
    """
    if len(set(places)) > 1:
        stand = ", ".join(f"rank {rank} at step {place[1]}" for rank, place in enumerate(places))
        raise DistributedError(
            f"the ranks do not go on from the same state: {stand}. A checkpoint that one of them has loaded the "
            "others must find too: save_path (or resume) must name a folder that all machines share"
        )


def restart_epoch(trainer: Trainer) -> None:
    """Begin the epoch that a checkpoint has left open again, at its first batch and from the present weights.

    Parameters
    ----------
    trainer : Trainer
        That has loaded the checkpoint.
    """
    progress = trainer.progress_checker
    if not progress.epoch_batch:
        return
    _log.warning(
        "epoch %d begins again at its first batch (mid_epoch='restart'): the %d batches that were used come a second "
        "time", progress.epoch + 1, progress.epoch_batch,
    )  # fmt: skip
    trainer.loader_position.restart(progress.batch)
    progress.epoch_step = progress.epoch_batch = 0
