"""Draw curves as text, in braille characters or in ASCII."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from zae.display.text import number
from zae.errors import printable

__all__ = ["Series", "draw"]

_MARKS = "*o+x#@%&"
_COLOURS = ("34", "33", "32", "35", "36", "31")  # Of a terminal: each can be read on black and on white.
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # The dot of each column and row of a character.


@dataclass
class Series:
    """The values of one metric; steps increase, times are seconds since 1970 or NaN."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, step: int, value: float, time: float) -> None:
        """Append a point; points of this step and of later ones are from before a resume, and are removed."""
        while self.steps and self.steps[-1] >= step:
            del self.steps[-1], self.values[-1], self.times[-1]
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)


def draw(
    curves: dict[str, Series],
    width: int = 80,
    height: int = 16,
    *,
    is_ascii: bool = False,
    is_log: bool = False,
    is_coloured: bool = False,
    ends: tuple[str, str] | None = None,
) -> str:
    """Return a plot of curves, at most ``width`` columns wide; points that are not finite are left out.

    With braille characters each curve has two by four dots in a character, and only colours tell curves apart; where
    two cross, the later one gives the colour. In ASCII each curve has its own mark. ``ends`` are the labels below, by
    default the steps.
    """
    points = {name: _scale(each, is_log) for name, each in curves.items()}
    steps: list[int] = []
    values: list[float] = []
    for each in points.values():
        steps += [step for step, _ in each]
        values += [value for _, value in each]
    if not values:
        return "there are no points to draw\n"
    low, high = min(values), max(values)
    labels = [number(10**at if is_log else at) for at in (high, (low + high) / 2, low)]
    margin = max(map(len, labels))
    columns = max(8, width - margin - 2)
    rows = max(3, height)
    # Dots in a character, across and down.
    across, down = (1, 1) if is_ascii else (2, 4)
    grid = [[" " if is_ascii else chr(0x2800)] * columns for _ in range(rows)]
    colours = [[""] * columns for _ in range(rows)]
    first, last = min(steps), max(steps)
    for at, each in enumerate(points.values()):
        for x, y in _dots(each, (first, last, columns * across), (high, low, rows * down)):
            row = y // down
            column = x // across
            dot = 0 if is_ascii else _BRAILLE[x % 2][y % 4]
            grid[row][column] = _MARKS[at % 8] if is_ascii else chr(ord(grid[row][column]) | dot)
            colours[row][column] = _COLOURS[at % len(_COLOURS)] if is_coloured else ""
    beside = {0: labels[0], rows // 2: labels[1], rows - 1: labels[2]}
    lines = [f"{beside.get(at, ''):>{margin}} {'│|'[is_ascii]}{''.join(row)}" for at, row in enumerate(grid)]
    ends = ends or (f"{first:,}", f"step {last:,}")
    lines.append(f"{'':{margin + 2}}{ends[0]}{ends[1]:>{max(1, columns - len(ends[0]))}}")
    for at, (name, series) in enumerate(curves.items()):
        mark = f"{_MARKS[at % 8]} " if is_ascii else "━━ " if is_coloured else ""
        lines.append(f"{mark}{printable(name, kept='')}: {number(series.values[0])} -> {number(series.values[-1])}")
    lines = [line.replace(chr(0x2800), " ").rstrip()[:width] for line in lines]
    if is_coloured:
        legend = [[_COLOURS[at % len(_COLOURS)]] * 2 for at in range(len(curves))]
        begins = [*[margin + 2] * (rows + 1), *[0] * len(curves)]
        lines = [_colour(*each) for each in zip(lines, begins, [*colours, [], *legend])]
    return "\n".join(lines) + "\n"


def _colour(line: str, begin: int, colours: list[str]) -> str:
    """Return a line whose characters from ``begin`` on have colours."""
    pieces = itertools.groupby(zip(line[begin:], colours), key=lambda pair: pair[1])
    texts = [(colour, "".join(each for each, _ in pairs)) for colour, pairs in pieces]
    drawn = "".join(f"\x1b[{colour}m{text}\x1b[0m" if colour else text for colour, text in texts)
    return line[:begin] + drawn + line[begin + len(colours) :]


def _scale(series: Series, is_log: bool) -> list[tuple[int, float]]:
    """Return the points that can be drawn."""
    finite = [(step, value) for step, value in zip(series.steps, series.values) if math.isfinite(value)]
    return [(step, math.log10(value)) for step, value in finite if value > 0] if is_log else finite


def _dots(
    points: list[tuple[int, float]], across: tuple[float, float, int], down: tuple[float, float, int]
) -> list[tuple[int, int]]:
    """Return the dots of the lines between neighbouring points."""

    def place(value: float, begin: float, end: float, count: int) -> int:
        return count // 2 if begin == end else min(count - 1, int((value - begin) / (end - begin) * (count - 1) + 0.5))

    at = [(place(x, *across), place(y, *down)) for x, y in points]
    found = at[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(at):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        found += [(x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count)) for i in range(1, count + 1)]
    return found
