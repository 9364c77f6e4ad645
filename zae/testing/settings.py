"""Settings of the process that an add-on may leave changed: read, compare, restore."""

from __future__ import annotations

import builtins
import contextlib
import gc
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from zae.common import random_state, torch_private

__all__ = ["LASTING", "PATCHED", "Settings", "preserve"]

Read = Callable[[], Any]
Write = Callable[[Any], object]


def _nothing(value: Any) -> None:
    """Leave a setting as it is: it cannot be restored from outside."""


def _set_autocast(value: tuple[Any, ...]) -> None:
    for device, (enabled, dtype) in zip(("cpu", "cuda"), value[:2]):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(value[2])


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_device(value: str) -> None:
    torch.set_default_device(None if value == "cpu" else value)


def _set_anomaly(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*value)


def _set_backends(value: tuple[bool, ...]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = value


def _set_group(exists: bool) -> None:
    if dist.is_initialized() and not exists:
        dist.destroy_process_group()


def _set_start_method(value: str | None) -> None:
    multiprocessing.set_start_method(value, force=True)


def _blanket_filters() -> list[Any]:
    """List the filters that concern every warning; libraries add others when they are imported."""
    return [each for each in warnings.filters if each[1] is None and each[3] is None and each[0] == "ignore"]


def _log_settings() -> list[Any]:
    loggers = [logging.getLogger(), logging.getLogger("zae")]
    return [logging.root.manager.disable, *((log.level, log.handlers[:], log.disabled) for log in loggers)]


def _set_log(value: list[Any]) -> None:
    logging.disable(value[0])
    for log, (level, handlers, disabled) in zip((logging.getLogger(), logging.getLogger("zae")), value[1:]):
        log.setLevel(level)
        log.handlers[:], log.disabled = handlers, disabled


def _global_hooks() -> dict[str, int]:
    """Count the hooks that every module or optimizer calls."""
    owners = (sys.modules[nn.Module.__module__], sys.modules[torch.optim.Optimizer.__module__])
    names = [(owner, name) for owner in owners for name in vars(owner) if name.startswith("_global_")]
    return {name: len(held) for owner, name in names if isinstance(held := getattr(owner, name), dict)}


SETTINGS: dict[str, tuple[Read, Write]] = {
    "autocast": (
        lambda: (
            *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
            torch.is_autocast_cache_enabled(),
        ),
        _set_autocast,
    ),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "inference mode": (torch.is_inference_mode_enabled, _nothing),
    "anomaly mode": (lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomaly),
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
    "profiler": (torch_private.is_profiling, _nothing),
    "dispatch modes": (torch_private.dispatch_modes, _nothing),
    "function modes": (torch_private.function_modes, _nothing),
    "threads of torch": (torch.get_num_threads, torch.set_num_threads),
    "process group": (dist.is_initialized, _set_group),
    "global hooks of torch": (_global_hooks, _nothing),
    "start method of processes": (lambda: multiprocessing.get_start_method(allow_none=True), _set_start_method),
    "filters of warnings": (_blanket_filters, _nothing),  # Every check has filters that end with it.
    "settings of logging": (_log_settings, _set_log),
    "sys.path": (lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
    "sys.stdout": (lambda: sys.stdout, lambda value: setattr(sys, "stdout", value)),
    "sys.stderr": (lambda: sys.stderr, lambda value: setattr(sys, "stderr", value)),
    "sys.excepthook": (lambda: sys.excepthook, lambda value: setattr(sys, "excepthook", value)),
    "threading.excepthook": (lambda: threading.excepthook, lambda value: setattr(threading, "excepthook", value)),
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "garbage collection": (gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    "error settings of numpy": (np.geterr, lambda value: np.seterr(**value)),
    "timeout of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
}
"""How to read and to restore each setting, by its name in a message."""

LASTING = frozenset(name for name, (_, write) in SETTINGS.items() if write is _nothing)
"""Settings that cannot be restored from outside."""

PATCHED: dict[str, Any] = {
    "torch": torch,
    "torch.nn": nn,
    "torch.nn.functional": nn.functional,
    "torch.nn.init": nn.init,
    "torch.nn.utils": nn.utils,
    "torch.nn.Module": nn.Module,
    "torch.Tensor": torch.Tensor,
    "torch.autograd": torch.autograd,
    "torch.optim": torch.optim,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.utils.data": torch.utils.data,
    "torch.utils.data.DataLoader": torch.utils.data.DataLoader,
    "builtins": builtins,
    "logging": logging,
    "os": os,
    "random": random,
    "numpy.random": np.random,
    "time": time,
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
        self.folder = os.getcwd()

    def changes(self) -> dict[str, str]:
        """Describe what has changed, by the name of the setting."""
        found = {}
        for name, (read, _) in SETTINGS.items():
            if (now := read()) != self._values[name]:
                found[name] = f"{self._values[name]!r:.60} became {now!r:.60}"
        if os.getcwd() != self.folder:
            found["working folder"] = f"{self.folder!r} became {os.getcwd()!r}"
        for name in sorted(self._environment.keys() | os.environ.keys()):
            before, now = self._environment.get(name), os.environ.get(name)
            if before != now:  # The values may be secrets.
                word = "was set" if before is None else "was deleted" if now is None else "has another value"
                found[f"environment variable {name!r}"] = word
        for name, handler in _handlers().items():
            if handler != self._handlers.get(name):
                found[f"handler of {name}"] = f"{self._handlers.get(name)!r:.60} became {handler!r:.60}"
        for label, name, before, now in self._replacements():
            found[f"function {label}.{name}"] = f"{before!r:.60} became {now!r:.60}"
        return found

    def _replacements(self) -> Iterator[tuple[str, str, Any, Any]]:
        for label, owner in PATCHED.items():
            now = vars(owner)
            for name, value in self._functions[label].items():
                if now.get(name) is not value:
                    yield label, name, value, now.get(name)

    def restore(self) -> None:
        """Restore what has changed, except for what torch does not let one restore."""
        for name, (read, write) in SETTINGS.items():
            if read() != self._values[name]:
                write(self._values[name])
        if os.getcwd() != self.folder:
            os.chdir(self.folder)
        for variable in os.environ.keys() - self._environment.keys():
            del os.environ[variable]
        os.environ.update({k: v for k, v in self._environment.items() if os.environ.get(k) != v})
        for name, handler in self._handlers.items():
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and handler is not None and signal.getsignal(signal.Signals[name]) != handler:
                signal.signal(signal.Signals[name], handler)
        for label, name, value, _ in list(self._replacements()):
            setattr(PATCHED[label], name, value)


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
