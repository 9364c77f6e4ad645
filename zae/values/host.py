"""What a step returns, on the host: without a graph, and without memory of a device."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

__all__ = ["to_host"]


def to_host(value: Any) -> Any:
    """Detach a tensor, or the tensors in a container or an object, and bring them to the host; copy an array."""
    if isinstance(value, Tensor):
        # A view of what the step continues to use would change later.
        return value.detach().clone() if value.is_cpu else value.detach().cpu()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_host(item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(to_host(item) for item in value)
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, to_host(getattr(value, field.name)))
        return twin
    return _free(value, {}) if hasattr(value, "__dict__") else value


def _free(value: Any, twins: dict[int, Any]) -> Any:
    """Return an object of any class without a graph or memory of a device: itself, or a copy where it holds some.

    A distribution is such an object, and the cache of keys and values that a language model returns. ``twins`` has the
    copies by the ids of what they are of, so that objects which refer to each other are copied once.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu() if value.requires_grad or not value.is_cpu else value
    kind = type(value)
    if kind in (list, tuple):
        items = [_free(item, twins) for item in value]
        is_same = all(map(operator.is_, items, value))
        return value if is_same else kind(items)
    members = value if kind is dict else getattr(value, "__dict__", None)
    # Modules stay alive in any case.
    if not members or type(members) is not dict or isinstance(value, (nn.Module, ModuleType)):
        return value
    if id(value) not in twins:
        try:
            twin = copy.copy(value)
            twins[id(value)] = twin  # Before its attributes are looked at, which may refer back to it.
            inner = {key: _free(item, twins) for key, item in members.items()}
            if all(inner[key] is item for key, item in members.items()):
                return value
            attributes = twin if kind is dict else vars(twin)
            attributes.update(inner)
        except Exception:  # Of the user's classes: what cannot be copied is kept as it is.
            return value
    return twins[id(value)]
