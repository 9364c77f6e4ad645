"""Change the trainer that a user's script makes, for the tools that look at one."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["explain_failure", "making", "options_for", "variant"]

_MOST = 12  # Frames of a traceback.


@contextlib.contextmanager
def making(make: Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Let a function make each trainer of the block.

    It gets what makes one, the class, and its arguments: further ones by position, and all that have a name by name.
    """
    from zae.compose.metaclass import TrainerMeta
    from zae.compose.options import options_of

    meta: Any = TrainerMeta
    original = meta.__call__

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, (p, _) in options_of(cls).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if any(name in kwargs for name, _ in zip(names, args)):
            return original(cls, *args, **kwargs)  # It refuses an argument that is given twice.
        return make(original, cls, args[len(names) :], {**dict(zip(names, args)), **kwargs})

    meta.__call__ = call
    try:
        yield
    finally:
        meta.__call__ = original


def variant(cls: Any, gone: Collection[Any], added: Sequence[Any]) -> Any:
    """Return a trainer class without some of its add-ons, and with others."""
    from zae.compose.composition import compose
    from zae.compose.introspect import recipe_of
    from zae.compose.leave_out import leave_out

    root, present = recipe_of(cls)
    kept = [each for each in present if each not in gone and each not in added]
    made = compose(root, [*kept, *added])
    return leave_out(made, add_ons=gone)  # The task itself may be derived from a class with add-ons.


def options_for(made: Any, cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a variant of a class takes too, and wrong ones, which it refuses."""
    from zae.compose.options import options_of

    known, own = options_of(made), options_of(cls)
    return {name: value for name, value in given.items() if name in known or name not in own}


def explain_failure(error: BaseException) -> str:
    """Return the user's frames of a traceback, the last ones if there are many, and the error with its notes."""
    folders = [str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    others = ("<", *(os.path.join(each, "") for each in folders))
    entries = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(others)
               and not {"site-packages", "dist-packages"} & set(Path(each.filename).parts)]  # fmt: skip
    left_out = [f"  ({len(entries) - _MOST} more above)\n"] if len(entries) > _MOST else []
    frames = traceback.format_list(entries[-_MOST:])
    return "".join([*left_out, *frames, *traceback.format_exception_only(error)]).rstrip()
