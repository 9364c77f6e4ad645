"""The script of a command, `script.py:make_trainer`, and the arguments that are for the script."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager

from zae.script import ScriptTrainer, trainer_of

__all__ = ["add_arguments", "made_by"]

_EXECUTED = """\
The script is imported, as `import script` would do: its top level runs, but
not what is under `if __name__ == "__main__":`. Then the function is called:

    def make_trainer():
        ...
        return trainer, {"n_epoch": 3, "loader": loader, "valid_loader": valid_loader}

It returns the trainer and the arguments of its `run`."""
"""For the help of a command: what is executed, and what is to be written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the script, and its own arguments."""
    parser.description = f"{parser.description}\n\n{_EXECUTED}"
    parser.add_argument(
        "script",
        metavar="script.py:FUNCTION",
        help="a script, and the function in it that makes the trainer (default: make_trainer)",
    )
    parser.add_argument(
        "given", metavar="ARGUMENT", nargs="*", default=[], help="arguments for the script's sys.argv, after --"
    )


def made_by(arguments: argparse.Namespace) -> AbstractContextManager[ScriptTrainer]:
    """Return a context with what the script makes; with ``--json``, what it prints goes to standard error."""
    return trainer_of(arguments.script, arguments.given, prints_aside=arguments.json)
