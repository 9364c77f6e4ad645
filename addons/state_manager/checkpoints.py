"""The checkpoints of a run: each is added in the place of those that the rule no longer keeps.

A save goes through these steps, and what it replaces stays until all of them are done::

    gather     the add-on reads the state on every rank, within `Checkpoints.add`
    stage      `Checkpoints.write` makes files of it, in memory (`zae.checkpoint.writer.plan`)
    write      `Saver` has them stored, at once or in a thread: each file is hashed and brought to the disk, the
               manifest last, and the folder is renamed (`zae.checkpoint.writer.write`)
    retain     what the new checkpoint replaces is removed
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from zae.addons.state_manager.checkpointer import Checkpointer
from zae.addons.state_manager.crash import forget_claims
from zae.addons.state_manager.retention import Retention
from zae.addons.state_manager.saver import Saver
from zae.checkpoint.folder import put_back
from zae.checkpoint.group import Group
from zae.checkpoint.locks import FolderLock
from zae.checkpoint.manifest import Manifest
from zae.checkpoint.names import checkpoint_name, original_name, step_of
from zae.checkpoint.rows import Pieces
from zae.checkpoint.writer import SavePlan, plan
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError, NonFiniteError
from zae.loop.progress import ProgressChecker
from zae.values.walk import is_sharded

__all__ = ["Checkpoints", "Lineage"]

_log = logging.getLogger("zae")
_Moment: TypeAlias = "tuple[int, int, str]"
MAX_RESUMES = 999  # As many as a manifest lists.


class Lineage:
    """Which run the checkpoints are of, and where it came from: what a manifest says beside its files.

    Parameters
    ----------
    composition : sequence of str
        The names of the add-ons.

    Attributes
    ----------
    run_id : str
        The name of the run; empty before its first checkpoint was looked for.
    parent : dict or None
        What the run started from (``start_from``): "path", "parts", and of a checkpoint "run_id", "step" and the
        "sha256" of its manifest.
    resumed_at : list of int
        The steps of the checkpoints that the run was resumed from.
    """

    def __init__(self, composition: Sequence[str] = ()) -> None:
        self.composition = list(composition)
        self.run_id = ""
        self.parent: dict[str, Any] | None = None
        self.resumed_at: list[int] = []

    def continue_run(self, manifest: Manifest) -> None:
        """Continue the run of a checkpoint that was loaded."""
        earlier = manifest["info"].get("resumed_at")  # It is not verified as the files are.
        steps = earlier[-MAX_RESUMES:] if isinstance(earlier, list) else []
        self.resumed_at = [*(step for step in steps if type(step) is int), manifest["step"]]
        self.run_id = manifest["run_id"]

    def describe(self, progress: ProgressChecker, world_size: int, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a manifest that are not about its files; ``info`` differs from save to save."""
        parent = {} if self.parent is None else {"parent": self.parent}
        return {
            "run_id": self.run_id or "unset",
            "step": progress.step,
            "epoch": progress.epoch,
            "composition": self.composition,
            "world_size": world_size,
            "info": {"resumed_at": list(self.resumed_at), **parent, **info},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the run, and what it started from."""
        return {"run_id": self.run_id} if self.parent is None else {"run_id": self.run_id, "parent": self.parent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.run_id = state.get("run_id", "")
        self.parent = state.get("parent")


class Checkpoints:
    """The checkpoints of one run: which are there, and which stay; it does not know any trainer.

    A run calls `open`, then for each checkpoint `add` and `write`, and at last `close`. Where the bytes are is the
    business of ``checkpointer``.

    Parameters
    ----------
    checkpointer : Checkpointer
        Where they are stored.
    model_format : {"safetensors", "ckpt", "sharded"}
        The format of the weights.
    retention : Retention
        The rule for which checkpoints stay.
    lineage : Lineage
        The run whose checkpoints these are.
    in_background : bool
        Whether a thread writes while training continues.
    on_save_error : {"raise", "warn"}
        What happens if the disk refuses.
    warns_of_nonfinite : bool
        Whether a save only warns if weights are not finite.

    Attributes
    ----------
    has_failed : bool
        Whether the run has failed: then no disk hides why.
    saved_at : tuple or None
        Epoch, step and pending validation of the newest checkpoint that was saved or loaded.
    passed_over : set of str
        The names of newer ones that a resume has found damaged.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        model_format: str,
        retention: Retention,
        lineage: Lineage,
        *,
        in_background: bool = False,
        on_save_error: str = "raise",
        warns_of_nonfinite: bool = False,
    ) -> None:
        if model_format not in checkpointer.formats:
            formats = " or ".join(f"save_format={name!r}" for name in checkpointer.formats)
            raise ConfigError(
                f"{type(checkpointer).__name__} cannot store save_format={model_format!r}; write {formats}"
            )
        self.checkpointer = checkpointer
        self.folder = checkpointer.folder
        self.model_format = model_format
        self.retention = retention
        self.lineage = lineage
        self.on_save_error = on_save_error
        self.warns_of_nonfinite = warns_of_nonfinite
        self.has_failed = False
        self.saved_at: _Moment | None = None
        self.passed_over: set[str] = set()
        self.saver = Saver(in_background)
        self._pieces = Pieces()
        self._lock = FolderLock(self.folder)
        self._lock.check()
        self._replaced: list[Path] = []  # Those of another run, which the first checkpoint of this one replaces.
        self._highest = -1  # The step of the newest one that was saved, or loaded.
        self._before: tuple[dict[str, float | None], list[Path]] = ({}, [])  # What the last save has changed.
        self._step = 0  # That of the last save.

    def path_at(self, step: int) -> Path:
        """Return the place of the checkpoint of a step."""
        return self.folder / checkpoint_name(step)

    @property
    def last(self) -> Path | None:
        """The newest checkpoint of this run, None before the first."""
        self.settle()
        return self.folder / max(self.retention.scores) if self.retention.scores else None

    @property
    def best(self) -> Path | None:
        """The existing checkpoint with the best score, None if there is no score."""
        self.settle()
        names = self._names()
        return next((self.folder / name for name in self.retention.best_first() if name in names), None)

    def _names(self) -> set[str]:
        """Return the names of the checkpoints in the folder, also of those that were moved aside."""
        return {original_name(path.name) for path in self.checkpointer.list_saved(self.folder)}

    # ------------------------------------------------------------------------------------------ before and after a run

    def open(self, step: int, overwrite: bool) -> None:
        """Lock the folder for a run that is at this step, and refuse to mix its checkpoints with those of another run.

        Raises
        ------
        ConfigError
            Another process saves there, or there are checkpoints of another run and `overwrite` is false.
        """
        self._lock.acquire()
        forget_claims(self.folder)
        put_back(self.folder)
        known_names = self.retention.scores.keys() | self.passed_over
        foreign = [path for path in self.checkpointer.list_saved(self.folder) if path.name not in known_names]
        if known_names:  # This run continues another one: older checkpoints of that are its own.
            foreign = [path for path in foreign if not self._is_left_over(path, step)]
        if foreign and not overwrite:
            raise ConfigError(
                f"save_path={str(self.folder)!r} contains {len(foreign)} checkpoint{'s' * (len(foreign) > 1)} of "
                f"another run or newer than this one (newest: {foreign[0].name}); write resume='auto' to resume "
                "from it, give another save_path, or write overwrite=True to replace them"
            )
        self._replaced = foreign

    def _is_left_over(self, path: Path, step: int) -> bool:
        """Return whether a checkpoint before this step is an older one of this run, or damaged."""
        if (step_of(original_name(path.name)) or 0) > step:
            return False
        try:
            return self.checkpointer.load_manifest(path)["run_id"] == self.lineage.run_id
        except (CheckpointDamaged, CheckpointNotFound):
            return True

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    # --------------------------------------------------------------------------------------------------------- saving

    @contextlib.contextmanager
    def add(self, saved: tuple[str, float | None] | None, moment: _Moment) -> Iterator[list[Path]]:
        """Add a checkpoint, by name and score, to those that are kept, and yield those that it replaces.

        All ranks call it; None is a checkpoint elsewhere. If the block fails, or the thread that writes, everything is
        as before, and the error is raised or logged.
        """
        self.saver.begin()
        scores = self.retention.scores
        self._before = (dict(scores), self._replaced)
        self._step = step = moment[1]
        dropped: list[str] = []
        replaced: list[Path] = []
        if saved is not None:
            if step < self._highest:  # The run has gone back, and makes the later steps again.
                self._replace_later(step)
            name, score = saved
            scores[name] = score
            dropped = self.retention.to_delete()
            replaced = [path for path in self._replaced if path.name not in scores]
        try:
            yield [*(self.folder / name for name in dropped), *replaced]
        except BaseException as error:
            self._fail(error)
            return
        if saved is not None:
            # Only now: until the new one is whole, the others are what there is.
            for name in dropped:
                del scores[name]
            self._replaced = []
            self._highest = step
            self.saved_at = moment

    def _replace_later(self, step: int) -> None:
        """Let the next save replace the checkpoints of later steps."""
        for path in self.checkpointer.list_saved(self.folder):
            name = original_name(path.name)
            if (step_of(name) or 0) > step:
                self.retention.scores.pop(name, None)
                if path not in self._replaced:
                    self._replaced = [*self._replaced, path]

    def write(
        self,
        target: Path,
        state: Mapping[str, Any],
        rows: Mapping[str, Sequence[Mapping[str, Any]]],
        about: Mapping[str, Any],
        *,
        replaces: Sequence[Path],
        trained: Collection[str],
        group: Group,
    ) -> None:
        """Write a state and the rows of its history, or begin to, and then remove the checkpoints that it replaces.

        Every rank calls it. Rank 0 has the whole state, and writes it; all of them write where the weights lie in
        parts. If one fails, all of them raise its error. After an exception the rank that failed calls it alone, and
        writes what it has. Parameters that are ``trained`` must be finite.
        """
        weights = state["model"]
        in_parts = _lies_in_parts(weights, self.model_format)

        def save(group: Group, model_format: str) -> None:
            pieces, last_rows = self._pieces.split(rows)
            beside_weights = {key: value for key, value in state.items() if key != "model"}
            beside_weights["records"] = {**beside_weights["records"], **last_rows}
            files = plan(
                target,
                weights,
                beside_weights,
                about,
                model_format=model_format,
                group=group,
                pieces=pieces,
                trained=trained,
            )
            self.saver.save(files, partial(self._commit, replaces))

        def save_alone() -> None:
            if group.rank == 0 or self.has_failed:
                self._lock.keep(target)  # Before a file is written: somebody may have removed the folder.
                if not in_parts:
                    save(Group(), "safetensors" if self.model_format == "sharded" else self.model_format)

        if self.has_failed:
            save_alone()
            self.saver.wait()
            return
        group.together(save_alone, target)
        if in_parts:  # Its ranks share the errors of each part.
            save(group, "sharded")

    def _commit(self, replaces: Sequence[Path], files: SavePlan) -> None:
        """Store a checkpoint, and only then remove those that it replaces: a run never has less than it had."""
        self.checkpointer.store(files, reads_back=bool(replaces))
        self._pieces.source = files.target
        for path in replaces if files.group.rank == 0 else ():
            try:
                self.checkpointer.remove(path)
            except CheckpointNotFound:  # Somebody else has removed it.
                continue
            except CheckpointError as error:  # A checkpoint that stays costs space, not the run.
                _log.warning("%s", error)

    def settle(self) -> None:
        """Wait for a save in the background; raise, or log, what it failed with, and forget that save."""
        try:
            self.saver.wait()
        except BaseException as error:
            self._fail(error)

    def sync(self, gather: Callable[[Any], list[Any]]) -> None:
        """Learn on every rank what became of the last save, so that all agree on what is due; all ranks call it."""
        if not (self.saver.is_pending and self.saver.has_ended(gather)):
            return

        def settle() -> bool:
            self.settle()
            return self.saver.has_failed

        has_failed = Group(gather=gather).together(settle, self.folder)[0]  # That of rank 0 counts.
        if has_failed and not self.saver.has_failed:
            self._forget_save()
        self.saver.is_pending = False
        self.saver.has_failed = has_failed

    def _fail(self, error: BaseException) -> None:
        """Forget a save that failed with the error that is handled, and raise that unless a warning is enough."""
        self._forget_save()
        if isinstance(error, NonFiniteError):
            is_warning_enough = self.warns_of_nonfinite
        else:
            by_disk = isinstance(error, CheckpointError) and error.errno is not None
            is_warning_enough = by_disk and (self.on_save_error == "warn" or self.has_failed)
        if not is_warning_enough:
            raise
        if getattr(error, "from_rank", None) is None:  # Else the rank that has failed says so.
            _log.warning("not saved at step %d: %s", self._step, error)

    def _forget_save(self) -> None:
        """Forget the last save, which failed: what it was to replace still exists."""
        self.retention.scores, self._replaced = self._before
        self.saved_at = None

    # -------------------------------------------------------------------------------------------------------- loading

    def adopt(self, path: Path, manifest: Manifest, moment: _Moment) -> None:
        """Continue the run of a checkpoint that was loaded, and keep it if it is in the folder."""
        self.lineage.continue_run(manifest)
        self.saved_at = moment
        self._highest = max(self._highest, manifest["step"])
        name = original_name(path.name)
        if path.parent == self.folder and name not in self.retention.scores and name in self._names():
            self.retention.scores[name] = None

    def restore(self, scores: Mapping[str, float | None]) -> None:
        """Keep those checkpoints of a run that still exist, with their scores."""
        names = self._names()
        self.retention.scores = {name: score for name, score in scores.items() if name in names}

    def require_best(self, monitor: str, best: Mapping[str, Any], is_validated: bool) -> Path:
        """Return the checkpoint with the best score; raise CheckpointNotFound if none has it.

        ``best`` is the best row of the history of this run, and ``is_validated`` whether it has any of a validation.
        """
        path = self.best
        if path is not None:
            score = self.retention.scores[path.name]
            wanted = best.get("score")
            if score is not None and wanted is not None and self.retention.is_better(wanted, score):
                text = (
                    f"the best has {monitor}={wanted:g}, in step {best['step']}, and no checkpoint of it is there; "
                    f"{path.name}, which is the best of those that are, has {score:g}"
                )
                if self.retention.best == 0:
                    raise CheckpointNotFound(
                        f"{text}. Write keep_best=1 (an option of StateManagerAddon) for another run; here "
                        f"load_state({str(path)!r}) loads this one"
                    )
                _log.warning("%s and is loaded", text)
            return path
        if self.last is None and (older := self.checkpointer.list_saved(self.folder)):
            raise CheckpointNotFound(
                f"{self.folder} contains {len(older)} checkpoint{'s' * (len(older) > 1)} of another run (newest: "
                f"{older[0].name}), and none of this trainer; write resume=True to continue that run"
            )
        if not is_validated:
            raise CheckpointNotFound(
                f"no checkpoint in {self.folder} has a score: no validation has been made; give run() a valid_loader, "
                "and where a run ends before its first validation valid_every=Every(steps=...)"
            )
        raise CheckpointNotFound(
            f"no checkpoint in {self.folder} has a score: no validation returned monitor={monitor!r}; write monitor= "
            "and the name of a metric that test_step returns"
        )


def _lies_in_parts(weights: Mapping[str, Tensor], model_format: str) -> bool:
    """Return whether each rank writes the tensors, or the parts of tensors, that it has; else one writes everything."""
    if any(map(is_sharded, weights.values())):
        return True
    # A stage of a pipeline has the weights of the other stages on the meta device.
    return model_format == "sharded" and any(weight.is_meta for weight in weights.values())
