"""What a script sets on its optimizers and schedulers, beside what a checkpoint holds of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from zae.errors import CheckpointMismatch, printable
from zae.schedulers import milestones_of, parts_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["REMEDY", "describe", "note", "read", "refuse_other_classes", "take_over", "warn"]

_log = logging.getLogger("zae")
REMEDY = (
    "begin a new run from parts of it: start_from=PATH, start_with=('model', 'optimizer'), options of StateManagerAddon"
)
_PLAIN = (bool, int, float, str, type(None))
_NO_VALUE = object()
# What moves with every step, or follows from the settings of the optimizer.
_MOVING = {"last_epoch", "base_lrs", "best", "mode", "mode_worse", "num_bad_epochs", "cooldown_counter", "T_cur"}
_SHOWN = 10


class _Noted(NamedTuple):
    """An optimizer or a scheduler: its settings as the script made it, and those that it was last loaded with."""

    object: Any
    script: dict[str, Any]
    loaded: dict[str, Any]


def describe(each: Any) -> dict[str, Any]:
    """Return the class of an optimizer or a scheduler, and its settings as plain values.

    Parameters
    ----------
    each : Optimizer or LRScheduler
        As the script has made it, before its first step.

    Returns
    -------
    dict
        ``"class"``, ``"settings"`` and ``"parts"``: the same of the schedulers in a scheduler.

    Examples
    --------
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    >>> describe(scheduler)
    {'class': 'StepLR', 'settings': {'step_size': 2, 'gamma': 0.1}, 'parts': []}
    >>> describe(optimizer)["settings"]["lr"]
    0.1
    """
    if isinstance(each, Optimizer):
        found, parts = dict(_of_groups(each)), []
    else:
        found = {key: value for key, value in vars(each).items() if key[0] != "_" and key not in _MOVING}
        found |= {"milestones": milestones} if (milestones := milestones_of(each)) is not None else {}
        parts = [describe(part) for part in parts_of(each)]
    plain = {key: _plain(value) for key, value in found.items()}
    settings = {key: value for key, value in plain.items() if value is not _NO_VALUE}
    return {"class": type(each).__name__, "settings": settings, "parts": parts}


def _of_groups(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the groups by name; of the rate, the one that a scheduler begins with."""
    for index, group in enumerate(optimizer.param_groups):
        where = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
        for key, value in group.items():
            if key == "lr":
                yield f"lr{where}", group.get("initial_lr", value)
            elif key not in ("params", "param_names", "initial_lr"):
                yield f"{key}{where}", value


def _plain(value: Any) -> Any:
    """Return a setting as a number, a text or a list of them; functions and objects are left out."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        size = value.numel() if isinstance(value, Tensor) else value.size
        value = value.item() if size == 1 else _NO_VALUE
    if isinstance(value, Counter):
        return sorted(value.elements())
    if isinstance(value, (list, tuple)):
        made = [_plain(each) for each in value]
        return _NO_VALUE if any(each is _NO_VALUE for each in made) else made
    return value if value is _NO_VALUE or isinstance(value, _PLAIN) else _NO_VALUE


def note(trainer: Trainer, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> None:
    """Note the settings of what has not been seen before: as the script has made it.

    Parameters
    ----------
    trainer : Trainer
        That keeps them.
    optimizers, schedulers : mapping
        By name.
    """
    noted = trainer._noted
    trainer._noted = {
        (what, name): noted[what, name]
        if (what, name) in noted and noted[what, name].object is each
        else _Noted(each, *[describe(each)] * 2)
        for what, several in (("optimizer", optimizers), ("scheduler", schedulers))
        for name, each in several.items()
    }


def read(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the settings that are in force, for a state."""
    made: dict[str, dict[str, Any]] = {"optimizer": {}, "scheduler": {}}
    for (what, name), each in trainer._noted.items():
        made[what][name] = each.loaded
    return made


def refuse_other_classes(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Refuse the state of an optimizer or a scheduler of another class.

    Parameters
    ----------
    trainer : Trainer
        Whose optimizers and schedulers are noted.
    state : mapping
        What ``state_dict`` returned; an older zae has not saved the classes, and the names of the entries of a
        scheduler have to say.

    Raises
    ------
    CheckpointMismatch
        With both classes.
    """
    saved = state["records"].get("settings")
    for (what, name), each in trainer._noted.items():
        if saved is None:
            _compare_keys(name, each.object, state[what][name]) if what == "scheduler" else None
            continue
        classes = [_classes(one) for one in (saved[what][name], each.script)]
        if classes[0] != classes[1]:
            raise CheckpointMismatch(
                f"{what} {name} was saved by {printable(classes[0])}, and is {classes[1]} here; build it as it was, or "
                + REMEDY
            )


def _classes(description: Mapping[str, Any]) -> str:
    """Return the class of a description, with those of its parts."""
    parts = ", ".join(map(_classes, description["parts"]))
    return str(description["class"]) + (f"({parts})" if parts else "")


def _compare_keys(name: str, scheduler: Any, state: Any) -> None:
    """Refuse the state of a scheduler that has and lacks settings that this one lacks and has."""
    if not isinstance(state, Mapping):
        raise CheckpointMismatch(f"the state of scheduler {name} is a {type(state).__name__}, not a dict")
    own, saved = ({key for key in each if key[:1] != "_"} for each in (scheduler.state_dict(), map(str, state)))
    if own - saved and saved - own:
        raise CheckpointMismatch(
            f"scheduler {name} is {type(scheduler).__name__}, whose {', '.join(sorted(own - saved))} the state does "
            f"not have; it has {printable(', '.join(sorted(saved - own)))}: it is of another class. Build "
            "it as it was, or " + REMEDY
        )


def take_over(trainer: Trainer, saved: Mapping[str, Any] | None) -> None:
    """Note that a state was loaded, and the settings it came with.

    Parameters
    ----------
    trainer : Trainer
        That has loaded it.
    saved : mapping or None
        What `read` returned; None of a state that has none.
    """
    if saved is not None:
        trainer._noted = {
            (what, name): each._replace(loaded=saved[what].get(name, each.script))
            for (what, name), each in trainer._noted.items()
        }
    trainer._tells_settings = saved is not None


def warn(trainer: Trainer) -> None:
    """Name, once after a load, the settings of the script that the state overrides.

    Parameters
    ----------
    trainer : Trainer
        Whose run begins.
    """
    if not trainer._tells_settings:
        return
    trainer._tells_settings = False
    found = [
        text
        for (what, name), each in trainer._noted.items()
        for text in _differences(f"{what} {name} ({each.script['class']})", each.script, each.loaded)
    ]
    if found and trainer.is_main:
        _log.warning(
            "the checkpoint overrides settings of this script (%d): %s. The checkpoint's values are used; to use the "
            "script's, %s",
            len(found), "; ".join(found[:_SHOWN]) + ("; ..." if len(found) > _SHOWN else ""), REMEDY,
        )  # fmt: skip


def _differences(where: str, script: Mapping[str, Any], loaded: Mapping[str, Any]) -> Iterator[str]:
    """Say which settings of two descriptions differ, with both values."""
    for key, value in script["settings"].items():
        other = loaded["settings"].get(key, value)
        if value != other and not (value != value and other != other):
            yield f"{where} has {key}={value!r} in the script and {printable(repr(other))} in the checkpoint"
    for index, parts in enumerate(zip(script["parts"], loaded["parts"])):
        yield from _differences(f"{where}, part {index} ({parts[0]['class']})", *parts)
