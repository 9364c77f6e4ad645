"""`python -m zae replay script.py:make_trainer --step N`: run to a step of a run again, and show what happens in it."""

from __future__ import annotations

import argparse

from zae.cli import Answer, script

__all__ = ["add_arguments", "run"]

_ABOUT = """\
The run is repeated from its nearest checkpoint before the step, bitwise, and
what happens in the step is shown: samples, losses, gradient norms, ranges of
the outputs of modules, and the first output and the first gradient that are not
finite. Nothing is written into the folders of the run: the loggers of zae are
left out, and options named ..._path, ..._dir, ..._file or ..._folder lead to a
temporary folder. Where the run has a ledger (LedgerAddon), each step is
compared with it. The exit status is 1 if a step differs from the ledger or is
not finite, or if the run fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    script.add_arguments(parser)
    parser.description = f"{parser.description}\n\n{_ABOUT}"
    parser.add_argument("--step", type=int, required=True, help="the optimizer step to look at")
    parser.add_argument("--to", type=int, help="look at all steps up to this one")
    parser.add_argument(
        "--from",
        dest="checkpoint",
        metavar="PATH",
        help="the checkpoint to begin with (default: the "
        "nearest one in save_path; without any, the beginning of the run)",
    )
    parser.add_argument("--ledger", metavar="FILE", help="the ledger to compare with (default: ledger_path)")


def run(arguments: argparse.Namespace) -> Answer:
    """Replay the steps, and show them."""
    from zae.replay.steps import replay
    from zae.replay.trainer import Request

    request = Request(
        arguments.script,
        arguments.step,
        arguments.step if arguments.to is None else arguments.to,
        tuple(arguments.given),
        arguments.checkpoint,
        arguments.ledger,
        prints_aside=arguments.json,
    )
    return replay(request)
