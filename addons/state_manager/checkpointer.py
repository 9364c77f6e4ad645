"""The checkpoints of one run in one folder: save them, remove old ones, find the one to resume from."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from zae.addons.state_manager.saver import Job, Saver
from zae.checkpoint import filesystem
from zae.checkpoint.filesystem import checkpoint_name, original_name, remove_checkpoint, step_of
from zae.checkpoint.folder import Group, list_checkpoints, load_checkpoint, newest_valid, put_back, refuse_links
from zae.checkpoint.locks import FolderLock
from zae.checkpoint.manifest import Manifest, check_progress, read_manifest
from zae.common.argument_checks import check_count
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError, NonFiniteError
from zae.loop.progress import Every, ProgressChecker

__all__ = [
    "EXACT",
    "Checkpointer",
    "Content",
    "CrashSaver",
    "Retention",
    "WeightFiles",
    "WeightFolder",
    "crashes_in",
    "make_checkpointer",
    "step_of_weights",
    "weight_files",
]

_log = logging.getLogger("zae")


# ------------------------------------------------------------------------------------------------------ which to keep

_WEIGHTS = re.compile(r"weights-(\d{8,18})\.(?:safetensors|ckpt)")


class Retention:
    """The scores of checkpoints by name, and the rule that keeps some of them."""

    def __init__(self, last: int | None, best: int, sign: int) -> None:
        self.last, self.best, self.sign = last, best, sign
        self.scores: dict[str, float | None] = {}

    @classmethod
    def parse(cls, keep_last: int | None, keep_best: int, direction: str) -> Retention:
        """Return the rule for the options ``keep_last`` and ``keep_best``, where the best is the "min" or the "max"."""
        last = check_count("keep_last", keep_last, optional=True)
        best = check_count("keep_best", keep_best, least=0)
        return cls(last, best or 0, 1 if direction == "min" else -1)

    def best_first(self) -> list[str]:
        """Return the names with a score, best first and of equal ones the older; NaN is not a score."""
        scored = [(self.sign * score, name) for name, score in self.scores.items() if score is not None]
        return [name for score, name in sorted(pair for pair in scored if pair[0] == pair[0])]

    def to_delete(self) -> list[str]:
        """Return the names that neither rule keeps; the newest is never among them."""
        names = sorted(self.scores)
        kept = set(names if self.last is None else names[-self.last :]) | set(self.best_first()[: self.best])
        return [name for name in names if name not in kept]

    def wants(self, name: str, is_scored: bool, is_best: bool) -> bool:
        """Return whether to save what was just validated: to note its score, or because it is the best so far."""
        return (is_scored and self.is_unscored(name)) or (is_best and self.best > 0 and self.best_first()[:1] != [name])

    def is_unscored(self, name: str) -> bool:
        """Return whether a checkpoint was saved before its score was known, and scores matter."""
        return self.best > 0 and name in self.scores and self.scores[name] is None


class WeightFiles:
    """Files of weights alone beside the checkpoints of a run, ``weights-00000012.safetensors``, and which to keep.

    Parameters
    ----------
    folder : Path
        The folder of the run.
    model_format : {"safetensors", "ckpt", "sharded"}
        That of the checkpoints.
    every : Every, int or None
        The option ``save_weights_every``: when to save; None saves none.
    last : int or None
        The option ``keep_weights``: how many of the newest to keep; None keeps all.
    best : int
        The option ``keep_best_weights``: how many of the best to keep beside them. They are saved when a validation
        was the best so far, too.
    sign : {1, -1}
        1 where the best score is the smallest.

    Attributes
    ----------
    rule : Retention
        The scores of the files by name, and the rule for which of them stay.
    is_used : bool
        Whether the run saves any.
    storage : WeightFolder
        Where they are.
    """

    def __init__(
        self,
        folder: Path,
        model_format: str,
        every: Every | int | None,
        last: int | None,
        best: int = 0,
        sign: int = 1,
    ) -> None:
        self.folder, self.suffix = folder, ".ckpt" if model_format == "ckpt" else ".safetensors"
        self.every = None if every is None else Every.parse(every, "save_weights_every", Every(epochs=1))
        kept = check_count("keep_weights", last, optional=True)
        best = check_count("keep_best_weights", best, least=0) or 0
        if kept is not None and self.every is None:
            raise ConfigError(f"keep_weights={last} keeps nothing; write save_weights_every=Every(epochs=1) too")
        if best and kept is None and self.every is not None:
            raise ConfigError(f"keep_best_weights={best}, but all files are kept; write keep_weights=1 too")
        # Where only the best are saved, the newest was the best so far.
        self.rule = Retention(1 if self.every is None else kept, best, sign)
        self.is_used = self.every is not None or best > 0
        self._replaced: list[Path] = []  # Those of another run.
        self._step: int | None = None  # That of the last file: a moment has several occasions to save.
        self.storage = WeightFolder(folder)

    def path_at(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"weights-{step:08d}{self.suffix}"

    def open(self, step: int, overwrite: bool) -> None:
        """Refuse files of another run, where this one begins and does not overwrite them."""
        others = [] if self.every is None or step else self.storage.list_saved()
        if others and not overwrite:
            raise ConfigError(
                f"save_path={str(self.folder)!r} contains {len(others)} file{'s' * (len(others) > 1)} of weights of "
                f"another run (newest: {others[-1].name}); give another save_path, or write overwrite=True to replace "
                "them"
            )
        self._replaced = others

    def is_due(self, progress: ProgressChecker, score: float | None, is_best: bool) -> bool:
        """Return whether to save now, or to note the score of what was just saved."""
        if progress.step == self._step:
            return score is not None and self.rule.is_unscored(self.path_at(progress.step).name)
        return (self.every is not None and self.every.is_due(progress)) or (self.rule.best > 0 and is_best)

    def save(self, step: int, score: float | None, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save the file of a step, on every rank, and then remove those that it replaces."""
        path = self.path_at(step)
        if step != self._step:
            self.storage.save(path, save_model, is_main)
        self.rule.scores[path.name] = score
        self._step, replaced, self._replaced = step, self._replaced, []
        if not is_main:
            return
        there = self.storage.list_saved()
        # A run that was resumed from an earlier step makes the later ones again.
        later = [each for each in there if each > path or (each in replaced and each != path)]
        present = [each for each in there if each not in later]
        self.rule.scores = {each.name: self.rule.scores.get(each.name) for each in present}
        for each in [*later, *(self.folder / name for name in self.rule.to_delete())]:
            self.storage.remove(each)
            self.rule.scores.pop(each.name, None)

    def plan_lines(self) -> list[str]:
        """Say when they are saved."""
        last, best = self.rule.last, self.rule.best
        if not self.is_used:
            return []
        if self.every is None:
            return [f"the weights alone are saved after each best validation, and the best {best} are kept"]
        kept = "all are kept" if last is None else f"the newest {last}{f' and the best {best}' * (best > 0)} are kept"
        return [f"the weights alone are saved too, {self.every!r}, and {kept}"]


