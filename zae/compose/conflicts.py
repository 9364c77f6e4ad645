"""Refuse sets of add-ons that do not go together, and classes in which one name, or one hook, has two owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zae.compose.introspect import (
    add_ons_of,
    classes_to_initialize,
    hooks_of,
    is_add_on,
    is_base,
    is_marked,
    is_trainer,
    mentions_super,
    traits_of,
)
from zae.compose.options import check_owners
from zae.compose.order import arrange, is_inside, is_named_in, label_of, relations_of
from zae.errors import AddOnConflict, AddOnOrder, AddOnRequirement

if TYPE_CHECKING:
    from zae.compose.metaclass import TrainerMeta

__all__ = ["check_composition", "check_set"]

_ATTRIBUTE_LISTS = ("state_attributes", "rank_state_attributes", "process_attributes")
_PRIVATE_MARKS = ("_is_addon", "_is_base", "_applied", "_partial", "_recipe", "_compositions")


def check_composition(cls: TrainerMeta) -> None:
    """Refuse a class whose add-ons are incompatible or in the wrong order."""
    add_ons = add_ons_of(cls)
    check_set(add_ons, cls)
    *outside, trainer = classes_to_initialize(cls)
    classes = [klass for klass in outside if "_partial" not in klass.__dict__]
    _check_collisions(cls, classes, trainer)
    _check_replaced(cls, classes)
    _check_order(cls, [klass for klass in cls.__mro__ if klass in add_ons])


# ------------------------------------------------------------------------------------------- a set of add-ons


def check_set(add_ons: Sequence[TrainerMeta], cls: TrainerMeta) -> None:
    """Refuse a name or a slot with two add-ons, a missing requirement, and an option with two owners."""
    _check_names(add_ons)
    _check_slots(add_ons)
    for add_on in add_ons:
        for trait, why in add_on.excludes.items():
            other = next(
                (present for present in add_ons if present is not add_on and trait in traits_of(present)), None
            )
            if other is not None:
                raise AddOnConflict(f"{add_on.__name__} and {other.__name__} do not go together: {why}")
        for need in add_on.requires:
            if not any(is_named_in(other, [need]) for other in add_ons):
                names = ", ".join(sorted({a.__name__ for a in add_ons} | {label_of(need)}))
                raise AddOnRequirement(
                    f"{add_on.__name__} needs {label_of(need)}, which is missing; write .add_on({names})"
                )
    check_owners(add_ons, cls)


def _check_names(add_ons: Sequence[TrainerMeta]) -> None:
    """Refuse two add-ons of one name, by which checkpoints have their states."""
    by_name: dict[str, TrainerMeta] = {}
    for add_on in add_ons:
        other = by_name.setdefault(add_on.__name__, add_on)
        if other is not add_on:
            raise AddOnConflict(
                f"two add-ons are called {add_on.__name__} ({_origin(other)} and {_origin(add_on)}), and their states "
                "would share a key; rename one (a class that was defined again is another class)"
            )


def _origin(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_slots(add_ons: Sequence[TrainerMeta]) -> None:
    """Refuse two add-ons in one slot; "parallel" is the slot of all of its dimensions, as "parallel.data"."""
    filled: dict[str, TrainerMeta] = {}
    for add_on in add_ons:
        if not add_on.slot:
            continue
        for slot, other in filled.items():
            if f"{slot}.".startswith(f"{add_on.slot}.") or f"{add_on.slot}.".startswith(f"{slot}."):
                first, second = sorted((other.__name__, add_on.__name__))
                shared = min(slot, add_on.slot, key=len)
                raise AddOnConflict(f"{first} and {second} both fill the slot {shared!r}; keep one")
        filled[add_on.slot] = add_on


def _check_order(cls: TrainerMeta, mixed: list[Any]) -> None:
    """Refuse add-ons that a class statement has put in another order than they declare."""
    for index, outer in enumerate(mixed):
        for inner in mixed[index + 1 :]:
            if not is_inside(outer, inner):
                continue
            base = next(c for c in cls.__mro__[1:] if is_trainer(c) and not is_add_on(c) and not add_ons_of(c))
            right = ", ".join(a.__name__ for a in arrange(mixed))
            raise AddOnOrder(
                f"{cls.__name__} puts {outer.__name__} outside of {inner.__name__}, but {outer.__name__} belongs "
                f"inside ({relations_of(outer)}; {relations_of(inner)}); put all add-ons in one place: "
                f"class {cls.__name__}({right}, {base.__name__}), or leave the order to add_on"
            )


# -------------------------------------------------------------------------------------- the names of a class


def _check_collisions(cls: Any, classes: list[Any], trainer: Any) -> None:
    """Refuse a name that two unrelated classes outside of Trainer both define."""
    names = {klass: _own_names(klass) for klass in cls.__mro__ if is_trainer(klass) or klass.__module__ != "builtins"}
    core: set[str] = set()
    for klass in trainer.__mro__:
        core.update(klass.__dict__)
    declared: set[str] = set()  # Attributes of AddOnBase: every add-on may set its own.
    for klass in cls.__mro__:
        if is_base(klass):
            declared.update(names[klass])
    owners: dict[str, Any] = {}
    for klass in classes:
        for name in names[klass]:
            outer = owners.setdefault(name, klass)
            count = is_add_on(outer) + is_add_on(klass)
            if name in core or count == 0 or (count == 2 and name in declared):
                continue
            if name in _ATTRIBUTE_LISTS and is_base(outer):  # A task says what its own attributes are.
                continue
            if any(name in names.get(c, ()) for c in outer.__mro__ if c in klass.__mro__):
                continue  # Both inherit it from one base.
            value = outer.__dict__.get(name)
            if not is_marked(value, "__replaces__") and not mentions_super(value):
                raise _collision(outer, klass, name)


def _collision(outer: Any, inner: Any, name: str) -> AddOnConflict:
    """Return the error for a name that both of these classes define."""
    remedy = f"rename it in {inner.__name__ if is_add_on(outer) else outer.__name__}"
    if is_marked(inner.__dict__.get(name), "__replaces__"):  # It is there to be overridden.
        remedy = f"mark {outer.__name__}.{name} with @zae.replaces, or call super().{name}(...) in it"
    return AddOnConflict(
        f"{outer.__name__} and {inner.__name__} both define {name!r}, and one would overwrite the other; {remedy}"
    )


def _check_replaced(cls: Any, classes: list[Any]) -> None:
    """Refuse an add-on that replaces a hook which a class inside of it overrides too."""
    replaced: set[str] = set()
    for klass in classes:
        if is_add_on(klass):
            replaced.update(name for name, value in klass.__dict__.items() if is_marked(value, "__replaces__"))
    if not replaced:  # Most classes: their hooks need not be listed.
        return
    for name in hooks_of(cls):
        if name not in replaced:
            continue
        holders = [klass for klass in classes if name in klass.__dict__ and not is_base(klass)]
        for index, outer in enumerate(holders):
            value = outer.__dict__[name]
            if not is_add_on(outer) or not is_marked(value, "__replaces__") or mentions_super(value):
                continue
            inner = next((klass for klass in holders[index + 1 :] if klass not in outer.__mro__), None)
            if inner is not None:
                raise AddOnConflict(
                    f"{outer.__name__} replaces {name}, so what {inner.__name__} does there is skipped; "
                    f"use one of them, or do that work in another hook"
                )


def _own_names(cls: Any) -> dict[str, None]:
    """Return the names that a class body defines, and the attributes that it declares, in order."""
    body = cls.__dict__
    defined = [
        name for name in body if name not in _PRIVATE_MARKS and not name.startswith("__") and name != "_abc_impl"
    ]
    declared = [name for kind in _ATTRIBUTE_LISTS for name in body.get(kind, ())]
    return dict.fromkeys((*defined, *declared))
