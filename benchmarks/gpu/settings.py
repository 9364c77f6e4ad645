"""Where the checks run, and how large they are."""

from __future__ import annotations

import gc
import os
import warnings

import torch
from device.on_device.tasks import DEVICE

SMALL = os.environ.get("SMALL") == "1"
"""Whether models and steps are shrunk, so that the checks themselves can be tried on an emulation."""
IS_EMULATED = "ZAE_EMULATED_DEVICE" in os.environ
"""Whether the device is the emulation of tests/device: nothing is compiled or captured, and no time means anything."""
if IS_EMULATED:
    warnings.filterwarnings("ignore", message="An output with one or more elements was resized")  # The emulation's own.
WHERE = "an emulation" if IS_EMULATED else f"a GPU ({torch.cuda.get_device_name()})"

__all__ = ["DEVICE", "IS_EMULATED", "SMALL", "WHERE", "free_memory"]


def free_memory() -> None:
    """Give back the memory of what is not used any more."""
    gc.collect()
    torch.cuda.empty_cache()
