"""Check the arguments of the constructor and of functions; each error says what to write."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from zae.errors import ConfigError, StepError, did_you_mean, kind_of

__all__ = [
    "check_alone",
    "check_devices",
    "check_file",
    "check_folder",
    "check_launch_precision",
    "check_metrics",
    "check_mode",
    "check_model",
    "check_same",
    "check_url",
    "describe_batch",
    "describe_value",
]

MAX_ENTRIES = 8  # Of a batch that is described.
MIN_COUNTED = 3  # Equal entries after each other that are shown as one.


def check_model(model: Any, seeded: AbstractContextManager[None]) -> nn.Module:
    """Return a module, or what a function returns that is called with seeded random streams."""
    if not isinstance(model, nn.Module) and callable(model):
        with seeded:
            try:
                model = model()
            except TypeError as error:
                if not isinstance(model, type):
                    raise
                name = model.__name__
                raise ConfigError(
                    f"model is the class {name}, and {name}() fails ({error}); give a module: {name}(...), or a "
                    f"function that makes one: lambda: {name}(...)"
                ) from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {kind_of(model)}; give a torch.nn.Module, or a function that returns one")
    return model


def check_same(present: Any, wrapped: Any, module: nn.Module) -> nn.Module:
    """Refuse a `trainer.model` that is neither the model that was given nor its wrapper."""
    if present is not module and present is not wrapped:
        raise ConfigError(
            f"trainer.model was set to a {type(present).__name__}, but a trainer keeps the model that it was created "
            f"with, a {type(module).__name__}; create a new trainer for another model, or override wrap_model(model) "
            "to return what train_step calls"
        )
    return module


def check_devices(devices: list[Any], name: str, slots: Mapping[str, Any]) -> list[Any]:
    """Refuse several devices without a parallel add-on."""
    if len(devices) > 1 and "parallel" not in slots:
        raise ConfigError(
            f"device is a list of {len(devices)}, but {name} trains on one device; to train on several, write "
            ".add_on(MultiGPUAddon)"
        )
    return devices


def check_alone(name: str, slots: Mapping[str, Any]) -> None:
    """Refuse to run in one of several ranks of a launcher without a parallel add-on: each would train all by itself.

    A script that has joined the ranks by itself may divide the work by hand, with its own DistributedDataParallel.
    """
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    is_launched = rank is not None and world.isdecimal() and int(world) > 1
    has_joined = dist.is_available() and dist.is_initialized()
    if is_launched and not has_joined and "parallel" not in slots:
        raise ConfigError(
            f"a launcher has started {world} ranks (RANK={rank}, WORLD_SIZE={world}), and {name} does not join them: "
            "each would train alone, on all of the data. Write .add_on(MultiGPUAddon); for runs that are meant to be "
            "independent, unset RANK and WORLD_SIZE in each process: os.environ.pop('RANK')"
        )


def check_launch_precision(name: str, is_taken: bool) -> None:
    """Refuse a precision that `accelerate launch` was asked for and that nothing here would train in."""
    requested = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if requested != "no" and not is_taken:
        raise ConfigError(
            f"accelerate launch was asked for mixed_precision={requested} (ACCELERATE_MIXED_PRECISION is set), and "
            f"{name} would train in the types of the model: write .add_on(AMPAddon) and precision={requested!r}, or "
            ".add_on(AccelerateAddon), which takes it from there, or --mixed_precision no"
        )


def check_mode(mode: Any) -> str:
    """Refuse a mode other than "train" and "test"."""
    if mode not in ("train", "test"):
        if hasattr(mode, "param_groups"):
            kind = type(mode).__name__
            raise ConfigError(
                f"mode is an optimizer ({kind}); the third argument is the mode, so name it: optimizer=..."
            )
        hint = did_you_mean(str(mode), ("train", "test"))
        raise ConfigError(f"mode={mode!r}; it must be 'train' or 'test'{hint}")
    return str(mode)


def check_partial(files: Any) -> list[str]:
    """Return the files that a checkpoint may lack; refuse a str, which iterates over its characters."""
    if not isinstance(files, (list, tuple, set, frozenset)):
        example = files if isinstance(files, str) else "state.json"
        raise ConfigError(f"allow_partial={files!r}; it must be a list of files: [{example!r}]")
    return list(files)


def check_folder(path: Any, name: str) -> Path:
    """Refuse a path that cannot be a writable folder, without creating it."""
    folder = _path_of(path, name, "folder")
    _check_place(folder.absolute(), f"{name}={str(path)!r}")
    return folder


def check_file(path: Any, name: str, example: str) -> Path:
    """Refuse a path that cannot be a writable file, without creating it."""
    file = _path_of(path, name, "file").absolute()
    if os.path.isdir(file):
        raise ConfigError(f"{name}={str(file)!r} is a folder; give a file in it: {str(file / example)!r}")
    _check_place(file.parent, f"{name}={str(path)!r}")
    if os.path.exists(file) and stat.S_IFMT(os.stat(file).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK):
        raise ConfigError(f"{name}={str(file)!r} is a pipe or a socket, which may block; give a file")
    if os.path.exists(file) and not os.access(file, os.W_OK):
        raise ConfigError(f"{name}={str(file)!r} cannot be written to; give another path or change its rights")
    return file


def check_url(name: str, url: str, **options: Any) -> tuple[Any, str]:
    """Return the file system of fsspec for a URL, and the path in it; refuse a URL that has none."""
    import fsspec  # A dependency of torch.

    try:
        files, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"{name}={url!r} cannot be used: {error}; give one that fsspec knows") from error
    return files, path


def _path_of(path: Any, name: str, kind: str) -> Path:
    """Return the path with its home folder expanded; refuse what cannot be a path."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ConfigError(f"{name}={path!r}; it must be the path of a {kind}")
    expanded = Path(path)
    try:
        expanded = expanded.expanduser()
        os.stat(expanded)
    except RuntimeError:
        raise ConfigError(f"{name}={str(path)!r}: there is no such home folder; write the path in full") from None
    except (OSError, ValueError) as error:  # A missing or unreadable path is not an error here.
        if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{name}={str(path)!r} cannot be a path: {reason}; give another path") from None
    return expanded


