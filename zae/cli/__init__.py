"""The commands of `python -m zae`: one module for each, imported only when it is used.

The module of a command has ``add_arguments(parser)`` and ``run(arguments) -> int``, which returns the exit status: 0
for no findings, 1 for findings, 2 for wrong usage and unreadable files. These modules do not import torch at the top,
so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "doctor": ("zae.cli.doctor", "list and verify the checkpoints of a run, and explain what to do about damaged ones"),
    "plot": ("zae.cli.plot", "draw curves of one run or several in the terminal"),
    "report": ("zae.cli.report", "write a page with curves, options and checkpoints of one run or several"),
    "consolidate": ("zae.cli.consolidate", "write the weights of a checkpoint, sharded or not, as one file"),
    "diff": ("zae.cli.diff", "name the first step and stage at which two runs differ"),
}
"""Each command with its module and its line in the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # The caller has closed it, as ">&-" does; the status is still returned.
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115  (until the process ends)
    given = list(sys.argv[1:] if argv is None else argv)
    # Only the module of the given command is imported; the help of all commands needs no module.
    name = next((word for word in given if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="python -m zae", description="Tools around runs of zae.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command, (module, line) in COMMANDS.items():
        sub = commands.add_parser(command, help=line, description=line[0].upper() + line[1:] + ".")
        if command == name:
            importlib.import_module(module).add_arguments(sub)
    arguments = parser.parse_args(given)
    if arguments.command is None:
        parser.print_usage(sys.stderr)
        return 2
    status = 2
    try:
        status = importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader, head for instance, has closed the pipe; drop the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # An unreadable file is an error, not a difference, which is status 1.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{error}\n")
    return status
