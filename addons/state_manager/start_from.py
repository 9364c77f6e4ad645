"""The options ``start_from`` and ``start_with``: a new run begins with parts of a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from zae import random_state
from zae.checkpoint.folder import list_checkpoints, newest_valid, verify
from zae.checkpoint.manifest import read_manifest
from zae.checkpoint.names import MODEL_FILES, STATE, STATE_TENSORS
from zae.checkpoint.reader import load_state
from zae.checkpoint.tensor_files import format_of
from zae.checkpoint.weights import load_weights
from zae.compose.introspect import add_ons_of, is_engine_slot
from zae.errors import CheckpointMismatch, CheckpointNotFound, ConfigError, did_you_mean
from zae.loop.rank_states import RankStates, engine_of
from zae.loop.trainer_state import explaining_misfits
from zae.model.weights import extra_names
from zae.optim.optimization import Optimization

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["Start", "parts_of"]

_Read = TypeVar("_Read")
_PARTS = ("model", "optimizer", "scheduler", "progress", "random")
_RATES = ("lr", "initial_lr")


class Start:
    """The options ``start_from`` and ``start_with``: which checkpoint, and which parts of it."""

    def __init__(
        self, start_from: Any, start_with: Any, cls: type, save_path: Path, resume: Any, allow_partial: Any
    ) -> None:
        self.parts = _check_parts(start_from, start_with, parts_of(cls))
        self._checked: list[str] = []  # Add-ons whose entry comes with the model (`checks_model`).
        if "model" in self.parts:
            self._checked = [add_on.__name__ for add_on in add_ons_of(cls) if add_on.checks_model]
        self.path = None if start_from is None else _check_path(save_path, start_from, resume, allow_partial)
        self._has_extra = False  # Whether the model has state beside its tensors, which files of weights lack.
        if self.path is not None and self.path.is_file():
            format_of(self.path)
            if self.parts != ["model"]:
                raise ConfigError(
                    f"start_from={str(start_from)!r} is a file of weights, and start_with={start_with!r} names more "
                    "than the model; leave start_with out, or give a checkpoint"
                )
        elif self.path is not None and not (resume == "auto" and list_checkpoints(save_path)):
            self._newest(read_manifest, read_manifest)

    def _newest(self, read: Callable[[Path], _Read], read_whole: Callable[[Path], _Read]) -> tuple[Path, _Read]:
        """Read the checkpoint at the path, or the newest whole one of a folder, and return both."""
        assert self.path is not None
        if self.path.is_file():
            return self.path, read(self.path)
        if not self.path.is_dir():
            raise CheckpointNotFound(
                f"start_from={str(self.path)!r} does not exist; give the folder of a checkpoint, or a file of weights"
            )
        newest = newest_valid(self.path, read_whole)
        return (self.path, read(self.path)) if newest is None else newest[:2]

    def _describe(self, path: Path) -> dict[str, Any]:
        """Return what checkpoints of the new run say of the one that it started from."""
        about: dict[str, Any] = {"path": str(path), "parts": list(self.parts)}
        if path.is_file():
            return about
        manifest = read_manifest(path)
        return {**about, **{name: manifest[name] for name in ("run_id", "step", "sha256")}}

    def _read(self, path: Path, verifies_others: bool = False) -> tuple[dict[str, Tensor], dict[Any, Any]]:
        """Read the files of a checkpoint that the parts need: the weights, and the state beside them."""
        needs_model = "model" in self.parts
        needs_state = self.parts != ["model"] or bool(self._checked) or self._has_extra
        if verifies_others:
            files = {*MODEL_FILES.values()} if needs_model else set()
            verify(path, skip={*files, STATE, STATE_TENSORS} if needs_state else files)
        model = load_weights(path) if needs_model else {}
        return model, load_state(path) if needs_state and path.is_dir() else {}

    def apply(self, trainer: Trainer) -> str:
        """Load the parts into a trainer that is set up and has not begun; on an error nothing is loaded.

        Return what there is to say of it.
        """
        if self.path is None:
            return ""
        self._has_extra = "model" in self.parts and bool(extra_names(trainer.unwrap().state_dict()))
        path, (model, state_beside) = self._newest(self._read, partial(self._read, verifies_others=True))
        engine = engine_of(type(trainer), state_beside)
        world = trainer.engine.dp_world_size
        rank = trainer.engine.dp_rank
        saved = RankStates.with_entries_of(state_beside, engine, world, rank)
        present = trainer.state_dict()
        streams = RankStates.streams_in(saved, rank, world) if "random" in self.parts else None
        state = {**present, **_merge(trainer.optimization, saved, present, self.parts, path)}
        if "optimizer" in self.parts:  # Its state has another order in memory than the parameters of this script.
            state["module"] = {**present["module"], "strides": None}
            state["devices"] = saved.get("devices", {})
        if "model" in self.parts:
            state["model"] = model
            state |= {"extra_state": saved["extra_state"]} if "extra_state" in saved else {}
            state |= {name: saved[name] for name in self._checked if saved.get(name) is not None}
            if "optimizer" in self.parts and saved.get("training_weights"):
                state["training_weights"] = saved["training_weights"]
        # The position in the data and the seed stay those of the new run.
        position = trainer.loader_position
        attributes = dict(vars(position))
        is_seeded = trainer.progress_checker.is_seeded
        trainer.load_state_dict(state)
        trainer.loader_position = position
        trainer.progress_checker.is_seeded = is_seeded
        vars(position).update(attributes)
        position.restart(trainer.progress_checker.batch)
        if streams is not None:
            random_state.restore(streams)
        trainer.checkpoints.lineage.parent = self._describe(path)  # type: ignore[attr-defined]
        place = trainer.checkpointer.shown(path)  # type: ignore[attr-defined]
        return f"a new run starts from {', '.join(self.parts)} of {place}"


def parts_of(cls: type) -> list[str]:
    """List the parts of a checkpoint that a trainer class may take: its own, and its add-ons."""
    # What distributes the work, and the list of the checkpoints, belong to a run.
    return [
        *_PARTS,
        *(add_on.__name__ for add_on in add_ons_of(cls) if add_on.slot != "state" and not is_engine_slot(add_on.slot)),
    ]


def _check_parts(start_from: Any, start_with: Any, known: Sequence[str]) -> list[str]:
    """Return the parts, or refuse them."""
    if start_from is None:
        if start_with is not None:
            raise ConfigError(f"start_with={start_with!r} names parts of a checkpoint; give its path: start_from=...")
        return []
    if start_with is None:
        return ["model"]
    if not isinstance(start_with, (list, tuple, set, frozenset)) or not start_with:
        raise ConfigError(f"start_with={start_with!r}; it must be a tuple of parts: start_with=('model', 'optimizer')")
    for name in start_with:
        if name not in known:
            raise ConfigError(
                f"start_with={start_with!r}: {name!r} is not a part of a checkpoint of this trainer"
                f"{did_you_mean(str(name), known)}; available: {', '.join(known)}"
            )
    return [name for name in known if name in start_with]


def _check_path(save_path: Path, start_from: Any, resume: Any, allow_partial: Any) -> Path:
    """Return the path; refuse it beside options that contradict it."""
    if not isinstance(start_from, (str, Path)) or not str(start_from):
        raise ConfigError(f"start_from={start_from!r}; it must be the path of a checkpoint, or of a folder of them")
    if "://" in str(start_from):
        raise ConfigError(
            f"start_from={start_from!r} is a URL, and start_from reads the local disk; copy the checkpoint to a local "
            "folder, or load a file of weights: trainer.apply_weights(url)"
        )
    if resume not in (False, "auto"):
        raise ConfigError(
            f"start_from begins a new run, and resume={resume!r} continues one; give one of them, or write "
            "resume='auto': start_from is then read only if save_path has no checkpoint"
        )
    if allow_partial:
        raise ConfigError(
            "allow_partial is for resume=PATH; with start_from, start_with selects the files that are read: leave "
            "allow_partial out"
        )
    path = Path(start_from).expanduser().absolute()
    if save_path in (path, path.parent):
        raise ConfigError(
            f"start_from={str(start_from)!r} is in save_path, which is for the checkpoints of the new run; give "
            "another save_path, or resume='auto' to continue the run that is there"
        )
    return path


def _merge(
    optimization: Optimization, saved: Mapping[Any, Any], present: Mapping[str, Any], parts: list[str], path: Path
) -> dict[str, Any]:
    """Return the entries of the new state that contain values of the saved one."""
    merged: dict[str, Any] = {}
    with explaining_misfits():
        if "optimizer" in parts or "scheduler" in parts:
            optimization.check_names(saved, ["optimizer"])
            merged |= _optimizers(saved, present, parts, _counters_of(optimization.optimizers))
        if "scheduler" in parts:
            optimization.check_names(saved, ["scheduler"])
            merged["scheduler"] = saved["scheduler"]
        if "progress" in parts:
            merged["progress"] = _progress(saved["progress"])
        merged["records"] = _records(saved, present, parts)
    for name in parts:
        if name not in _PARTS:
            if saved.get(name) is None:
                raise CheckpointMismatch(f"{path} has no entry of {name}; leave {name!r} out of start_with")
            merged[name] = saved[name]
    return merged


def _counters_of(optimizers: Mapping[str, Optimizer]) -> dict[str, set[str]]:
    """Return the counters in the groups of each optimizer, as schedule-free ones have: not arguments of its class."""
    counters = {}
    for name, optimizer in optimizers.items():
        parameters = inspect.signature(type(optimizer)).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        counters[name] = set() if takes_any else set(optimizer.defaults) - set(parameters)
    return counters


def _optimizers(
    saved: Mapping[Any, Any], present: Mapping[str, Any], parts: list[str], counters: Mapping[str, set[str]]
) -> dict[str, Any]:
    """Return the saved state of each parameter, and the settings of the script; a schedule brings its rates."""
    merged: dict[str, Any] = {"optimizer": {}, "order": {}, "outside": {}}
    for name, present_state in present["optimizer"].items():
        saved_state = saved["optimizer"][name]
        source = saved_state if "optimizer" in parts else present_state
        groups = [dict(group) for group in present_state["param_groups"]]
        if len(groups) != len(saved_state["param_groups"]):
            raise CheckpointMismatch(
                f"optimizer {name} has {len(groups)} parameter groups, and was saved with "
                f"{len(saved_state['param_groups'])}; build it as it was, or take the model alone: "
                "start_with=('model',)"
            )
        for group, before, source_group in zip(groups, saved_state["param_groups"], source["param_groups"]):
            group["params"] = source_group["params"]
            group.update({key: source_group[key] for key in counters[name] if key in source_group})
            if "scheduler" in parts:
                group.update({key: before[key] for key in _RATES if key in before})
        merged["optimizer"][name] = {**source, "param_groups": groups}
        state = saved if "optimizer" in parts else present
        for key in ("order", "outside"):
            if name in state.get(key, {}):
                merged[key][name] = state[key][name]
    return merged


def _progress(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters for a run that begins with an epoch; an open epoch counts as finished."""
    is_open = bool(saved["epoch_batch"])
    changed = {
        "epoch": saved["epoch"] + is_open,
        "epoch_step": 0,
        "epoch_batch": 0,
        "run_starts": [],
        "stop_reason": None,
    }
    return {**saved, **changed}


def _records(saved: Mapping[Any, Any], present: Mapping[str, Any], parts: list[str]) -> dict[str, Any]:
    """Return the records of the new run, which say of the parts that come along what they were made with."""
    records = dict(present["records"])
    begun = saved.get("records", {}).get("run", {}).get("script", {})  # Older versions had none.
    brought = {
        name: value
        for name, value in begun.items()
        if ("optimizer" in parts and name.startswith("optimizer ") and ": " not in name)  # Its class alone.
        or ("scheduler" in parts and name.startswith("scheduler "))
    }
    script = records["run"]["script"]
    settings = {
        name: value for name, value in script.items() if not ("scheduler" in parts and name.startswith("scheduler "))
    }
    return {**records, "run": {"script": settings | brought, "calls": []}}
