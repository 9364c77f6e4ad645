"""Send values to another process through a file."""

from __future__ import annotations

import errno
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

    class Pickler(pickle.Pickler):
        """Records the classes and functions of ``__main__``, which are pickled by name."""

        def reducer_override(self, value: Any) -> Any:
            is_of_main = isinstance(value, (type, FunctionType)) and value.__module__ == "__main__"
            if is_of_main and "_recipe" not in vars(value):
                from_main.append(value)
            return NotImplemented

    module = ModuleType("zae_pickle")
    vars(module).update({**vars(pickle), "Pickler": Pickler})
    try:
        with open(path, "wb") as file:  # Given a path, torch raises an error that does not say why.
            torch.save(value, file, pickle_module=module)
    except Exception as error:
        failed = _failure_of_the_disk(error)
        if failed is None:
            raise ConfigError(_refusal({name: value} if name else value, error)) from error
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


def _refusal(values: Mapping[str, Any], error: Exception) -> str:
    """Return the error that names what cannot be sent and its class, and the remedy."""
    for name, value in values.items():
        try:
            pickle.dumps(value)
        except Exception as reason:
            return f"{name}, a {type(value).__name__}, cannot be sent to another process: {reason}. {_REMEDY}"
    return f"{', '.join(values)} cannot be sent to another process: {error}. {_REMEDY}"
