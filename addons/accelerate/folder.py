"""The folder that ``Accelerator.save_state`` writes: written whole or not at all, and read without pickle."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from zae.addons.accelerate.accelerator import Prepared, load_library
from zae.checkpoint.filesystem import make_directory
from zae.checkpoint.folder import install
from zae.checkpoint.group import Group
from zae.checkpoint.names import aside_name, staging_name
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound

__all__ = ["PARTS", "Folder", "save"]

PARTS = ("model", "optimizer", "scheduler", "random")
"""What is read of a folder."""

_FILES = re.compile(
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin"
    r"|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
)


def save(accelerator: Any, folder: str | Path, group: Group) -> Path:
    """Let each rank write its files into a hidden folder, and rename it when all have; all ranks call it."""
    path = Path(folder).expanduser().absolute()
    staging: Path = group.gather(path.with_name(staging_name(path.name)))[0]
    settings = accelerator.project_configuration
    is_automatic = settings.automatic_checkpoint_naming
    settings.automatic_checkpoint_naming = False

    def begin() -> None:
        if group.rank == 0:
            _check_replaceable(path)
            make_directory(path.parent)

    def end() -> None:
        if group.rank == 0:
            _sync(staging)
            before = path.with_name(aside_name(path.name, "replaced"))
            if path.exists():
                os.replace(path, before)
            install(staging, path)
            shutil.rmtree(before, ignore_errors=True)

    try:
        group.together(begin, path)
        group.together(lambda: accelerator.save_state(str(staging)), path)
        group.together(end, path)
    except BaseException:
        if group.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        settings.automatic_checkpoint_naming = is_automatic
    return path


def _check_replaceable(path: Path) -> None:
    """Refuse to replace a file, or a folder with anything but the files of Accelerate."""
    if path.is_dir():
        foreign = sorted(name for name in os.listdir(path) if _FILES.fullmatch(name) is None)
        if foreign:
            raise CheckpointError(
                f"{path} contains {foreign[0]!r}, which Accelerate has not written; give another folder"
            )
    elif path.exists():
        raise CheckpointError(f"{path} is a file; give a folder")


def _sync(folder: Path) -> None:
    """Wait until the disk has the files."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Folder:
    """A folder of Accelerate, of which nothing is loaded before all of it was read and checked.

    Parameters
    ----------
    path : str or Path
        The folder.
    prepared : Prepared
        The objects that are loaded: their numbers are in the names of the files.
    """

    def __init__(self, path: str | Path, prepared: Prepared) -> None:
        self.path = Path(path).expanduser()
        self._prepared = prepared
        self._places = prepared.places()
        if not self.path.is_dir():
            raise CheckpointNotFound(
                f"there is no folder {self.path}; give one that Accelerator.save_state has written"
            )

    def _name(self, stem: str, number: int, suffix: str) -> Path:
        return self.path / (f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}")

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Read the weights of the model, tied ones under each of their names."""
        (number,) = self._places["model"]
        path = self._name("model", number, ".safetensors")
        if not path.exists():
            raise CheckpointNotFound(
                f"{self.path} has no {path.name}; give a folder of Accelerator.save_state, of safetensors, "
                "in which each process had the whole model, without DeepSpeed and FSDP"
            )
        present = module.state_dict()
        weights_by_name = {}
        for name, weight in _read_weights(path).items():
            weights_by_name[name if name in present else name.removeprefix("module.")] = weight
        # safetensors has one of several names of a tensor: the others get what that one has.
        name_at = {
            (weight.data_ptr(), weight.shape): name
            for name, weight in present.items()
            if name in weights_by_name and weight.numel()
        }
        for name, weight in present.items():
            alias = name_at.get((weight.data_ptr(), weight.shape))
            if name not in weights_by_name and alias is not None:
                weights_by_name[name] = weights_by_name[alias]
        return weights_by_name

    def states(self, kind: str, names: Sequence[str]) -> dict[str, Any]:
        """Read the states of the optimizers, or of the schedulers, by their names in the trainer."""
        several = self._places[kind]
        paths = [self._name(kind, number, ".bin") for number in several]
        next_file = self._name(kind, max(several, default=-1) + 1, ".bin")
        missing = [path.name for path in paths if not path.exists()]
        if missing or next_file.exists():
            difference = f"no {missing[0]}" if missing else f"{next_file.name} too"
            raise CheckpointMismatch(
                f"{self.path} has {difference}, and the trainer has {len(several)} {kind}{'s' * (len(several) != 1)}; "
                f"build the trainer as it was, or leave {kind!r} out of parts"
            )
        return dict(zip(names, map(_load, paths), strict=True))

    def check_counts(self, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> None:
        """Refuse schedulers that were stepped once for each process: in zae a step counts once."""
        steps = 0.0
        for optimizer_state in optimizers.values():
            for slots in optimizer_state.get("state", {}).values():
                steps = max(steps, float(slots.get("step", 0.0)))
        for state in schedulers.values():
            count = state.get("last_epoch", 0)
            if steps and count > steps:
                raise CheckpointMismatch(
                    f"a scheduler in {self.path} has counted {count} steps, and the optimizer {steps:g}: Accelerate "
                    "steps a scheduler once for each process. Leave it out, parts=('model', 'optimizer', 'random'), "
                    "and give the trainer a scheduler that begins there"
                )

    def streams(self, rank: int) -> dict[str, Any] | None:
        """Read the random streams of a rank; None if the folder does not have it."""
        path = self.path / f"random_states_{rank}.pkl"
        return _load(path) if path.exists() else None

    def custom_states(self) -> list[tuple[Any, Any]]:
        """Pair each object that was registered for checkpointing with its state."""
        objects = self._prepared.custom_objects()
        paths = sorted(self.path.glob("custom_checkpoint_*.pkl"), key=lambda path: int(path.stem.rpartition("_")[2]))
        if len(paths) != len(objects):
            raise CheckpointMismatch(
                f"{self.path} has the state of {len(paths)} custom objects, and {len(objects)} are registered; call "
                "accelerator.register_for_checkpointing as for the run that has saved it"
            )
        return [(owner, _load(path)) for owner, path in zip(objects, paths)]


def restore_streams(streams: Mapping[str, Any]) -> None:
    """Restore the random streams that a folder has."""
    random.setstate(streams["random_state"])
    np.random.set_state(streams["numpy_random_seed"])
    torch.set_rng_state(streams["torch_manual_seed"])
    if "torch_cuda_manual_seed" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(streams["torch_cuda_manual_seed"])


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}; give another folder") from error


def _load(path: Path) -> Any:
    """Read a file of ``torch.save`` that has only tensors, numbers, text and arrays; anything else is refused."""
    try:
        return load_library().utils.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointDamaged(
            f"{path} is damaged, or contains objects that only pickle could make, which runs code of anyone who has "
            f"written it: {str(error).splitlines()[0]:.200}. It was not read; give another folder"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read ({type(error).__name__}: {error!s:.200}); give another folder"
        ) from error
