"""The command: ``resumecheck [options] -- python train.py ...``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .check import Options, check
from .errors import Refused
from .report import as_json, as_markdown, as_text

__all__ = ["main"]

_ABOUT = """\
Does this training script resume to the same steps after a kill? It is run once
in a copy of the working folder. Then it is started again in what SIGKILL would
have left after a save and at each change of a file within one, and each step
is compared to the bit. The command that starts it is to resume it, unless
--resume-with says what is added:

  resumecheck -- python train.py --epochs 3
  resumecheck --resume-with "--resume {newest:out/step_*}" -- python train.py
  resumecheck -- torchrun --nproc-per-node 2 train.py
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resumecheck",
        description=_ABOUT,
        usage="resumecheck [options] -- python train.py ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--resume-with", metavar="WORDS", default="", help="added to resume; {newest} or {newest:GLOB} is a checkpoint")
    add("--horizon", metavar="STEPS", type=int, default=20, help="compared after a resume, at least (20)")
    add("--steps", type=int, help="end the first run after so many steps, where training takes days")
    add("--to-the-end", action="store_true", help="run each instant to the end")
    add("--all", action="store_true", dest="all_instants", help="try all instants of all saves")
    add("--sigterm", action="store_true", help="try what a signal to end costs, too")
    add("--minutes", type=float, default=60.0, help="how long it may take (60)")
    add("--gigabytes", type=int, default=8, help="how much the snapshots may take (8)")
    add("--without", metavar="GLOB", action="append", default=[], help="what the copy leaves out, as old checkpoints")
    add("--allow", metavar="FOLDER", action="append", default=[], help="a cache outside that all runs may write to")
    add("--json", action="store_true", help="print the report as JSON")
    add("--markdown", metavar="FILE", help='append the report to a page, as "$GITHUB_STEP_SUMMARY"')
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a script; return 0 if it resumes to the same run, 1 if not, 2 if it could not be judged."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--resume-with" in words[:-1]:  # Its value begins with a dash, which argparse takes for an option.
        place = words.index("--resume-with")
        words[place : place + 2] = [f"--resume-with={words[place + 1]}"]
    given = vars(_parser().parse_args(words))
    command, as_object, page = given.pop("command"), given.pop("json"), given.pop("markdown")
    try:
        result = check(command[1:] if command[:1] == ["--"] else command, Options(**given))
    except Refused as error:
        print(f"resumecheck: {error}", file=sys.stderr)
        return 2
    print(as_json(result) if as_object else as_text(result))
    if page:
        with open(os.path.expandvars(page), "a", encoding="utf-8") as file:
            file.write(as_markdown(result))
    return result.status


if __name__ == "__main__":
    sys.exit(main())
