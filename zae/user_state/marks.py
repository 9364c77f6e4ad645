"""The mark of a value: equal as long as the value has not changed, and another one once it has.

All of a value is looked at. Of arrays and tensors above a megabyte, the sums of blocks of a kilobyte are compared,
which takes a sixth of the time of a hash: what is only exchanged within a block is missed. What lies in a file that is
mapped into memory is not looked at.
"""

from __future__ import annotations

import io
import marshal
from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from zae.common.random_state import STREAMS, read_stream
from zae.common.walk import is_of_library, local_part

__all__ = ["LARGE", "mark_of"]

LARGE = 1 << 20
"""Bytes of an array from which on its blocks are summed, and of a value from which on no copy of it is kept."""

_Entries: TypeAlias = "list[Any] | tuple[Any, ...]"
_BLOCK = 1024
_CHUNK = 4096  # Entries of a container that are written at once.
_SHORT = 64  # Bytes that are kept as they are.
_DEPTH = 4  # Objects of libraries in one another.
_MANY = 64  # Entries of a container in such an object; of a larger one their number counts.


def mark_of(value: Any, paths: Mapping[int, str] = MappingProxyType({}), depth: int = _DEPTH) -> object:
    """Return the mark of a value; of an object whose values have marks of their own, it is the path by its id."""
    if id(value) in paths:
        return type(value), paths[id(value)]
    kind = type(value)
    if kind in (bool, int, str, type(None)):
        return kind, value
    if isinstance(value, Tensor):
        return _mark_of_tensor(value)
    if isinstance(value, np.ndarray):
        return _mark_of_array(value)
    if isinstance(value, STREAMS):
        return kind, mark_of(read_stream(value))
    if isinstance(value, Mapping):
        return kind, _mark_of_entries(list(value.items()), paths, depth)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        entries = value if isinstance(value, (list, tuple)) else list(value)
        return kind, getattr(value, "maxlen", None), _mark_of_entries(entries, paths, depth)
    if isinstance(value, (float, complex, bytes, np.generic)):
        return kind, repr(value)  # Not the number itself: NaN is not equal to NaN.
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return object()  # It is there to be read on, and does not say how far it was read.
    return _mark_of_object(value, paths, depth)


def _mark_of_entries(entries: _Entries, paths: Mapping[int, str], depth: int) -> object:
    """Return the mark of what a container holds, by parts: together they would take the memory of all of it."""
    marks = [_mark_of_chunk(entries[start : start + _CHUNK], paths, depth) for start in range(0, len(entries), _CHUNK)]
    return len(entries), marks[0] if len(marks) == 1 else hash(tuple(marks))


def _mark_of_chunk(entries: _Entries, paths: Mapping[int, str], depth: int) -> object:
    try:
        # What consists of the plain types of Python alone; in version 2 of the format, which has no references.
        data = marshal.dumps(tuple(entries), 2)
        return data if len(data) <= _SHORT else hash(data)
    except ValueError:
        return tuple([mark_of(each, paths, depth) for each in entries])


def _mark_of_array(value: np.ndarray[Any, Any]) -> object:
    form = value.dtype.str, value.shape
    if isinstance(value, np.memmap) or isinstance(value.base, np.memmap):
        return form
    if value.dtype.hasobject:
        return form, mark_of(value.tolist())
    return form, _digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _digest(data: np.ndarray[Any, Any]) -> int:
    if data.nbytes < LARGE:
        return hash(data.tobytes())
    whole = data.nbytes // _BLOCK * _BLOCK
    sums = data[:whole].view(np.uint64).reshape(-1, _BLOCK // 8).sum(axis=1)
    return hash((sums.tobytes(), data[whole:].tobytes()))


def _mark_of_tensor(value: Tensor) -> object:
    form = str(value.dtype), str(value.device), tuple(value.shape)
    tensor = local_part(value.detach())
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return form
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if size > 1 and not stride:
            tensor = tensor.narrow(axis, 0, 1)
    try:
        data = tensor.contiguous().view(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError):  # A class of tensors of its own.
        return form
    if data.is_cpu:
        return form, _digest(data.numpy())
    if data.nbytes < LARGE:
        return form, _digest(data.cpu().numpy())
    whole = data.nbytes // _BLOCK * _BLOCK
    sums = data[:whole].view(torch.int64).view(-1, _BLOCK // 8).sum(1)  # There, and only these come to the host.
    return form, hash((sums.cpu().numpy().tobytes(), data[whole:].cpu().numpy().tobytes()))


def _mark_of_object(value: Any, paths: Mapping[int, str], depth: int) -> object:
    """Return what is seen of an object that is not looked into: numbers in its public attributes, in short."""
    kind = type(value)
    if isinstance(value, (type, nn.Module)) or callable(value) or not depth:
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", kind.__qualname__)
    marks = []
    for name, each in getattr(value, "__dict__", {}).items():
        if name.startswith("_") and is_of_library(kind):
            continue
        is_large = hasattr(each, "__len__") and not isinstance(each, str) and _size_of(each) > _MANY
        marks.append((name, _size_of(each) if is_large else mark_of(each, paths, depth - 1)))
    return kind.__module__, kind.__qualname__, tuple(marks)


def _size_of(value: Any) -> int:
    try:
        return len(value)
    except TypeError:  # A tensor without dimensions, or a loader of unknown length.
        return 0
