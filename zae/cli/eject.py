"""`python -m zae eject script.py:make_trainer -o plain.py`: the same training in plain PyTorch, without zae."""

from __future__ import annotations

import argparse
from pathlib import Path

from zae.cli import Answer, script
from zae.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    script.add_arguments(parser)
    parser.add_argument("-o", "--out", metavar="FILE", help="the file to write; without it, the script is printed")
    parser.add_argument("--force", action="store_true", help="replace FILE where it exists")


def run(arguments: argparse.Namespace) -> Answer:
    """Write the script, and name what it leaves out."""
    out = Path(arguments.out) if arguments.out else None
    if out is not None and out.exists() and not arguments.force:
        raise ConfigError(f"{out} exists; give another name, or --force to replace it")
    with script.trainer_of(arguments) as (trainer, given):
        from zae.preview.eject.eject import write_script

        made = write_script(trainer, given, *script.maker_of(arguments.script))
    data = {"script": str(made), "left_out": [what for what, _ in made.missing],
            "changes_weights": [what for what, changes in made.missing if changes]}  # fmt: skip
    if out is None:
        return Answer(data, str(made).rstrip())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(str(made), encoding="utf-8")
    left = "".join(f"\n  {'not written, so that the weights differ' if changes else 'left out'}: {what}"
                   for what, changes in made.missing)  # fmt: skip
    start = f"\n  start it with {made.torchrun} {out}" if made.torchrun else ""
    return Answer(data, f"{out}: {len(made.splitlines())} lines{start}{left}")
