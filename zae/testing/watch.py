"""Observe what an add-on does: settings, random streams, hooks and calls; compare values."""

from __future__ import annotations

import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zae.random_state import STREAMS, read_stream
from zae.torch_private import accelerator
from zae.values.walk import fields_of, has_same_bits, is_dataclass

__all__ = [
    "Calls",
    "Settings",
    "difference",
    "differing_parts",
    "hooks_of",
]

_SEQUENCES = (list, tuple, deque)
_VALUES = (int, float, complex, str, bytes, set, frozenset, type(None), np.ndarray, Tensor)


def _read_autocast() -> tuple[Any, ...]:
    device = accelerator()
    kinds = ["cpu", *([] if device is None else [device.type])]
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _set_autocast(value: tuple[Any, ...]) -> None:
    for kind, enabled, dtype in value:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "autocast": (_read_autocast, _set_autocast),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "threads of torch": (torch.get_num_threads, torch.set_num_threads),
    "working folder": (os.getcwd, os.chdir),
}
"""How to read and to restore each setting that an add-on may leave changed, by its name in a message."""


class Settings:
    """The settings of this process as they are now."""

    def __init__(self) -> None:
        self._values = {name: read() for name, (read, _) in _SETTINGS.items()}

    def restore(self) -> dict[str, str]:
        """Restore what has changed, and describe it by the name of the setting."""
        states = {}
        for name, (read, write) in _SETTINGS.items():
            before = self._values[name]
            after = read()
            if after != before:
                states[name] = f"{before!r:.60} became {after!r:.60}"
                write(before)
        return states


def hooks_of(model: nn.Module, optimizers: list[Any]) -> dict[str, int]:
    """Count the hooks on a model and its optimizers."""
    counts: dict[str, int] = {}
    for owner in [*model.modules(), *optimizers]:
        for name, value in vars(owner).items():
            if name.endswith("_hooks") and isinstance(value, Mapping):
                counts[name] = counts.get(name, 0) + len(value)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        counts[f"parameter{name}"] = sum(len(getattr(p, name, None) or ()) for p in model.parameters())
    return counts


def difference(a: Any, b: Any, where: str = "", depth: int = 8) -> str | None:
    """Return the first place where two nested values differ bitwise; what cannot be compared is ignored."""
    pairs: list[tuple[str, Any, Any]]
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        pairs = [(f"{where}[{key!r}]", a[key], b[key]) for key in a]
    elif isinstance(a, _SEQUENCES) and isinstance(b, _SEQUENCES) and len(a) == len(b):
        pairs = [(f"{where}[{index}]", *items) for index, items in enumerate(zip(a, b, strict=True))]
    elif type(a) is not type(b) or isinstance(a, (*_VALUES, *_SEQUENCES, Mapping)):
        return None if has_same_bits(a, b) else where
    else:
        pairs = [(where, _contents(a), _contents(b))]
    if not depth:
        return None
    places = (difference(x, y, place, depth - 1) for place, x, y in pairs)
    return next((place for place in places if place is not None), None)


def _contents(value: Any) -> Any:
    """Return what an object of a known kind contains; None for any other."""
    if isinstance(value, STREAMS):
        return read_stream(value)
    if isinstance(value, nn.Module):
        return dict(value.state_dict())
    return fields_of(value) if is_dataclass(value) else None


class Calls:
    """Count the calls of some functions."""

    def __init__(self, codes: Mapping[CodeType, str]) -> None:
        self.codes = codes
        self.count = dict.fromkeys(codes.values(), 0)
        self._seen: dict[int, FrameType] = {}  # Of generators, which are called once and entered often.

    def __enter__(self) -> Calls:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        name = self.codes.get(frame.f_code)
        if name is None or event != "call" or id(frame) in self._seen:
            return
        self.count[name] += 1
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            self._seen[id(frame)] = frame


def differing_parts(a: Any, b: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts in which two trainers differ at the end."""
    rows: dict[str, Callable[[Any], Any]] = {
        "model": lambda t: dict(t.unwrap().state_dict()),
        "optimizer": lambda t: [optimizer.state_dict() for optimizer in t.optimizers.values()],
        "scheduler": lambda t: [_public(scheduler.state_dict()) for scheduler in t.schedulers.values()],
        "history": lambda t: [dict(row) for row in t.train_history + t.valid_history],
        "progress": lambda t: [t.progress_checker.step, t.progress_checker.epoch, t.progress_checker.skipped_steps],
    }
    for part, read in rows.items():
        path = difference(read(a), read(b), part)
        if path is not None:
            yield part, path


def _public(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key[0] != "_"}
