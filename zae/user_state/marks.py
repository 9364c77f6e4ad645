"""The mark of a value: equal as long as the value has not changed, and another one once it has.

All of a value is looked at, but for what lies in a file that is mapped into memory, and for large tables of pandas.
"""

from __future__ import annotations

import io
import marshal
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zae.random_state import STREAMS, read_stream
from zae.values.plain_values import content_digest
from zae.values.strides import without_repeats
from zae.values.walk import is_of_library, local_part

__all__ = ["LARGE", "mark_of"]

LARGE = 1 << 20
"""Bytes of a value from which on no copy of it is kept."""

_DEPTH = 4  # Objects of libraries in one another.
_FEW = 64  # Entries of a container in such an object; of a larger one their number counts.
_CHUNK = 4096  # Entries of a container that are written at once; values of a table that are read.


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
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        return kind, getattr(value, "maxlen", None), _mark_of_entries(value, paths, depth)
    if isinstance(value, (float, complex, bytes, np.generic)):
        return kind, repr(value)  # Not the number itself: NaN is not equal to NaN.
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return object()  # It is there to be read on, and does not say how far it was read.
    return _mark_of_object(value, paths, depth)


def _mark_of_entries(container: Any, paths: Mapping[int, str], depth: int) -> object:
    """Return the mark of what a container holds, by parts: together they would take the memory of all of it."""
    if isinstance(container, Mapping):
        container = [*container.items()]
    elif not isinstance(container, (list, tuple)):
        container = [*container]
    marks: list[object] = []
    for start in range(0, len(container), _CHUNK):
        entries = tuple(container[start : start + _CHUNK])
        try:
            # What consists of the plain types of Python alone; in version 2 of the format, which has no references.
            data = marshal.dumps(entries, 2)
            marks.append(data if len(container) <= _FEW else hash(data))
        except ValueError:
            mark = tuple([mark_of(entry, paths, depth) for entry in entries])
            marks.append(mark if len(container) <= _CHUNK else hash(mark))
    return len(container), marks


def _mark_of_array(value: np.ndarray[Any, Any]) -> object:
    form = value.dtype.str, value.shape
    if value.dtype.hasobject:
        return form, mark_of(value.tolist())
    is_small = value.nbytes < LARGE and not isinstance(value, np.memmap)
    return form, hash(value.tobytes()) if is_small else content_digest(value)


def _mark_of_tensor(value: Tensor) -> object:
    form = value.dtype, value.device
    if value.is_nested:
        return form, [_mark_of_tensor(part) for part in value.unbind()]
    try:
        tensor = local_part(value)
        if tensor.layout is torch.strided and not tensor.is_contiguous():
            tensor = without_repeats(tensor)
        if tensor.layout is torch.strided and tensor.is_cpu and tensor.nbytes < LARGE:
            data = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return form, value.shape, hash(data.unsqueeze(-1).view(torch.uint8).numpy().tobytes())
        return form, value.shape, content_digest(tensor.detach())
    # Nested, lazy (a ValueError), or of a class of its own: no checkpoint holds it.
    except (RuntimeError, NotImplementedError, ValueError):
        return form


def _mark_of_object(value: Any, paths: Mapping[int, str], depth: int) -> object:
    """Return what is seen of an object that is not looked into: numbers in its public attributes, in short."""
    kind = type(value)
    is_function = callable(value) and not isinstance(value, partial)
    if isinstance(value, (type, nn.Module)) or is_function or not depth:
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", kind.__qualname__)
    if hasattr(value, "iloc"):  # A table of pandas.
        return kind, value.shape, content_digest(value) if value.size <= _CHUNK else None
    attributes = getattr(value, "__dict__", {})
    if not attributes:
        return kind, _mark_of_copy(value, paths, depth)
    marks = []
    for name, attribute in attributes.items():
        if name.startswith("_") and is_of_library(kind):
            continue
        is_large = hasattr(attribute, "__len__") and not isinstance(attribute, str) and _size_of(attribute) > _FEW
        marks.append((name, _size_of(attribute) if is_large else mark_of(attribute, paths, depth - 1)))
    return kind.__module__, kind.__qualname__, tuple(marks)


def _mark_of_copy(value: Any, paths: Mapping[int, str], depth: int) -> object:
    """Return the mark of what a copy is made of: an object without attributes holds its values in C."""
    if isinstance(value, memoryview):
        return hash(value.tobytes())
    try:
        parts = value.__reduce_ex__(2)
    except Exception:  # A file, a lock: there is no copy of it.
        return None
    return mark_of(parts if isinstance(parts, str) else parts[:3], paths, depth - 1)


def _size_of(value: Any) -> int:
    try:
        return len(value)
    except TypeError:  # A tensor without dimensions, or a loader of unknown length.
        return 0
