"""Former names of seams and attributes, which work for one more version and warn."""

from __future__ import annotations

import warnings
from typing import Any

from zae.composition.introspect import RENAMED_SEAMS, is_trainer

__all__ = ["keep_old_names"]


class _OldName:
    """The former name of a seam on one class, so that a chain of overrides may mix both names."""

    def __init__(self, old: str, new: str, value: Any) -> None:
        self.old, self.new, self.value = old, new, value

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self.value
        if next(c.__dict__[self.old] for c in type(instance).__mro__ if self.old in c.__dict__) is not self:
            return self.value.__get__(instance, owner)  # Reached by super(); the class that calls it was warned of.
        self._warn(instance)
        return getattr(instance, self.new)

    def __set__(self, instance: Any, value: Any) -> None:
        self._warn(instance)
        setattr(instance, self.new, value)

    def _warn(self, instance: Any) -> None:
        text = f"{type(instance).__name__}.{self.old} is now called {self.new}; use that name"
        warnings.warn(text, DeprecationWarning, stacklevel=3)


def keep_old_names(cls: Any) -> None:
    """Give a class, and the plain classes it derives from, both names of each renamed seam that they define."""
    for klass in (cls, *(c for c in cls.__mro__ if not is_trainer(c) and c is not object)):
        for new, old in RENAMED_SEAMS.items():
            names = klass.__dict__.keys() & {old, new}
            if names == {old}:
                setattr(klass, new, klass.__dict__[old])
                text = f"{klass.__name__} overrides {old}, which is now called {new}; rename the method"
                warnings.warn(text, DeprecationWarning, stacklevel=3)
            if len(names) == 1:
                setattr(klass, old, _OldName(old, new, klass.__dict__[new]))
