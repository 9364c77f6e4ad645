"""Compose trainer classes of add-ons: order, check, name, cache and pickle them.

`TrainerMeta` is the metaclass of `zae.Trainer`. It checks every class when it is created
(`zae.compose.class_checks`), and the arguments of every call before any ``__init__`` runs
(`zae.compose.options`).
"""

from __future__ import annotations

import copyreg
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from zae.compose.class_checks import check_class, check_complete, check_instance
from zae.compose.collisions import check_collisions
from zae.compose.foreign_names import missing_attribute
from zae.compose.introspect import (
    LAYERS,
    add_ons_of,
    hook,
    hooks_of,
    is_add_on,
    is_base,
    is_trainer,
    recipe_of,
    replaces,
    slots_of,
)
from zae.compose.options import check_call, check_owners, check_received, expand_call, options_of
from zae.errors import AddOnConflict, AddOnError, AddOnOrder, AddOnRequirement, did_you_mean

__all__ = [
    "LAYERS",
    "TrainerMeta",
    "add_ons_of",
    "compose",
    "hook",
    "hooks_of",
    "load_installed",
    "options_of",
    "replaces",
    "slots_of",
]


class _OfClass(classmethod):
    """A classmethod that raises when it is called on an instance, where its result would be lost."""

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        return super().__get__(instance, owner) if instance is None else partial(_refuse_instance, owner)


def _refuse_instance(cls: TrainerMeta, *add_ons: Any) -> Any:
    root, names = recipe_of(cls)[0].__name__, [getattr(a, "__name__", repr(a)) for a in add_ons]
    raise AddOnError(
        f"add_on() makes a class, and this {cls.__name__} exists already; write "
        f"{root}.add_on({', '.join(names)})(model, ...)"
    )


class TrainerMeta(ABCMeta):
    """Metaclass of every trainer and every add-on."""

    _is_addon: bool
    _recipe: tuple[TrainerMeta, tuple[TrainerMeta, ...]]
    _compositions: WeakValueDictionary[tuple[TrainerMeta, ...], TrainerMeta]
    # What an add-on declares; see zae.addon.AddOnBase.
    layer: str
    inside: tuple[str | type, ...]
    outside: tuple[str | type, ...]
    slot: str | None
    requires: tuple[str | type, ...]
    excludes: Mapping[str, str]
    apply: Callable[[Any], Any]
    expand_options: Callable[[Mapping[str, Any]], dict[str, Any]]
    make_from: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> TrainerMeta:
        parents = [base for base in bases if isinstance(base, TrainerMeta)]
        namespace.setdefault("_is_addon", bool(parents) and all(base._is_addon for base in parents))
        if not parents:
            namespace["add_on"] = _OfClass(namespace["add_on"].__func__)
        try:
            cls = super().__new__(mcls, name, bases, namespace, **kwargs)
        except TypeError as error:
            _explain_bases(name, parents, error)
            raise
        if parents:
            check_class(cls)
            if not cls._is_addon and not getattr(cls, "_partial", False):
                _check_composition(cls)
        return cls

    def _make(cls, *args: Any, **kwargs: Any) -> Any:
        """Check a class and the arguments of its constructor, and make a trainer."""
        if cls._is_addon:
            raise AddOnError(
                f"{cls.__name__} is an add-on and does not run alone; "
                f"write Task.add_on({cls.__name__})(...), or class MyTrainer({cls.__name__}, Task), with your own Task"
            )
        check_complete(cls, args, kwargs)
        if (made := cls.make_from(args, kwargs)) is not None:
            return made
        args, kwargs = expand_call(cls, args, kwargs)
        check_call(cls, args, kwargs)
        trainer = super().__call__(*args, **kwargs)
        check_instance(trainer)
        check_received(trainer, kwargs)
        return trainer

    if not TYPE_CHECKING:  # A checker would take every trainer for Any: it reads __init__ instead.
        __call__ = _make

        def __getattr__(cls, name: str) -> Any:
            raise missing_attribute(cls, name, is_class=True)

    @property
    def __signature__(cls) -> inspect.Signature:
        """Every option that the class takes, from any of its add-ons."""
        parameters = [parameter for parameter, _ in options_of(cls).values()]
        return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__name__}'>"


