"""Where the checks run, and how large they are."""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings

import torch
from device.on_device.deep import SMALL, free_memory
from device.on_device.tasks import DEVICE

IS_EMULATED = "ZAE_EMULATED_DEVICE" in os.environ
"""Whether the device is the emulation of tests/device: nothing is compiled or captured, and no time means anything."""
if IS_EMULATED:
    warnings.filterwarnings("ignore", message="An output with one or more elements was resized")  # The emulation's own.
WHERE = "an emulation" if IS_EMULATED else f"a GPU ({torch.cuda.get_device_name()})"

__all__ = ["DEVICE", "IS_EMULATED", "SMALL", "WHERE", "free_memory", "why_not_compiled"]


def why_not_compiled() -> str:
    """Return what torch.compile lacks here to make kernels of the GPU; empty where it has all."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "there is no C compiler, with which triton builds what launches its kernels"
    return ""
