"""`python -m zae doctor [PATH]`: examine this machine, or the checkpoints of a run, and say what to do."""

from __future__ import annotations

import argparse
from pathlib import Path

from zae.cli import Answer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "path",
        nargs="?",
        help="the folder that a run saves to (save_path), its URL in object "
        "storage (s3://bucket/run), or one checkpoint: each is verified; without it, packages, "
        "devices, disk, limits and variables are examined, for runs in the present "
        "folder",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Report on a folder, or on the machine; the status is 0 if the newest checkpoint, or the machine, is healthy."""
    from zae.doctor import checkpoints, environment

    if arguments.path is not None:
        return checkpoints.diagnose(arguments.path)
    report = environment.examine(Path.cwd())
    return Answer(report, environment.table_of(report), 0 if report["healthy"] else 1)
