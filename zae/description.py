"""Describe a trainer in plain values, for logs and reports."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

import zae
from zae.common.device import name_of_device
from zae.common.walk import flatten
from zae.compose.introspect import add_ons_of
from zae.compose.options import option_values, options_of
from zae.loop.progress import Every
from zae.optim import has_lazy

__all__ = ["describe", "describe_options", "trainer_text"]

_OBJECTS = ("model", "optimizer", "scheduler", "web_logger")  # Options that the config describes in another form.
_INFERRED = ("device", "mode", "monitor_mode")  # Options that are shown elsewhere, or follow from others.
_ASIDE = ("allow_partial", "checkpointer", "log_bar", "overwrite", "resume")  # Of no effect on what is computed.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONG, _MOST = 200, 200  # Characters of an option, and options, that are recorded as they are.


def describe(instance: Any) -> dict[str, Any]:
    """Return how a trainer was made: "config" (options, model, optimizers, add-ons), "explain" and "environment".

    Secrets are in it where options hold them.
    """
    config = {name: _plain(value) for name, value in option_values(instance).items() if name not in _OBJECTS}
    module = instance.unwrap()
    config["model"] = type(module).__name__
    if not has_lazy(module.parameters()):  # Else the first batch creates them.
        config["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    config |= _optimizers(instance)
    config["composition"] = [add_on.__name__ for add_on in add_ons_of(type(instance))]
    config["world_size"] = instance.world_size
    return {"config": config, "explain": str(instance.explain()), "environment": _environment(instance.device)}


def describe_options(instance: Any, hide: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what a checkpoint records of how a trainer was made: options that are not the defaults, as plain values.

    Left out is where and how a run is saved, resumed and shown. ``hide`` removes secrets.
    """
    cls, values = type(instance), option_values(instance)
    found = {
        name: _plain(value)
        for name, value in values.items()
        if name not in (*_OBJECTS, *_ASIDE) and not isinstance(value, os.PathLike) and _differs(cls, name, value)
    }
    found |= {"monitor_mode": values["monitor_mode"], "model": type(instance.unwrap()).__name__}
    optimizers = {
        name: {key: value for key, value in entries.items() if value is not False}
        for name, entries in _optimizers(instance).items()
    }
    # Those with many entries, as hyperparameters may have, come last: a manifest does not take any number of them.
    found = dict(sorted(found.items(), key=lambda item: isinstance(item[1], dict)))
    flat = flatten(hide(optimizers | found), ".")
    rest = {name: flat.pop(name) for name in list(flat)[_MOST:]}
    return {name: _shortened(value) for name, value in (flat | ({"...": rest} if rest else {})).items()}


def _optimizers(instance: Any) -> dict[str, dict[str, Any]]:
    """Return the class of each optimizer, and its numbers."""
    found = {}
    for name, optimizer in instance.optimizers.items():
        rates = {key: value for key, value in optimizer.defaults.items() if isinstance(value, (int, float))}
        found["optimizer" if name == "0" else f"optimizer_{name}"] = {"name": type(optimizer).__name__, **rates}
    return found


def _shortened(value: Any) -> Any:
    """Return a number as it is, and anything else as text: if that is long, its beginning and its hash."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    data = _ADDRESS.sub("", str(value)).encode(errors="backslashreplace")
    text, digest = data.decode(), hashlib.sha256(data).hexdigest()[:12]
    return text if len(text) <= _LONG else f"{text[:_LONG]}... (sha256 {digest})"


def trainer_text(instance: Any) -> str:
    """Return the kind of a trainer and its model, and where it stands, in one line."""
    at, whose = instance.progress_checker, f"{type(instance).__name__}(model={type(instance.unwrap()).__name__}"
    return f"{whose}, device={instance.device}, mode={instance.mode}, epoch={at.epoch}, step={at.step})"


def _differs(cls: Any, name: str, value: Any) -> bool:
    """Return whether an option has another value than its default, or than what None as the default means."""
    default = options_of(cls)[name][0].default
    is_default = name in _INFERRED or value is default or (type(value) is type(default) and value == default)
    return not is_default and not (default is None and (value is False or value == Every(epochs=1)))


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
    name = f"{device} ({made})" if (made := name_of_device(device)) else str(device)
    threads = {"cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    return {**found, "platform": f"{platform.system()} {platform.machine()}", "device": name, **threads}
