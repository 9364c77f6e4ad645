"""Settings of the process that an add-on may leave changed: read, compare, restore."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from zae.common import random_state

__all__ = ["PATCHED", "Settings", "preserve"]

Read = Callable[[], Any]
Write = Callable[[Any], object]


def _set_autocast(value: tuple[Any, ...]) -> None:
    for device, (enabled, dtype) in zip(("cpu", "cuda"), value):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_device(value: str) -> None:
    torch.set_default_device(None if value == "cpu" else value)


def _set_backends(value: tuple[bool, ...]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = value


def _blanket_filters() -> list[Any]:
    """List the filters that concern every warning; libraries add others when they are imported."""
    return [each for each in warnings.filters if each[1] is None and each[3] is None and each[0] == "ignore"]


def _set_filters(value: list[Any]) -> None:
    """Leave the filters: each run ends with those that it began with, by `warnings.catch_warnings`."""


SETTINGS: dict[str, tuple[Read, Write]] = {
    "autocast": (
        lambda: tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        _set_autocast,
    ),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (lambda: str(torch.get_default_device()), _set_device),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "settings of cuDNN and TF32": (
        lambda: (
            *(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
            torch.backends.cuda.matmul.allow_tf32,
        ),
        _set_backends,
    ),
    "threads of torch": (torch.get_num_threads, torch.set_num_threads),
    "filters of warnings": (_blanket_filters, _set_filters),
    "working folder": (os.getcwd, os.chdir),
    "sys.stdout": (lambda: sys.stdout, lambda value: setattr(sys, "stdout", value)),
    "sys.stderr": (lambda: sys.stderr, lambda value: setattr(sys, "stderr", value)),
    "error settings of numpy": (np.geterr, lambda value: np.seterr(**value)),
}
"""How to read and to restore each setting, by its name in a message."""

PATCHED: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.nn.Module": nn.Module,
    "torch.Tensor": torch.Tensor,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.utils.data.DataLoader": torch.utils.data.DataLoader,
    "random": random,
    "numpy.random": np.random,
}
"""Modules and classes whose functions an add-on may have replaced."""


def _functions(owner: Any) -> dict[str, Any]:
    """Return the functions and classes of a module or class, by name."""
    public = ((name, value) for name, value in list(vars(owner).items()) if name[0] != "_" or name in _SPECIAL)
    found = {name: value for name, value in public if callable(value) or isinstance(value, property)}
    found.pop("Storage", None)  # It follows the default dtype.
    return found


_SPECIAL = ("__init__", "__call__", "__setattr__", "__getattr__", "__new__")


def _handlers() -> dict[str, Any]:
    return {s.name: signal.getsignal(s) for s in signal.valid_signals() if isinstance(s, signal.Signals)}


class Settings:
    """The settings of this process as they are now."""

    def __init__(self) -> None:
        self._values = {name: read() for name, (read, _) in SETTINGS.items()}
        self._environment = dict(os.environ)
        self._handlers = _handlers()
        self._functions = {name: _functions(owner) for name, owner in PATCHED.items()}

    def changes(self) -> dict[str, str]:
        """Describe what has changed, by the name of the setting."""
        found = {}
        for name, (read, _) in SETTINGS.items():
            if (now := read()) != self._values[name]:
                found[name] = _became(self._values[name], now)
        for name in sorted(self._environment.keys() | os.environ.keys()):
            before, now = self._environment.get(name), os.environ.get(name)
            if before != now:  # The values may be secrets.
                word = "was set" if before is None else "was deleted" if now is None else "has another value"
                found[f"environment variable {name!r}"] = word
        for name, handler in _handlers().items():
            if handler != self._handlers.get(name):
                found[f"handler of {name}"] = _became(self._handlers.get(name), handler)
        for label, name, before, now in self._replacements():
            found[f"function {label}.{name}"] = _became(before, now)
        return found

    def _replacements(self) -> Iterator[tuple[str, str, Any, Any]]:
        for label, owner in PATCHED.items():
            now = vars(owner)
            for name, value in self._functions[label].items():
                if now.get(name) is not value:
                    yield label, name, value, now.get(name)

    def restore(self) -> None:
        """Restore what has changed."""
        for name, (read, write) in SETTINGS.items():
            if read() != self._values[name]:
                write(self._values[name])
        for variable in os.environ.keys() - self._environment.keys():
            del os.environ[variable]
        os.environ.update({k: v for k, v in self._environment.items() if os.environ.get(k) != v})
        for name, handler in self._handlers.items():
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and handler is not None and signal.getsignal(signal.Signals[name]) != handler:
                signal.signal(signal.Signals[name], handler)
        for label, name, value, _ in list(self._replacements()):
            setattr(PATCHED[label], name, value)


def _became(before: Any, now: Any) -> str:
    return f"{before!r:.60} became {now!r:.60}"


@contextlib.contextmanager
def preserve(warm_up: Callable[[], object]) -> Iterator[Settings]:
    """Restore every setting and every random stream of the process at the end.

    ``warm_up`` is called first: torch imports much of itself, and sets a variable, when it trains for the first time.
    """
    streams = random_state.capture()
    try:
        with contextlib.suppress(Exception):  # The checks that need it report it.
            warm_up()
        settings = Settings()
        try:
            with warnings.catch_warnings():
                yield settings
        finally:
            settings.restore()
    finally:
        random_state.restore(streams)
