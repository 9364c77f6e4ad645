"""`python -m zae plot RUN [RUN ...] METRIC [METRIC ...]`: draw curves in the terminal."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zae.cli import Answer
from zae.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from zae.display.text_plot import Series

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "names",
        metavar="RUN or METRIC",
        nargs="+",
        help="folders or logs of runs, then metrics: run/ train/loss valid/loss (default: every loss)",
    )
    parser.add_argument(
        "--ascii", action="store_true", help="draw each curve with its own mark, as is done without colours too"
    )
    parser.add_argument("--log", action="store_true", help="draw the values on a logarithmic scale")
    parser.add_argument("--width", type=int, help="columns (default: those of the terminal)")
    parser.add_argument("--height", type=int, default=16, help="lines of the plot (default: 16)")


def run(arguments: argparse.Namespace) -> Answer:
    """Draw all metrics of all runs into one plot; ConfigError where a run or a metric is unknown."""
    from zae.common.walk import json_safe
    from zae.display.text_plot import draw
    from zae.report.loading import load_run, names_of

    for name, least in (("width", 20), ("height", 3)):
        if (given := getattr(arguments, name)) is not None and given < least:
            raise ConfigError(f"--{name} {given} is too small for a plot; give at least {least}")
    paths = [path for path in map(Path, arguments.names) if path.expanduser().exists()]
    metrics = [name for name in arguments.names if not Path(name).expanduser().exists()]
    if not paths:
        raise ConfigError(f"{arguments.names[0]} does not exist; give the folder or the log of a run, then metrics")
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
    points = {name: [*zip(each.steps, each.values)] for name, each in curves.items()}
    width = arguments.width or shutil.get_terminal_size().columns
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    is_ascii = arguments.ascii or not _can_draw() or (len(curves) > 1 and not is_coloured)  # Marks tell them apart.
    style = {"is_ascii": is_ascii, "is_log": arguments.log, "is_coloured": is_coloured and len(curves) > 1}
    return Answer(json_safe(points), draw(curves, width, arguments.height, **style))


def _can_draw() -> bool:
    """Return whether standard output takes braille characters."""
    try:
        "⠿│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True
