"""Names of other trainers, and the errors that say what they are called here."""

from __future__ import annotations

import difflib
from typing import Any

from zae.composition.foreign_tables import ARGUMENTS, ATTRIBUTES, HOOKS, OPTIONS, OWNERS, WITHOUT_COUNTERPART
from zae.errors import MissingError

__all__ = ["ABSENT_NAMES", "Absent", "foreign_argument", "foreign_attribute", "foreign_hook", "foreign_option"]

ABSENT_NAMES = {**WITHOUT_COUNTERPART, **OPTIONS, **HOOKS, **ATTRIBUTES, **OWNERS}
"""All names that a trainer explains when they are read, unless it has them."""


class Absent:
    """A name of another trainer, or of an add-on that is not there: reading it raises an error with what to write.

    A class attribute, not ``__getattr__``: with that, Python would not cache where the attributes of a trainer are,
    and each ``self.name`` of a step would take twice as long.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise MissingError(f"{owner.__name__} has no attribute {self.name!r}{foreign_attribute(self.name)}")


def foreign_argument(name: str) -> str:
    """Return the argument of ``run`` for the name of another trainer; empty if the name is unknown."""
    return ARGUMENTS.get(name, "")


def foreign_option(name: str) -> str:
    """Explain the option of another trainer; empty if the name is unknown."""
    if name in WITHOUT_COUNTERPART:
        return f"zae has no counterpart: {WITHOUT_COUNTERPART[name]}"
    return f"here it is {OPTIONS[name]}" if name in OPTIONS else ""


def foreign_attribute(name: str) -> str:
    """Explain a method or attribute of another trainer, or of an add-on that is not there."""
    if name in OWNERS:
        return f": it belongs to {OWNERS[name]}; add it with .add_on({OWNERS[name]})"
    here = ABSENT_NAMES[name]
    return f"; zae has no counterpart: {here}" if name in WITHOUT_COUNTERPART else f"; here it is {here}"


def foreign_hook(name: str) -> str:
    """Explain a hook of another trainer, which may be misspelt; empty if it is unknown."""
    # Only hooks are called by nobody else: a helper may have almost any name, and is not taken for a misspelt one.
    known = HOOKS if name.startswith("on_") or name.endswith("_step") else HOOKS.keys() & {name}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
    if not near:
        return ""
    meant = "here it is" if near[0] == name else f"did you mean {near[0]!r}? Here that is"
    return f"{meant} {HOOKS[near[0]]}"
