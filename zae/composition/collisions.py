"""Names that two classes of one trainer would fight over: what one hides, overwrites or replaces of another."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

from zae.composition.introspect import calls_super, function_of, is_add_on, is_marked, is_trainer, seams_of
from zae.errors import AddOnConflict, AddOnError, TaskError

__all__ = ["check_collisions", "check_init_names"]

_STORE = dis.opmap["STORE_ATTR"]
_OURS = ("_is_addon", "_is_base", "_applied", "_partial", "_recipe", "_compositions")


def check_init_names(cls: Any) -> None:
    """Refuse an ``__init__`` that drops its ``*args`` or ``**kwargs``, or that sets what the trainer keeps for itself.

    Parameters
    ----------
    cls : type
        A subclass of Trainer, or one of its plain mixins, with an ``__init__`` of its own.

    Raises
    ------
    TaskError
        With the name.
    """
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
    for name in _stored(init):
        if name in private:
            raise error(f"{cls.__name__}.__init__ sets self.{name}, which the trainer keeps for itself; rename it")


def check_collisions(cls: Any) -> None:
    """Refuse a name that two unrelated classes both mean as their own, and a seam that is replaced over another's.

    Parameters
    ----------
    cls : type
        A trainer class, wholly composed.

    Raises
    ------
    AddOnConflict
        With both classes and the name.
    """
    names = {c: _own_names(c) for c in cls.__mro__ if is_trainer(c) or c.__module__ != "builtins"}
    mro = [c for c in cls.__mro__[: cls.__mro__.index(_root(cls))] if "_partial" not in c.__dict__]
    core = {n for c in _root(cls).__mro__ for n in c.__dict__} | _all_stored(_root(cls))
    owners: dict[str, Any] = {}
    for klass in mro:
        for name in names[klass]:
            outer = owners.setdefault(name, klass)
            if name in core or not (is_add_on(outer) or is_add_on(klass)):
                continue
            if any(name in names.get(c, ()) for c in outer.__mro__ if c in klass.__mro__):
                continue  # It is of one base of both, and they both know it.
            value = outer.__dict__.get(name)
            if is_marked(value, "__replaces__") or calls_super(value, name):
                continue
            mine = klass if is_add_on(outer) else outer
            raise AddOnConflict(
                f"{outer.__name__} and {klass.__name__} both have a {name!r}, and the one would take the place of the "
                f"other; rename it in {mine.__name__}"
            )
    _check_replaced(cls, mro)


def _check_replaced(cls: Any, mro: list[Any]) -> None:
    """Refuse an add-on that does a seam's whole work, where that would leave out what another class does there."""
    for name in seams_of(cls):
        holders = [c for c in mro if name in c.__dict__ and not c.__dict__.get("_is_base")]
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
    """Trainer itself."""
    return next(c for c in reversed(cls.__mro__) if is_trainer(c))


def _own_names(cls: Any) -> dict[str, None]:
    """What a class body defines, and what its ``__init__`` sets on ``self``."""
    defined = [n for n in cls.__dict__ if n not in _OURS and not n.startswith("__") and n != "_abc_impl"]
    return dict.fromkeys((*defined, *_stored(cls.__dict__.get("__init__"))))


def _rest_of(function: FunctionType) -> list[str]:
    """The names of ``*args`` and ``**kwargs``."""
    code = function.__code__
    first = code.co_argcount + code.co_kwonlyargcount
    return list(code.co_varnames[first : first + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)])


def _stored(function: Any) -> Iterator[str]:
    """The attributes that a method sets on ``self``."""
    if not isinstance(function, FunctionType) or not function.__code__.co_varnames:
        return
    if _STORE not in function.__code__.co_code[::2]:
        return  # To take a function apart is most of what an import of zae.addons costs.
    me, before = function.__code__.co_varnames[0], None
    for instruction in dis.get_instructions(function):
        # From Python 3.13 on, one instruction may load two names.
        if instruction.opname == "STORE_ATTR" and (before == me or (isinstance(before, tuple) and before[-1] == me)):
            yield instruction.argval
        before = instruction.argval


@cache
def _all_stored(root: Any) -> frozenset[str]:
    """The attributes that Trainer sets; found out once, for it would be most of what an import of zae.addons costs."""
    return frozenset(name for value in root.__dict__.values() for name in _stored(value))


def _private_names(root: Any) -> set[str]:
    """What Trainer keeps for itself: its private methods, and the private attributes that it sets."""
    return {n for n in (*root.__dict__, *_all_stored(root)) if n.startswith("_") and not n.startswith("__")} - set(
        _OURS
    )
