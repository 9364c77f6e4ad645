"""Types of arguments with their limits: a signature states them, and a call is checked against it.

For a type checker, ``patience: Count = 3`` is an int. The constructor of an add-on is checked as it is; any other
function has the decorator `checked`. An error names the argument, its value, and what to write instead.

A parameter is checked if its type consists of

- ``bool``, ``None``, ``Literal["min", "max"]`` and ``Callable[...]``;
- numbers with limits: `Count`, `CountOrZero`, `Seed`, `NonNegative`, or ``Annotated[float, Interval("(0, 1]")]``;
- types with a text of what to write: ``Annotated[Mapping[str, int], "a dict of sizes, for instance {'shard': 4}"]``.

It is not checked if another type is among them, or a name that only type checkers import. What relates two arguments is
for the code of the function.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from zae.errors import ConfigError, did_you_mean

__all__ = ["Count", "CountOrZero", "Interval", "NonNegative", "Seed", "check_argument", "checked", "declared_arguments"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Interval(NamedTuple):
    """The interval that a number is in, as mathematics writes it; an infinite end is not within.

    Parameters
    ----------
    text : str
        ``"[0, 1)"`` is from 0, which is within, to 1, which is not; ``"[1, inf)"`` has no upper end.

    Examples
    --------
    >>> from typing import Annotated
    >>> from zae.arguments import Interval, checked
    >>> @checked
    ... def average(decay: Annotated[float, Interval("[0, 1)")]):
    ...     return decay
    >>> average(1.5)
    Traceback (most recent call last):
    zae.errors.ConfigError: decay=1.5; it must be a number in [0, 1)
    """

    text: str

    @property
    def ends(self) -> list[float]:
        """The lower and the upper end."""
        return [float(end) for end in self.text[1:-1].split(",")]

    def contains(self, value: float) -> bool:
        """Return whether a number is within."""
        lower, upper = self.ends
        is_end_within = (value == lower and self.text[0] == "[") or (value == upper and self.text[-1] == "]")
        return lower < value < upper or is_end_within

    def __str__(self) -> str:
        lower, upper = self.ends
        is_half_line = self.text[0] == "[" and upper == math.inf
        return f"of at least {lower:g}" if is_half_line else f"in {self.text}"


Count: TypeAlias = Annotated[int, Interval("[1, inf)")]
CountOrZero: TypeAlias = Annotated[int, Interval("[0, inf)")]
Seed: TypeAlias = Annotated[int, Interval(f"[0, {2**64})"), "a whole number of at least 0 and below 2**64"]
NonNegative: TypeAlias = Annotated[float, Interval("[0, inf)")]


class Alternative(NamedTuple):
    """One of the types that an argument may have: in words, and how to recognize a value and to convert it."""

    words: str
    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


class Declaration(list[Alternative]):
    """What a type says of an argument: the alternatives."""

    def __str__(self) -> str:
        return ", or ".join(alternative.words for alternative in self)

    def convert(self, name: str, value: Any) -> Any:
        """Return a value as the function gets it, a number of NumPy as one of Python, or refuse it."""
        for alternative in self:
            if alternative.fits(value):
                return alternative.convert(value)
        hint = did_you_mean(str(value), re.findall(r"'(\w+)'", str(self)))
        raise ConfigError(f"{name}={value!r:.80}; it must be {self}{hint}")


def _alternatives(annotation: Any) -> Iterator[Alternative]:
    """Yield what a type allows; TypeError where that cannot be checked."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for part in parts:
            yield from _alternatives(part)
    elif origin is Literal or annotation in (bool, NoneType):
        yield _choice(parts or {bool: (True, False), NoneType: (None,)}[annotation])
    elif origin is Callable:
        yield Alternative("a function", callable)
    elif origin is Annotated:
        yield _annotated(*parts)
    else:
        raise TypeError(f"{annotation!r} has no limits")


def _choice(values: tuple[Any, ...]) -> Alternative:
    """Return the alternative of one of these values."""
    kinds = (*map(type, values), *([np.bool_] if True in values else []))
    *most, last = map(repr, values)
    words = f"{', '.join(most)} or {last}" if most else last
    return Alternative(
        words, lambda value: isinstance(value, kinds) and value in values, lambda value: values[values.index(value)]
    )


def _annotated(kind: Any, *notes: Any) -> Alternative:
    """Return the alternative of a number in an interval, or of an instance of a class."""
    words = next((note for note in notes if isinstance(note, str)), "")
    interval = next((note for note in notes if isinstance(note, Interval)), None)
    if interval is None:
        base = get_origin(kind) or kind
        return Alternative(words or str(kind), lambda value: isinstance(value, base))
    number: Any = {int: Integral, float: Real}[kind]

    def fits(value: Any) -> bool:
        return isinstance(value, number) and not isinstance(value, bool) and interval.contains(value)

    return Alternative(words or f"a {'whole ' * (kind is int)}number {interval}", fits, kind)


@cache
def _declaration(kind: Any) -> Declaration:
    """Return what a type says, read once: a cadence checks three arguments."""
    return Declaration(_alternatives(kind))


def check_argument(name: str, value: Any, kind: Any) -> Any:
    """Return a value as a type with limits has it, or refuse it by a name."""
    return _declaration(kind).convert(name, value)


def declared_arguments(function: Callable[..., Any]) -> dict[str, Declaration]:
    """Return what the types in the signature of a function say of its arguments, by their names."""
    function = inspect.unwrap(function)
    declarations = {}
    for name, annotation in function.__annotations__.items():
        # Each alone: a name in the type of another parameter may be there for type checkers only.
        with suppress(NameError, AttributeError, TypeError):
            parameter = SimpleNamespace(__annotations__={name: annotation})
            kind = get_type_hints(parameter, function.__globals__, include_extras=True)[name]
            declarations[name] = _declaration(kind)
    declarations.pop("return", None)
    return declarations


def checked(function: _Function) -> _Function:
    """Check the arguments of each call against the types in the signature.

    Parameters
    ----------
    function : callable
        A function, or a method.

    Raises
    ------
    ConfigError
        In a call, for an argument that is not what its type says.

    Examples
    --------
    >>> from zae.arguments import Count, checked
    >>> @checked
    ... def repeat(text: str, times: Count = 1):
    ...     return text * times
    >>> repeat("ab", 0)
    Traceback (most recent call last):
    zae.errors.ConfigError: times=0; it must be a whole number of at least 1
    """
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    declared: dict[str, Declaration] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal declared
        if declared is None:  # Not before the first call: a type may be defined below the function.
            declared = declared_arguments(function)
        for name, value in kwargs.items():
            if name in declared:
                kwargs[name] = declared[name].convert(name, value)
        first = [declared[name].convert(name, value) if name in declared else value for name, value in zip(names, args)]
        return function(*first, *args[len(first) :], **kwargs)

    return cast(_Function, call)
