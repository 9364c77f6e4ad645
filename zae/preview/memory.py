"""Predict the memory that training takes on each rank, without activations: a formula that engines change."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae import optim
from zae.common import random_state
from zae.common.walk import tensors_in
from zae.display.text import format_size
from zae.optim.modes import has_modes
from zae.optim.state import copy_optimizer
from zae.optimizers.quantized import bytes_of

__all__ = ["Memory", "Part", "bytes_in", "shard_memory", "state_after_a_step"]


_STEP = "the optimizer's step"


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
    """The bytes that training takes on the rank that holds most, beside the activations.

    `Trainer.plan` makes it for one process, and engines change it in ``plan_memory``.

    Attributes
    ----------
    parts : dict of str to Part
        By the name of the parameter; those outside of the model are numbered.
    buffers : int
        Bytes of the buffers of the model.
    held : dict of str to int
        What else is there all the time, by name, such as the buckets of DistributedDataParallel.
    peaks : dict of str to int
        What is there for a moment of a step, by name; only the largest of them counts.
    start : int
        The bytes of all together before an engine has divided the model.
    is_offloaded : bool
        Whether parameters, gradients and states of the optimizer are in the memory of the host (``cpu_offload``).

    Examples
    --------
    >>> import torch
    >>> from zae.preview.memory import Memory
    >>> model = torch.nn.Linear(250, 1000, bias=False)
    >>> memory = Memory.of_model(model)
    >>> memory.parameters, memory.gradients, memory.total
    (1000000, 1000000, 2000000)
    """

    parts: dict[str, Part]
    buffers: int = 0
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    start: int = 0
    is_offloaded: bool = False

    @classmethod
    def of_model(cls, model: nn.Module, optimizers: Iterable[tuple[Optimizer, list[Tensor], Any]] = ()) -> Memory:
        """Return the memory of one process; each optimizer comes with its parameters and its state after a step.

        An optimizer whose parameters are all outside of the model was made to look at: it trains the whole model.
        """
        parts = {id(each): _part(each) for each in model.parameters()}
        names = {id(each): name for name, each in model.named_parameters()}
        peak = 0
        for optimizer, trained_by, state in optimizers:
            own = {id(each): each for each in trained_by}
            trained = own if own.keys() & names.keys() else dict.fromkeys(parts)
            parts |= {key: _part(each) for key, each in own.items() if trained is own and key not in parts}
            slots = bytes_in(state) / max(1, _bytes(own.values()))
            held = [parts[key] for key in trained if parts[key].is_trained]
            for each in held:
                each.slots += slots
            sizes = [each.bytes for each in held]
            peak = max(peak, _temporaries(optimizer, slots, sizes))
        named = {names.get(key, f"outside {index}"): each for index, (key, each) in enumerate(parts.items())}
        return cls(named, _bytes(model.buffers()), peaks={_STEP: peak})

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
        """The bytes of all together on the device, in the moment in which they are most."""
        return max(self.start, sum(self.entries().values()))

    @property
    def host(self) -> int:
        """The bytes in the memory of the host, where the state is offloaded; pinned memory, if the device is a GPU."""
        return sum(self._state().values()) + self.peaks.get(_STEP, 0) if self.is_offloaded else 0

    def _state(self) -> dict[str, int]:
        return {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}

    def entries(self) -> dict[str, int]:
        """Return the bytes of a step on the device by name, with the largest peak."""
        found = {**({} if self.is_offloaded else self._state()), **self.held}
        peaks = {name: size for name, size in self.peaks.items() if not (self.is_offloaded and name == _STEP)}
        largest = max(peaks, key=peaks.__getitem__, default=None)
        if largest is not None:
            found[largest] = peaks[largest]
        return {name: size for name, size in found.items() if size}

    def __str__(self) -> str:
        entries = self.entries()
        step = sum(entries.values())
        before = f"; {format_size(self.start)} before the model is divided" if self.start > step else ""
        host = f"; {format_size(self.host)} on the host ({_list(self._state())})" if self.is_offloaded else ""
        return f"{format_size(step)} and activations: {_list(entries)}{before}{host}"


class _Gathered(NamedTuple):
    """The bytes of modules that ``fully_shard`` gathers together, while they are whole."""

    parameters: int
    gradients: int
    sent: int  # The gradients, in the type in which they are averaged.
    shards: int  # This rank's part of the averaged gradients.

    @classmethod
    def of(cls, parts: Iterable[Part], ranks: int, policy: Any = None) -> _Gathered:
        """Return those of some parameters, which a MixedPrecisionPolicy may gather in another type."""
        sizes = [0, 0, 0, 0]
        for each in parts:
            used, sent = (getattr(policy, f"{name}_dtype", None) for name in ("param", "reduce"))
            size = each.itemsize if used is None else used.itemsize
            trained = each.count * each.is_trained
            sizes[0] += each.count * size
            sizes[1] += trained * size
            sizes[2] += trained * (size if sent is None else sent.itemsize)
            sizes[3] += -(-each.gradient // ranks)
        return cls(*sizes)


def shard_memory(
    memory: Memory,
    groups: Sequence[Sequence[str]],
    ranks: int,
    policy: Any = None,
    keeps: bool = False,
    accumulates: bool = False,
) -> None:
    """Divide a model among ranks as ``fully_shard`` does, and add what it gathers.

    Parameters
    ----------
    memory : Memory
        Changed in place.
    groups : sequence of sequence of str
        The parameters that are gathered together; those of no block come first.
    ranks : int
        How many ranks each parameter is divided among.
    policy : MixedPrecisionPolicy, optional
        The types in which blocks compute and gradients are averaged.
    keeps : bool
        Whether blocks stay gathered from the forward to the backward.
    accumulates : bool
        Whether whole gradients are accumulated before they are sent.
    """
    rest, *blocks = (_Gathered.of([memory.parts[name] for name in names], ranks, policy) for names in groups)
    memory.peaks["gathered blocks"] = _gathered_bytes(rest, blocks, keeps, accumulates)
    for name in itertools.chain.from_iterable(groups):
        memory.parts[name].divide(0, ranks)


def _gathered_bytes(rest: _Gathered, blocks: Sequence[_Gathered], keeps: bool, accumulates: bool) -> int:
    """Return what is gathered in a backward beside the shards, at most; the rest stays gathered until it ends."""
    groups = [rest, *blocks]
    block = max(blocks, key=sum, default=_Gathered(0, 0, 0, 0))
    # While a block computes, the next one is gathered, and the gradients of the one before are sent.
    beside = [0, 0, max(block.parameters, block.sent), block.parameters + block.sent][min(len(blocks), 3)]
    # The shards of gradients that are still to be sent are not there yet.
    within = rest.parameters + rest.gradients + block.parameters + block.gradients + beside - rest.shards - block.shards
    end = rest.gradients + rest.sent + block.sent
    begin = block.sent - sum(each.shards for each in groups)
    begin += sum(each.parameters for each in groups) if keeps else rest.parameters + 2 * block.parameters
    # Gradients are accumulated in the type in which they are sent.
    begin += sum(each.sent for each in groups) if accumulates else rest.gradients + block.gradients
    return max(within, end, begin if keeps or accumulates else 0)


def _list(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_size(size)}" for name, size in sizes.items() if size)


def _part(parameter: Tensor) -> Part:
    return Part(list(parameter.shape), parameter.element_size(), parameter.requires_grad)


def bytes_in(value: Any) -> int:
    """Return the bytes of the tensors in a value, at any depth."""
    return _bytes(tensors_in(value))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(bytes_of, tensors))


def _temporaries(optimizer: Optimizer, slots: float, sizes: list[int]) -> int:
    """Return the bytes that a step of an optimizer computes with beside its state: two results where it keeps two."""
    groups = optimizer.param_groups
    at_once = any(group.get("foreach") for group in groups)
    if not sizes or any(group.get("fused") for group in groups):
        return 0
    return round(min(slots, 1) * sum(sizes) if at_once else min(slots, 2) * max(sizes))


def state_after_a_step(optimizer: Optimizer) -> Any:
    """Return the state of an optimizer after a step; before its first one, of tensors without data."""
    return optimizer.state or _state_of_a_step(optimizer)


def _state_of_a_step(optimizer: Optimizer) -> Any:
    """Return the state of an optimizer after its first step, tried on tensors without data."""
    # What else it holds is copied, large tensors without their data: a step may change it in place.
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in tensors_in(vars(optimizer))
                            if each.dim()}  # fmt: skip
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
