"""`python -m zae explain script.py:make_trainer`: the effective loop of a script's trainer, and who overrides what."""

from __future__ import annotations

import argparse

from zae.cli import Answer, script

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    script.add_arguments(parser)
    parser.description = f"{parser.description} A trainer alone is enough here.\nNothing is trained."


def run(arguments: argparse.Namespace) -> Answer:
    """Return what ``trainer.explain()`` returns."""
    with script.made_by(arguments) as (trainer, _):
        from zae.compose.introspect import add_ons_of
        from zae.explain import lines_of

        text = str(trainer.explain())
        lines = [each._asdict() for each in lines_of(type(trainer), trainer)]
        add_ons = [each.__name__ for each in add_ons_of(type(trainer))]
        data = {"trainer": type(trainer).__name__, "add_ons": add_ons, "lines": lines, "text": text}
        return Answer(data, text.rstrip())
