"""Check what the constructor of a trainer is given, and where it is called; each error says what to write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn

from zae.errors import ConfigError, did_you_mean, kind_of

__all__ = ["check_alone", "check_devices", "check_launch_precision", "check_mode", "check_model", "check_same"]

MODES = ("train", "test")


def check_model(model: Any, seeded: AbstractContextManager[None]) -> nn.Module:
    """Return a module, or what a function returns that is called with seeded random streams."""
    if not isinstance(model, nn.Module) and callable(model):
        with seeded:
            try:
                model = model()
            except TypeError as error:
                if not isinstance(model, type):
                    raise
                name = model.__name__
                raise ConfigError(
                    f"model is the class {name}, and {name}() fails ({error}); give a module: {name}(...), or a "
                    f"function that makes one: lambda: {name}(...)"
                ) from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {kind_of(model)}; give a torch.nn.Module, or a function that returns one")
    return model


def check_same(present: Any, wrapped: Any, module: nn.Module) -> nn.Module:
    """Refuse a `trainer.model` that is neither the model that was given nor its wrapper."""
    if present is not module and present is not wrapped:
        raise ConfigError(
            f"trainer.model was set to a {type(present).__name__}, but a trainer keeps the model that it was created "
            f"with, a {type(module).__name__}; create a new trainer for another model, or override wrap_model(model) "
            "to return what train_step calls"
        )
    return module


def check_devices(devices: list[Any], name: str, slots: Mapping[str, Any]) -> list[Any]:
    """Refuse several devices without a parallel add-on."""
    if len(devices) > 1 and "parallel" not in slots:
        raise ConfigError(
            f"device is a list of {len(devices)}, but {name} trains on one device; to train on several, write "
            ".add_on(MultiGPUAddon)"
        )
    return devices


def check_alone(name: str, slots: Mapping[str, Any]) -> None:
    """Refuse to run in one of several ranks of a launcher without a parallel add-on: each would train all by itself.

    A script that has joined the ranks by itself may divide the work by hand, with its own DistributedDataParallel.
    """
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    is_launched = rank is not None and world.isdecimal() and int(world) > 1
    has_joined = dist.is_available() and dist.is_initialized()
    if is_launched and not has_joined and "parallel" not in slots:
        raise ConfigError(
            f"a launcher has started {world} ranks (RANK={rank}, WORLD_SIZE={world}), and {name} does not join them: "
            "each would train alone, on all of the data. Write .add_on(MultiGPUAddon); for runs that are meant to be "
            "independent, unset RANK and WORLD_SIZE in each process: os.environ.pop('RANK')"
        )


def check_launch_precision(name: str, is_taken: bool) -> None:
    """Refuse a precision that `accelerate launch` was asked for and that nothing here would train in."""
    requested = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if requested != "no" and not is_taken:
        raise ConfigError(
            f"accelerate launch was asked for mixed_precision={requested} (ACCELERATE_MIXED_PRECISION is set), and "
            f"{name} would train in the types of the model: write .add_on(AMPAddon) and precision={requested!r}, or "
            ".add_on(AccelerateAddon), which takes it from there, or --mixed_precision no"
        )


def check_mode(mode: Any) -> str:
    """Refuse a mode other than "train" and "test"."""
    if mode not in MODES:
        if hasattr(mode, "param_groups"):
            kind = type(mode).__name__
            raise ConfigError(
                f"mode is an optimizer ({kind}); the third argument is the mode, so name it: optimizer=..."
            )
        hint = did_you_mean(str(mode), MODES)
        raise ConfigError(
            f"mode={mode!r}; it must be 'train' or 'test', and says what run() does: give an attribute of your own "
            f"another name{hint}"
        )
    return str(mode)
