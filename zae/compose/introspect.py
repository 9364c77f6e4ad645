"""Read a trainer class: its hooks, its add-ons and their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial, partialmethod
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from zae.addon import AddOnBase

__all__ = [
    "LAYERS",
    "AddOnPart",
    "add_ons_of",
    "by_name",
    "classes_to_initialize",
    "function_of",
    "hook",
    "hooks_of",
    "is_add_on",
    "is_base",
    "is_default",
    "is_engine_slot",
    "is_marked",
    "is_overridden",
    "is_trainer",
    "kinds_of",
    "mentions_super",
    "owners_of",
    "repeats",
    "replaces",
    "slots_of",
    "traits_of",
    "with_trait",
    "wrappers_of",
]

LAYERS = ("model", "loop", "precision", "parallel", "state", "control", "observe")
"""Where an add-on sits, innermost first."""

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


if TYPE_CHECKING:

    class AddOnPart(AddOnBase): ...

else:

    class AddOnPart:
        """Base of a class that holds some of the hooks of one add-on, which derives from it and from AddOnBase."""

        _is_addon = True
        _is_base = True
        slot = None


def hook(function: AnyFunction) -> AnyFunction:
    """Mark a method as a hook: a verb that add-ons override, calling ``super()``.

    Examples
    --------
    >>> from zae import Trainer
    >>> Trainer.clip.__hook__
    True
    """
    _mark(function, "__hook__")
    return function


def replaces(function: AnyFunction) -> AnyFunction:
    """Mark an override that does the whole work of a hook: it does not call ``super()``, or in some calls only.

    Examples
    --------
    >>> from zae import AddOnBase, replaces
    >>> class SignAddon(AddOnBase):
    ...     "Step by the sign of the gradient."
    ...     layer = "loop"
    ...     @replaces
    ...     def clip(self):
    ...         for parameter in self.model.parameters():
    ...             parameter.grad.sign_()
    """
    _mark(function, "__replaces__")
    return function


def repeats(function: AnyFunction) -> AnyFunction:
    """Mark an override that calls ``super()`` several times on purpose: it does the hook's work more than once.

    Examples
    --------
    >>> from zae import AddOnBase, repeats
    >>> class TwiceAddon(AddOnBase):
    ...     "Double every gradient."
    ...     layer = "loop"
    ...     @repeats
    ...     def gradients(self, batch):
    ...         super().gradients(batch)
    ...         return super().gradients(batch)
    """
    _mark(function, "__repeats__")
    return function


def by_name(function: AnyFunction) -> AnyFunction:
    """Mark a method that gets its optional arguments by name; an override gets only the arguments that it takes."""
    _mark(function, "__by_name__")
    return function


def _mark(value: Any, mark: str) -> None:
    """Mark a function; of a property, which takes no attributes, the function inside."""
    setattr(function_of(value) if isinstance(value, (property, cached_property)) else value, mark, True)


def is_marked(value: Any, mark: str) -> bool:
    """Return whether a method carries a mark, on any of the wrappers around it."""
    if isinstance(value, FunctionType) and not value.__dict__:
        return False  # Most methods: neither marked nor around another one.
    return any(getattr(layer, mark, False) is True for layer in wrappers_of(value))


def function_of(value: Any) -> Any:
    """Return the function inside a property, a classmethod, a partial or a wrapper; else the value itself."""
    return list(wrappers_of(value))[-1]


def wrappers_of(value: Any) -> Iterator[Any]:
    """Yield a value of a class body and what it wraps, outermost first."""
    while True:
        yield value
        inner = None
        if isinstance(value, FunctionType):
            inner = value.__dict__.get("__wrapped__")
        elif isinstance(value, property):
            inner = value.fget
        elif isinstance(value, (classmethod, staticmethod)):
            inner = value.__func__
        elif isinstance(value, (partial, partialmethod, cached_property)):
            inner = value.func
        if inner is None:
            return
        value = inner


def mentions_super(value: Any) -> bool:
    """Return whether a method, or one that it wraps or holds, has the cell that ``super()`` without arguments needs."""
    functions = [wrapper for wrapper in wrappers_of(value) if isinstance(wrapper, FunctionType)]
    for layer in list(functions):
        functions += [value for value in _cell_values(layer) if isinstance(value, FunctionType)]
    return any("__class__" in function.__code__.co_freevars for function in functions)


def _cell_values(function: FunctionType) -> Iterator[Any]:
    """Yield what the cells of a closure hold; a cell may still be empty."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents


def is_trainer(cls: Any) -> bool:
    """Return whether a class is Trainer, AddOnBase, or derived from one of them."""
    return isinstance(cls, type) and hasattr(cls, "_is_addon")


