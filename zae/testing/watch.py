"""Observe what an add-on does: files, random streams, hooks, calls, device reads; compare values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zae.common import random_state

__all__ = [
    "Calls",
    "Transfers",
    "class_values",
    "copy_of_plain",
    "difference",
    "differing_parts",
    "effects",
    "graph_in",
    "groups_of",
    "held_in",
    "hooks_of",
    "output",
    "shared_entries",
    "snapshot",
    "streams",
    "tensors_in",
]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_listening: list[list[str]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note effects outside of the process inside of `effects`; an audit hook cannot be removed."""
    if not _listening or threading.current_thread() is not threading.main_thread():
        return
    if event == "open":
        path, mode, flags = arguments
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags and flags & _WRITES)
        if writes and isinstance(path, (str, bytes, os.PathLike)) and not str(path).startswith("/dev/"):
            _listening[-1].append(f"opens {os.fsdecode(path)!r} for writing")
    elif event == "os.mkdir":
        _listening[-1].append(f"makes the folder {str(arguments[0])!r}")
    elif event in ("subprocess.Popen", "socket.connect", "os.fork"):
        _listening[-1].append(f"calls {event}")


@contextlib.contextmanager
def effects() -> Iterator[list[str]]:
    """Collect what the block does to files, processes and the network, as text."""
    if not getattr(_audit, "installed", False):
        sys.addaudithook(_audit)
        _audit.installed = True  # type: ignore[attr-defined]
    _listening.append([])
    try:
        yield _listening[-1]
    finally:
        _listening.pop()


@contextlib.contextmanager
def output() -> Iterator[io.StringIO]:
    """Collect what the block prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


def streams() -> dict[str, Any]:
    """Return the state of each random stream by name, in a comparable form."""
    name, key, *rest = cast("Any", np.random.get_state(legacy=True))
    devices = {kind: [bytes(each.numpy()) for each in states] for kind, states in random_state.of_devices().items()}
    own = {"torch": bytes(torch.get_rng_state().numpy()), "python": random.getstate()}
    return {**own, "numpy": (name, bytes(key), *rest), **devices}


def hooks_of(model: nn.Module, optimizers: list[Any]) -> dict[str, int]:
    """Count the hooks on a model and its optimizers."""
    found: dict[str, int] = {}
    for owner in [*model.modules(), *optimizers]:
        for name, held in vars(owner).items():
            if name.endswith("_hooks") and isinstance(held, Mapping):
                found[name] = found.get(name, 0) + len(held)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        found[f"parameter{name}"] = sum(len(getattr(p, name, None) or ()) for p in model.parameters())
    return found


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Copy the settings of an optimizer's parameter groups."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def difference(a: Any, b: Any, where: str = "", depth: int = 8) -> str | None:
    """Return the first place where two nested values differ bitwise; what cannot be compared is ignored."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        return None if same else where
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return f"{where}[{next(iter(a.keys() ^ b.keys()))!r}]"
        return next((f for key in a if (f := difference(a[key], b[key], f"{where}[{key!r}]")) is not None), None)
    if isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)):
        if len(a) != len(b):
            return where
        pairs = enumerate(zip(a, b, strict=True))
        return next((f for i, (x, y) in pairs if (f := difference(x, y, f"{where}[{i}]")) is not None), None)
    plain = (int, float, complex, str, bytes, bool, type(None))
    if isinstance(a, plain) or isinstance(b, plain):
        return None if type(a) is type(b) and repr(a) == repr(b) else where
    if isinstance(a, (set, frozenset)) and isinstance(b, (set, frozenset)):
        return None if a == b else where
    if type(a) is type(b) and depth:
        return difference(_inside(a), _inside(b), where, depth - 1)
    return None


def _inside(value: Any) -> Any:
    """Return the contents of an object of a known kind."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, nn.Module):
        return dict(value.state_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(vars(value)) if hasattr(value, "__dict__") else None
    return None


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Copy the weights and buffers of a model."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


_PLAIN = (bool, int, float, complex, str, bytes, list, dict, set, deque, Tensor, type(None))


def copy_of_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy those values that are numbers, text, tensors or containers."""
    found = {}
    for name, value in values.items():
        if type(value) in _PLAIN:
            with contextlib.suppress(Exception):  # A container may hold what cannot be copied.
                found[name] = copy.deepcopy(value)
    return found


