"""TrainerMeta: the metaclass of `zae.Trainer`, which looks at every trainer class and at every call of one.

It does what no base class can do, and nothing else:

- When a class statement, or `Trainer.add_on`, makes a class, it is checked: a hook that would never be called, two
  add-ons in one slot, an order that the add-ons do not have (`zae.compose.class_checks`, `zae.compose.conflicts`).
- When a class is called, its arguments are checked before any ``__init__`` runs, with all options of all add-ons known
  (`zae.compose.options`); afterwards the instance is looked at (`zae.compose.instance_checks`). An ``__init__`` sees
  its own options only, and that of an add-on is checked against the types in its signature (`zae.arguments`).
- Where Python finds no order of the bases, its error gets the line to write.

A class that is derived from add-ons alone is an add-on, and cannot be called.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from zae.arguments import checked
from zae.compose.class_checks import check_class
from zae.compose.conflicts import check_composition
from zae.compose.instance_checks import check_complete, check_instance, check_received
from zae.compose.introspect import recipe_of
from zae.compose.options import check_call, expand_call, options_of
from zae.compose.order import arrange
from zae.errors import AddOnError, AddOnOrder

__all__ = ["TrainerMeta"]


class TrainerMeta(ABCMeta):
    """Metaclass of every trainer and every add-on."""

    # What the metaclass, or `zae.compose.composition`, keeps on a class.
    _is_addon: bool
    _recipe: tuple[TrainerMeta, tuple[TrainerMeta, ...]]
    _compositions: WeakValueDictionary[tuple[TrainerMeta, ...], TrainerMeta]
    # What an add-on declares; see zae.addon.AddOnBase.
    layer: str
    inside: tuple[str | type, ...]
    outside: tuple[str | type, ...]
    slot: str | None
    requires: tuple[str | type, ...]
    traits: tuple[str, ...]
    excludes: Mapping[str, str]
    apply: Callable[[Any], Any]
    expand_options: Callable[[Mapping[str, Any]], dict[str, Any]]
    make_from: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> TrainerMeta:
        parents = [base for base in bases if isinstance(base, TrainerMeta)]
        namespace.setdefault("_is_addon", bool(parents) and all(base._is_addon for base in parents))
        if not parents:  # It is Trainer itself.
            namespace["add_on"] = _OfClass(namespace["add_on"].__func__)
        init = namespace.get("__init__")
        if isinstance(init, FunctionType) and (namespace["_is_addon"] or not parents):
            namespace["__init__"] = checked(init)
        try:
            cls = super().__new__(mcls, name, bases, namespace, **kwargs)
        except TypeError as error:
            _explain_bases(name, parents, error)
            raise
        if parents:
            check_class(cls)
            # A partial class is a step on the way to a composed one, which is checked whole.
            if not cls._is_addon and not getattr(cls, "_partial", False):
                check_composition(cls)
        return cls

    def _make(cls, *args: Any, **kwargs: Any) -> Any:
        """Check a class and the arguments of its constructor, and make a trainer."""
        if cls._is_addon:
            raise AddOnError(
                f"{cls.__name__} is an add-on and does not run alone; "
                f"write Task.add_on({cls.__name__})(...), or class MyTrainer({cls.__name__}, Task), with your own Task"
            )
        converted = cls.make_from(args, kwargs)
        if converted is not None:
            return converted
        args, kwargs = expand_call(cls, args, kwargs)
        check_call(cls, args, kwargs)
        check_complete(cls)
        trainer = super().__call__(*args, **kwargs)
        check_instance(trainer)
        check_received(trainer, kwargs)
        return trainer

    if not TYPE_CHECKING:  # A checker would take every trainer for Any: it reads __init__ instead.
        __call__ = _make

        def __getattr__(cls, name: str) -> Any:
            from zae.compose.hints import missing_attribute

            raise missing_attribute(cls, name, is_class=True)

    @property
    def __signature__(cls) -> inspect.Signature:
        """Every option that the class takes, from any of its add-ons."""
        parameters = [parameter for parameter, _ in options_of(cls).values()]
        return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__name__}'>"


def _explain_bases(name: str, parents: Sequence[TrainerMeta], error: TypeError) -> None:
    """Raise with the right order of the bases, where Python finds none."""
    add_ons = [parent for parent in parents if parent._is_addon]
    if "(MRO)" not in str(error) or not add_ons:
        return
    tasks = [parent for parent in parents if not parent._is_addon]
    right = ", ".join(parent.__name__ for parent in (*arrange(add_ons), *tasks))
    raise AddOnOrder(
        f"{name}({', '.join(parent.__name__ for parent in parents)}) has no consistent order; add-ons come first: "
        f"class {name}({right})"
    ) from None


class _OfClass(classmethod):
    """A classmethod that raises when it is called on an instance, where its result would be lost."""

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        if instance is None:
            return super().__get__(instance, owner)
        return partial(_refuse_instance, owner)


def _refuse_instance(cls: TrainerMeta, *add_ons: Any) -> Any:
    root, _ = recipe_of(cls)
    names = [getattr(add_on, "__name__", repr(add_on)) for add_on in add_ons]
    raise AddOnError(
        f"add_on() makes a class, and this {cls.__name__} exists already; write "
        f"{root.__name__}.add_on({', '.join(names)})(model, ...)"
    )
