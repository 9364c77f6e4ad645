"""An emulated device for tests on a machine without a GPU. README.md, one folder up, says what it proves."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

VARIABLE = "ZAE_EMULATED_DEVICE"
"""The variable that names the kind of a process: "cuda" or "sim". `site/sitecustomize.py` reads it at the start."""


def start(kind: str) -> None:
    """Give this process the emulated device. Torch must not be imported yet."""
    if kind == "cuda":
        from emulation import hooks

        hooks.register()
        importlib.import_module("emulation.cuda")
    elif kind == "sim":
        importlib.import_module("emulation.sim")
    else:
        raise ValueError(f"{VARIABLE} is {kind!r}; it is 'cuda', 'sim' or not set")


def setting(name: str, default: int) -> int:
    """Return a number that the environment sets: ZAE_EMULATED_DEVICES, ZAE_EMULATED_PROTECT, ZAE_EMULATED_LIMIT."""
    return int(os.environ.get(f"ZAE_EMULATED_{name}", default))


def core() -> ModuleType | Any:
    """Return the extension of this process's kind: counts of kernels and copies, memory, limits."""
    import torch

    return torch.get_device_module(os.environ[VARIABLE])._emulation
