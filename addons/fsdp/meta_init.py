"""Models that are made on the meta device, where they need no memory, and get their weights later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zae import random_state
from zae.arguments.constructor import check_model
from zae.distributed.collectives import broadcast
from zae.errors import ConfigError
from zae.values.walk import redistribute_like

__all__ = ["MetaInit", "is_meta"]

_AS_CLASS = "Task(Net, ...), or Task(functools.partial(Net, 8), ...)"


def is_meta(module: nn.Module) -> bool:
    """Return whether some tensor of a module is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class MetaInit:
    """What makes a model: it is called on the meta device first, and for the weights later."""

    def __init__(self, factory: Any) -> None:
        if isinstance(factory, nn.Module) or not callable(factory):
            raise ConfigError(f"meta_init=True needs what makes the model, its class or a function: {_AS_CLASS}")
        self.factory: Any = factory

    @classmethod
    def in_place_of_model(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[MetaInit, tuple[Any, ...], Any]:
        """Return what makes the model, and the arguments of a trainer with `make_empty` as their model."""
        instance = cls(args[0] if args else kwargs.get("model"))
        if args:
            return instance, (instance.make_empty, *args[1:]), kwargs
        return instance, (), {**kwargs, "model": instance.make_empty}

    def make_empty(self) -> nn.Module:
        """Return a model without weights."""
        with torch.device("meta"):
            module: nn.Module = self.factory()
        return module

    def make(self, seed: int | None) -> nn.Module:
        """Return the model that one process makes."""
        return check_model(self.factory, random_state.isolated() if seed is None else random_state.seeded(seed))

    def fill(self, module: nn.Module, seed: int | None) -> None:
        """Put new parameters and buffers into a module that was made empty."""
        for submodule, other in zip(module.modules(), self.make(seed).modules(), strict=True):
            submodule._parameters.update(other._parameters)
            submodule._buffers.update(other._buffers)

    def send(self, module: nn.Module, seed: int | None, device: torch.device, is_main: bool) -> None:
        """Give a sharded module the weights that rank 0 makes, one tensor after another; all ranks call it."""
        filled = self.make(seed) if is_main else None
        module.to_empty(device=device)
        sources = {} if filled is None else {**dict(filled.named_parameters()), **dict(filled.named_buffers())}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            _send(tensor, sources.get(name), device)


@torch.no_grad()
def _send(tensor: Tensor, source: Tensor | None, device: torch.device) -> None:
    """Copy into a tensor of all ranks, which may be sharded, what rank 0 has."""
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if source is not None:
        value.copy_(source)
    broadcast([value] if value.numel() else [])
    tensor.copy_(redistribute_like(value, tensor))
