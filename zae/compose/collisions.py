"""Refuse names that two classes of one trainer both use, and hooks that one replaces over another."""

from __future__ import annotations

from typing import Any

from zae.compose.introspect import (
    hooks_of,
    is_add_on,
    is_base,
    is_marked,
    is_trainer,
    mentions_super,
)
from zae.errors import AddOnConflict

__all__ = ["check_collisions"]

_OURS = ("_is_addon", "_is_base", "_applied", "_partial", "_recipe", "_compositions")


def check_collisions(cls: Any) -> None:
    """Refuse a name that two unrelated classes both define, and a hook that one class replaces over another."""
    names = {c: _own_names(c) for c in cls.__mro__ if is_trainer(c) or c.__module__ != "builtins"}
    mro = [c for c in cls.__mro__[: cls.__mro__.index(_root(cls))] if "_partial" not in c.__dict__]
    core = {n for c in _root(cls).__mro__ for n in c.__dict__}
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
            if is_marked(value, "__replaces__") or mentions_super(value):
                continue
            mine = klass if is_add_on(outer) else outer
            raise AddOnConflict(
                f"{outer.__name__} and {klass.__name__} both define {name!r}, and one would overwrite the other; "
                f"rename it in {mine.__name__}"
            )
    _check_replaced(cls, mro)


def _check_replaced(cls: Any, mro: list[Any]) -> None:
    """Refuse an add-on that replaces a hook which a class inside of it overrides too."""
    replaced = {n for c in mro if is_add_on(c) for n, value in c.__dict__.items() if is_marked(value, "__replaces__")}
    for name in hooks_of(cls) if replaced else ():
        if name not in replaced:
            continue
        holders = [c for c in mro if name in c.__dict__ and not is_base(c)]
        for index, outer in enumerate(holders):
            value = outer.__dict__[name]
            if not is_add_on(outer) or not is_marked(value, "__replaces__") or mentions_super(value):
                continue
            inner = next((c for c in holders[index + 1 :] if c not in outer.__mro__), None)
            if inner is not None:
                raise AddOnConflict(
                    f"{outer.__name__} replaces {name}, so what {inner.__name__} does there is skipped; "
                    f"use one of them, or do that work in another hook"
                )


def _root(cls: Any) -> Any:
    """Return Trainer."""
    return next(c for c in reversed(cls.__mro__) if is_trainer(c))


def _own_names(cls: Any) -> dict[str, None]:
    """Return the names that a class body defines, and the attributes that it declares as state, in order."""
    body = cls.__dict__
    defined = [n for n in body if n not in _OURS and not n.startswith("__") and n != "_abc_impl"]
    return dict.fromkeys((*defined, *body.get("state_attributes", ()), *body.get("rank_state_attributes", ())))
