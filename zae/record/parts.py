"""Read what a run was given, one function for each owner: numbers and text that are equal in two processes."""

from __future__ import annotations

import enum
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from zae.compose.introspect import function_of, is_add_on
from zae.compose.options import option_values, options_of
from zae.data.loader_parts import LoaderParts
from zae.data.loaders import length_of
from zae.record.contents import contents_of
from zae.schedulers.lengths import milestones_of, parts_of
from zae.values.plain_values import MAX_ENTRIES, code_digest, content_digest, plain_value
from zae.values.walk import is_of_library

if TYPE_CHECKING:
    from zae.loop.run import Run
    from zae.trainer import Trainer

__all__ = [
    "Record",
    "of_call",
    "of_code",
    "of_dataset",
    "of_loader",
    "of_model",
    "of_optimizers",
    "of_options",
    "of_parameters",
    "of_samples",
    "of_schedules",
    "replicated_options",
]

Record = dict[str, Any]

_FACTS_ASIDE = ("seed of the SeededDataset", "dataset length", "number of batches")
"""Facts of a loader that follow from its data."""

_LAYERS_ASIDE = ("observe", "parallel", "state")
"""The layers of add-ons whose options change nothing of what is computed."""

_FACTS_IN_MANIFEST = ("composition", "model", "parameters", "world_size")

_OPTIONS_ASIDE = (
    *("model", "device", "mode", "optimizer", "scheduler", "monitor", "monitor_mode"),  # Described in another way.
    *("fast_data", "keep_train_outputs", "log_bar", "log_every", "web_logger"),
)

_IN_MOTION = {"last_epoch", "base_lrs", "best", "mode", "mode_worse", "num_bad_epochs", "cooldown_counter", "T_cur"}
"""Attributes of schedules that change with their steps, or follow from the settings of the optimizer."""


def replicated_options(trainer: Trainer) -> tuple[Record, dict[str, str]]:
    """Return the options that must be the same on all ranks, and for each the hook that reads it."""
    readers: dict[str, str] = {}
    for owner in reversed(type(trainer).__mro__):
        readers.update(owner.__dict__.get("replicated_options", {}))
    values = option_values(trainer)
    return {name: plain_value(values.get(name)) for name in readers}, readers


def of_options(trainer: Trainer) -> Record:
    """Return the options that decide what a run computes, and what add-ons say of how the trainer was made.

    Left out is where it runs, what it shows, and where it saves.
    """
    record: Record = {}
    values = option_values(trainer)
    for name, (_, owner) in options_of(type(trainer)).items():
        is_aside = is_add_on(owner) and getattr(owner, "layer", None) in _LAYERS_ASIDE
        if name in values and name not in _OPTIONS_ASIDE and not is_aside and not isinstance(values[name], os.PathLike):
            record[name] = _plain_option(values[name])
    for fact in trainer.describe():
        if fact.where == "trainer" and fact.name not in _FACTS_IN_MANIFEST:
            record[fact.name] = _plain_option(fact.value)
    return record


def _plain_option(value: Any) -> Any:
    """Return the value of an option; of data, and of what holds much, the class."""
    is_container = isinstance(value, (list, tuple, dict, set, frozenset))
    is_data = hasattr(value, "__len__") and not isinstance(value, str)
    if is_data and (not is_container or len(value) > MAX_ENTRIES):
        return type(value).__qualname__
    return plain_value(value)


