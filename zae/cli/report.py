"""`python -m zae report RUN [RUN ...] -o FILE`: write a page with the curves and all else that is known of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from zae.cli import Answer
from zae.display.text import format_size
from zae.errors import ConfigError, printable

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="the folder of a run, or a log of JSONLLoggerAddon",
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, default=Path("report.html"), help="the page (default: report.html)"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Write the page of all runs together; ConfigError or CheckpointError where one cannot be read."""
    from zae.report.loading import load_run, names_of
    from zae.report.page import write

    out: Path = arguments.out.expanduser()
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"-o {out} would not be opened as a page; end it with .html")
    paths = list(dict.fromkeys(path.expanduser() for path in arguments.runs))
    runs = [load_run(path, name, paths) for path, name in zip(paths, names_of(paths))]
    size = write(out, runs)
    counts = {run.name: sum(len(series.steps) for series in run.records.series.values()) for run in runs}
    points = ", ".join(f"{printable(name, kept='')}: {count:,} points" for name, count in counts.items())
    text = f"{printable(str(out), kept='')} ({format_size(size)}; {points})"
    return Answer({"file": str(out), "bytes": size, "points": counts}, text)
