"""Send values to another process through a file."""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from zae.errors import ConfigError, DistributedError

__all__ = ["main_is_a_file", "pack", "unpack"]

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
_REMEDY = (
    "Define classes and functions at the top level of a file, and make open files, locks and generators in setup(); or "
    "start the script with torchrun, which sends nothing: torchrun --nproc_per_node 2 script.py"
)


def pack(value: Any, path: Path, name: str = "") -> None:
    """Write a value to a file for a process of the same run; tensors are copied, and what is shared stays shared."""
    from_main: list[Any] = []
    module = ModuleType("zae_pickle")
    vars(module).update({**vars(pickle), "Pickler": _recording_pickler(from_main)})
    try:
        with open(path, "wb") as file:  # Given a path, torch raises an error that does not say why.
            torch.save(value, file, pickle_module=module)
    except Exception as error:
        failed = _failure_of_the_disk(error)
        if failed is None:
            raise ConfigError(_refusal(value, name, error)) from error
        raise DistributedError(
            f"{name or 'the trainer'} could not be written to {path.parent}, through which run() and the ranks that it "
            f"starts exchange it: {failed.strerror}. Free space there, or set TMPDIR to a folder on a larger disk; "
            "a script that is begun with torchrun sends nothing"
        ) from failed
    if from_main and not main_is_a_file():
        names = sorted({cls.__qualname__ for cls in from_main})
        raise ConfigError(
            f"{' and '.join(names)} cannot be sent to another process: defined in __main__, which is not a file here "
            "(but a notebook, standard input or python -c). Put it into a file, for instance task.py, and write from "
            f"task import {', '.join(names)}"
        )


def _failure_of_the_disk(error: BaseException | None) -> OSError | None:
    """Return the error of the disk that has led to this one: as it closes the file, torch raises another."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            return error
        error = error.__cause__ or error.__context__
    return None


def unpack(path: Path, map_location: str | dict[str, str] = "cpu") -> Any:
    """Read what `pack` wrote, in a process of the same run; the devices are those of ``torch.load``."""
    module = ModuleType("zae_pickle")
    vars(module).update({**vars(pickle), "Unpickler": _Unpickler})
    # Not a checkpoint: the parent process wrote this file a moment ago, in a folder of this run.
    return torch.load(path, map_location=map_location, weights_only=False, pickle_module=module)


def _recording_pickler(seen: list[Any]) -> type:
    """Return a pickler class that records names of ``__main__``."""

    class Recording(_Pickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.from_main = seen

    return Recording


class _Pickler(pickle.Pickler):
    """Records the classes and functions of ``__main__``, which are pickled by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.from_main: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__" and "_recipe" not in vars(value):
            self.from_main.append(value)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Names a missing class or function; Python's message differs between versions."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except AttributeError as error:
            if module not in sys.modules:  # What its import has raised.
                raise
            raise ConfigError(
                f"{name} does not exist when another process imports its module; define it at the top level, not under "
                'if __name__ == "__main__": or in a function that is only called there'
            ) from error


def main_is_a_file() -> bool:
    """Return whether another process can import the main module."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or os.path.exists(getattr(main, "__file__", None) or "")


def _refusal(value: Any, name: str, error: Exception) -> str:
    """Return the error that names what cannot be sent and its class, and the remedy."""
    named = value if isinstance(value, Mapping) and not name else {name: value}
    for key, each in named.items():
        reason = _pickle_error(each)
        if reason is not None:
            return f"{key}, a {type(each).__name__}, cannot be sent to another process: {reason}. {_REMEDY}"
    return f"{name or 'what is to be sent'} cannot be sent to another process: {error}. {_REMEDY}"


def _pickle_error(value: Any) -> Exception | None:
    """Return why pickle refuses a value."""
    try:
        _Pickler(io.BytesIO(), protocol=4).dump(value)
    except Exception as error:
        return error
    return None
