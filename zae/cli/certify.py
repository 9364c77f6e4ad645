"""`python -m zae certify train.py`: does a training script resume to the same run, whatever its trainer?"""

from __future__ import annotations

import argparse
import shlex

from zae.cli import Answer

__all__ = ["add_arguments", "run"]

_ABOUT = """\
The script is run as it is, in copies of the working folder: twice without a
kill, then with kills at steps and in the middle of saves, each time started
again until it ends. What the runs do is compared to the bit, and where they
part, the cause is named. The script needs no import of zae: any trainer whose
optimizers are torch's.

  python -m zae certify train.py --epochs 3
  python -m zae certify --kills 2 -- torchrun --nproc-per-node 2 train.py
  python -m zae certify --resume-with "--resume_from_checkpoint True" train.py

Options of certify stand before the script; all that follows is the script's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = f"{parser.description}\n\n{_ABOUT}"
    parser.add_argument(
        "command_line",
        metavar="script.py ...",
        nargs=argparse.REMAINDER,
        help="the script and its arguments, or -- and a launcher with both",
    )
    parser.add_argument("--kills", type=int, default=4, help="how many runs are killed (default: 4)")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it may take (default: 60)")
    parser.add_argument(
        "--resume-with",
        metavar='"ARGUMENTS"',
        default="",
        help="what is appended to the command when a checkpoint is to be resumed from",
    )
    parser.add_argument(
        "--signal",
        metavar="NAME",
        default="SIGTERM",
        help="the signal by which a script is asked to end, such as SIGUSR1 (default: SIGTERM)",
    )
    parser.add_argument(
        "--checkpoints",
        metavar="FOLDER",
        help="where the script saves, if that is outside of the working folder, or if it holds the "
        "checkpoints of other runs",
    )
    parser.add_argument(
        "--only",
        metavar="PROMISE",
        action="append",
        default=[],
        help="try only this promise, by a part of its name; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the instants of the kills (default: 0)")
    parser.add_argument("-o", "--out", metavar="FILE", help="a page to write, in Markdown, or HTML by its ending")


def run(arguments: argparse.Namespace) -> Answer:
    """Try each promise, and write the page."""
    from zae.certify.certificate import certify

    words = arguments.command_line[1:] if arguments.command_line[:1] == ["--"] else arguments.command_line
    names = ("kills", "minutes", "checkpoints", "only", "seed", "signal", "out")
    options = {name: getattr(arguments, name) for name in names}
    return certify(words, resume_with=shlex.split(arguments.resume_with), **options)
