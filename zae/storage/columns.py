"""Long lists of records as columns: a run that logs each step has the same few names, and a number under each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["LEAST", "PLAIN", "Table", "join", "split"]

LEAST = 256
"""A shorter list stays as it is, which is easier to read."""

PLAIN = frozenset({type(None), bool, int, float, str})
"""The types of what a record may hold: nothing in it changes, or names anything else."""

_MOST = 64  # kinds of records; with more of them nothing is gained


class Table(NamedTuple):
    """Records by kind, which is the names that they have, in their order.

    Attributes
    ----------
    kinds : list of dict
        For each kind its columns by name: an array of float64 or int64, or a list of values of several types.
    order : list of int or None
        The kind of each record; None where there is one kind only.
    """

    kinds: list[dict[str, Any]]
    order: list[int] | None


def split(rows: Sequence[Any]) -> Table | None:
    """Split a list of records into columns.

    Parameters
    ----------
    rows : sequence
        Dicts with names as keys.

    Returns
    -------
    Table or None
        None where they are too few, or hold anything but numbers, text and None.

    Examples
    --------
    >>> rows = [{"step": step, "loss": 0.5} for step in range(300)]
    >>> table = split(rows)
    >>> list(table.kinds[0]), table.order, join(table) == rows
    (['step', 'loss'], None, True)
    >>> split(rows[:10]) is None
    True
    """
    if len(rows) < LEAST or set(map(type, rows)) != {dict}:
        return None
    numbers: dict[tuple[Any, ...], int] = {}
    order = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
    if len(numbers) > _MOST or not all(names and set(map(type, names)) == {str} for names in numbers):
        return None
    kinds = []
    for names, number in numbers.items():
        own = rows if len(numbers) == 1 else [row for row, kind in zip(rows, order, strict=True) if kind == number]
        columns = {name: _column([row[name] for row in own]) for name in names}
        if any(column is None for column in columns.values()):
            return None
        kinds.append(columns)
    return Table(kinds, None if len(numbers) == 1 else order)


def join(table: Table) -> list[dict[str, Any]]:
    """Put the records together again.

    Parameters
    ----------
    table : Table
        Of a file that may be hostile: its columns are lists or arrays.

    Returns
    -------
    list of dict
        The records.

    Raises
    ------
    ValueError
        The columns are not as long as each other, or not as the order says.

    Examples
    --------
    >>> join(Table([{"a": [1, 2]}, {"b": [0.5]}], [0, 1, 0]))
    [{'a': 1}, {'b': 0.5}, {'a': 2}]
    """
    made = []
    for columns in table.kinds:
        values = [each.tolist() if isinstance(each, np.ndarray) else each for each in columns.values()]
        made.append([dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)])
    if table.order is None:
        (rows,) = made
        return rows
    if Counter(table.order) != Counter({number: len(rows) for number, rows in enumerate(made)}):
        raise ValueError(f"{len(table.order)} records are not those of {len(made)} kinds")
    following = [iter(rows) for rows in made]
    return [next(following[number]) for number in table.order]


def _column(values: list[Any]) -> Any:
    """The values under one name: in an array where they are of one type, None where they are no plain values."""
    types = set(map(type, values))
    if types == {float}:
        return np.array(values, np.float64)
    if types == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return np.array(values, np.int64)
    return values if types <= PLAIN else None
