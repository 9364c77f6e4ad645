"""Values as numbers and text that are equal in two processes: no addresses, no seeds of hashes, no order of sets."""

from __future__ import annotations

import enum
import hashlib
import json
import marshal
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import chain, islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zae.random_state import STREAMS
from zae.values.hashes import fingerprint
from zae.values.walk import is_sharded

__all__ = ["code_digest", "content_digest", "plain_value"]

MAX_DEPTH = 5
MAX_ENTRIES = 64
"""Entries of a container that are written out; a longer one is described by its length and the hash of its content."""

MAX_TEXT = 200
MAX_OBJECTS = 1000
CHUNK = 1 << 16
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def plain_value(value: Any) -> Any:
    """Return a value as a number, as text, or as lists and dicts of them; an object by its class and its attributes.

    Where a value is large it is described by its hash.
    """
    return _plain(value, MAX_DEPTH, set())


def _plain(value: Any, depth: int, visited: set[int]) -> Any:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, (Tensor, np.ndarray)):
        is_number = (value.numel() if isinstance(value, Tensor) else value.size) == 1
        return value.item() if is_number and not is_sharded(value) else content_digest(value)
    if isinstance(value, (type, FunctionType, MethodType, partial)):
        return _describe_callable(value, depth, visited)
    if isinstance(value, (range, complex, bytes, torch.dtype, torch.device, torch.Size)):
        text = repr(value)
        return text if len(text) <= MAX_TEXT else f"{len(text)} characters {_digest_of_bytes([text.encode()])}"
    if depth == 0:
        return f"a {type(value).__qualname__}"
    if isinstance(value, Counter):
        return [_plain(item, depth - 1, visited) for item in _sorted(value.elements())]
    if isinstance(value, Mapping):
        if len(value) > MAX_ENTRIES:
            return content_digest(value)
        return {str(key): _plain(entry, depth - 1, visited) for key, entry in value.items()}
    if isinstance(value, AbstractSet):
        return _sorted(_plain(item, depth - 1, visited) for item in value)
    if isinstance(value, (list, tuple, deque)):
        if len(value) > MAX_ENTRIES:
            return content_digest(value)
        return [_plain(item, depth - 1, visited) for item in value]
    return _describe_object(value, depth - 1, visited)


def _sorted(values: Iterable[Any]) -> list[Any]:
    """Return values in their order, or where they have none in that of their texts."""
    entries = list(values)
    try:
        return sorted(entries)
    except TypeError:
        return sorted(entries, key=repr)


def _describe_object(value: Any, depth: int, visited: set[int]) -> Any:
    """Return the class of an object with its attributes; of the model, of an object that was described, its class."""
    kind = type(value).__qualname__
    attributes = getattr(value, "__dict__", {})
    is_closed = isinstance(value, (torch.nn.Module, ModuleType, *STREAMS)) or len(attributes) > MAX_ENTRIES
    if is_closed or id(value) in visited or len(visited) > MAX_OBJECTS:
        return kind
    visited.add(id(value))
    described = {
        key: _plain(attribute, depth, visited)
        for key, attribute in attributes.items()
        if not isinstance(attribute, STREAMS)
    }
    return {"class": kind, **described} if described else kind


def _describe_callable(value: Any, depth: int, visited: set[int]) -> Any:
    """Return the name of a class, or of a function with the hash of its code and the numbers that it holds."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        cell_values = [*value.args, *value.keywords.items()] if depth else []
        return [
            _plain(value.func, depth, visited),
            *(_plain(held_value, depth - 1, visited) for held_value in cell_values),
        ]
    function = getattr(value, "__func__", value)
    if not isinstance(function, FunctionType):
        return getattr(function, "__qualname__", type(function).__qualname__)
    text = f"{function.__qualname__} ({code_digest(function.__code__)})"
    cell_values = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    numbers = [
        held_value
        for held_value in (*cell_values, *(function.__defaults__ or ()))
        if isinstance(held_value, (*_SCALARS, tuple))
    ]
    return [text, *(_plain(number, depth - 1, visited) for number in numbers)] if numbers and depth else text


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def code_digest(code: CodeType) -> str:
    """Return a hash of what a function does, and not of where its source stands."""
    return _digest_of_bytes([repr(_instructions(code)).encode()])


def _instructions(code: CodeType) -> list[Any]:
    constants = [
        _instructions(constant) if isinstance(constant, CodeType) else _ordered(constant) for constant in code.co_consts
    ]
    return [code.co_code, code.co_names, code.co_varnames, constants]


def _ordered(constant: Any) -> Any:
    return _sorted(constant) if isinstance(constant, frozenset) else constant


def content_digest(value: Any) -> str:
    """Return a hash of all that a long value holds; of an object of an unknown class, only the class."""
    # A mapped file may be larger than the memory, and would be read from the disk.
    if isinstance(value, np.memmap) or isinstance(getattr(value, "base", None), np.memmap):
        return f"a mapped file of {value.dtype} {value.shape}"
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUSV":
        return f"{value.dtype.kind} {value.shape} {content_digest(value.ravel().tolist())}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {_of_array(value)}"
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {_of_tensors([value])}"
    if isinstance(value, range):
        return repr(value)
    if hasattr(value, "iloc"):
        return f"{len(value)} rows {_of_table(value)}"
    size = len(value)
    entries: Iterable[Any] = value.items() if isinstance(value, Mapping) else value
    if isinstance(value, AbstractSet):
        entries = _sorted(value)
    return f"{size} entries {_digest_of_bytes(_encode(entries))}"


def _of_tensors(tensors: Sequence[Tensor]) -> str:
    """Hash tensors; those without bytes of their own are not read."""
    readable = [tensor for tensor in tensors if not tensor.is_meta and not is_sharded(tensor)]
    return fingerprint(readable)


def _of_array(array: np.ndarray) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A tensor of an array that is not writable: it is only read.
        return fingerprint([torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))])


def _of_table(table: Any) -> str:
    """Hash a table of pandas."""
    from importlib import import_module

    hash_rows = import_module("pandas").util.hash_pandas_object
    return content_digest(np.asarray(hash_rows(table)))


def _encode(entries: Iterable[Any]) -> Iterator[bytes]:
    """Yield the bytes of many entries, by the fastest way that writes the same in each process."""
    iterator = iter(entries)
    while chunk := list(islice(iterator, CHUNK)):
        kinds = set(map(type, chunk))
        if kinds <= {tuple, list}:
            kinds = set(map(type, chain.from_iterable(chunk)))
        if kinds <= set(_SCALARS):
            yield marshal.dumps(chunk, 2)  # The later versions depend on who else refers to an object.
        elif all(issubclass(kind, Tensor) for kind in kinds) and isinstance(chunk[0], Tensor):
            yield _of_tensors(chunk).encode()
        else:
            yield _json(chunk)


def _json(chunk: list[Any]) -> bytes:
    try:
        return json.dumps(chunk, sort_keys=True).encode()
    except (TypeError, ValueError):
        return repr([plain_value(item) for item in chunk]).encode()


def _digest_of_bytes(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
