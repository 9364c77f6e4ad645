"""Send values to another process through a file; name the attribute that cannot be pickled."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from zae.errors import ConfigError, DistributedError

__all__ = ["find_unpicklable", "main_is_a_file", "pack", "unpack"]

_DEPTH = 12
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
_ELSE = ", or begin the whole script with torchrun: nothing is sent then"  # It need not be the user's own to mend.


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
        names = sorted({each.__qualname__ for each in from_main})
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
    """Return the error that names the attribute, and the remedy."""
    named = {name: value} if name or not isinstance(value, Mapping) else value
    for key, each in named.items():
        found = find_unpicklable(each, key)
        if found is not None:
            path, thing, why = found
            return f"{path} cannot be sent to another process: {_describe(thing, why)}{_ELSE}"
    return f"{name or 'what is to be sent'} cannot be sent to another process: {error}"


def find_unpicklable(value: Any, path: str) -> tuple[str, Any, Exception] | None:
    """Find the innermost value that pickle refuses."""
    return _find(value, path, set(), _DEPTH)


def _find(value: Any, path: str, seen: set[int], depth: int) -> tuple[str, Any, Exception] | None:
    error = _error_of(value)
    if error is None or id(value) in seen:
        return None
    seen.add(id(value))
    if depth:
        for name, child in _parts(value):
            found = _find(child, path + name, seen, depth - 1)
            if found is not None:
                return found
    return path, value, error


def _error_of(value: Any) -> Exception | None:
    try:
        _Pickler(io.BytesIO(), protocol=4).dump(value)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """List the parts of a value, with their expressions."""
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return
    if isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))
    else:
        if isinstance(value, nn.Module):
            yield from ((f".{name}", child) for name, child in value.named_children())
        # Whatever its __reduce_ex__ does, a failure there is the value's own.
        with contextlib.suppress(Exception):
            made = value.__reduce_ex__(4)
            if isinstance(made, tuple):
                yield from _parts_of_reduced(made)


def _parts_of_reduced(made: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """List the parts of what ``__reduce_ex__`` returned: the state first, because it has names."""
    _, arguments, *rest = made
    state = rest[0] if rest else None
    for each in state if isinstance(state, tuple) else (state,):
        if isinstance(each, Mapping):
            yield from ((f".{key}", part) for key, part in each.items())
    for argument in arguments:
        if isinstance(argument, type):
            yield " (its class)", argument
        elif argument is not None:
            yield "", argument


def _describe(thing: Any, error: Exception) -> str:
    """Describe a value that cannot be pickled, and the remedy."""
    if isinstance(thing, (type, FunctionType)):
        kind, keyword = ("class", "class") if isinstance(thing, type) else ("function", "def")
        return (
            f"it is the {kind} {thing.__qualname__}, and that is found by its name only; define it with {keyword} at "
            "the top level of a module"
        )
    if isinstance(thing, io.IOBase):
        return f"it is an open file ({getattr(thing, 'name', '?')}); open it in setup(), or where it is used"
    if isinstance(thing, GeneratorType):
        return "it is a generator, which runs in this process only; give a DataLoader, or a list of batches"
    return (
        f"it is a {type(thing).__name__} ({error}); make it in setup(), or give its class a __getstate__ that leaves "
        "it out"
    )
