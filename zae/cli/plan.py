"""`python -m zae plan script.py:make_trainer`: what the run of a script would do, without training."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from zae.cli import Answer, script
from zae.errors import ConfigError, ZaeError, did_you_mean, printable
from zae.script import explain_failure, require_arguments

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    script.add_arguments(parser)
    parser.description = (
        f"{parser.description}\n\nNothing is trained, no batch is loaded, and zae writes nothing. What the run would\n"
        "refuse is status 1."
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Return the plan of the run, or what it would refuse; the status is 1 where it would refuse something."""
    with script.made_by(arguments) as made:
        trainer, options = made.trainer, require_arguments(made, arguments.script)
        _check(trainer.plan, options)
        status, found = 0, {}
        try:
            plan = trainer.plan(**options)
            text, found = str(plan), fields_of(plan)
        except Exception as error:
            words = str(error) if isinstance(error, ZaeError) else explain_failure(error)
            status, found["refused"] = 1, f"{type(error).__name__}: {error}"
            text = f"the run would fail:\n{words}"
    return Answer(found, printable(text), status)


def fields_of(plan: Any) -> dict[str, Any]:
    """Return the fields of a plan as JSON takes them; the memory is that of a step, by what takes it."""
    from zae.common.walk import json_safe

    names = [each.name for each in dataclasses.fields(plan)]
    fields = {name: getattr(plan, name) for name in [*names, "steps", "effective_batch_size"]}
    memory = plan.memory and {**plan.memory.entries(), "total": plan.memory.total}
    found: dict[str, Any] = json_safe({**fields, "memory": memory})
    return found


def _check(plan: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse arguments that ``run`` does not have, or lacks."""
    signature = inspect.signature(plan)
    names = list(signature.parameters)
    for name in options:
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise ConfigError(f"run() has no argument {name!r}{hint or '; it has ' + ', '.join(names)}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"run(): {error}; the script returned {', '.join(map(str, options)) or 'none'}") from None
