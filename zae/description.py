"""Describe a trainer in plain values, for logs and reports."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import zae
from zae.compose.introspect import add_ons_of
from zae.compose.options import option_values
from zae.device import name_of_device
from zae.model.weights import has_lazy

__all__ = ["Description", "describe", "descriptions_of", "trainer_text"]

_OBJECTS = ("model", "optimizer", "scheduler", "web_logger")  # Options that the config describes in another form.


@dataclass(frozen=True)
class Description:
    """A fact about a trainer or an add-on, which ``describe`` returns.

    Plans, reports, loggers and checkpoints get the same descriptions, and each formats them.

    Parameters
    ----------
    name : str
        The name of the fact; in a plan, the beginning of a note.
    value : object
        A number or text, or a list or dict of them; True where the name is enough, and None where there is nothing to
        show. A function is given the ``RunPreview`` of a call of ``plan``, and returns the value: for what depends on
        the run, its ranks for instance, and for what takes long to find.
    unit : str
        Of a number, for instance "samples".
    where : str
        Where it acts: the name of a hook, or one of these.

        - "option", "optimizer", "trainer": how the trainer is made, which logs, reports and checkpoints record.
        - "ranks": how the processes divide the work. The name is an attribute of the RunPreview that is set.

    Examples
    --------
    >>> from zae.description import Description
    >>> str(Description("may end earlier", "after 3 validations", where="should_stop"))
    'may end earlier: after 3 validations'
    >>> str(Description("buffer", 4, "samples"))
    'buffer: 4 samples'
    """

    name: str
    value: Any = True
    unit: str = ""
    where: str = ""

    def __str__(self) -> str:
        if self.value is True:
            return self.name
        return f"{self.name}: {self.value} {self.unit}".rstrip()


def descriptions_of(instance: Any) -> list[Description]:
    """Return how a trainer was made: its options, its model, its optimizers and its add-ons."""
    descriptions = [Description(name, value, where="option") for name, value in option_values(instance).items()]
    module = instance.unwrap()
    descriptions.append(Description("model", type(module).__name__, where="trainer"))
    if not has_lazy(module.parameters()):  # Else the first batch creates them.
        descriptions.append(
            Description("parameters", sum(parameter.numel() for parameter in module.parameters()), where="trainer")
        )
    for name, optimizer in instance.optimizers.items():
        rates = {key: value for key, value in optimizer.defaults.items() if isinstance(value, (int, float))}
        key = "optimizer" if name == "0" else f"optimizer_{name}"
        descriptions.append(Description(key, {"name": type(optimizer).__name__, **rates}, where="optimizer"))
    composition = [add_on.__name__ for add_on in add_ons_of(type(instance))]
    descriptions.append(Description("composition", composition, where="trainer"))
    return [*descriptions, Description("world_size", instance.world_size, where="trainer")]


def describe(instance: Any) -> dict[str, Any]:
    """Return how a trainer was made: "config" (options, model, optimizers, add-ons), "explain" and "environment".

    Secrets are in it where options hold them.
    """
    by_name = {
        description.name: description
        for description in instance.describe()
        if description.where in ("option", "optimizer", "trainer")
    }
    shown = [
        description
        for description in by_name.values()
        if description.where != "option" or description.name not in _OBJECTS
    ]
    config = {description.name: _plain(description.value) for description in shown}
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