# ------------------------------------------------------------------------------------------------- composing


def compose(base: TrainerMeta, add_ons: Sequence[Any]) -> TrainerMeta:
    """Return the class composed of ``base`` and a set of add-ons, whose order does not matter."""
    if base._is_addon:
        raise AddOnError(f"{base.__name__} is an add-on, not a trainer; write Task.add_on({base.__name__}, ...)")
    named = [_resolve(base, add_on) for add_on in add_ons]
    root, present = recipe_of(base)
    held = add_ons_of(root)
    wanted = _outermost_kinds([*present, *(a for a in named if not any(a in h.__mro__ for h in held))])
    if not wanted:
        return root
    ordered = arrange(wanted)
    if "_compositions" not in root.__dict__:
        # Weak, so that a class made in a function is freed with its last user.
        root._compositions = WeakValueDictionary()
    found = root._compositions.get(ordered)
    if found is None:
        _check_set(_outermost_kinds([*ordered, *held]), root)
        found = root._compositions[ordered] = _build(root, ordered)
    return found


def arrange(add_ons: Iterable[TrainerMeta]) -> tuple[TrainerMeta, ...]:
    """Order add-ons, outermost first, by their layers and by ``inside`` / ``outside``; ties go by name."""
    waiting = sorted(set(add_ons), key=lambda a: (LAYERS.index(a.layer), a.__name__, a.__module__))
    ordered: list[TrainerMeta] = []
    while waiting:
        ready = [a for a in waiting if not any(_is_inside(b, a) for b in waiting if b is not a)]
        if not ready:
            names = ", ".join(a.__name__ for a in waiting)
            relations = "; ".join(_relations(a) for a in waiting)
            raise AddOnOrder(
                f"no order of {names} satisfies their declarations: {relations}; change a layer, or remove one of "
                "the inside / outside relations"
            )
        ordered.append(ready[0])
        waiting.remove(ready[0])
    return tuple(reversed(ordered))


def _is_inside(a: TrainerMeta, b: TrainerMeta) -> bool:
    """Return whether ``a`` must be inside of ``b``."""
    if LAYERS.index(a.layer) != LAYERS.index(b.layer):
        return LAYERS.index(a.layer) < LAYERS.index(b.layer) or _named_in(b, a.inside) or _named_in(a, b.outside)
    return _named_in(b, a.inside) or _named_in(a, b.outside)


def _named_in(add_on: TrainerMeta, names: Iterable[Any]) -> bool:
    """Return whether an add-on or one of its bases is in a list of names and classes."""
    return any(c is name or c.__name__ == name for name in names for c in add_on.__mro__)


def _relations(add_on: TrainerMeta) -> str:
    """Describe the layer and the relations of an add-on."""
    named = [f"inside {_label(n)}" for n in add_on.inside] + [f"outside {_label(n)}" for n in add_on.outside]
    return f"{add_on.__name__} is in layer {add_on.layer!r}" + "".join(f", {n}" for n in named)


def _label(name: Any) -> str:
    return name if isinstance(name, str) else str(name.__name__)


def _resolve(base: TrainerMeta, add_on: Any) -> TrainerMeta:
    """Return an add-on class, looking a name up among the installed entry points."""
    if isinstance(add_on, str):
        add_on = load_installed(add_on)
    if isinstance(add_on, (list, tuple, set)):
        raise AddOnError(f"add_on() takes the classes one by one, not in a {type(add_on).__name__}; write add_on(A, B)")
    if not isinstance(add_on, type):
        raise AddOnError(f"add_on() takes classes, and got an instance, {add_on!r:.80}; write add_on(SomeAddon)")
    if not is_add_on(add_on) or is_base(add_on):
        what = "the base of all add-ons" if is_add_on(add_on) else "not an add-on"
        name = "MyAddon" if is_trainer(add_on) or add_on.__module__ == "builtins" else add_on.__name__
        raise AddOnError(
            f"{add_on.__name__} is {what}; write class {name}(AddOnBase): ..., and {base.__name__}.add_on({name})"
        )
    return cast(TrainerMeta, add_on)


