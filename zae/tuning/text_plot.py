"""Draw curves as text, in braille characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from zae.display.text import number

__all__ = ["draw"]

_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # Of each column and row of a character.


def draw(curves: Sequence[Sequence[float]], ends: tuple[str, str], width: int = 78, height: int = 12) -> list[str]:
    """Return the lines of a plot of curves over the same steps; ``ends`` are the labels of the first and last step."""
    values = [value for curve in curves for value in curve]
    low, high = min(values), max(values)
    labels = {0: number(high), height // 2: number((low + high) / 2), height - 1: number(low)}
    margin = max(map(len, labels.values()))
    columns = width - margin - 2
    grid = [[_BLANK] * columns for _ in range(height)]
    for curve in curves:
        for x, y in _points(curve, low, high, columns * 2, height * 4):
            grid[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    rows = ["".join(map(chr, row)).replace(chr(_BLANK), " ") for row in grid]
    lines = [f"{labels.get(at, ''):>{margin}} │{row}".rstrip() for at, row in enumerate(rows)]
    return [*lines, f"{'':{margin + 2}}{ends[0]}{ends[1]:>{max(1, columns - len(ends[0]))}}"]


def _points(curve: Sequence[float], low: float, high: float, across: int, down: int) -> list[tuple[int, int]]:
    """Return the dots of the lines between neighbouring values, each as its column and its row."""
    places = [
        (_place(step, 0, len(curve) - 1, across), _place(value, high, low, down)) for step, value in enumerate(curve)
    ]
    dots = places[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        dots += [(x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count)) for i in range(1, count + 1)]
    return dots


def _place(value: float, begin: float, end: float, count: int) -> int:
    """Return the dot, of so many between two values, that is nearest to a value."""
    if begin == end:
        return count // 2
    return min(count - 1, int((value - begin) / (end - begin) * (count - 1) + 0.5))
