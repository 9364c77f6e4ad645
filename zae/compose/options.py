"""Collect the options of a trainer class with their owners, and refuse wrong arguments with the line to write."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from operator import attrgetter
from types import FunctionType, MappingProxyType
from typing import Any, TypeAlias

from zae.compose.introspect import classes_to_initialize, is_add_on, is_base, is_trainer
from zae.errors import AddOnConflict, OptionError, did_you_mean

__all__ = [
    "check_call",
    "check_owners",
    "expand_call",
    "join",
    "option_value",
    "option_values",
    "options_of",
    "own_options",
    "owners_of_options",
]

_Options: TypeAlias = "Mapping[str, tuple[inspect.Parameter, type]]"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _SetByClass:
    """The default of an option that an outer ``__init__`` passes itself."""

    def __repr__(self) -> str:
        return "<set by the class>"


_SET_BY_CLASS = _SetByClass()


def options_of(cls: Any) -> _Options:
    """Map each option that a class takes to its parameter and its owner, positional ones first."""
    # Cached on the class while its __init__ functions stay the same: each new trainer asks twice, and reading every
    # signature takes longer than a dozen steps of training.
    inits = [klass.__dict__.get("__init__") for klass in cls.__mro__]
    cached_inits, options = cls.__dict__.get("__options__", (None, {}))
    if cached_inits != inits:
        options_by_name: _Options = {}
        for klass in reversed(classes_to_initialize(cls)):
            if isinstance(klass.__dict__.get("__init__"), FunctionType):
                options_by_name = _options_outside(options_by_name, klass)
        options = MappingProxyType(options_by_name)
        cls.__options__ = (inits, options)
    return options


def _options_outside(inner: _Options, klass: type) -> _Options:
    """Return the options of a class whose ``__init__`` passes the rest on to one that takes ``inner``."""
    parameters = _parameters(klass)
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    takes_args = next((p for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    declared = {p.name for p in (*positional, *keyword)}

    # Positional ones: its own, and those of the inner class that come after them, where *args reaches these.
    outside: dict[str, tuple[inspect.Parameter, type]] = {p.name: (p, klass) for p in positional}
    reached = [name for name, (p, _) in inner.items() if p.kind in _POSITIONAL]
    passes_on = takes_args is not None and [p.name for p in positional] == reached[: len(positional)]
    if passes_on:
        for name in reached[len(positional) :]:
            if name in declared:
                break
            outside[name] = inner[name]
    if takes_args is not None and (not passes_on or "*" in inner):
        outside["*"] = (takes_args, klass)
    outside |= {p.name: (p, klass) for p in keyword}
    if takes_kwargs:
        # An __init__ that neither declares a required argument nor passes positional ones on may give it itself.
        gives = not is_add_on(klass) and not passes_on
        for name, (p, owner) in inner.items():
            if name not in outside and name != "*":
                default = _SET_BY_CLASS if gives and p.default is p.empty and p.kind in _POSITIONAL else p.default
                outside[name] = (p.replace(kind=p.KEYWORD_ONLY, default=default), owner)
    return outside


def _parameters(cls: type) -> list[inspect.Parameter]:
    init = cls.__dict__.get("__init__")
    return list(inspect.signature(init).parameters.values())[1:] if isinstance(init, FunctionType) else []


def own_options(cls: type) -> dict[str, inspect.Parameter]:
    """Return the options that a class declares in its own ``__init__``."""
    return {p.name: p for p in _parameters(cls) if p.kind not in _VARIADIC}


def option_values(trainer: Any) -> dict[str, Any]:
    """Return the values of the options that a trainer, or a part of it named in ``_option_places``, has."""
    places: dict[str, str] = {}
    for klass in type(trainer).__mro__:
        places |= klass.__dict__.get("_option_places", {})
    values = {}
    for name in options_of(type(trainer)):
        with suppress(AttributeError):
            values[name] = attrgetter(places.get(name, name))(trainer)
    return values


def option_value(trainer: Any, name: str, default: Any = None) -> Any:
    """Return the value of an option of any add-on; the default where the class takes none of this name."""
    return option_values(trainer).get(name, default)


def check_owners(add_ons: Iterable[Any], cls: Any) -> None:
    """Refuse an option that two unrelated classes declare; a derived class may declare one of its bases again."""
    owners: dict[str, Any] = {}
    classes: dict[Any, None] = {}  # As a set in order.
    for add_on in add_ons:
        classes |= dict.fromkeys(klass for klass in add_on.__mro__ if is_add_on(klass))
    classes |= dict.fromkeys(klass for klass in cls.__mro__ if is_trainer(klass) and not is_add_on(klass))
    for klass in classes:
        for name in own_options(klass):
            owner = owners.setdefault(name, klass)
            if owner not in klass.__mro__ and klass not in owner.__mro__:
                raise AddOnConflict(
                    f"{owner.__name__} and {klass.__name__} both have an option {name!r}; "
                    "rename one of them, or move it to a common base"
                )


def expand_call(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the options that stand for others, whether they are given by position or by name."""
    positional = _positional_names(options_of(cls))
    by_position = dict(zip(positional, args, strict=False))
    given_once = {name: value for name, value in by_position.items() if name not in kwargs}
    expanded = cls.expand_options({**kwargs, **given_once})
    for name, value in given_once.items():
        by_position[name] = expanded.pop(name, value)
    further = args[len(by_position) :]
    return (*by_position.values(), *further), expanded


