"""Compose a trainer class of a task and a set of add-ons: order, build, name, cache and pickle it.

``Task.add_on(A, B)`` is a class whose method resolution order is the add-ons, outermost first, and then the task. The
same set gives the same class, in whatever order and in however many calls it is written. A composed class keeps its
recipe: the task, and the add-ons that were put on it. It is found, extended and pickled by that.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, cast
from weakref import WeakValueDictionary

from zae.compose.conflicts import check_set
from zae.compose.introspect import add_ons_of, is_add_on, is_base, is_trainer, recipe_of
from zae.compose.metaclass import TrainerMeta
from zae.compose.order import arrange, is_inside
from zae.errors import AddOnConflict, AddOnError, AddOnRequirement, did_you_mean

__all__ = ["compose", "load_installed", "mix"]


def compose(base: TrainerMeta, add_ons: Sequence[Any]) -> TrainerMeta:
    """Return the class composed of ``base`` and a set of add-ons, whose order does not matter."""
    if base._is_addon:
        raise AddOnError(f"{base.__name__} is an add-on, not a trainer; write Task.add_on({base.__name__}, ...)")
    classes = [_resolve(base, add_on) for add_on in add_ons]
    root, present = recipe_of(base)
    add_ons_of_root = add_ons_of(root)  # Those that the user's own class derives from.
    further = [a for a in classes if not any(a in inherited.__mro__ for inherited in add_ons_of_root)]
    kinds = _outermost_kinds([*present, *further])
    if not kinds:
        return root
    ordered = arrange(kinds)
    if "_compositions" not in root.__dict__:
        # Weak, so that a class made in a function is freed with its last user.
        root._compositions = WeakValueDictionary()
    composition = root._compositions.get(ordered)
    if composition is None:
        check_set(_outermost_kinds([*ordered, *add_ons_of_root]), root)
        composition = _build(root, ordered)
        root._compositions[ordered] = composition
    return composition


def mix(add_on: Any, base: Any) -> TrainerMeta:
    """Return a class with one add-on outside of it, for `AddOnBase.apply`."""
    if not _overrides_apply(add_on):
        return compose(base, [add_on])
    return cast(TrainerMeta, _derive((add_on, base), base, [add_on], _partial=True))


# --------------------------------------------------------------------------------------- from names to classes


def _resolve(base: TrainerMeta, add_on: Any) -> TrainerMeta:
    """Return an add-on class, looking a name up among the installed entry points."""
    if isinstance(add_on, str):
        add_on = load_installed(add_on)
    if not isinstance(add_on, type):
        raise AddOnError(f"add_on() takes classes, one by one, and got {add_on!r:.80}; write add_on(A, B)")
    if not is_add_on(add_on) or is_base(add_on):
        kind = "the base of all add-ons" if is_add_on(add_on) else "not an add-on"
        name = "MyAddon" if is_trainer(add_on) or add_on.__module__ == "builtins" else add_on.__name__
        raise AddOnError(
            f"{add_on.__name__} is {kind}; write class {name}(AddOnBase): ..., and {base.__name__}.add_on({name})"
        )
    return cast(TrainerMeta, add_on)


def load_installed(name: str) -> Any:
    """Load the add-on that is installed under a name."""
    points = list(metadata.entry_points(group="zae.addons"))
    points_by_value = {point.value: point for point in points if point.name == name}
    if not points_by_value:
        points_by_value = {point.value: point for point in points if point.name == f"{name}Addon"}
    if not points_by_value:
        installed_names = sorted({point.name for point in points})
        longer = [candidate for candidate in installed_names if candidate.lower().startswith(name.lower())]
        hint = did_you_mean(name, longer or installed_names, cutoff=0.0 if longer else 0.6)
        hint = hint or f"; installed are {', '.join(installed_names)}"
        raise AddOnError(f"no add-on is called {name!r}{hint}")
    if len(points_by_value) > 1:
        owners = " and ".join(f"{p.value} of {p.dist.name if p.dist else '?'}" for p in points_by_value.values())
        raise AddOnConflict(f"{name!r} is installed more than once: {owners}; import the class and pass it to add_on()")
    point = next(iter(points_by_value.values()))
    try:
        return point.load()
    except ImportError as error:
        raise AddOnRequirement(f"the add-on {name!r} ({point.value}) cannot be imported: {error}") from error


def _outermost_kinds(add_ons: Iterable[TrainerMeta]) -> list[TrainerMeta]:
    """Drop duplicates, and add-ons that are bases of others."""
    unique = list(dict.fromkeys(add_ons))
    return [a for a in unique if not any(b is not a and issubclass(b, a) for b in unique)]


# ------------------------------------------------------------------------------------------- making the class


def _build(root: TrainerMeta, ordered: tuple[TrainerMeta, ...]) -> TrainerMeta:
    """Build the class; an add-on that overrides ``apply`` wraps the class inside of it."""
    inside = _inside_of_root(root, ordered)
    bases: tuple[TrainerMeta, ...] = (root,)
    if inside:
        # The user's class derives from an add-on that belongs outside of these: they come between it and its task.
        add_ons_of_root = add_ons_of(root)
        plain = next(c for c in root.__mro__ if isinstance(c, TrainerMeta) and not c._is_addon and not add_ons_of(c))
        bases = (root, compose(plain, [*add_ons_of_root, *inside]))
    for add_on in reversed([a for a in ordered if a not in inside]):
        if not _overrides_apply(add_on):
            bases = (add_on, *bases)
            continue
        # It gets a class, and returns one: the bases so far are made one class, and go on as what it returned.
        inner = bases[0]
        if len(bases) > 1 or add_on.requires:
            inner = _derive(bases, root, ordered, _partial=True)
        outer = add_on.apply(inner)
        if outer is inner or not (isinstance(outer, TrainerMeta) and inner in outer.__mro__):
            raise AddOnError(f"{add_on.__name__}.apply(base_cls) returned {outer!r}; return a subclass of base_cls")
        # Not on the returned class itself, which may be in use elsewhere.
        bases = (_derive((outer,), root, ordered, _partial=True, _applied=(add_on,)),)
    return _derive(bases, root, ordered, _partial=False, _recipe=(root, ordered))


def _inside_of_root(root: TrainerMeta, ordered: Sequence[TrainerMeta]) -> list[TrainerMeta]:
    """Return the add-ons that belong inside of one that the user's class derives from."""
    outer: list[TrainerMeta] = list(add_ons_of(root))
    inside: list[TrainerMeta] = []
    for add_on in ordered:  # Outermost first, so that one pass is enough.
        if any(is_inside(add_on, other) for other in outer):
            inside.append(add_on)
            outer.append(add_on)
    return inside


