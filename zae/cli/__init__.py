"""The commands of `python -m zae`: one module for each, imported only when it is used; tools do what they are for.

A command is a line of `COMMANDS` and a module ``zae.cli.NAME`` with ``add_arguments(parser)`` and ``run(arguments) ->
Answer``: its arguments, and a call of the tool. `main` adds ``--json`` and prints the answer, and the errors of zae and
of the system without a traceback. These modules do not import torch at the top, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import zae
from zae.display.answer import Answer
from zae.errors import CheckpointDamaged, ZaeError, did_you_mean, printable

__all__ = ["COMMANDS", "Answer", "main"]

_COMMANDS = {
    "doctor": "examine the checkpoints of a run, and say what to do about those that are damaged",
    "report": "write a page with curves, options and checkpoints of one run or several",
    "consolidate": "write the weights of a checkpoint, sharded or not, as one file",
    "diff": "name the first step and stage at which two runs differ",
}
COMMANDS = {name: line for name, line in _COMMANDS.items() if importlib.util.find_spec(f"zae.cli.{name}") is not None}
"""Each command that is there, with its line in the help."""

_STATUS = """\
exit status:
  0  nothing wrong was found
  1  something wrong was found in what was looked at
  2  nothing could be looked at: wrong arguments, or a file that cannot be read
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # The caller has closed it, as ">&-" does; the status is still returned.
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115  (until the process ends)
    words = list(sys.argv[1:] if argv is None else argv)
    # Only the module of the given command is imported; the help of all commands needs no module.
    name = next((word for word in words if not word.startswith("-")), None)
    parser = _Parser(prog="python -m zae", description="Tools around runs of zae.")
    parser.add_argument("--version", action="version", version=f"zae {zae.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
    for command, line in COMMANDS.items():
        sub = commands.add_parser(command, help=line, description=line[0].upper() + line[1:] + ".")
        if command == name:
            _module(command).add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="print one JSON object")
    if name is not None and name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or "."
        parser.error(f"there is no command {name!r}{hint} Commands: {', '.join(COMMANDS)}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        commands.choices.get(name or "", parser).error(f"unknown arguments: {' '.join(unknown)}")
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    return _print_answer(arguments)


def _print_answer(arguments: argparse.Namespace) -> int:
    """Run the command and print its answer, or its error in words; return the exit status."""
    status = 2
    try:
        answer: Answer = _module(arguments.command).run(arguments)
        text = json.dumps(answer.data) if arguments.json else answer.text
        sys.stdout.write(text.removesuffix("\n") + "\n")
        sys.stdout.flush()
        status = answer.status
    except BrokenPipeError:  # The reader, head for instance, has closed the pipe; drop the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        status = 130
    except (ZaeError, OSError) as error:
        status = 1 if isinstance(error, CheckpointDamaged) else 2
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{printable(str(error))}\n")
    return status


class _Parser(argparse.ArgumentParser):
    """A parser whose help ends with what the exit status means."""

    def __init__(self, **options: Any) -> None:
        super().__init__(epilog=_STATUS, formatter_class=argparse.RawDescriptionHelpFormatter, **options)


def _module(command: str) -> Any:
    return importlib.import_module(f"zae.cli.{command}")
