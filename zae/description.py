"""Describe a trainer in plain values, for logs and reports."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

import zae
from zae.compose.introspect import add_ons_of
from zae.compose.options import option_values
from zae.device import name_of_device
from zae.fact import Fact
from zae.optim import has_lazy

__all__ = ["describe", "facts_of", "trainer_text"]

_OBJECTS = ("model", "optimizer", "scheduler", "web_logger")  # Options that the config describes in another form.


def facts_of(instance: Any) -> list[Fact]:
    """Return how a trainer was made: its options, its model, its optimizers and its add-ons."""
    facts = [Fact(name, value, where="option") for name, value in option_values(instance).items()]
    module = instance.unwrap()
    facts.append(Fact("model", type(module).__name__, where="trainer"))
    if not has_lazy(module.parameters()):  # Else the first batch creates them.
        facts.append(Fact("parameters", sum(parameter.numel() for parameter in module.parameters()), where="trainer"))
    for name, optimizer in instance.optimizers.items():
        rates = {key: value for key, value in optimizer.defaults.items() if isinstance(value, (int, float))}
        key = "optimizer" if name == "0" else f"optimizer_{name}"
        facts.append(Fact(key, {"name": type(optimizer).__name__, **rates}, where="optimizer"))
    composition = [add_on.__name__ for add_on in add_ons_of(type(instance))]
    facts.append(Fact("composition", composition, where="trainer"))
    return [*facts, Fact("world_size", instance.world_size, where="trainer")]


def describe(instance: Any) -> dict[str, Any]:
    """Return how a trainer was made: "config" (options, model, optimizers, add-ons), "explain" and "environment".

    Secrets are in it where options hold them.
    """
    told = {fact.name: fact for fact in instance.describe() if fact.where in ("option", "optimizer", "trainer")}
    shown = [fact for fact in told.values() if fact.where != "option" or fact.name not in _OBJECTS]
    config = {fact.name: _plain(fact.value) for fact in shown}
    return {"config": config, "explain": str(instance.explain()), "environment": _environment(instance.device)}


def trainer_text(instance: Any) -> str:
    """Return the kind of a trainer and its model, and where it stands, in one line."""
    at, whose = instance.progress_checker, f"{type(instance).__name__}(model={type(instance.unwrap()).__name__}"
    return f"{whose}, device={instance.device}, mode={instance.mode}, epoch={at.epoch}, step={at.step})"


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
    environment: dict[str, Any] = {
        "zae": zae.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        environment |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    name = f"{device} ({made})" if (made := name_of_device(device)) else str(device)
    threads = {"cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    return {**environment, "platform": f"{platform.system()} {platform.machine()}", "device": name, **threads}