def class_values(classes: list[Any]) -> dict[str, Any]:
    """Copy the plain class attributes of some classes, by class and name."""
    values = {f"{c.__name__}.{name}": value for c in classes for name, value in vars(c).items() if name[:2] != "__"}
    return copy_of_plain(values)


def held_in(value: Any, wanted: Mapping[int, str], where: str) -> str | None:
    """Return the first place in a nested value with one of the wanted objects, which ``wanted`` maps by id."""

    def found(each: Any) -> str | None:
        if id(each) in wanted:
            return f" is {wanted[id(each)]}"
        owner = getattr(each, "__self__", None) if isinstance(each, MethodType) else None
        return f" is a method of {wanted[id(owner)]}" if id(owner) in wanted else None

    return _search(value, where, found)


def graph_in(value: Any, where: str) -> str | None:
    """Return the first place in a nested value with a tensor that has an autograd graph."""
    return _search(value, where, lambda each: "" if isinstance(each, Tensor) and each.grad_fn is not None else None)


def _search(value: Any, where: str, found: Callable[[Any], str | None], depth: int = 4) -> str | None:
    """Return the first place in a nested value for which ``found`` returns a text, and that text."""
    if (text := found(value)) is not None:
        return where + text
    parts = _parts(value, where) if depth else []
    return next((text for place, part in parts if (text := _search(part, place, found, depth - 1)) is not None), None)


def _parts(value: Any, where: str) -> list[tuple[str, Any]]:
    """Return what a container or an object contains, with the place of each."""
    if isinstance(value, (str, bytes, Tensor, nn.Module, type)):
        return []
    if isinstance(value, Mapping):
        return [(f"{where}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(f"{where}[{index}]", item) for index, item in enumerate(value)]
    return [(f"{where}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]


def tensors_in(value: Any, depth: int = 5) -> int:
    """Count the tensors in a nested value."""
    if isinstance(value, Tensor):
        return 1
    if not depth or isinstance(value, (nn.Module, str, bytes)):
        return 0
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple, set, frozenset, deque)):
        value = vars(value).values() if dataclasses.is_dataclass(value) and hasattr(value, "__dict__") else ()
    return sum(tensors_in(item, depth - 1) for item in value)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Calls:
    """Count the calls of some functions, and call back when one of them returns."""

    def __init__(self, codes: Mapping[CodeType, str], on_return: Callable[[str], None] | None = None) -> None:
        self.codes = codes
        self.count = dict.fromkeys(codes.values(), 0)
        self._on_return = on_return
        self._seen: dict[int, FrameType] = {}  # Of generators, which are called once and entered often.

    def __enter__(self) -> Calls:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        name = self.codes.get(frame.f_code)
        if name is None:
            return
        if event == "call" and id(frame) not in self._seen:
            self.count[name] += 1
            if frame.f_code.co_flags & 0x20:  # A generator.
                self._seen[id(frame)] = frame
        elif event == "return" and self._on_return is not None:
            self._on_return(name)


_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__array__")


class Transfers(TorchFunctionMode):
    """Note where some functions read the value of a tensor, so that the host waits for the device."""

    def __init__(self, codes: set[CodeType]) -> None:
        super().__init__()
        self._codes = codes
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in _READS:
            frame = cast(FrameType, cast(FrameType, inspect.currentframe()).f_back)
            if frame.f_code in self._codes:
                self.found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}")
        return function(*args, **(kwargs or {}))


def differing_parts(a: Any, b: Any, may_add: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the parts in which two trainers differ at the end; with ``may_add``, ``b`` may have more metrics."""
    rows: dict[str, Callable[[Any], Any]] = {
        "model": lambda t: dict(t.unwrap().state_dict()),
        "optimizer": lambda t: [each.state_dict() for each in t.optimizers.values()],
        "scheduler": lambda t: [_public(each.state_dict()) for each in t.schedulers.values()],
        "history": lambda t: [dict(row) for row in t.train_history + t.valid_history],
        "progress": lambda t: [t.progress_checker.step, t.progress_checker.epoch, t.progress_checker.skipped_steps],
    }
    for part, read in rows.items():
        before, after = read(a), read(b)
        if part == "history" and may_add:
            after = shared_entries(after, before)
        found = difference(before, after, part)
        if found is not None:
            yield part, found


def shared_entries(rows: list[Any], known: list[Any]) -> list[Any]:
    """Return rows with the entries that the known row at their place has; those that have none as they are."""
    return [{k: row[k] for k in row if k in old} for row, old in zip(rows, known)] + rows[len(known) :]


def _public(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key[0] != "_"}
