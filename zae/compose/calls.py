"""Explain wrong arguments of ``run``, and of other methods that a script calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any, ParamSpec, TypeVar

from zae.compose.options import join, options_of, owners_of_options
from zae.errors import OptionError, did_you_mean

__all__ = ["explained_call", "of_class_or_instance", "run_call"]

P = ParamSpec("P")
R = TypeVar("R")


class of_class_or_instance:  # noqa: N801  (a decorator)
    """Make a method that may be called on the class as well as on an instance: it gets the one or the other."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return MethodType(self.function, owner if instance is None else instance)


def run_call(run: Callable[P, R]) -> Callable[P, R]:
    """Make ``run`` refuse arguments that do not fit its signature."""
    signature = inspect.signature(run)

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _fits(signature, args, kwargs):
            raise OptionError(_explain(list(signature.parameters)[1:], type(args[0]), list(args[1:]), kwargs))
        return run(*args, **kwargs)

    return call


def explained_call(example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method refuse arguments that do not fit its signature, with a call to write instead."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # It was called, and has raised it itself.
                raise OptionError(f"{str(error).rpartition('.')[2]}; write {example}") from None

        return call

    return decorate


def _fits(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether Python can bind the arguments, and ``n_epoch`` is not a loader."""
    try:
        n_epoch = signature.bind(*args, **kwargs).arguments["n_epoch"]
    except TypeError:
        return False
    return not _is_loader(n_epoch)


def _is_loader(value: Any) -> bool:
    is_number = hasattr(value, "item")  # A tensor or an array can be iterated over as well.
    return hasattr(value, "__iter__") and not isinstance(value, str) and not is_number


def _explain(names: list[str], cls: Any, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments, and the line to write."""
    meant = {name: name if name in names else _meant(name, names) for name in kwargs}
    unknown = [name for name in kwargs if name not in names]
    arguments = {meant[name]: value for name, value in kwargs.items()}
    swapped = bool(args) and _is_loader(args[0])
    if swapped:  # A number that follows is that of the epochs.
        counts = [index for index, value in enumerate(args) if isinstance(value, int)]
        args.insert(0, args.pop(counts[0]) if counts else arguments.get("n_epoch", inspect.Parameter.empty))
    call = f"write {_line(names, args, arguments)}"
    if unknown:
        hints = [_hint_for(cls, name) for name in unknown if not meant[name]]
        plural = "s" if len(unknown) > 1 else ""
        return f"unknown argument{plural} {join(map(repr, unknown))} for run(){''.join(hints)}; {call}"
    if swapped or _is_loader(arguments.get("n_epoch")):
        kind = type(args[1] if swapped else arguments["n_epoch"]).__name__
        return f"the first argument of run() is n_epoch, the number of epochs, and not a loader ({kind}); {call}"
    twice = [name for name, _ in zip(names, args, strict=False) if name in kwargs]
    if twice:
        return f"run() got {join(map(repr, twice))} twice, by position and by name; {call}"
    if len(args) > 3:
        return f"run() takes 3 positional arguments (n_epoch, loader, valid_loader) and got {len(args)}; {call}"
    absent = [name for name in names[len(args) : 2] if name not in arguments]
    return f"run() needs {join(map(repr, absent))}; {call}"


def _meant(name: str, names: list[str]) -> str:
    """Return the argument that a name of another trainer, or a misspelt one, stands for; else an empty string."""
    from zae.compose.hints import argument_of_run

    return argument_of_run(name) or did_you_mean(name, names, cutoff=0.8)[len("; did you mean '") : -2]


def _hint_for(cls: Any, name: str) -> str:
    """Return where an argument belongs that ``run`` does not take."""
    if name in options_of(cls):
        return f": {name!r} is an option of the constructor, {cls.__name__}(model, ..., {name}=...)"
    from zae.compose.hints import hint

    if owner := owners_of_options(cls).get(name):
        return f": {name!r} is an option of {owner.__name__}; add it with .add_on({owner.__name__})"
    remedy = hint(name)
    return f": {remedy}" if remedy else ""


def _line(names: list[str], args: list[Any], by_name: Mapping[str, Any]) -> str:
    """Return the call that was meant."""
    values = {**by_name, **dict(zip(names, args, strict=False))}
    n_epoch = values.get("n_epoch")
    if not isinstance(n_epoch, int):
        n_epoch = None if "max_steps" in values and "n_epoch" not in by_name else 1
    texts = [repr(n_epoch), "loader"]
    if "valid_loader" in values:
        texts.append("valid_loader")
    texts += [f"{name}={values[name]!r}" for name in names[3:] if name in values]
    return f"run({', '.join(texts)})"