def load_installed(name: str) -> Any:
    """Load the add-on that is installed under a name."""
    points = list(metadata.entry_points(group="zae.addons"))
    found = {p.value: p for p in points if p.name == name} or {p.value: p for p in points if p.name == name + "Addon"}
    if not found:
        known = sorted({p.name for p in points})
        longer = [each for each in known if each.lower().startswith(name.lower())]
        hint = did_you_mean(name, longer or known, cutoff=0.0 if longer else 0.6)
        hint = hint or f"; installed are {', '.join(known)}"
        raise AddOnError(f"no add-on is called {name!r}{hint}")
    if len(found) > 1:
        owners = " and ".join(f"{p.value} of {p.dist.name if p.dist else '?'}" for p in found.values())
        raise AddOnConflict(f"{name!r} is installed more than once: {owners}; import the class and pass it to add_on()")
    point = next(iter(found.values()))
    try:
        return point.load()
    except ImportError as error:
        raise AddOnRequirement(f"the add-on {name!r} ({point.value}) cannot be imported: {error}") from error


def _outermost_kinds(add_ons: Iterable[TrainerMeta]) -> list[TrainerMeta]:
    """Drop duplicates, and add-ons that are bases of others."""
    unique = list(dict.fromkeys(add_ons))
    return [a for a in unique if not any(b is not a and issubclass(b, a) for b in unique)]


def _build(root: TrainerMeta, ordered: tuple[TrainerMeta, ...]) -> TrainerMeta:
    """Build the class; an add-on that overrides ``apply`` wraps the class inside of it."""
    inside = _inside_of_root(root, ordered)
    bases: tuple[TrainerMeta, ...] = (root,)
    if inside:
        held = add_ons_of(root)
        plain = next(c for c in root.__mro__ if isinstance(c, TrainerMeta) and not c._is_addon and not add_ons_of(c))
        bases = (root, compose(plain, [*held, *inside]))
    for add_on in reversed([a for a in ordered if a not in inside]):
        if _overridden_apply(add_on) is None:
            bases = (add_on, *bases)
            continue
        inner = bases[0] if len(bases) == 1 and not add_on.requires else _derive(bases, root, ordered, _partial=True)
        made = add_on.apply(inner)
        if made is inner or not (isinstance(made, TrainerMeta) and inner in made.__mro__):
            raise AddOnError(f"{add_on.__name__}.apply(base_cls) returned {made!r}; return a subclass of base_cls")
        # Not on the returned class itself, which may be in use elsewhere.
        bases = (_derive((made,), root, ordered, _partial=True, _applied=(add_on,)),)
    return _derive(bases, root, ordered, _partial=False, _recipe=(root, ordered))


def mix(add_on: Any, base: Any) -> TrainerMeta:
    """Return a class with one add-on outside of it, for `AddOnBase.apply`."""
    if _overridden_apply(add_on) is None:
        return compose(base, [add_on])
    return cast(TrainerMeta, _derive((add_on, base), base, [add_on], _partial=True))


def _inside_of_root(root: TrainerMeta, ordered: Sequence[TrainerMeta]) -> list[TrainerMeta]:
    """Return the add-ons that belong inside of one that the user's class derives from."""
    outer: list[TrainerMeta] = list(add_ons_of(root))
    inside: list[TrainerMeta] = []
    for add_on in ordered:  # Outermost first, so that one pass is enough.
        if any(_is_inside(add_on, other) for other in outer):
            inside.append(add_on)
            outer.append(add_on)
    return inside


def _derive(bases: tuple[TrainerMeta, ...], root: TrainerMeta, ordered: Sequence[TrainerMeta], **marks: Any) -> Any:
    """Create a class of these bases, with the add-ons in its name and docstring."""
    name = f"{root.__name__}[{', '.join(a.__name__ for a in ordered)}]"
    lines = [f"{root.__name__} with add-ons, outermost first:", ""]
    lines += [f"- {a.__name__}: {(inspect.getdoc(a) or 'no description').splitlines()[0]}" for a in ordered]
    if root.__doc__:
        lines += ["", inspect.getdoc(root) or ""]
    namespace = {"__module__": root.__module__, "__qualname__": name, "__doc__": "\n".join(lines), **marks}
    return TrainerMeta(name, bases, namespace)


