"""Walk through the objects that a value contains: batches, states, and the objects of a user."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["children_of", "fields_of", "is_dataclass", "search", "tensors_in"]

_MISSING = object()


def is_dataclass(value: object) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance that have a value, in order."""
    found = {field.name: getattr(value, field.name, _MISSING) for field in dataclasses.fields(value)}
    return {name: item for name, item in found.items() if item is not _MISSING}


def children_of(value: Any) -> Iterable[Any]:
    """Return what a tuple, a list, a mapping or a dataclass contains, in order; nothing for any other object."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    return fields_of(value).values() if is_dataclass(value) else ()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, at any depth; one that is contained twice is yielded twice."""
    if isinstance(value, Tensor):
        yield value
        return
    for each in children_of(value):
        yield from tensors_in(each)


def search(
    value: Any,
    place: str,
    kinds: tuple[type, ...],
    *,
    closed: tuple[type, ...] = (),
    seen: set[int] | None = None,
    apart: Collection[int] = (),
    limit: int = 1000,
    many: int = 64,
) -> Iterator[tuple[str, Any]]:
    """Yield the objects of some kinds in an object, in its attributes and containers, the nearest first."""
    seen = set() if seen is None else seen
    left = deque([(place, value)])
    for _ in range(limit):
        if not left:
            return
        where, each = left.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kinds):
            yield where, each
            continue
        inner: Any = each if isinstance(each, (list, tuple, dict)) else getattr(each, "__dict__", {})
        if len(inner) > many:
            continue
        inner = inner if isinstance(inner, dict) else dict(enumerate(inner))
        for key, part in sorted(inner.items(), key=lambda item: str(item[0])):
            is_open = isinstance(part, (*kinds, list, tuple, dict)) or hasattr(part, "__dict__")
            if is_open and not isinstance(part, closed) and id(part) not in seen and id(part) not in apart:
                left.append((f"{where}.{key}", part))
