"""Find random numbers that are drawn for an activation of which each rank has another part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from zae.common.walk import tensors_in
from zae.errors import ConfigError

__all__ = ["DrawsWatch"]


class DrawsWatch(TorchFunctionMode):
    """Refuses functions that draw random numbers and take tensors of which each rank has another part.

    So it does gradients of gradients, which torch computes wrongly through such layers.
    """

    def __init__(self, model: nn.Module, device: torch.device, is_same: Callable[[Any], bool]) -> None:
        super().__init__()
        self._device, self._is_same = device, is_same  # Whether the ranks have the same tensors; all of them ask.
        self._names = {id(each): name for name, each in model.named_modules()}
        self._inside: list[str] = []
        self._hooks: Sequence[Any] = ()

    def __enter__(self) -> DrawsWatch:
        self._hooks = (
            module_hooks.register_module_forward_pre_hook(self._begin),
            module_hooks.register_module_forward_hook(self._end, always_call=True),
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, *_: Any) -> None:
        self._inside.append(self._names.get(id(module), type(module).__name__))

    def _end(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.autograd.grad and (kwargs or {}).get("create_graph"):
            raise ConfigError(
                "train_step differentiates gradients (create_graph=True), which torch computes wrongly through layers "
                "in parts, without an error; leave the penalty out, or train with MultiGPUAddon"
            )
        before = self._stream()
        made = function(*args, **(kwargs or {}))
        if self._stream() != before:
            taken = [*tensors_in((args, kwargs))]
            in_parts = any(not place.is_replicate() for each in taken for place in getattr(each, "placements", ()))
            if in_parts or not self._is_same(taken):
                raise ConfigError(
                    f"{function.__name__} in {(self._inside or ['train_step'])[-1] or 'the model'} draws random "
                    "numbers for an activation of which each rank has another part: they would not be those of one "
                    "process. Move it behind the layer that ends the division (RowwiseParallel), or set its p to 0"
                )
        return made

    def _stream(self) -> Any:
        """Return the state of the random streams in a comparable form."""
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(getattr(torch, self._device.type).get_rng_state(self._device))
        return [each.numpy().tobytes() for each in states]