def of_model(model: nn.Module) -> Record:
    """Return the settings of the modules, as the rate of a dropout: for each class and name the values there are."""
    values: dict[str, dict[str, Any]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name[0] != "_" and name != "training" and isinstance(value, (bool, int, float, str)):
                values.setdefault(f"{type(module).__qualname__}.{name}", {})[repr(value)] = value
    return {f"{name} of the model": _some(list(values_by_name.values())) for name, values_by_name in values.items()}


def _some(values: list[Any]) -> Any:
    """Return the one value that there is, or several in order."""
    return plain_value(values[0] if len(values) == 1 else sorted(values, key=repr))


def of_code(trainer: Trainer) -> Record:
    """Return a hash of the code of each class of the user: of the task, its add-ons, and the modules of the model."""
    roots = [*type(trainer).__mro__, *(base for module in trainer.unwrap().modules() for base in type(module).__mro__)]
    version = ".".join(map(str, sys.version_info[:2]))  # Each version of Python has other instructions.
    record: Record = {}
    for cls in dict.fromkeys(roots):
        if not is_of_library(cls) and "_recipe" not in vars(cls):
            functions = [function_of(value) for _, value in sorted(vars(cls).items())]
            digests = [code_digest(function.__code__) for function in functions if isinstance(function, FunctionType)]
            record[f"code of {cls.__qualname__}"] = f"{version} {content_digest(digests)}"
    return record


def of_call(run: Run) -> Record:
    """Return the arguments of a call of ``run`` beside its loaders."""
    limits = run.limits
    valid = run.valid_loader
    return {
        "n_epoch": limits.n_epoch,
        "max_steps": limits.max_steps,
        "steps_per_epoch": limits.steps_per_epoch,
        "valid_every": str(limits.valid_every),
        "limit_batches": [limits.batches.train, limits.batches.valid],
        "overfit_batches": limits.batches.repeats,
        "valid_loader": [*map(str, valid)] if isinstance(valid, Mapping) else valid is not None,
    }


def of_loader(loader: Any, name: str) -> Record:
    """Return the settings of a loader that decide its batches."""
    if getattr(loader, "is_sharded", False):
        return {f"{name}.is_sharded": True}
    facts = {f"{key} of {name}": value for key, value in LoaderParts(loader).facts().items() if key not in _FACTS_ASIDE}
    return {f"{name}.is_sharded": False, **facts}


def of_samples(loader: Any, name: str) -> Record:
    """Return a hash of all that a loader has for its samples; not where each rank, or a stream, divides it itself."""
    dataset = getattr(loader, "dataset", None)
    if getattr(loader, "is_sharded", False) or isinstance(dataset, IterableDataset):
        return {}
    record: Record = {}
    for place, value in contents_of(loader).samples.items():
        record[f"len({name}{place[4:]}" if place.startswith("len(") else f"{name}{place}"] = value
    if not record and (size := length_of(loader)) is not None:
        record[f"number of batches of {name}"] = size
    return record


def of_dataset(loader: Any, name: str) -> Record:
    """Return the settings of the datasets of a loader: their attributes beside what there is for each sample."""
    return {f"{name}{place}": value for place, value in contents_of(loader).settings.items()}


def of_parameters(module: nn.Module) -> Record:
    """Return the types and shapes of the parameters and buffers of a model, and which parameters are trained."""
    record: Record = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        record[f"parameter {name}"] = f"{tensor.dtype} {_shape_of(tensor)}, requires_grad={tensor.requires_grad}"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        record[f"buffer {name}"] = f"{buffer.dtype} {_shape_of(buffer)}"
    return record


def _shape_of(tensor: Tensor) -> Any:
    return "of no shape yet" if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def of_optimizers(optimizers: Mapping[str, Optimizer]) -> Record:
    """Return the classes of the optimizers and the settings of their groups; with a schedule, the initial rates."""
    record: Record = {}
    for name, optimizer in optimizers.items():
        owner = f"optimizer {name}"
        record[owner] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            of_group = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
            record[f"{owner}: parameters{of_group}"] = len(group["params"])
            for key, value in group.items():
                if key == "lr":
                    record[f"{owner}: lr{of_group}"] = plain_value(group.get("initial_lr", value))
                elif key not in ("params", "param_names", "initial_lr"):
                    record[f"{owner}: {key}{of_group}"] = plain_value(value)
    return record


def of_schedules(schedulers: Mapping[str, Any]) -> Record:
    """Return the classes and settings of the schedules, and of those within them."""
    record: Record = {}
    for name, scheduler in schedulers.items():
        record.update(_of_schedule(scheduler, f"scheduler {name}"))
    return record


def _of_schedule(scheduler: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, type(scheduler).__name__
    milestones = milestones_of(scheduler)
    if milestones is not None:
        yield f"{name}: milestones", plain_value(milestones)
    inner = parts_of(scheduler)
    for key, value in vars(scheduler).items():
        if key[0] != "_" and key not in _IN_MOTION and _is_setting(value):
            yield f"{name}: {key}", plain_value(value)
    for index, part in enumerate(inner):
        yield from _of_schedule(part, f"{name}, part {index}")


def _is_setting(value: Any) -> bool:
    """Return whether an attribute of a schedule is a setting: a number, text, a function, or several of them."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1
    if isinstance(value, (list, tuple)):
        return all(map(_is_setting, value))
    kinds = (bool, int, float, str, enum.Enum, Counter, np.generic)
    return value is None or isinstance(value, kinds) or callable(value)