def _overridden_apply(add_on: TrainerMeta) -> Callable[[TrainerMeta], Any] | None:
    """Return the ``apply`` of an add-on that overrides it."""
    owner = next(klass for klass in add_on.__mro__ if "apply" in klass.__dict__)
    return None if is_base(owner) else add_on.apply


def _reduce(cls: TrainerMeta) -> Any:
    """Pickle a composed class by its parts, and any other class by name."""
    recipe = cls.__dict__.get("_recipe")
    return cls.__qualname__ if recipe is None else (compose, recipe)


copyreg.pickle(TrainerMeta, _reduce)

# -------------------------------------------------------------------------------------- checks of a class


def _check_composition(cls: TrainerMeta) -> None:
    """Refuse a class whose add-ons are incompatible or in the wrong order."""
    add_ons = add_ons_of(cls)
    _check_set(add_ons, cls)
    check_collisions(cls)
    mixed: list[Any] = [a for a in cls.__mro__ if a in add_ons]
    for outer, inner in ((a, b) for i, a in enumerate(mixed) for b in mixed[i + 1 :]):
        if _is_inside(outer, inner):
            base = next(c for c in cls.__mro__[1:] if is_trainer(c) and not is_add_on(c) and not add_ons_of(c))
            right = ", ".join(a.__name__ for a in arrange(mixed))
            raise AddOnOrder(
                f"{cls.__name__} puts {outer.__name__} outside of {inner.__name__}, but {outer.__name__} belongs "
                f"inside ({_relations(outer)}; {_relations(inner)}); put all add-ons in one place: "
                f"class {cls.__name__}({right}, {base.__name__}), or leave the order to add_on"
            )


def _origin(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_set(add_ons: Sequence[TrainerMeta], cls: TrainerMeta) -> None:
    """Refuse a slot with two add-ons, a missing requirement, and an option with two owners."""
    by_name: dict[str, TrainerMeta] = {}
    for add_on in add_ons:
        other = by_name.setdefault(add_on.__name__, add_on)
        if other is not add_on:
            raise AddOnConflict(
                f"two add-ons are called {add_on.__name__} ({_origin(other)} and {_origin(add_on)}), and their states "
                "would share a key; rename one (a class that was defined again is another class)"
            )
    slots: dict[str, TrainerMeta] = {}
    for add_on in add_ons:
        for slot, other in slots.items() if add_on.slot else ():
            if f"{slot}.".startswith(f"{add_on.slot}.") or f"{add_on.slot}.".startswith(f"{slot}."):
                first, second = sorted((other.__name__, add_on.__name__))
                shared = min(slot, str(add_on.slot), key=len)  # "parallel" fills all of its dimensions.
                raise AddOnConflict(f"{first} and {second} both fill the slot {shared!r}; keep one")
        if add_on.slot:
            slots[add_on.slot] = add_on
    for add_on in add_ons:
        for name, why in add_on.excludes.items():
            if any(_named_in(other, [name]) for other in add_ons):
                raise AddOnConflict(f"{add_on.__name__} and {name} do not go together: {why}")
        for need in add_on.requires:
            if not any(_named_in(other, [need]) for other in add_ons):
                names = ", ".join(sorted({a.__name__ for a in add_ons} | {_label(need)}))
                raise AddOnRequirement(
                    f"{add_on.__name__} needs {_label(need)}, which is missing; write .add_on({names})"
                )
    check_owners(add_ons, cls)


# ----------------------------------------------------------------------------------- Python's errors, in words


def _explain_bases(name: str, parents: Sequence[TrainerMeta], error: TypeError) -> None:
    """Raise with the right order of the bases, where Python finds none."""
    if "(MRO)" not in str(error) or not any(p._is_addon for p in parents):
        return
    add_ons = arrange([p for p in parents if p._is_addon])
    right = ", ".join(p.__name__ for p in (*add_ons, *(p for p in parents if not p._is_addon)))
    raise AddOnOrder(
        f"{name}({', '.join(p.__name__ for p in parents)}) has no consistent order; add-ons come first: "
        f"class {name}({right})"
    ) from None