def is_add_on(cls: Any) -> bool:
    """Return whether a class is an add-on: a mixin that cannot run without a trainer."""
    return isinstance(cls, type) and bool(getattr(cls, "_is_addon", False))


def classes_to_initialize(cls: Any) -> list[Any]:
    """List the classes of a trainer whose ``__init__`` runs: those up to Trainer, which does not call its base's."""
    mro = list(cls.__mro__)
    return mro[: 1 + max(index for index, klass in enumerate(mro) if is_trainer(klass))]


def is_base(cls: type) -> bool:
    """Return whether a class is AddOnBase itself, whose methods are no work of an add-on."""
    return bool(cls.__dict__.get("_is_base"))


def kinds_of(add_on: Any) -> list[Any]:
    """List an add-on and its bases that are add-ons, without AddOnBase."""
    return [c for c in add_on.__mro__ if is_add_on(c) and not is_base(c)]


def add_ons_of(cls: Any) -> list[Any]:
    """List the add-ons of a class, outermost first."""
    mixed = [c for c in cls.__mro__ if is_add_on(c)]
    # Without the bases of others: an add-on that derives from another one counts as one.
    add_ons = [a for a in mixed if not is_base(a) and not any(b is not a and a in b.__mro__ for b in mixed)]
    for klass in cls.__mro__:
        # Add-ons that have built their class by `apply`, and so are not among its bases.
        add_ons += [a for a in klass.__dict__.get("_applied", ()) if a not in add_ons]
    return add_ons


def is_overridden(trainer: Any, name: str) -> bool:
    """Return whether a class, or an attribute of this trainer, overrides a hook of Trainer."""
    return name in vars(trainer) or sum(name in c.__dict__ for c in type(trainer).__mro__) > 1


def is_default(method: Any) -> bool:
    """Return whether a method is that of Trainer itself."""
    return str(getattr(method, "__qualname__", "")).startswith("Trainer.")


def owners_of(cls: Any, name: str) -> list[Any]:
    """List the classes that override a hook, or write a step, outermost first."""
    owners = [klass for klass in cls.__mro__ if name in klass.__dict__]
    introduced = next((klass for klass in reversed(owners) if is_marked(klass.__dict__[name], "__hook__")), None)
    return [klass for klass in owners if klass is not introduced and klass.__name__ != "Trainer"]


def recipe_of(cls: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the class that add-ons were put on, and the add-ons, outermost first."""
    recipe: tuple[Any, tuple[Any, ...]] = cls.__dict__.get("_recipe", (cls, ()))
    return recipe


def slots_of(cls: Any) -> dict[str, Any]:
    """Map each filled slot to the add-on that fills it; "parallel" to the outermost one of its dimensions."""
    filled = {add_on.slot: add_on for add_on in add_ons_of(cls) if add_on.slot}
    engines = [add_on for slot, add_on in filled.items() if is_engine_slot(slot)]
    return {**filled, "parallel": engines[0]} if engines else filled


def traits_of(add_on: Any) -> set[str]:
    """Return what an add-on and its bases declare to do, and the slot that it fills."""
    traits: set[str] = set()
    for kind in add_on.__mro__:
        traits.update(kind.__dict__.get("traits", ()))
    if add_on.slot:
        traits.add(add_on.slot)
    return traits


def with_trait(cls: Any, *traits: str) -> Any:
    """Return the outermost add-on of a class that declares one of these traits, or fills a slot of the name."""
    return next((add_on for add_on in add_ons_of(cls) if not traits_of(add_on).isdisjoint(traits)), None)


def is_engine_slot(slot: str | None) -> bool:
    """Return whether a slot is "parallel", or one of its dimensions, as "parallel.data"."""
    return (slot or "").partition(".")[0] == "parallel"


def hooks_of(cls: Any) -> dict[str, Any]:
    """Map each hook of a class to the class that introduced it, in the order of their definition."""
    hooks: dict[str, Any] = {}
    for klass in reversed(cls.__mro__):
        for name in _own_hooks(klass):
            hooks.setdefault(name, klass)
    return hooks


_hooks_by_class: WeakKeyDictionary[type, tuple[int, list[str]]] = WeakKeyDictionary()


def _own_hooks(cls: type) -> list[str]:
    """List the hooks that a class body defines; noted, as each composition looks at the classes that it is made of."""
    body = cls.__dict__
    size, names = _hooks_by_class.get(cls, (-1, []))
    if size != len(body):  # What is being made gets more names.
        names = [name for name, value in body.items() if is_marked(value, "__hook__")]
        _hooks_by_class[cls] = (len(body), names)
    return names
