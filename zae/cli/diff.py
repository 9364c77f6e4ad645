"""`python -m zae diff runA runB`: the first step and stage at which the ledgers of two runs differ."""

from __future__ import annotations

import argparse
from pathlib import Path

from zae.cli import Answer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("first", metavar="runA", type=Path, help="a ledger, or a folder with a ledger.jsonl")
    parser.add_argument("second", metavar="runB", type=Path, help="the same, of the other run")
    parser.add_argument(
        "--deep",
        action="store_true",
        help="name the tensors that differ first: weights, gradients, "
        "optimizer state (the runs need ledger_tensors=True)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Return the first difference of two runs; the status is 1 if there is one."""
    from zae.diff import diff

    return diff(arguments.first, arguments.second, by_tensor=arguments.deep)
