"""`python -m zae certify script.py:make_trainer`: prove the promises of zae for the trainer of a script."""

from __future__ import annotations

import argparse

from zae.cli import Answer, script

__all__ = ["add_arguments", "run"]

_ABOUT = """\
Short runs of the script's trainer, each in a process and a folder of its own,
prove for this composition and this model what zae promises: two runs are equal;
the weights are those of a loop by hand in plain PyTorch; loggers and
checkpoints change nothing; two ranks are one process; a run that is killed and
resumed has the same end.
The exit status is 1 if a promise fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    script.add_arguments(parser)
    parser.description = f"{parser.description}\n\n{_ABOUT}"
    parser.add_argument("-o", "--out", metavar="FILE", default="certificate.md",
                        help="the page to write, in Markdown (default: certificate.md)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=5.0, help="how long it may take (default: 5)")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run at most (default: 24)")
    parser.add_argument("--kills", type=int, default=4, help="how often a run is killed (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants of the kills (default: 0)")
    parser.add_argument("--only", metavar="PROMISE", action="append", default=[],
                        help="try only this promise, by a part of its name; may be repeated")  # fmt: skip


def run(arguments: argparse.Namespace) -> Answer:
    """Try each promise, and write the page."""
    from zae.certify.certificate import certify

    names = ("out", "minutes", "steps", "kills", "seed", "only")
    return certify(arguments.script, arguments.given, **{name: getattr(arguments, name) for name in names})