def _derive(bases: tuple[TrainerMeta, ...], root: TrainerMeta, ordered: Sequence[TrainerMeta], **marks: Any) -> Any:
    """Create a class of these bases, with the add-ons in its name and docstring."""
    name = f"{root.__name__}[{', '.join(a.__name__ for a in ordered)}]"
    lines = [f"{root.__name__} with add-ons, outermost first:", ""]
    for add_on in ordered:
        summary = (inspect.getdoc(add_on) or "no description").splitlines()[0]
        lines.append(f"- {add_on.__name__}: {summary}")
    if root.__doc__:
        lines += ["", inspect.getdoc(root) or ""]
    namespace = {"__module__": root.__module__, "__qualname__": name, "__doc__": "\n".join(lines), **marks}
    return TrainerMeta(name, bases, namespace)


def _overrides_apply(add_on: TrainerMeta) -> bool:
    """Return whether an add-on makes the class itself that it is put on."""
    return not is_base(next(klass for klass in add_on.__mro__ if "apply" in klass.__dict__))


def _reduce(cls: TrainerMeta) -> Any:
    """Pickle a composed class by its parts, and any other class by name."""
    recipe = cls.__dict__.get("_recipe")
    return cls.__qualname__ if recipe is None else (compose, recipe)


copyreg.pickle(TrainerMeta, _reduce)
