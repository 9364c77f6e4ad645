"""`python -m zae runs FOLDER`: draw the tree of the runs in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from zae.cli import Answer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="+",
        type=Path,
        help="a folder that contains runs, at any depth; only the manifests of their checkpoints are read",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Draw the runs below the folders; the status is 1 if a checkpoint is damaged."""
    from zae.runs.drawing import draw_runs

    return draw_runs(arguments.folders)