class WeightFolder:
    """The folder of files of weights; a subclass keeps them elsewhere, under the same names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_saved(self) -> list[Path]:
        """List the files by their step."""
        return weight_files(self.folder)

    def save(self, path: Path, save_model: Callable[[Path], Path], is_main: bool) -> None:
        """Save a file, whole or absent; every rank calls it."""
        save_model(path)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink(missing_ok=True)


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights in the folder of a run, by their step."""
    return sorted(path for path in folder.glob("weights-*") if _WEIGHTS.fullmatch(path.name))


def step_of_weights(name: str) -> int:
    """Return the step in the name of a file of weights; 0 for another name."""
    found = _WEIGHTS.fullmatch(name)
    return int(found[1]) if found else 0


# -------------------------------------------------------------------------------------------------------- failed runs

EXACT = "exact"
"""Where the manifest of a failed run says whether a resume from it is bitwise the run without the failure."""

_CLAIM = ".crash-"
_IN_PARTS = "the state lies in parts on the ranks, and one alone cannot save it"
_HALF_STEPPED = "the state is that of no step, and is not saved"
_CRASH = re.compile(r"crash-\d{8,18}")


def crashes_in(folder: Path) -> list[Path]:
    """List the states of failed runs in a folder, the highest step first; copies under other names are left out."""
    found = (path for path in folder.glob("crash-*") if _CRASH.fullmatch(path.name))
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), reverse=True)


