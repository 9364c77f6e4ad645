"""Read what a run was given, one function for each owner: numbers and text that are equal in two processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from zae.common.plain_values import plain_value
from zae.compose.options import option_values
from zae.data.contents import contents_of
from zae.data.loader_state import FINGERPRINT, facts_of
from zae.schedulers.lengths import milestones_of, parts_of

if TYPE_CHECKING:
    from zae.loop.run import Run
    from zae.trainer import Trainer

__all__ = ["of_call", "of_loader", "of_optimizers", "of_parameters", "of_schedules", "replicated_options"]

Record = dict[str, Any]

_OF_DATA = ("dataset length", "number of batches")
"""Facts of a loader that follow from its data and from its other settings."""

_OF_A_RANK = (FINGERPRINT, "seed of the SeededDataset")
"""Facts of a loader in which ranks may differ: the library datasets draws some fingerprints at random."""

_IN_MOTION = {"last_epoch", "base_lrs", "best", "mode", "mode_worse", "num_bad_epochs", "cooldown_counter", "T_cur"}
"""Attributes of schedules that change with their steps, or follow from the settings of the optimizer."""


def replicated_options(trainer: Trainer) -> tuple[Record, dict[str, str]]:
    """Return the options that must be the same on all ranks, and for each the hook that reads it."""
    readers: dict[str, str] = {}
    for owner in reversed(type(trainer).__mro__):
        readers.update(owner.__dict__.get("replicated_options", {}))
    values = option_values(trainer)
    return {name: plain_value(values.get(name)) for name in readers}, readers


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
    """Return what decides the batches of a loader: nothing of the data that each rank divides itself."""
    if getattr(loader, "is_sharded", False):
        return {f"{name}.is_sharded": True}
    facts = facts_of(loader)
    last = {key: facts.pop(key) for key in _OF_DATA if key in facts}
    record: Record = {f"{name}.is_sharded": False}
    record |= {f"{key} of {name}": value for key, value in facts.items() if key not in _OF_A_RANK}
    if isinstance(getattr(loader, "dataset", None), IterableDataset):  # It says itself whether it is divided.
        return record
    for place, value in contents_of(loader).samples.items():
        record[f"len({name}{place[4:]}" if place.startswith("len(") else f"{name}{place}"] = value
    return record | {f"{key} of {name}": value for key, value in last.items()}


def of_parameters(module: nn.Module) -> Record:
    """Return the types and shapes of the parameters and buffers of a model, and which parameters are trained."""
    record: Record = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        record[f"parameter {name}"] = f"{each.dtype} {_shape_of(each)}, requires_grad={each.requires_grad}"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        record[f"buffer {name}"] = f"{buffer.dtype} {_shape_of(buffer)}"
    return record


def _shape_of(tensor: Tensor) -> Any:
    return "of no shape yet" if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def of_optimizers(optimizers: Mapping[str, Optimizer]) -> Record:
    """Return the classes of the optimizers and the settings of their groups; with a schedule, the initial rates."""
    record: Record = {}
    for name, optimizer in optimizers.items():
        what = f"optimizer {name}"
        record[what] = type(optimizer).__qualname__
        for index, group in enumerate(optimizer.param_groups):
            where = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
            record[f"{what}: parameters{where}"] = len(group["params"])
            for key, value in group.items():
                if key == "lr":
                    record[f"{what}: lr{where}"] = plain_value(group.get("initial_lr", value))
                elif key not in ("params", "param_names", "initial_lr"):
                    record[f"{what}: {key}{where}"] = plain_value(value)
    return record


def of_schedules(schedulers: Mapping[str, Any]) -> Record:
    """Return the classes and settings of the schedules, and of those within them."""
    record: Record = {}
    for name, scheduler in schedulers.items():
        record.update(_of_schedule(scheduler, f"scheduler {name}"))
    return record


def _of_schedule(scheduler: Any, what: str) -> Iterator[tuple[str, Any]]:
    yield what, type(scheduler).__qualname__
    milestones = milestones_of(scheduler)
    if milestones is not None:
        yield f"{what}: milestones", plain_value(milestones)
    inner = parts_of(scheduler)
    for key, value in vars(scheduler).items():
        if key[0] != "_" and key not in _IN_MOTION and key != "optimizer":
            yield f"{what}: {key}", plain_value(value)
    for index, each in enumerate(inner):
        yield from _of_schedule(each, f"{what}, part {index}")
