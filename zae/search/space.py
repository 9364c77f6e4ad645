"""The space of a search: what each parameter may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zae.common.argument_checks import describe_value
from zae.errors import ConfigError

__all__ = ["check_space", "describe_space", "suggest"]

_HOW = "write (low, high), (low, high, 'log') or (low, high, step) for a range, or a list of choices"


def check_space(space: Any) -> Mapping[str, Any] | Callable[[Any], Any] | None:
    """Return the space if each of its entries can be used; raise ConfigError otherwise."""
    if space is None or (callable(space) and not isinstance(space, (type, Mapping))):
        return space
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(
            f"space={describe_value(space)}; it must be a dict of ranges and choices, {{'lr': (1e-4, 1e-1, 'log'), "
            "'width': [16, 32]}, or a function of an optuna trial that returns the parameters"
        )
    for name, entry in space.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"space has the name {name!r}; the names of parameters are texts that are not empty")
        if isinstance(entry, list):
            _check_choices(name, entry)
        elif isinstance(entry, tuple):
            _check_range(name, entry)
        else:
            raise ConfigError(
                f"space[{name!r}] is {describe_value(entry)}; {_HOW}; a value that stays the same belongs into "
                "make_trainer"
            )
    return space


def _check_choices(name: str, entry: list[Any]) -> None:
    if not entry:
        raise ConfigError(f"space[{name!r}] is an empty list; {_HOW}")
    for choice in entry:
        if not (choice is None or isinstance(choice, (bool, int, float, str))):
            raise ConfigError(
                f"space[{name!r}] has the choice {describe_value(choice)}; choices are numbers, texts, booleans and "
                "None: write a name for it, and look the name up in make_trainer"
            )


def _check_range(name: str, entry: tuple[Any, ...]) -> None:
    numbers = [each for each in entry if isinstance(each, (int, float)) and not isinstance(each, bool)]
    more = entry[2:]
    fits = len(numbers) == len(entry) or (len(numbers) == 2 and more == ("log",))
    if len(entry) not in (2, 3) or not fits or entry[:2] != tuple(numbers[:2]):
        raise ConfigError(f"space[{name!r}] is {entry!r}; {_HOW}")
    low, high = numbers[:2]
    if not low < high:
        raise ConfigError(f"space[{name!r}] is {entry!r}, where {low!r} is not below {high!r}; {_HOW}")
    if more == ("log",) and low <= 0:
        raise ConfigError(f"space[{name!r}] is {entry!r}; a range with 'log' begins above 0")
    if more and more != ("log",) and not 0 < more[0] <= high - low:
        raise ConfigError(f"space[{name!r}] is {entry!r}; a step is above 0, and at most high - low")


def suggest(space: Any, trial: Any) -> dict[str, Any]:
    """Return the parameters of a trial of optuna; those that it has already stay as they are."""
    if space is None:
        return {}
    if callable(space):
        found = space(trial)
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"the function space returned {describe_value(found)}; it must return a dict of parameters by name, "
                "for instance {'lr': trial.suggest_float('lr', 1e-4, 1e-1, log=True)}"
            )
        return dict(found)
    return {name: _suggest_one(trial, name, entry) for name, entry in space.items()}


def _suggest_one(trial: Any, name: str, entry: Any) -> Any:
    if isinstance(entry, list):
        return trial.suggest_categorical(name, entry)
    low, high, *more = entry
    kind = trial.suggest_int if all(isinstance(each, int) for each in entry if each != "log") else trial.suggest_float
    return kind(name, low, high, **({"log": True} if more == ["log"] else {"step": more[0]} if more else {}))


def describe_space(space: Any) -> Any:
    """Return a space as JSON: a search is continued only with the space that it began with."""
    if isinstance(space, Mapping):
        return {name: repr(entry) for name, entry in space.items()}
    return None if space is None else "a function"