def _check_place(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be written to or created."""
    # Not the methods of Path: they raise where they have no permission.
    present = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if not os.path.isdir(present):
        raise ConfigError(f"{option}: {present} is a file, not a folder; give another path")
    if not os.access(present, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: {present} cannot be written to; give another path or change its rights")


def describe_batch(batch: Any, depth: int = 0) -> str:
    """Describe a batch by the shapes and types in it."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return f"{type(batch).__name__}{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping) and depth < 3:
        return f"{{{_listed(f'{key}: {describe_batch(value, depth + 1)}' for key, value in batch.items())}}}"
    if isinstance(batch, (tuple, list)) and depth < 3:
        return f"{type(batch).__name__}({_listed(describe_batch(value, depth + 1) for value in batch)})"
    return type(batch).__name__


def _listed(entries: Iterable[str]) -> str:
    """Join the descriptions of the entries of a batch; equal ones after each other are one, with their number."""
    parts: list[str] = []
    for text, equal in groupby(entries):
        count = len([*equal])
        parts += [text] * count if count < MIN_COUNTED else [f"{count} times {text}"]
    return ", ".join(parts[:MAX_ENTRIES] + ["..."] * (len(parts) > MAX_ENTRIES))


def check_metrics(name: str, metrics: Any) -> dict[str, float]:
    """Return the metrics that a method of the user returned as floats; refuse what cannot be converted."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise StepError(f"{name} returned {type(metrics).__name__} {describe_value(metrics)}; return a dict of numbers")
    numbers = {}
    for key, value in metrics.items():
        try:
            numbers[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise StepError(
                f"{name} returned {key!r} of type {type(value).__name__} {describe_value(value)}; return a number, for "
                f"instance the mean"
            ) from None
    return numbers


def describe_value(value: Any) -> str:
    """Describe a value by its shape or length, or by the beginning of its repr."""
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"of {len(value)} entries" if isinstance(value, (tuple, list)) else repr(value)[:60]
