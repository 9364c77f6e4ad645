"""Refuse names that two classes of one trainer both use, and seams that one replaces over another."""

from __future__ import annotations

import dis
from functools import cache
from types import FunctionType
from typing import Any

from zae.composition.introspect import (
    calls_super,
    function_of,
    is_add_on,
    is_base,
    is_marked,
    is_trainer,
    names_set_in,
    seams_of,
)
from zae.errors import AddOnConflict, AddOnError, TaskError

__all__ = ["check_collisions", "check_init_names"]

_OURS = ("_is_addon", "_is_base", "_applied", "_partial", "_recipe", "_compositions")


def check_init_names(cls: Any) -> None:
    """Refuse an ``__init__`` that drops its ``*args`` or ``**kwargs``, or that sets a private name of Trainer."""
    init = cls.__dict__.get("__init__")
    if not isinstance(init, FunctionType):
        return
    error = AddOnError if is_add_on(cls) else TaskError
    function = function_of(init)
    for name in _rest_of(function) if calls_super(init, "__init__") else ():
        if not any(i.argval == name for i in dis.get_instructions(function) if i.opname != "RESUME"):
            stars = "*" if name == _rest_of(function)[0] and function.__code__.co_flags & 0x04 else "**"
            raise error(
                f"{cls.__name__}.__init__ takes {stars}{name} but does not pass them on, so these arguments are "
                "lost; write super().__init__(*args, **kwargs)"
            )
    private = _private_names(_root(cls)) if is_trainer(cls) else set()
    for name in names_set_in(init):
        if name in private:
            raise error(f"{cls.__name__}.__init__ sets self.{name}, a private name of Trainer; rename it")


def check_collisions(cls: Any) -> None:
    """Refuse a name that two unrelated classes both define, and a seam that one class replaces over another."""
    names = {c: _own_names(c) for c in cls.__mro__ if is_trainer(c) or c.__module__ != "builtins"}
    mro = [c for c in cls.__mro__[: cls.__mro__.index(_root(cls))] if "_partial" not in c.__dict__]
    core = {n for c in _root(cls).__mro__ for n in c.__dict__} | _names_of_root(_root(cls))
    declared = {n for c in cls.__mro__ if is_base(c) for n in names[c]}
    owners: dict[str, Any] = {}
    for klass in mro:
        for name in names[klass]:
            outer = owners.setdefault(name, klass)
            count = is_add_on(outer) + is_add_on(klass)
            if name in core or count == 0 or (count == 2 and name in declared):
                continue
            if any(name in names.get(c, ()) for c in outer.__mro__ if c in klass.__mro__):
                continue  # Both inherit it from one base.
            value = outer.__dict__.get(name)
            if is_marked(value, "__replaces__") or calls_super(value, name):
                continue
            mine = klass if is_add_on(outer) else outer
            raise AddOnConflict(
                f"{outer.__name__} and {klass.__name__} both define {name!r}, and one would overwrite the other; "
                f"rename it in {mine.__name__}"
            )
    _check_replaced(cls, mro)


def _check_replaced(cls: Any, mro: list[Any]) -> None:
    """Refuse an add-on that replaces a seam which a class inside of it overrides too."""
    replaced = {n for c in mro if is_add_on(c) for n, value in c.__dict__.items() if is_marked(value, "__replaces__")}
    for name in seams_of(cls) if replaced else ():
        if name not in replaced:
            continue
        holders = [c for c in mro if name in c.__dict__ and not is_base(c)]
        for index, outer in enumerate(holders):
            value = outer.__dict__[name]
            if not is_add_on(outer) or not is_marked(value, "__replaces__") or calls_super(value, name):
                continue
            inner = next((c for c in holders[index + 1 :] if c not in outer.__mro__), None)
            if inner is not None:
                raise AddOnConflict(
                    f"{outer.__name__} replaces {name}, so what {inner.__name__} does there is skipped; "
                    f"use one of them, or do that work in another seam"
                )


def _root(cls: Any) -> Any:
    """Return Trainer."""
    return next(c for c in reversed(cls.__mro__) if is_trainer(c))


def _own_names(cls: Any) -> dict[str, None]:
    """Return the names that a class body defines and that its ``__init__`` sets on ``self``, in order."""
    defined = [n for n in cls.__dict__ if n not in _OURS and not n.startswith("__") and n != "_abc_impl"]
    return dict.fromkeys((*defined, *names_set_in(cls.__dict__.get("__init__"))))


def _rest_of(function: FunctionType) -> list[str]:
    """Return the names of ``*args`` and ``**kwargs``."""
    code = function.__code__
    first = code.co_argcount + code.co_kwonlyargcount
    return list(code.co_varnames[first : first + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)])


_PARTS = {"current_run", "history", "optimization", "optimizers", "schedulers"}


@cache
def _names_of_root(root: Any) -> frozenset[str]:
    """Return the attributes that Trainer sets; cached, as it is most of what an import of zae.addons costs."""
    return frozenset(name for value in root.__dict__.values() for name in names_set_in(value))


def _private_names(root: Any) -> set[str]:
    """Return what Trainer keeps for itself: its private methods and attributes, and the objects it is made of."""
    private = {n for n in (*root.__dict__, *_names_of_root(root)) if n.startswith("_") and not n.startswith("__")}
    return (private | _PARTS) - set(_OURS)
