"""Names that a trainer does not have: former ones work for one more version and warn, others explain what to write."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Container
from operator import attrgetter
from typing import Any

from zae.composition.foreign_names import ABSENT_NAMES, Absent
from zae.composition.introspect import RENAMED_SEAMS

__all__ = ["absent_names", "keep_old_names", "present_names"]


class _OldName:
    """The former name of a seam on one class, or of an attribute."""

    def __init__(self, old: str, new: str, value: Any = None) -> None:
        self.old, self.new, self.value = old, new, value

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self.value or self
        if next(c.__dict__[self.old] for c in type(instance).__mro__ if self.old in c.__dict__) is not self:
            return self.value.__get__(instance, owner)  # Reached by super(); the class that calls it was warned of.
        self._warn(instance)
        return attrgetter(self.new)(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        self._warn(instance)
        holder, _, name = self.new.rpartition(".")
        setattr(attrgetter(holder)(instance) if holder else instance, name, value)

    def _warn(self, instance: Any) -> None:
        cure = f"is now {self.new}; use that name" if self.new[0] != "_" else "is not public anymore; keep the option"
        warnings.warn(f"{type(instance).__name__}.{self.old} {cure}", DeprecationWarning, stacklevel=3)


def keep_old_names(cls: Any) -> None:
    """Add the former names of a class: of its ``old_attributes``, and of each renamed seam.

    Each class that defines a seam gets both names, also a class without a metaclass that ``cls`` derives from, so that
    a chain of overrides may mix them.
    """
    for old, new in cls.__dict__.get("old_attributes", {}).items():
        setattr(cls, old, _OldName(old, new))
    for klass in (cls, *(c for c in cls.__mro__ if not isinstance(c, type(cls)))):
        for new, old in RENAMED_SEAMS.items():
            names = klass.__dict__.keys() & {old, new}
            if names == {old}:
                setattr(klass, new, klass.__dict__[old])
                text = f"{klass.__name__} overrides {old}, which is now called {new}; rename the method"
                warnings.warn(text, DeprecationWarning, stacklevel=4)  # The class statement.
            if len(names) == 1:
                setattr(klass, old, _OldName(old, new, klass.__dict__[new]))


def absent_names(present: Container[str]) -> dict[str, Any]:
    """Return what explains the absent names, for the namespace of Trainer; a class or an instance may set each."""
    return {**{name: Absent(name) for name in ABSENT_NAMES if name not in present}, "__dir__": present_names}


def present_names(self: Any) -> list[str]:
    """Return what ``dir`` lists of a class or an instance."""
    names = type.__dir__(self) if isinstance(self, type) else object.__dir__(self)
    hidden = {name for name in names if isinstance(inspect.getattr_static(self, name, None), (Absent, _OldName))}
    return [name for name in names if name not in hidden]
