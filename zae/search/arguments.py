"""Check the arguments of a search."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from zae.common.argument_checks import check_count, describe_value
from zae.distributed.spawn import launched_world
from zae.errors import ConfigError, did_you_mean
from zae.search.space import check_space, describe_space
from zae.search.study import NAME

__all__ = ["check_arguments", "check_directory", "check_seconds"]

_DIRECTIONS = {"minimize": "minimize", "maximize": "maximize", "min": "minimize", "max": "maximize"}


def check_arguments(
    make_trainer: Any,
    run: Any,
    space: Any,
    direction: Any,
    pruner: Any,
    objective: Any,
    sampler: Any,
    seed: Any,
    catch: Any,
    name: Any,
) -> dict[str, Any]:
    """Return the attributes of a search, if they can be used."""
    world = launched_world()
    if world is not None and world[1] > 1:
        raise ConfigError(
            f"a search runs in one process, and a launcher has started {world[1]} ranks; start it without the launcher"
        )
    for argument, value in {"make_trainer": make_trainer, "run": run, "objective": objective, "name": name}.items():
        if not callable(value) and not (value is None and argument in ("objective", "name")):
            raise ConfigError(f"{argument}={describe_value(value)}; it must be a function")
    if pruner is not None and not hasattr(pruner, "prune"):
        raise ConfigError(f"pruner={describe_value(pruner)}; give an object, such as optuna.pruners.MedianPruner()")
    if sampler is not None and not callable(sampler) and not hasattr(sampler, "sample_independent"):
        raise ConfigError(f"sampler={describe_value(sampler)}; give a class, such as optuna.samplers.RandomSampler")
    # None is that of the first trainer's monitor.
    directions = None if direction is None and objective is None else _directions(direction or "minimize")
    if pruner is not None and directions is not None and len(directions) > 1:
        raise ConfigError("a search in several directions prunes no trial: leave out pruner, or give one direction")
    caught = None if catch is None else tuple(catch) if isinstance(catch, (list, tuple)) else (catch,)
    if caught and not all(isinstance(each, type) and issubclass(each, BaseException) for each in caught):
        raise ConfigError(f"catch={describe_value(catch)}; give exception classes, for instance catch=RuntimeError")
    checked = check_space(space)
    seed = check_count("seed", seed, least=0, bits=32, optional=True)
    settings = {"space": describe_space(checked), "directions": directions, "seed": seed}
    return {
        "make_trainer": make_trainer,
        "run": run,
        "space": checked,
        "settings": settings,
        "objective": objective,
        "takes_direction": directions is None,
        "sampler": sampler,
        "pruner": pruner,
        "catch": caught,
        "name": name,
    }


def _directions(direction: Any) -> list[str]:
    given = [direction] if isinstance(direction, str) else direction
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(f"direction={describe_value(direction)}; write 'minimize' or 'maximize', or a list of them")
    for each in given:
        if each not in _DIRECTIONS:
            hint = did_you_mean(str(each), ("minimize", "maximize"))
            raise ConfigError(f"direction={each!r}{hint}; it must be 'minimize' or 'maximize'")
    return [_DIRECTIONS[each] for each in given]


def check_seconds(max_time: Any) -> float:
    """Return a limit of time in seconds."""
    found = max_time.total_seconds() if isinstance(max_time, timedelta) else math.inf if max_time is None else max_time
    if not isinstance(found, (int, float)) or isinstance(found, bool) or not found > 0:
        raise ConfigError(f"max_time={max_time!r}; it must be seconds above 0, or a timedelta")
    return float(found)


def check_directory(folder: Any) -> Path:
    """Return the folder of a search; ConfigError where it has trials that no study knows."""
    if not isinstance(folder, (str, Path)) or not str(folder):
        raise ConfigError(f"folder={describe_value(folder)}; it must be the path of a folder")
    path = Path(os.path.abspath(Path(folder).expanduser()))
    if path.exists() and not path.is_dir():
        raise ConfigError(f"folder={str(path)!r} is a file; give the path of a folder")
    if not (path / NAME).exists() and (path / "trial-0000" / "trial.json").exists():
        raise ConfigError(
            f"folder={str(path)!r} has trials, and the record of its search, {NAME}, is missing; choose another folder"
        )
    return path
