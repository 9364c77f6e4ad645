"""`python -m zae plot RUN [RUN ...] METRIC [METRIC ...]`: draw curves in the terminal."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zae.errors import ConfigError, did_you_mean, printable

if TYPE_CHECKING:
    from zae.report.records import Series

__all__ = ["add_arguments", "draw", "run"]

_MARKS = "*o+x#@%&"
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # The dot of each column and row of a character.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("names", metavar="RUN or METRIC", nargs="+", help="folders or logs of runs, then metrics: "
                        "run/ train/loss valid/loss (default: every loss)")  # fmt: skip
    parser.add_argument("--ascii", action="store_true", help="draw without characters outside of ASCII")
    parser.add_argument("--log", action="store_true", help="draw the values on a logarithmic scale")
    parser.add_argument("--width", type=int, help="columns (default: those of the terminal)")
    parser.add_argument("--height", type=int, default=16, help="lines of the plot (default: 16)")


def run(arguments: argparse.Namespace) -> int:
    """Draw all metrics of all runs into one plot; ConfigError where a run or a metric is unknown."""
    from zae.cli.report import load_run, names_of
    from zae.common.walk import json_safe

    paths = [path for path in map(Path, arguments.names) if path.expanduser().exists()]
    metrics = [name for name in arguments.names if not Path(name).expanduser().exists()]
    if not paths:
        raise ConfigError(f"{arguments.names[0]} does not exist; give the folder of a run, or its log, first")
    runs = [load_run(path.expanduser(), name) for path, name in zip(paths, names_of(paths))]
    curves: dict[str, Series] = {}
    for each in runs:
        series = each.records.series
        for metric in metrics or [name for name in series if name.endswith("loss")]:
            if metric not in series:
                hint = did_you_mean(metric, series)
                known = f"{hint} A" if hint else "; a"
                raise ConfigError(f"{each.name} has no metric {metric!r}{known}vailable: {', '.join(series) or 'none'}")
            curves[f"{each.name} {metric}" if len(runs) > 1 else metric] = series[metric]
    if arguments.json:
        points = {name: [*zip(each.steps, each.values)] for name, each in curves.items()}
        sys.stdout.write(json.dumps(json_safe(points)) + "\n")
        return 0
    width = arguments.width or shutil.get_terminal_size().columns
    is_ascii = arguments.ascii or not _can_draw()
    sys.stdout.write(draw(curves, width, arguments.height, is_ascii=is_ascii, is_log=arguments.log))
    return 0


def draw(
    curves: dict[str, Series],
    width: int = 80,
    height: int = 16,
    *,
    is_ascii: bool = False,
    is_log: bool = False,
    ends: tuple[str, str] | None = None,
) -> str:
    """Return a plot of curves, at most ``width`` columns wide; points that are not finite are left out.

    With braille characters each curve has two by four dots in a character, and all look alike: the legend tells the
    values at their ends. In ASCII each curve has its own mark. ``ends`` are the labels below, by default the steps.
    """
    points = {name: _scaled(each, is_log) for name, each in curves.items()}
    steps, values = ([pair[at] for each in points.values() for pair in each] for at in (0, 1))
    if not values:
        return "there are no points to draw\n"
    low, high = min(values), max(values)
    labels = [f"{10**at if is_log else at:.4g}" for at in (high, (low + high) / 2, low)]
    margin = max(map(len, labels))
    columns, rows = max(8, width - margin - 2), max(3, height)
    fine = (1, 1) if is_ascii else (2, 4)
    grid = [[" " if is_ascii else chr(0x2800)] * columns for _ in range(rows)]
    first, last = min(steps), max(steps)
    for number, each in enumerate(points.values()):
        for x, y in _dots(each, (first, last, columns * fine[0]), (high, low, rows * fine[1])):
            row, column = y // fine[1], x // fine[0]
            dot = 0 if is_ascii else _BRAILLE[x % 2][y % 4]
            grid[row][column] = _MARKS[number % 8] if is_ascii else chr(ord(grid[row][column]) | dot)
    beside = {0: labels[0], rows // 2: labels[1], rows - 1: labels[2]}
    bar = "|" if is_ascii else "│"
    lines = [f"{beside.get(at, ''):>{margin}} {bar}{''.join(row)}" for at, row in enumerate(grid)]
    ends = ends or (f"{first:,}", f"step {last:,}")
    lines.append(f"{'':{margin + 2}}{ends[0]}{ends[1]:>{max(1, columns - len(ends[0]))}}")
    for number, (name, series) in enumerate(curves.items()):
        mark = f"{_MARKS[number % 8]} " if is_ascii else ""
        lines.append(f"{mark}{printable(name, kept='')}: {series.values[0]:.4g} -> {series.values[-1]:.4g}")
    return "\n".join(line.replace(chr(0x2800), " ").rstrip()[:width] for line in lines) + "\n"


def _scaled(series: Series, is_log: bool) -> list[tuple[int, float]]:
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


def _can_draw() -> bool:
    """Return whether standard output takes braille characters."""
    try:
        "⠿│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True