class CrashSaver:
    """Note whether a run is within a step, and save the state of a failed one beside the checkpoints.

    Of several ranks the first one to fail saves, without the others: weights, optimizer and counters are the same on
    all of them, but the random streams of the others are lost, and the manifest says so.
    """

    def __init__(self, folder: Path, list_saved: Callable[[Path, str], list[Path]]) -> None:
        self.folder, self._list_saved = folder, list_saved
        self._token = ""  # The same on every rank, and another in every run.
        self._began_at = self._rested_at = -1  # Batches used when the run began, and when it was last between steps.
        self._rested_moment: tuple[int, int, str] | None = None

    def begin(self, progress: ProgressChecker, token: str) -> None:
        """Note that a run begins."""
        self._began_at, self._rested_at, self._token = progress.batch, -1, token

    def rest(self, progress: ProgressChecker) -> None:
        """Note that the run is between two steps."""
        self._rested_at, self._rested_moment = progress.batch, progress.moment

    def end(self) -> None:
        """Note that the run has ended."""
        self._began_at = self._rested_at = -1

    def was_in_step(self, progress: ProgressChecker, has_batch: bool) -> bool | None:
        """Return whether the run failed between a step's forward and its checkpoint; None before the first step."""
        last = self._began_at if self._rested_at < 0 else self._rested_at
        in_step = progress.batch != last or has_batch
        return None if last < 0 or (self._rested_at < 0 and not in_step) else in_step

    def is_exact(self, progress: ProgressChecker, has_drawn: bool) -> bool:
        """Return whether a run that resumes from this state ends bitwise as if nothing had failed.

        It does if a validation has failed, which it repeats: the random numbers of a validation are not those of
        training. It does if the next batch of an open epoch has failed, and this process has drawn nothing for it.
        """
        if progress.pending_validation:
            return True
        is_between_steps = (self._rested_at, self._rested_moment) == (progress.batch, progress.moment)
        return is_between_steps and progress.epoch_batch > 0 and not has_drawn

    def save(
        self, step: int, rank: int, world_size: int, write: Callable[..., None] | None, error: BaseException
    ) -> None:
        """Save the state of the failed run; what fails here is only logged.

        ``write`` is called with the folder, the older ones that it replaces, and entries for the manifest. None
        is that of a rank which has only a part of the state, or whose state is that of no step.
        """
        if step and write is None:
            self._decline(error, _IN_PARTS if world_size > 1 else _HALF_STEPPED)
        if not step or write is None:
            return
        target, name, regular = self.folder / f"crash-{step:08d}", type(error).__name__, ""
        try:
            regular = self._regular()
            if world_size > 1:
                filesystem.disk.mkdir(self.folder / f"{_CLAIM}{step:08d}-{self._token}")
            older = [path for path in self._list_saved(self.folder, "crash") if path != target]
            write(target, older, {"error": name, **({"rank": rank} if world_size > 1 else {})})
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


def forget_claims(folder: Path) -> None:
    """Remove the marks of ranks that failed in an earlier run."""
    for path in folder.glob(f"{_CLAIM}*"):
        with contextlib.suppress(OSError):
            filesystem.disk.remove_directory(path)


