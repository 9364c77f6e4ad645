"""Describe the machine and the versions of a run."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import zae

__all__ = ["environment"]


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions of zae, Python and torch, the platform, and the device of a run.

    Parameters
    ----------
    device : torch.device
        The device of this rank; one that is not used is not initialised.

    Examples
    --------
    >>> import torch
    >>> environment(torch.device("cpu"))["device"]
    'cpu'
    """
    found: dict[str, Any] = {"zae": zae.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    threads = {"cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    return {**found, "platform": f"{platform.system()} {platform.machine()}", "device": name, **threads}
