"""Count the memory that the state of training takes on each rank: a formula that engines change."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae import optim
from zae.common import random_state
from zae.common.walk import tensors_in
from zae.display.text import format_size
from zae.optim.modes import has_modes
from zae.optim.state import copy_optimizer

__all__ = ["Memory", "Part", "bytes_in", "state_after_a_step"]


@dataclass
class Part:
    """What a rank holds of one parameter.

    Attributes
    ----------
    shape : list of int
        Of this rank's part.
    itemsize : int
        Bytes of an element.
    is_trained : bool
        Whether it gets a gradient.
    slots : float
        What the optimizer keeps, as a multiple of the parameter: 2 for AdamW.
    """

    shape: list[int]
    itemsize: int
    is_trained: bool
    slots: float = 0.0

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the elements."""
        return self.count * self.itemsize

    @property
    def gradient(self) -> int:
        """The bytes of the gradient."""
        return self.bytes * self.is_trained

    def divide(self, dimension: int, ranks: int) -> None:
        """Keep the largest of the parts into which several ranks divide a dimension."""
        if self.shape:
            self.shape[dimension] = -(-self.shape[dimension] // ranks)


@dataclass
class Memory:
    """The bytes of the state on the rank that holds most; activations and temporaries come on top.

    `Trainer.plan` makes it for one process, and engines divide it: see `zae.fact.Fact`.

    Attributes
    ----------
    parts : dict of str to Part
        By the name of the parameter; those outside of the model are numbered.
    buffers : int
        Bytes of the buffers of the model.
    held : dict of str to int
        What else is there all the time, by name, such as the buckets of DistributedDataParallel.
    is_offloaded : bool
        Whether parameters, gradients and states of the optimizer are in the memory of the host (``cpu_offload``).

    Examples
    --------
    >>> import torch
    >>> from zae.plan.memory import Memory
    >>> model = torch.nn.Linear(250, 1000, bias=False)
    >>> memory = Memory.of_model(model)
    >>> memory.parameters, memory.gradients, memory.total
    (1000000, 1000000, 2000000)
    """

    parts: dict[str, Part]
    buffers: int = 0
    held: dict[str, int] = field(default_factory=dict)
    is_offloaded: bool = False

    @classmethod
    def of_model(cls, model: nn.Module, optimizers: Iterable[tuple[list[Tensor], Any]] = ()) -> Memory:
        """Return the memory of one process; an optimizer is its parameters, and its state after a step.

        An optimizer whose parameters are all outside of the model was made to look at: it trains the whole model.
        """
        parts = {id(each): _part(each) for each in model.parameters()}
        names = {id(each): name for name, each in model.named_parameters()}
        for trained_by, state in optimizers:
            own = {id(each): each for each in trained_by}
            trained = own if own.keys() & names.keys() else dict.fromkeys(parts)
            parts |= {key: _part(each) for key, each in own.items() if trained is own and key not in parts}
            slots = bytes_in(state) / max(1, _bytes(own.values()))
            for key in trained:
                parts[key].slots += slots * parts[key].is_trained
        named = {names.get(key, f"outside {index}"): each for index, (key, each) in enumerate(parts.items())}
        return cls(named, _bytes(model.buffers()))

    @property
    def parameters(self) -> int:
        """The bytes of the parameters and buffers."""
        return sum(each.bytes for each in self.parts.values()) + self.buffers

    @property
    def in_float32(self) -> int:
        """The bytes of the parameters and buffers, with parameters in half precision in float32."""
        return self.parameters + sum(each.bytes for each in self.parts.values() if each.itemsize == 2)

    @property
    def gradients(self) -> int:
        """The bytes of the gradients."""
        return sum(each.gradient for each in self.parts.values())

    @property
    def optimizer(self) -> int:
        """The bytes of the states of the optimizers."""
        return round(sum(each.bytes * each.slots for each in self.parts.values()))

    @property
    def total(self) -> int:
        """The bytes of all together."""
        return sum(self.entries().values())

    def entries(self) -> dict[str, int]:
        """Return the bytes by name."""
        found = {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer, **self.held}
        return {name: size for name, size in found.items() if size}

    def __str__(self) -> str:
        where = ", on the host" if self.is_offloaded else ""
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in self.entries().items())
        return f"{format_size(self.total)} beside activations and temporaries{where}: {parts}"


def _part(parameter: Tensor) -> Part:
    return Part(list(parameter.shape), parameter.element_size(), parameter.requires_grad)


def bytes_in(value: Any) -> int:
    """Return the bytes of the tensors in a value, at any depth."""
    return _bytes(tensors_in(value))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def state_after_a_step(optimizer: Optimizer) -> Any:
    """Return the state of an optimizer after a step; before its first one, of tensors without data."""
    return optimizer.state or _state_of_a_step(optimizer)


def _state_of_a_step(optimizer: Optimizer) -> Any:
    """Return the state of an optimizer after its first step, tried on tensors without data."""
    # What else it holds is copied, large tensors without their data: a step may change it in place.
    memo: dict[int, Any] = {
        id(each): torch.empty_like(each, device="meta") for each in tensors_in(vars(optimizer)) if each.dim()
    }
    for parameter in optim.parameters_of(optimizer):
        memo[id(parameter)] = shape = torch.zeros_like(parameter, device="meta").requires_grad_()
        shape.grad = torch.zeros_like(shape)
    try:
        twin = copy_optimizer(optimizer, memo, state=defaultdict(dict))
        for group in twin.param_groups:
            group.update(foreach=False, fused=False)
        with random_state.isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if has_modes(optimizer):
                twin.train()  # type: ignore[attr-defined]
            type(optimizer).step(twin)
    except Exception:
        return [p for group in optimizer.param_groups for p in group["params"]] * 2  # As much as Adam keeps.
    return twin.state