def warn_of_lost_ranks(path: Path, manifest: Mapping[str, Any]) -> None:
    """Warn that a state which one of several ranks has saved alone cannot be resumed exactly."""
    rank, world = manifest["info"].get("rank"), manifest["world_size"]
    if rank is not None and world > 1:
        _log.warning(
            "%s was saved by rank %d of %d alone, as it failed: weights, optimizer and counters are those of that "
            "step, but the random streams and the records of the other ranks are lost, and the rest of the epoch may "
            "have another order; the end is not exactly that of an uninterrupted run", path, rank, world,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------- the checkpoints of a run

Content: TypeAlias = "tuple[Manifest, dict[str, Tensor], dict[Any, Any]]"
_Held: TypeAlias = Mapping[str, Tensor]
_NONE: _Held = MappingProxyType({})
_Moment: TypeAlias = "tuple[int, int, str]"
_RESUMES = 999  # As many as a manifest lists.


class Checkpointer:
    """Saves, keeps and finds the checkpoints of a run in one folder; it does not know any trainer.

    A run calls `open`, then for each checkpoint `add` and `write`, and at last `close`. These decide what is saved,
    kept and loaded. Where the bytes are is decided by five methods, which a class for another kind of storage
    overrides. It is given as the option ``checkpointer`` of `StateManagerAddon`:

    - `list_saved`, `load` and `load_manifest` read. Every rank calls them.
    - `store` and `remove` write. Rank 0 calls them, or after an exception the rank that failed; with ``save_async`` in
      a thread, one call at a time.

    A path ``folder / "step-00000012"`` names a checkpoint in all of them, and ``folder / "crash-00000012"`` the state
    of a failed run. Nothing needs to exist at this path. Paths in other folders are those of plain checkpoints: pass
    them on to ``super()``. A class has to keep three promises, at whatever instant the process is killed:

    - A checkpoint is whole or absent: `list_saved` leaves out what `store` has not finished, or `load` raises
      `CheckpointDamaged` for it; then the one before is loaded.
    - While `store` replaces a checkpoint of the same name, `load` returns the old one or the new one.
    - When `store` returns, the checkpoint can be read back. Only then `remove` is called for older ones.

    Parameters
    ----------
    folder : Path
        The folder of the checkpoints.
    model_format : {"safetensors", "ckpt", "sharded"}
        The format of the weights.
    retention : Retention
        The rule for which checkpoints stay.
    weights : WeightFiles, optional
        The files of weights alone.
    in_background : bool
        Whether a thread writes while training continues.
    on_save_error : {"raise", "warn"}
        What happens if the disk refuses.
    warns_of_nonfinite : bool
        Whether a save only warns if weights are not finite.

    Attributes
    ----------
    run_id : str
        The run whose checkpoints these are.
    parent : dict or None
        What the run started from (``start_from``): "path", "parts", and of a checkpoint "run_id", "step" and the
        "sha256" of its manifest. Each checkpoint of the run has it in the ``info`` of its manifest.
    resumed_at : list of int
        The steps of the checkpoints that the run was resumed from; they are in the ``info`` of its manifests too.
    code : dict
        What ``describe_code`` of ``provenance.py`` returned when the run was set up; it is in the ``info`` too.
    has_failed : bool
        Whether the run has failed: then no disk hides why.
    saved_at : tuple or None
        Epoch, step and pending validation of the newest checkpoint that was saved or loaded.
    formats : tuple of str
        Of a class: the formats that it can store. With "sharded" every rank calls `store`.

    Examples
    --------
    >>> checkpointer = Checkpointer(Path("runs/no-such-run"), "safetensors", Retention(2, 1, sign=1))
    >>> checkpointer.find("auto"), checkpointer.last, checkpointer.path_at(12).name
    (None, None, 'step-00000012')
    """

    formats: ClassVar[tuple[str, ...]] = ("safetensors", "ckpt", "sharded")

    def __init__(
        self,
        folder: Path,
        model_format: str,
        retention: Retention,
        weights: WeightFiles | None = None,
        *,
        in_background: bool = False,
        on_save_error: str = "raise",
        warns_of_nonfinite: bool = False,
    ) -> None:
        self.folder, self.model_format, self.retention = folder, model_format, retention
        if model_format not in self.formats:
            known = " or ".join(f"save_format={each!r}" for each in self.formats)
            raise ConfigError(f"{type(self).__name__} cannot store save_format={model_format!r}; write {known}")
        self.weights = weights or WeightFiles(folder, model_format, None, None)
        if on_save_error not in ("raise", "warn"):
            raise ConfigError(f"on_save_error={on_save_error!r}; it must be 'raise' or 'warn'")
        self.on_save_error, self.warns_of_nonfinite = on_save_error, warns_of_nonfinite
        self.run_id, self.has_failed = "", False
        self.parent: dict[str, Any] | None = None
        self.resumed_at: list[int] = []
        self.code: dict[str, dict[str, str]] = {}
        self.saved_at: _Moment | None = None
        self.saver = Saver(in_background)
        self._lock = FolderLock(folder)
        self._lock.check()
        self._damaged: set[str] = set()  # Newer ones that the resume has passed over.
        self._replaced: list[Path] = []  # Those of another run, which the first checkpoint of this one replaces.
        self._highest = -1  # The step of the newest one that was saved, or loaded.
        self._before: tuple[dict[str, float | None], list[Path]] = ({}, [])  # What the last save has changed.
        self._step = 0  # That of the last save.

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    def path_at(self, step: int) -> Path:
        """Return the place of the checkpoint of a step."""
        return self.folder / checkpoint_name(step)

    def shown(self, path: Path) -> str:
        """Return a checkpoint or folder as it is shown: relative to the present folder where it lies in it."""
        with contextlib.suppress(OSError):  # The present folder may be gone.
            if Path.cwd() in path.parents:
                return str(path.relative_to(Path.cwd()))
        return str(path)

    @property
    def last(self) -> Path | None:
        """The newest checkpoint of this run, None before the first."""
        self.settle()
        return self.folder / max(self.retention.scores) if self.retention.scores else None

    @property
    def best(self) -> Path | None:
        """The existing checkpoint with the best score, None if there is no score."""
        self.settle()
        there = self._names()
        return next((self.folder / name for name in self.retention.best_first() if name in there), None)

    def _names(self) -> set[str]:
        """Return the names of the checkpoints in the folder, also of those that were moved aside."""
        return {original_name(path.name) for path in self.list_saved(self.folder)}

    # ------------------------------------------------------------------------------------- where the bytes are

    def list_saved(self, folder: Path, kind: str = "step") -> list[Path]:
        """List the checkpoints in a folder, without reading them.

        Parameters
        ----------
        folder : Path
            That of this run, or another one.
        kind : {"step", "crash"}
            Whether to list checkpoints, or the states of failed runs.

        Returns
        -------
        list of Path
            The highest step first; empty if there is no such folder.
        """
        return list_checkpoints(folder) if kind == "step" else crashes_in(folder)

    def load(self, path: Path, allow_partial: Collection[str] = (), held: _Held = _NONE) -> Content:
        """Read a whole checkpoint and verify its hashes.

        Parameters
        ----------
        path : Path
            The checkpoint.
        allow_partial : collection of str
            Files that may be missing or damaged.
        held : mapping
            With "sharded", the tensors of which this rank needs its part only.

        Returns
        -------
        manifest, model, state : tuple
            What `zae.checkpoint.folder.load_checkpoint` returns for a folder.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
            It is absent, it is not what was stored, or a newer zae wrote it.
        """
        return load_checkpoint(path, allow_partial=allow_partial, held=held)

    def load_manifest(self, path: Path) -> Manifest:
        """Read the manifest of a checkpoint alone.

        Parameters
        ----------
        path : Path
            The checkpoint.

        Returns
        -------
        Manifest
            Its content.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged
            As for `load`.
        """
        return read_manifest(path)

    def store(self, job: Job) -> None:
        """Write a checkpoint, whole or absent.

        Parameters
        ----------
        job : Job
            What to write: ``job.target`` is its path, and ``job.write_folder(path)`` writes it as a folder elsewhere,
            for instance to pack or upload it from there. With ``job.replaces``, verify what was written.

        Raises
        ------
        CheckpointError
            It was not written; ``errno`` is set if the storage refused, so that ``on_save_error="warn"`` applies.
        """
        job.write_folder()

    def remove(self, path: Path) -> None:
        """Remove a checkpoint; when this is interrupted, what is left of it is not taken for a whole one.

        Parameters
        ----------
        path : Path
            The checkpoint.

        Raises
        ------
        CheckpointNotFound
            It is not there, which is not an error for the run.
        CheckpointError
            It could not be removed; the run warns and continues.
        """
        remove_checkpoint(path)

    def _commit(self, job: Job) -> None:
        job.write(self.store, self.remove)

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
        known = self.retention.scores.keys() | self._damaged
        others = [path for path in self.list_saved(self.folder) if path.name not in known]
        others = [path for path in others if not (known and self._is_left_over(path, step))]
        if others and not overwrite:
            raise ConfigError(
                f"save_path={str(self.folder)!r} contains {len(others)} checkpoint{'s' * (len(others) > 1)} of "
                f"another run or newer than this one (newest: {others[0].name}); write resume='auto' to resume "
                "from it, give another save_path, or write overwrite=True to replace them"
            )
        self._replaced = others
        self.weights.open(step, overwrite)

    def _is_left_over(self, path: Path, step: int) -> bool:
        """Return whether a checkpoint before this step is an older one of this run, or damaged."""
        if (step_of(original_name(path.name)) or 0) > step:
            return False
        try:
            return self.load_manifest(path)["run_id"] == self.run_id
        except (CheckpointDamaged, CheckpointNotFound):
            return True

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    # --------------------------------------------------------------------------------------------------------- saving

    @contextlib.contextmanager
    def add(self, kept: tuple[str, float | None] | None, moment: _Moment) -> Iterator[list[Path]]:
        """Add a checkpoint, by name and score, to those that are kept, and yield those that it replaces.

        All ranks call it; None is a checkpoint elsewhere. If the block fails, or the thread that writes, everything is
        as before, and the error is raised or logged.
        """
        self.saver.begin()
        scores = self.retention.scores
        self._before, self._step = (dict(scores), self._replaced), moment[1]
        if kept is not None and moment[1] < self._highest:  # The run has gone back, and makes these steps again.
            steps = {path: step_of(original_name(path.name)) or 0 for path in self.list_saved(self.folder)}
            later = [path for path, step in steps.items() if step > moment[1]]
            self._replaced = [*dict.fromkeys([*self._replaced, *later])]
            for path in later:
                scores.pop(original_name(path.name), None)
        names: list[str] = []
        replaced: list[Path] = []
        if kept is not None:
            scores[kept[0]] = kept[1]
            names = self.retention.to_delete()
            replaced = [path for path in self._replaced if path.name not in scores]
        try:
            yield [*(self.folder / name for name in names), *replaced]
        except BaseException as error:
            self._fail(error)
            return
        if kept is not None:
            self.saved_at, self._replaced, self._highest = moment, [], moment[1]
            for name in names:
                del scores[name]

    def write(self, job: Job, is_writer: bool) -> None:
        """Write a checkpoint, or begin to, and then remove those that it replaces.

        Every rank calls it, and the one that has the whole state is the writer; all of them write a sharded one. If one
        fails, all of them raise its error. After an exception the rank that failed calls it alone, as the writer.
        """

        def write() -> None:
            if is_writer:
                self._lock.keep(job.target)
            if is_writer and not job.is_sharded:
                self.saver.save(job, self._commit)

        if self.has_failed:
            write()
            self.saver.wait()
            return
        job.group.together(write, job.target)
        if job.is_sharded:  # Its ranks share the errors of each part.
            self.saver.save(job, self._commit)

    def save_weights(
        self,
        progress: ProgressChecker,
        save_model: Callable[[Path], Path],
        group: Group,
        score: float | None,
        is_best: bool,
    ) -> None:
        """Save the weights alone if that is due; all ranks call it."""
        if self.weights.is_due(progress, score, is_best):
            save = partial(self.weights.save, progress.step, score, save_model, group.rank == 0)
            try:
                group.together(save, self.folder)
            except CheckpointError as error:
                if error.errno is None or self.on_save_error != "warn":
                    raise
                if error.from_rank is None:
                    _log.warning("not saved at step %d: %s", progress.step, error)

    def settle(self) -> None:
        """Wait for a save in the background; raise, or log, what it failed with, and forget that save."""
        try:
            self.saver.wait()
        except BaseException as error:
            self._fail(error)

    def sync(self, gather: Callable[[Any], list[Any]]) -> None:
        """Learn on every rank what became of the last save, so that all agree on what is due; all ranks call it."""
        if not self.saver.is_pending:
            return
        has_ended = self.saver.has_ended(gather)

        def settle() -> tuple[bool, bool]:
            if has_ended:
                self.settle()
            return self.saver.outcome

        if self.saver.learn_of_failure(*Group(gather=gather).together(settle, self.folder)[0]):
            self._forget_save()

    def _fail(self, error: BaseException) -> None:
        """Forget a save that failed with the error that is handled, and raise that unless a warning is enough."""
        self._forget_save()
        by_disk = isinstance(error, CheckpointError) and error.errno is not None
        is_told = by_disk and (self.on_save_error == "warn" or self.has_failed)
        if not (is_told or (isinstance(error, NonFiniteError) and self.warns_of_nonfinite)):
            raise
        if getattr(error, "from_rank", None) is None:
            _log.warning("not saved at step %d: %s", self._step, error)

    def _forget_save(self) -> None:
        """Forget the last save, which failed: what it was to replace still exists."""
        (self.retention.scores, self._replaced), self.saved_at = self._before, None

    def plan_lines(self, plan: Any, every: Every) -> list[str]:
        """Set in a plan when is saved, and describe what is kept."""
        kept = self.retention
        return [*plan.keep(every, kept.last, kept.best, self.folder), *self.weights.plan_lines()]

    # -------------------------------------------------------------------------------------------------------- loading

    def find(
        self, resume: bool | str | Path, allow_partial: Collection[str] = (), held: _Held = _NONE
    ) -> tuple[Path, Content] | None:
        """Find the checkpoint that the option ``resume`` means, and read it as `read` does.

        Returns
        -------
        path, content : tuple, or None
            The checkpoint, and what ``load_checkpoint`` returned for it; None to start from scratch.

        Raises
        ------
        CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
            There is none, all are damaged, or a newer zae wrote the newest.
        """
        if resume is False:
            return None
        folder = self.folder if resume in (True, "auto") else Path(resume).expanduser()  # type: ignore[arg-type]
        if folder != self.folder and not self.list_saved(folder):
            return folder, self.read(folder, allow_partial, held)
        found = newest_valid(folder, partial(self.read, held=held), self.list_saved)
        refuse_links(folder, found[0] if found else None)
        if (failed := self._exact_crash(folder, None if found is None else found[1][0], held)) is not None:
            _log.info("resuming from %s: a failed run has saved it between two steps", failed[0])
            return failed
        if found is None:
            crashed = next(iter(self.list_saved(folder, "crash")), None)
            hint = f"; resume={str(crashed)!r} resumes from what a failed run has saved" if crashed else ""
            if resume == "auto":
                level = logging.WARNING if hint else logging.INFO
                _log.log(level, "no checkpoint in %s: a new run begins%s", folder, hint)
                return None
            raise CheckpointNotFound(
                f"resume={resume!r}, but {folder} contains no checkpoint; write resume='auto' to start a new run in "
                f"that case{hint}"
            )
        path, content, passed_over = found
        for damaged, why in passed_over:
            _log.warning("passed over %s, which is damaged (%s); resuming from %s", damaged, why, path)
        self._damaged = {damaged.name for damaged, _ in passed_over}
        return path, content

    def _exact_crash(self, folder: Path, newest: Manifest | None, held: _Held) -> tuple[Path, Content] | None:
        """Return the exact state of a failed run that is newer than the newest checkpoint, and of its run."""
        for path in self.list_saved(folder, "crash"):
            try:
                manifest = self.load_manifest(path)
                if newest is not None and manifest["step"] <= newest["step"]:
                    return None
                is_of_run = newest is None or manifest["run_id"] == newest["run_id"]
                if is_of_run and manifest["info"].get(EXACT) is True:
                    return path, self.read(path, held=held)
            except (CheckpointDamaged, CheckpointNotFound) as error:
                _log.warning("passed over %s, which is damaged (%s)", path, error)
        return None

    def newest(self, path: Path, allow_partial: Collection[str], held: _Held) -> tuple[Path, Content]:
        """Read a checkpoint as `read` does, or the newest whole one in a folder of them."""
        found = newest_valid(path, partial(self.read, held=held), self.list_saved)
        if found is None:
            return path, self.read(path, allow_partial, held)
        for damaged, why in found[2]:
            _log.warning("passed over %s, which is damaged (%s); loading %s", damaged, why, found[0])
        return found[:2]

    def read(self, path: Path, allow_partial: Collection[str] = (), held: _Held = _NONE) -> Content:
        """Read a checkpoint, and warn if other ranks have lost their part of it.

        ``held`` names the tensors of which this rank holds a part, and needs no more of the checkpoint.
        """
        manifest, model, state = self.load(path, allow_partial, held)
        check_progress(path, manifest, state)
        warn_of_lost_ranks(path, manifest)
        return manifest, model, state

    def adopt(self, path: Path, manifest: Manifest, moment: _Moment) -> None:
        """Continue the run of a checkpoint that was loaded, and keep it if it is in the folder."""
        self.run_id, self.saved_at = manifest["run_id"], moment
        earlier = manifest["info"].get("resumed_at")  # It is not verified as the files are.
        steps = earlier[-_RESUMES:] if isinstance(earlier, list) else []
        self.resumed_at = [*(each for each in steps if type(each) is int), manifest["step"]]
        self._highest = max(self._highest, manifest["step"])
        name = original_name(path.name)
        if path.parent == self.folder and name in self._names():
            self.retention.scores.setdefault(name, None)  # Its state was saved before it was in its own list.

    def begin_run(self, name: str, describe_code: Callable[[], dict[str, dict[str, str]]]) -> None:
        """Name the run unless it continues another one, and note its code the first time."""
        self.run_id, self.code = self.run_id or name, self.code or describe_code()

    @property
    def lineage(self) -> dict[str, Any]:
        """Where the run has started from, as checkpoints contain it."""
        return {} if self.parent is None else {"parent": self.parent}

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the run, and the scores of its checkpoints and files of weights, for `restore`."""
        of_weights = self.weights.rule.scores
        kept = {"run_id": self.run_id, "scores": dict(self.retention.scores), **self.lineage}
        return kept | ({"weight_scores": dict(of_weights)} if of_weights else {})

    def describe(
        self, progress: ProgressChecker, add_ons: Sequence[type], world_size: int, info: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what a manifest says of the run, beside its files."""
        at = {"run_id": self.run_id or "unset", "step": progress.step, "epoch": progress.epoch}
        composition = [each.__name__ for each in add_ons]
        whole = {"resumed_at": list(self.resumed_at), **self.code, **self.lineage, **info}
        return {**at, "composition": composition, "world_size": world_size, "info": whole}

    def restore(self, saved: Mapping[str, Any], by_step: Mapping[int, Mapping[str, Any]] | None) -> None:
        """Load the name of the run, its start, and the scores of those of its checkpoints that still exist.

        ``by_step`` has the rows of the history by another monitor than the one that the scores were saved with.
        """
        there = self._names()
        scores = {name: score for name, score in saved["scores"].items() if name in there}
        of_weights = dict(saved.get("weight_scores", {}))
        if by_step is not None:
            rows = {name: by_step.get(step_of(name) or 0) for name in scores}
            scores = {name: None if row is None else row["score"] for name, row in rows.items()}
            rows = {name: by_step.get(step_of_weights(name)) for name in of_weights}
            of_weights = {name: None if row is None else row["score"] for name, row in rows.items()}
        self.run_id, self.parent, self.retention.scores = saved.get("run_id", ""), saved.get("parent"), scores
        self.weights.rule.scores = of_weights

    def require_best(self, monitor: str, best: Mapping[str, Any]) -> Path:
        """Return the checkpoint with the best score; raise CheckpointNotFound if none has it.

        ``best`` is the best row of the history of this run.
        """
        path = self.best
        if path is not None:
            found, wanted, sign = self.retention.scores[path.name], best.get("score"), self.retention.sign
            if found is not None and wanted is not None and sign * found > sign * wanted:
                text = (
                    f"the best has {monitor}={wanted:g}, in step {best['step']}, and no checkpoint of it is there; "
                    f"{path.name}, which is the best of those that are, has {found:g}"
                )
                if self.retention.best == 0:
                    raise CheckpointNotFound(
                        f"{text}. Write keep_best=1 (an option of StateManagerAddon) for another run; here "
                        f"load_state({str(path)!r}) loads this one"
                    )
                _log.warning("%s and is loaded", text)
            return path
        if self.last is None and (older := self.list_saved(self.folder)):
            raise CheckpointNotFound(
                f"{self.folder} contains {len(older)} checkpoint{'s' * (len(older) > 1)} of another run (newest: "
                f"{older[0].name}), and none of this trainer; write resume=True to continue that run"
            )
        raise CheckpointNotFound(
            f"no checkpoint in {self.folder} has a score: no validation returned monitor={monitor!r}; give run() a "
            "valid_loader, and monitor= the name of a metric that test_step returns"
        )


def make_checkpointer(checkpointer: Any, *args: Any, **options: Any) -> Checkpointer:
    """Call what was given as the option ``checkpointer``."""
    made = checkpointer(*args, **options) if callable(checkpointer) else checkpointer
    if not isinstance(made, Checkpointer):
        found = f"returned a {type(made).__name__}" if callable(checkpointer) else f"is a {type(made).__name__}"
        raise ConfigError(
            f"checkpointer {found}; give a class derived from zae.addons.state_manager.checkpointer.Checkpointer, or a "
            "functools.partial of one"
        )
    return made
