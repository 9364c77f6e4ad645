"""Choose which cells of a long table the default run keeps; the others get the marker ``exhaustive``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

__all__ = ["choose", "mark_the_rest"]

_LEFT_OUT = ("exhaustive", "deepspeed", "fits", "vision")
"""Cells that are left out already, or need a library that the others do not need."""


def choose(cells: Sequence[Mapping[str, Any]], seed: str, *, count: int = 0, covering: int = 0) -> list[int]:
    """Return the indices of the chosen cells, each a mapping of parameters to values, in their order.

    The choice is random, but always the same for the same seed and cells. It has ``count`` cells; or as many as it
    takes for each value of each parameter, and each member of a value that is a tuple, to be in ``covering`` of them.
    """
    order = list(range(len(cells)))
    random.Random(seed).shuffle(order)
    if count:
        return sorted(order[:count])
    seen: Counter[Hashable] = Counter()
    chosen = []
    for index in order:
        parts = set(_parts_of(cells[index]))
        if any(seen[part] < covering for part in parts):
            seen.update(parts)
            chosen.append(index)
    return sorted(chosen)


def _parts_of(cell: Mapping[str, Any]) -> Iterable[Hashable]:
    for name, value in cell.items():
        for each in value if isinstance(value, tuple) else (value,):
            yield name, each if isinstance(each, (str, int, float, type(None))) else id(each)


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark the cells that ``@pytest.mark.sample`` leaves out, of functions that are collected with all their cells."""
    functions: dict[str, list[Any]] = {}
    for item in items:
        is_left_out = any(item.get_closest_marker(name) is not None for name in _LEFT_OUT)
        if not is_left_out and item.get_closest_marker("sample") is not None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cells in functions.items():
        options = dict(cells[0].get_closest_marker("sample").kwargs)
        only = options.pop("of", None)
        values = [{key: each for key, each in cell.callspec.params.items() if only in (None, key)} for cell in cells]
        chosen = set(choose(values, name, **options))
        for index, cell in enumerate(cells):
            if index not in chosen:
                cell.add_marker(pytest.mark.exhaustive)
