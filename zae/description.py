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
from zae.fact import Fact
from zae.loop.progress import Every
from zae.optim import has_lazy

__all__ = ["describe", "describe_options", "facts_of", "trainer_text"]

_OBJECTS = ("model", "optimizer", "scheduler", "web_logger")  # Options that the config describes in another form.
_INFERRED = ("device", "mode", "monitor_mode")  # Options that are shown elsewhere, or follow from others.
_ASIDE = ("allow_partial", "checkpointer", "log_bar", "overwrite", "resume")  # Of no effect on what is computed.
_IN_MANIFEST = ("composition", "parameters", "world_size")  # A manifest has them, or the shapes, in any case.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONG, _MOST = 200, 200  # Characters of an option, and options, that are recorded as they are.


def facts_of(instance: Any) -> list[Fact]:
    """Return how a trainer was made: its options, its model, its optimizers and its add-ons."""
    facts = [Fact(name, value, where="option") for name, value in option_values(instance).items()]
    module = instance.unwrap()
    facts.append(Fact("model", type(module).__name__, where="trainer"))
    if not has_lazy(module.parameters()):  # Else the first batch creates them.
        facts.append(Fact("parameters", sum(each.numel() for each in module.parameters()), where="trainer"))
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


def describe_options(instance: Any, hide: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what a checkpoint records of how a trainer was made: options that are not the defaults, as plain values.

    Left out is where and how a run is saved, resumed and shown. ``hide`` removes secrets.
    """
    cls, facts = type(instance), instance.describe()
    options = {fact.name: fact.value for fact in facts if fact.where == "option"}
    found = {
        name: _plain(value)
        for name, value in options.items()
        if name not in (*_OBJECTS, *_ASIDE) and not isinstance(value, os.PathLike) and _differs(cls, name, value)
    }
    found["monitor_mode"] = options["monitor_mode"]
    made = {fact.name: _plain(fact.value) for fact in facts if fact.where == "trainer"}
    found |= {name: value for name, value in made.items() if name not in _IN_MANIFEST}
    optimizers = {
        fact.name: {key: value for key, value in fact.value.items() if value is not False}
        for fact in facts
        if fact.where == "optimizer"
    }
    # Those with many entries, as hyperparameters may have, come last: a manifest does not take any number of them.
    found = dict(sorted(found.items(), key=lambda item: isinstance(item[1], dict)))
    flat = flatten(hide(optimizers | found), ".")
    rest = {name: flat.pop(name) for name in list(flat)[_MOST:]}
    return {name: _shortened(value) for name, value in (flat | ({"...": rest} if rest else {})).items()}


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
