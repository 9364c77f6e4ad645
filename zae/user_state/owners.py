"""One walk over the objects of a user: which of them hold values, and which values these are.

An owner is an object whose attributes are looked at one by one: of a class that is not of a library, or a namespace; a
dict with a few text keys, by its keys; and a module, by its tensors too. All else that an owner holds is a value, and
so is the state of an owner that saves one itself.
"""

from __future__ import annotations

import argparse
import enum
import functools
import io
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from zae.random_state import STREAMS
from zae.torch_private import unsaved_buffers
from zae.user_state.values import PLAIN, Name, has_state, kind_of
from zae.values.walk import has_same_bits, is_of_library, is_of_zae

__all__ = [
    "MAX_PLACES",
    "STATE",
    "Owner",
    "Place",
    "Walk",
    "attributes_of",
    "can_have",
    "is_of_user",
    "once_for_a_class",
]

_Found = TypeVar("_Found")
_log = logging.getLogger("zae")
STATE = "state_dict()"
"""The key of what an owner saves itself."""

MAX_DEPTH = 5  # Owners in owners.
MAX_PLACES = 5000
MAX_ENTRIES = 64  # Of a container in which owners are looked for.
_BAGS = (types.SimpleNamespace, argparse.Namespace)  # Of Python, and nothing but attributes.
_CLOSED = (type, types.ModuleType, BaseException, logging.Logger, io.IOBase, enum.Enum)
_VALUES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
    deque,
    np.generic,
)
_OF_BASES: dict[type, frozenset[str]] = {
    nn.Module: frozenset(vars(nn.Module())),
    # A schedule puts the last three into its optimizer.
    Optimizer: frozenset({*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called", "_step_count"}),
    DataLoader: frozenset(
        {*vars(DataLoader(TensorDataset(torch.zeros(1)))), "_iterator", "_IterableDataset_len_called"}
    ),
}
"""The attributes of classes of torch that users derive from: they are no values of the user."""


def once_for_a_class(function: Callable[[type], _Found]) -> Callable[[type], _Found]:
    """Keep what a function returns for a class as long as the class is there."""
    known: WeakKeyDictionary[type, _Found] = WeakKeyDictionary()

    @functools.wraps(function)
    def look(cls: type) -> _Found:
        if cls not in known:
            known[cls] = function(cls)
        return known[cls]

    return look


class Place(NamedTuple):
    """Where a value is."""

    store: Any  # A mapping; of the state that an object saves itself, the object.
    key: str
    cls: type | None = None  # The class that holds it, where it is no attribute of the object.

    @property
    def value(self) -> Any:
        """The value that is there."""
        return self.store.state_dict() if self.key is STATE else self.store[self.key]

    def write(self, value: Any) -> None:
        """Put another value there."""
        if self.key is STATE:
            if not has_same_bits(self.store.state_dict(), value):
                self.store.load_state_dict(value)
        elif self.cls is None:
            self.store[self.key] = value
        else:
            type.__setattr__(self.cls, self.key, value)


class Owner(NamedTuple):
    """An object that holds values."""

    object: Any
    store: MutableMapping[str, Any]  # Its attributes, or its entries.


class Walk:
    """The owners and the values that are reached from some objects.

    Parameters
    ----------
    apart : iterable
        Objects that a state has otherwise, and that are not looked at.
    known : mapping
        The paths of owners that an earlier walk has found, by id: they keep them, wherever they are now.
    is_divided : callable
        Whether a dict with text keys is looked at by its keys, by the name of its place.

    Attributes
    ----------
    places : dict
        The values, by name.
    owners : dict
        The owners, by path.
    paths : dict
        The paths of the owners, by id.
    stateful : dict
        The owners that save a state of their own, by path.
    first_omitted : str
        The first value that is one too many to be looked at; else an empty string.
    """

    def __init__(
        self,
        apart: Iterable[object] = (),
        known: Mapping[int, str] = types.MappingProxyType({}),
        is_divided: Callable[[Name, Any], bool] = lambda name, value: True,
    ) -> None:
        self.places: dict[Name, Place] = {}
        self.owners: dict[str, Owner] = {}
        self.paths: dict[int, str] = {}
        self.stateful: dict[str, Any] = {}
        self.first_omitted = ""
        self._apart = set(map(id, apart))
        self._known = known
        self._taken = set(known.values())
        self._is_divided = is_divided
        self._classes: dict[type, tuple[frozenset[str], list[tuple[type, str]]]] = {}
        self._count = 0  # Of the values of the user.

    def add(self, path: str, value: Any, depth: int = MAX_DEPTH, without: frozenset[str] = frozenset()) -> None:
        """Look at an object whose attributes are values, whatever its class."""
        store = value if isinstance(value, dict) else attributes_of(value)
        self.paths[id(value)] = path
        self.owners[path] = Owner(value, store)
        if isinstance(value, dict):
            for name in [*value]:
                self._visit(path, Place(store, name), depth)
            return
        cls = type(value)
        if cls not in self._classes:
            self._classes[cls] = _names_aside(cls), _class_values(cls)
        aside, of_classes = self._classes[cls]
        for holder, name in of_classes:
            if name not in aside and name not in without and name not in store:
                self._visit(path, Place(vars(holder), name, holder), depth)
        for name in [*store]:
            if name in aside or name in without or name.startswith("__"):
                continue
            # What is called in place of a method is none: the first step of a run is watched so.
            if not (callable(store[name]) and callable(getattr(cls, name, None))):
                self._visit(path, Place(store, name), depth)

    def add_module(self, path: str, module: nn.Module, depth: int = MAX_DEPTH, *, with_tensors: bool) -> None:
        """Look at a module and those within: at buffers that its state lacks, or at all tensors; and at attributes."""
        for inner, part in module.named_modules(prefix=path):
            if id(part) in self.paths or (with_tensors and id(part) in self._apart):
                continue
            for name in [*part._buffers, *part._parameters] if with_tensors else unsaved_buffers(part):
                self.places[inner, name] = Place(part._parameters if name in part._parameters else part._buffers, name)
            if is_of_user(type(part)) or (with_tensors and not type(part).__module__.startswith("torch.")):
                self.add(inner, part, depth)
            else:
                self.add_settings(inner, part, vars(part))

    def add_settings(self, path: str, owner: Any, store: MutableMapping[str, Any]) -> None:
        """Look at the numbers and texts alone: the rate of a Dropout, for instance, or the options of a trainer."""
        self.paths[id(owner)] = path
        self.owners[path] = Owner(owner, store)
        for name in store:
            if type(store[name]) in PLAIN and not name.startswith("_") and name not in _OF_BASES[nn.Module]:
                self.places[path, name] = Place(store, name)

    def _visit(self, path: str, place: Place, depth: int) -> None:
        """Note a value, and look into it where it is an owner."""
        value = place.value
        self._count += 1
        if self._count > MAX_PLACES:
            self.first_omitted = self.first_omitted or f"{path}.{place.key}"
            return
        if type(value) in PLAIN:
            self.places[path, place.key] = place
            return
        if id(value) in self._apart or is_of_zae(type(value)):
            return
        inner = f"{path}.{place.key}"
        is_open = depth and type(value) is dict and id(value) not in self.paths and _has_few_names(value)
        if is_open and self._is_divided((path, place.key), value):
            self.add(inner, value, depth - 1)
            return
        self.places[path, place.key] = place
        if depth:
            for location, owner in _owners_in(inner, value):
                self._enter(location, owner, depth - 1)

    def _enter(self, location: str, value: Any, depth: int) -> None:
        """Look into an owner that was not met yet; it has the path of its place, unless it had another one before."""
        if id(value) in self.paths or id(value) in self._apart or is_of_zae(type(value)):
            return
        path = self._known.get(id(value), "")
        if not path and location in self._taken:  # By an object that is elsewhere now.
            return
        path = path or location
        if isinstance(value, nn.Module):
            self.add_module(path, value, depth, with_tensors=True)
            return
        if _is_owner(value):
            self.add(path, value, depth)
        else:
            self.paths[id(value)] = path
            self.owners[path] = Owner(value, {})
        if has_state(value):
            self.stateful[path] = value
            self.places[path, STATE] = Place(value, STATE)


def _owners_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value that is an owner, or saves a state of its own, and those in a short container."""
    if _is_owner(value) or (has_state(value) and not isinstance(value, _CLOSED)):
        yield path, value
    elif isinstance(value, (list, tuple, dict, deque)) and len(value) <= MAX_ENTRIES:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _owners_in(f"{path}[{key!r}]", entry)


def _is_owner(value: Any) -> bool:
    """Return whether the attributes of an object are looked at one by one."""
    if isinstance(value, (nn.Module, *_BAGS)):
        return True
    if isinstance(value, (*_VALUES, *_CLOSED, *STREAMS, Tensor, np.ndarray)) or not is_of_user(type(value)):
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(type(value)))


def _has_few_names(value: dict[Any, Any]) -> bool:
    return 0 < len(value) <= MAX_ENTRIES and all(type(key) is str for key in value)


# ------------------------------------------------------------------------------------------------------------ classes


def is_of_user(cls: type) -> bool:
    """Return whether a class, or one that it derives from, is of no library: engines derive from those of users."""
    return bool(_places_of_user(cls))


@once_for_a_class
def _places_of_user(cls: type) -> tuple[int, ...]:
    """Return where in the bases of a class those of no library are: to keep these would keep the class."""
    return tuple(index for index, base in enumerate(cls.__mro__) if not _is_of_library(base))


def _is_of_library(cls: type) -> bool:
    """Return whether a class is of a library; one of a metaclass or `make_dataclass` is not, whose module it has."""
    is_made = cls.__module__ in ("abc", "types") and getattr(sys.modules[cls.__module__], cls.__name__, None) is not cls
    return is_of_library(cls) and not is_made


def _names_aside(cls: type) -> frozenset[str]:
    """Return the attributes that are no values: of classes of torch, and those that a class leaves unsaved."""
    aside = {"unsaved_attributes"}.union(*(names for base, names in _OF_BASES.items() if issubclass(cls, base)))
    return frozenset(aside.union(*(vars(base).get("unsaved_attributes", ()) for base in cls.__mro__)))


def _class_values(cls: type) -> list[tuple[type, str]]:
    """Return the attributes of a user's classes that are values, each with the class that has it."""
    classes: dict[str, type] = {}
    for base in (cls.__mro__[index] for index in reversed(_places_of_user(cls))):
        if not vars(base).get("_is_addon"):
            for name, value in vars(base).items():
                if isinstance(value, (*_VALUES, Tensor, np.ndarray, *STREAMS)) and not name.startswith(("__", "_abc_")):
                    classes[name] = base
    return [(cls, name) for name, cls in classes.items()]


def can_have(owner: Owner, name: str) -> bool:
    """Return whether a state may give an object an attribute of this name, which it does not have yet.

    A dunder, and a name that its class has for anything but a value, a method or a property for instance, it may not.
    """
    if isinstance(owner.object, dict):
        return True
    if owner.object is owner.store:  # The options of a trainer: its class says which there are.
        return False
    cls = type(owner.object)
    if name.startswith("__") or not name.isidentifier() or name in _names_aside(cls):
        return False
    attribute = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    return (
        attribute is None
        or isinstance(attribute, (types.MemberDescriptorType, *_VALUES))
        or kind_of(attribute) is not None
    )


# --------------------------------------------------------------------------------------------------------- attributes


def _slots_of(cls: type) -> dict[str, types.MemberDescriptorType]:
    """Return the attributes that the classes of an object keep in slots."""
    slots_by_name = {}
    for base in reversed(cls.__mro__):
        if "__slots__" in vars(base) and not is_of_library(base):
            slots = {name: slot for name, slot in vars(base).items() if isinstance(slot, types.MemberDescriptorType)}
            slots_by_name.update(slots)
    return slots_by_name


def attributes_of(value: Any) -> MutableMapping[str, Any]:
    """Return the attributes of an object; to write into it calls no code of its class."""
    slots = _slots_of(type(value))
    return _InSlots(value, slots) if slots else vars(value)


class _InSlots(dict[str, Any]):
    """The attributes of an object of a class with slots, and those beside them; what is set here is set there."""

    def __init__(self, value: Any, slots: dict[str, types.MemberDescriptorType]) -> None:
        self._object = value
        self._slots = slots
        super().__init__(getattr(value, "__dict__", {}))
        for name, slot in slots.items():
            with suppress(AttributeError):  # It is empty.
                super().__setitem__(name, slot.__get__(value))

    def __getitem__(self, name: str) -> Any:
        return self._slots[name].__get__(self._object) if name in self._slots else vars(self._object)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._object, value)
        elif hasattr(self._object, "__dict__"):
            vars(self._object)[name] = value
        super().__setitem__(name, value)

    def pop(self, name: str, *default: Any) -> Any:
        if name in self._slots and name in self:
            self._slots[name].__delete__(self._object)
        else:
            getattr(self._object, "__dict__", {}).pop(name, None)
        return super().pop(name, *default)
