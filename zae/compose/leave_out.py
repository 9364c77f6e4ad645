"""Derive a class without some of its add-ons, for a trial that neither saves nor logs."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from zae.compose.introspect import add_ons_of, kinds_of

__all__ = ["leave_out"]


def leave_out(cls: Any, layers: Container[str]) -> Any:
    """Return a class like this one without its add-ons of these layers; their methods do nothing.

    A class that derives from such an add-on keeps its own methods: the method resolution order passes by the add-on.
    Other public attributes of the add-on are None.
    """
    present = add_ons_of(cls)
    left_out = [add_on for add_on in present if add_on.layer in layers]
    removed: set[Any] = set()
    for add_on in left_out:
        removed.update(kinds_of(add_on))
    for add_on in present:
        if add_on not in left_out:
            removed.difference_update(kinds_of(add_on))
    if not removed:
        return cls

    class WithoutAddOns(type(cls)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            return [base for base in super().mro() if base not in removed]

    remaining_names: set[str] = set()
    for klass in cls.__mro__:
        if klass not in removed:
            remaining_names.update(vars(klass))
    # Code of the task may read and call what an add-on has: it finds a method that does nothing, or None.
    idle: dict[str, Any] = {}
    for klass in removed:
        for name, value in vars(klass).items():
            if name[0] != "_" and name not in remaining_names:
                idle[name] = _do_nothing if callable(value) else None
    return WithoutAddOns(cls.__name__, (cls,), {"__module__": cls.__module__, "_partial": True, **idle})


def _do_nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...
