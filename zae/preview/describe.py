"""Describe a trainer in plain values, for logs and reports."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

import zae
from zae.common.optim import has_lazy
from zae.composition.introspect import add_ons_of
from zae.composition.options import option_values

__all__ = ["describe"]

_OBJECTS = ("model", "optimizer", "scheduler", "web_logger")  # Options that the config describes in another form.


def describe(instance: Any) -> dict[str, Any]:
    """Return how a trainer was made: "config" (options, model, optimizers, add-ons), "explain" and "environment".

    Secrets are in it where options hold them.
    """
    config = {name: _plain(value) for name, value in option_values(instance).items() if name not in _OBJECTS}
    module = instance.unwrap()
    config["model"] = type(module).__name__
    if not has_lazy(module.parameters()):  # Else the first batch creates them.
        config["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    for name, optimizer in instance.optimizers.items():
        rates = {key: value for key, value in optimizer.defaults.items() if isinstance(value, (int, float))}
        config["optimizer" if name == "0" else f"optimizer_{name}"] = {"name": type(optimizer).__name__, **rates}
    config["composition"] = [add_on.__name__ for add_on in add_ons_of(type(instance))]
    config["world_size"] = instance.world_size
    return {"config": config, "explain": str(instance.explain()), "environment": _environment(instance.device)}


def _plain(value: Any) -> Any:
    """Return the value of an option for a config."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return type(value).__name__ if callable(value) else str(value)


def _environment(device: torch.device) -> dict[str, Any]:
    """Return the versions of zae, Python and torch, the platform, and the device; one not used is not initialised."""
    found: dict[str, Any] = {"zae": zae.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    threads = {"cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    return {**found, "platform": f"{platform.system()} {platform.machine()}", "device": name, **threads}
