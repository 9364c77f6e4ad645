"""Decorators of the methods that a script calls: wrong arguments are explained, and a class may be asked as well."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from functools import wraps
from types import MethodType
from typing import Any, ParamSpec, TypeVar

from zae.compose.options import options_of, owners_of_options
from zae.errors import OptionError, did_you_mean

__all__ = ["explained_call", "of_class_or_instance"]

P = ParamSpec("P")
R = TypeVar("R")


class of_class_or_instance:  # noqa: N801  (a decorator)
    """Make a method that may be called on the class as well as on an instance: it gets the one or the other."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return MethodType(self.function, owner if instance is None else instance)


def explained_call(example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method refuse arguments that do not fit its signature, with a call to write instead."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = inspect.signature(function).parameters

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # It was called, and has raised it itself.
                raise OptionError(f"{_cause(str(error), args[0], names)}; write {example}") from None

        return call

    return decorate


def _cause(message: str, owner: Any, names: Collection[str]) -> str:
    """Return Python's message about the arguments of a method, with what an unknown name stands for."""
    place, _, text = message.partition("() ")
    unknown = re.match(r"got an unexpected keyword argument '(\w+)'", text)
    if unknown:
        text = f"{unknown[0]}{_remedy_for(unknown[1], owner, names)}"
    return f"{place.rpartition('.')[2]}() {text}"


def _remedy_for(name: str, owner: Any, names: Collection[str]) -> str:
    """Return what a name stands for that a method does not take; empty where nothing is known."""
    from zae.compose.hints import hint

    cls = owner if isinstance(owner, type) else type(owner)
    if name in options_of(cls):
        return f", which is an option of the constructor, {cls.__name__}(model, ..., {name}=...)"
    if remedy := hint(name):
        return f"; {remedy}"
    if add_on := owners_of_options(cls).get(name):
        return f", which is an option of {add_on.__name__}; add it with .add_on({add_on.__name__})"
    return did_you_mean(name, names).removesuffix("?")
