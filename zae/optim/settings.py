"""The settings of optimizers and schedulers in a script, and in a checkpoint that overrides them."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from zae.errors import CheckpointMismatch, printable
from zae.schedulers.lengths import milestones_of, parts_of

__all__ = ["REMEDY", "ScriptSettings", "describe"]

_log = logging.getLogger("zae")
REMEDY = (
    "begin a new run from parts of it: start_from=PATH, start_with=('model', 'optimizer'), options of StateManagerAddon"
)
_PLAIN = (bool, int, float, str, type(None))
_NO_VALUE = object()
# Attributes that change with every step, or follow from the settings of the optimizer.
_CHANGING = {"last_epoch", "base_lrs", "best", "mode", "mode_worse", "num_bad_epochs", "cooldown_counter", "T_cur"}
_SHOWN = 10


class _Settings(NamedTuple):
    """The settings of an optimizer or a scheduler in the script, and the settings that were loaded last."""

    object: Any
    script: dict[str, Any]
    loaded: dict[str, Any]


def describe(each: Any) -> dict[str, Any]:
    """Return the class of an optimizer or a scheduler, and its settings as plain values."""
    parts: list[dict[str, Any]] = []
    if isinstance(each, Optimizer):
        found = dict(_of_groups(each))
    else:
        found = {key: value for key, value in vars(each).items() if key[0] != "_" and key not in _CHANGING}
        milestones = milestones_of(each)
        if milestones is not None:
            found["milestones"] = milestones
        parts += [describe(part) for part in parts_of(each)]
    plain = {key: _plain(value) for key, value in found.items()}
    settings = {key: value for key, value in plain.items() if value is not _NO_VALUE}
    return {"class": type(each).__name__, "settings": settings, "parts": parts}


def _of_groups(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the groups by name; the rate is the initial one where there is a scheduler."""
    for index, group in enumerate(optimizer.param_groups):
        where = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
        for key, value in group.items():
            if key == "lr":
                yield f"lr{where}", group.get("initial_lr", value)
            elif key not in ("params", "param_names", "initial_lr"):
                yield f"{key}{where}", value


def _plain(value: Any) -> Any:
    """Return a setting as a number, a str or a list of them; functions and objects are left out."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        size = value.numel() if isinstance(value, Tensor) else value.size
        value = value.item() if size == 1 else _NO_VALUE
    if isinstance(value, Counter):
        return sorted(value.elements())
    if isinstance(value, (list, tuple)):
        made = [_plain(each) for each in value]
        return _NO_VALUE if any(each is _NO_VALUE for each in made) else made
    return value if value is _NO_VALUE or isinstance(value, _PLAIN) else _NO_VALUE


class ScriptSettings:
    """The settings of optimizers and schedulers in a script, and in the checkpoint that was loaded."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], _Settings] = {}
        self._is_loaded = False  # Whether a state was loaded whose settings `warn` has not compared yet.

    def note(self, **several: Mapping[str, Any]) -> None:
        """Record the settings of optimizers and schedulers that are new, by name."""
        noted = {}
        for what, held in several.items():
            for name, each in held.items():
                known = self._noted.get((what, name))
                if known is None or known.object is not each:
                    description = describe(each)
                    known = _Settings(each, description, description)
                noted[what, name] = known
        self._noted = noted

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the settings in use."""
        made: dict[str, dict[str, Any]] = {"optimizer": {}, "scheduler": {}}
        for (what, name), each in self._noted.items():
            made[what][name] = each.loaded
        return made

    def check_classes(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of a trainer whose optimizers or schedulers are of other classes."""
        saved = state["records"]["settings"]
        for (what, name), each in self._noted.items():
            classes_before = _classes(saved[what][name])
            classes = _classes(each.script)
            if classes_before != classes:
                raise CheckpointMismatch(
                    f"{what} {name} was saved by {printable(classes_before)}, and is {classes} here; build it as it "
                    f"was, or {REMEDY}"
                )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Record the settings of a state that was loaded."""
        for (what, name), each in list(self._noted.items()):
            self._noted[what, name] = each._replace(loaded=saved[what].get(name, each.script))
        self._is_loaded = True

    def warn(self, is_main: bool) -> None:
        """Warn, once after a load, of the settings of the script that the state overrides."""
        if not self._is_loaded:
            return
        self._is_loaded = False
        texts: list[str] = []
        for (what, name), each in self._noted.items():
            texts += _differences(f"{what} {name} ({each.script['class']})", each.script, each.loaded)
        if texts and is_main:
            shown = "; ".join(texts[:_SHOWN])
            if len(texts) > _SHOWN:
                shown += "; ..."
            _log.warning(
                "the checkpoint overrides settings of this script (%d): %s. The checkpoint's values are used; to use "
                "the script's, %s",
                len(texts),
                shown,
                REMEDY,
            )


def _classes(description: Mapping[str, Any]) -> str:
    """Return the class name of a description, with those of its parts."""
    parts = ", ".join(map(_classes, description["parts"]))
    return str(description["class"]) + (f"({parts})" if parts else "")


def _differences(where: str, script: Mapping[str, Any], loaded: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each setting in which two descriptions differ."""
    for key, value in script["settings"].items():
        other = loaded["settings"].get(key, value)
        if value != other and not (value != value and other != other):
            yield f"{where} has {key}={value!r} in the script and {printable(repr(other))} in the checkpoint"
    for index, parts in enumerate(zip(script["parts"], loaded["parts"])):
        yield from _differences(f"{where}, part {index} ({parts[0]['class']})", *parts)