def _positional_names(options: _Options) -> list[str]:
    """Name the options that can be given by position, in their order."""
    return [name for name, (parameter, _) in options.items() if parameter.kind in _POSITIONAL]


def check_call(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse an unknown, repeated or missing argument before any ``__init__`` runs."""
    options = options_of(cls)
    positional = _positional_names(options)
    by_position = positional[: len(args)]
    named = {name: entry for name, entry in options.items() if name != "*"}
    if len(args) > len(positional) and "*" not in options:
        others = [name for name in named if name not in positional]
        raise OptionError(
            f"{cls.__name__} takes {len(positional)} positional arguments ({', '.join(positional)}) "
            f"and got {len(args)}; name the others: {', '.join(others)}"
        )
    unknown = [name for name in kwargs if name not in named]
    if len(unknown) == 1:
        raise OptionError(f"unknown argument {unknown[0]!r} for {cls.__name__}{_hint_for(cls, unknown[0], named)}")
    if unknown:
        lines = "".join(f"\n  {name!r}{_hint_for(cls, name, named)}" for name in unknown)
        raise OptionError(f"unknown arguments for {cls.__name__}:{lines}")
    for name in kwargs:
        if name in by_position:
            value = args[by_position.index(name)]
            remedy = "keep one"
            if hasattr(value, "param_groups"):
                remedy = f"by position it is an optimizer ({type(value).__name__}), so name that: optimizer=..."
            raise OptionError(f"{cls.__name__} got {name!r} twice: by position and by name; {remedy}")
    required = {name: owner for name, (parameter, owner) in named.items() if parameter.default is parameter.empty}
    missing = {name: owner for name, owner in required.items() if name not in kwargs and name not in by_position}
    if missing:
        names = [repr(name) if owner is cls else f"{name!r} ({owner.__name__})" for name, owner in missing.items()]
        example = getattr(cls, "_option_example", lambda name: "...")
        written = ", ".join(f"{name}={example(name)}" for name in missing)
        raise OptionError(f"{cls.__name__} needs {join(names)}; write {cls.__name__}(..., {written})")


def _hint_for(cls: Any, name: str, options: Collection[str]) -> str:
    """Return what to write instead of an option that the class does not have."""
    if reason := _not_passed_on(cls, name):
        return reason
    owners = owners_of_options(cls)
    owner = owners[name].__name__ if name in owners else ""
    if foreign := _hint_for_foreign(name, options, owner):
        return foreign
    if owner:
        return f": it is an option of {owner}; add it with .add_on({owner})"
    if near := did_you_mean(name, options):
        return near
    if near := did_you_mean(name, owners):
        owner = owners[near.split("'")[1]].__name__
        return f"{near[:-1]}, an option of {owner}? Add it with .add_on({owner})"
    listing = f"; it has {', '.join(options)}"
    user_class = next((klass for klass in _classes_with_init(cls) if not klass.__module__.startswith("zae.")), None)
    if user_class is None:
        return listing
    return (
        f"{listing}; if {user_class.__name__}.__init__ takes it out of its **kwargs, write "
        f"def __init__(self, *args, {name}=..., **kwargs) there"
    )


def _hint_for_foreign(name: str, options: Collection[str], owner: str) -> str:
    """Return what an option of another library is here; empty where none has it, or an add-on has it as well."""
    from zae.compose.hints import HINTS

    remedy = HINTS.get(name)
    if remedy is None or (owner and remedy.startswith(f"{name} (")):
        return ""
    alike = [option for option in options if HINTS.get(option) == remedy]
    near_alike = difflib.get_close_matches(name, alike, n=1)
    is_option = remedy.split()[0] in options
    alternatives = near_alike or ([] if is_option else alike)
    first = f"{' or '.join(alternatives)}, or " if alternatives else ""
    also = f", or the same option of {owner}" if owner and owner not in remedy else ""
    return f"; here it is {first}{remedy}{also}"


def _classes_with_init(cls: Any) -> list[Any]:
    """Return the classes that have an ``__init__`` of their own, the outermost first."""
    return [klass for klass in classes_to_initialize(cls) if isinstance(klass.__dict__.get("__init__"), FunctionType)]


def _not_passed_on(cls: Any, name: str) -> str:
    """Say which ``__init__`` does not pass an option on to the one that declares it; empty where none does."""
    initialized = _classes_with_init(cls)
    for index, klass in enumerate(initialized):
        if not any(p.kind is p.VAR_KEYWORD for p in _parameters(klass)):
            owner = next((inner for inner in initialized[index + 1 :] if name in own_options(inner)), None)
            if owner is None:
                break
            return (
                f": {klass.__name__}.__init__ does not pass it on to {owner.__name__}.__init__, which declares it; "
                "write def __init__(self, ..., **kwargs) there, and super().__init__(..., **kwargs)"
            )
    return ""


def owners_of_options(cls: Any) -> dict[str, Any]:
    """Return the options of the add-ons that are known, with their owners."""
    owners: dict[str, Any] = {}
    for add_on in _defined_add_ons(cls):  # The last owner wins, so that a derived class of a user does not.
        for klass in add_on.__mro__:
            if is_add_on(klass) or not is_trainer(klass):
                owners |= dict.fromkeys(own_options(klass), add_on)
    return owners


def join(names: Iterable[str]) -> str:
    """Join names by commas and a last "and"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


@cache
def _own_entry_points() -> list[metadata.EntryPoint]:
    """List the entry points of zae: to find them reads the metadata of every installed package."""
    points = metadata.entry_points(group="zae.addons")
    return [point for point in points if point.dist is None or point.dist.name == "zae"]


def _defined_add_ons(cls: Any) -> list[Any]:
    """List the add-ons that are defined by now, zae's own last; only for errors, as it imports them."""
    root = classes_to_initialize(cls)[-1]
    installed = []
    for point in _own_entry_points():
        # The message is about another mistake; and the metadata of an editable install may be older than its files.
        with suppress(ImportError, AttributeError):
            installed.append(point.load())
    add_ons: dict[Any, None] = {}
    waiting: list[Any] = [c for c in type.__subclasses__(root) if is_base(c)]
    while waiting:
        subclasses: list[Any] = [c for c in type.__subclasses__(waiting.pop()) if is_add_on(c) and c not in add_ons]
        add_ons |= dict.fromkeys(subclasses)
        waiting += subclasses
    # A base of several add-ons is not what one adds: of WebLoggerAddon and WandBLoggerAddon the second is named.
    leaves = [c for c in installed if not any(other is not c and issubclass(other, c) for other in installed)]
    return [*(c for c in add_ons if c not in leaves), *leaves]
