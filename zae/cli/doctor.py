"""`python -m zae doctor PATH`: examine the checkpoints of a run, and say what to do about those that are damaged."""

from __future__ import annotations

import argparse

from zae.cli import Answer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "path",
        help="the folder that a run saves to (save_path), its URL in object storage (s3://bucket/run), or one "
        "checkpoint: each is verified",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Report on a folder; the status is 0 if the newest checkpoint is whole."""
    from zae.doctor.checkpoints import diagnose

    return diagnose(arguments.path)
