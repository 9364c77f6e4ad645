"""Compute the gradients of a step several times from the same start, and compare what was computed, bitwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zae.common import random_state
from zae.common.model_weights import named_parameters
from zae.common.torch_private import version_of
from zae.common.walk import dense_part, is_sharded, local_part, tensors_in
from zae.data.loader_state import STREAMS, read_stream, write_stream
from zae.errors import StepError

__all__ = ["Computed", "Start", "compare"]

Rewind = Callable[[], Callable[[], Any]]  # Returns a function that puts random streams back to where they are now.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Computed(NamedTuple):
    """What a computation of the gradients has made: tensors by name, in the order in which they are compared."""

    gradients: dict[str, Tensor]
    losses: dict[str, Tensor]
    buffers: dict[str, Tensor]
    averaged: dict[str, Tensor]


class Start:
    """What a computation of the gradients begins with, and puts back for the next one."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        held: Iterable[Any],
        rewind_others: Rewind,
        has_ranks: bool,
    ) -> None:
        names = {id(each): name for name, each in named_parameters(model).items()}
        self._parameters = {names.get(id(p), f"parameter {i} of the optimizers"): p for i, p in enumerate(parameters)}
        self._before = {
            name: (None if p.grad is None else p.grad.clone(), version_of(p)) for name, p in self._parameters.items()
        }
        self._buffers = [
            (module._buffers, key, f"{path}.{key}".lstrip("."), each, each.detach().clone())
            for path, module in model.named_modules()
            for key, each in module._buffers.items()
            if each is not None
        ]
        held = [*held, *(each for module in model.modules() for each in vars(module).values())]
        self._generators = [each for each in held if isinstance(each, STREAMS)]
        self._rewind_others = rewind_others
        self._has_ranks = has_ranks
        self._streams = [self._capture()]  # At the start, and of each batch.
        self._batches: list[list[tuple[Tensor, Tensor, bool]]] = []
        # The batches that this computation has begun, and was given.
        self._number = 0
        self._given = 0

    def _capture(self) -> list[Callable[[], Any]]:
        streams = [partial(write_stream, each, read_stream(each)) for each in self._generators]
        return [random_state.rewind(), self._rewind_others(), *streams]

    def restore(self) -> None:
        """Put everything back."""
        self._number = 0
        self._given = 0
        for restore in self._streams[0]:
            restore()
        with torch.no_grad():
            for owner, key, _, each, value in self._buffers:
                owner[key] = each
                each.copy_(value)
            for tensor, value, requires_grad in (entry for batch in self._batches for entry in batch):
                if tensor.is_leaf and tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                    tensor.grad = None
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for name, parameter in self._parameters.items():
            given = self._before[name][0]
            parameter.grad = None if given is None else given.clone()

    def begin_batch(self) -> None:
        """Note the random streams in the first computation, and put them back in the others."""
        self._number += 1
        if self._number == len(self._streams):  # What reads data may have drawn since the last batch.
            self._streams.append(self._capture())
            return
        for restore in self._streams[self._number]:
            restore()

    def keep_batch(self, batch: Any, moved: Any) -> Any:
        """Return the batch in new containers, and note its tensors where a step could change those of the window."""
        self._given += 1
        if self._given > len(self._batches):
            known = {id(each) for each in tensors_in(batch)}
            own = [each for each in tensors_in(moved) if id(each) in known and each.layout is torch.strided]
            self._batches.append([(each, each.detach().clone(), each.requires_grad) for each in own])
        return _with_new_containers(moved)

    def check_parameters(self) -> None:
        """Refuse a step that changes parameters: the second computation would begin with others."""
        for name, parameter in self._parameters.items():
            if not is_sharded(parameter) and version_of(parameter) != self._before[name][1]:
                raise StepError(
                    f"train_step changes the parameter {name}, and SilentFaultGuardAddon calls it twice: change "
                    "parameters in on_step_end of the trainer, or leave the add-on out"
                )

    @contextmanager
    def watched(self, local: dict[str, Tensor] | None) -> Iterator[None]:
        """Keep each gradient as it is before DistributedDataParallel averages it."""

        def keep(name: str, parameter: Tensor) -> None:
            if local is not None and parameter.grad is not None:
                local[name] = parameter.grad.detach().clone()

        watched = {} if local is None else self._parameters
        hooks = [
            p.register_post_accumulate_grad_hook(partial(keep, name))
            for name, p in watched.items()
            if p.requires_grad and p.is_leaf and not is_sharded(p)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def computed(self, local: dict[str, Tensor], losses: list[Any]) -> Computed:
        """Return what a computation has made; the next one does not change it."""
        made = {name: _unshared(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        present = ((name, owner[key]) for owner, key, name, *_ in self._buffers)
        buffers = {name: each.detach().clone() for name, each in present if each is not None}
        found = [each.detach().clone() for each in tensors_in(losses)]
        named = {f"batch {number} of the step": each for number, each in enumerate(found, 1)}
        return Computed(local, named, buffers, made) if self._has_ranks else Computed(made, named, buffers, {})


def _with_new_containers(value: Any) -> Any:
    """Return a value with its dicts, lists and tuples copied, as a step may take entries out of them."""
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key, each in value.items():
            inner = _with_new_containers(each)
            if inner is not each:
                made[key] = inner
        return made
    if type(value) in (list, tuple):
        return type(value)(map(_with_new_containers, value))
    return value


def _unshared(gradient: Tensor) -> Tensor:
    """Return a gradient that does not lie in a buffer with others, which the next backward writes to."""
    if gradient.layout is not torch.strided:
        return gradient
    part = local_part(gradient)
    is_alone = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return gradient if is_alone else gradient.detach().clone()


def compare(first: Computed, second: Computed) -> dict[str, Any] | None:
    """Return what differs most between two computations, of the first kind of tensors that differ."""
    for where, a, b in zip(("gradient", "loss", "buffer", "averaged gradient"), first, second):
        counts = {name: _count_different(a.get(name), b.get(name)) for name in {**a, **b}}
        if found := {name: count for name, count in counts.items() if count}:
            sizes = {name: _largest_difference(a.get(name), b.get(name)) for name in found}
            worst = max(found, key=lambda name: (sizes[name] != sizes[name], sizes[name]))
            return {
                "where": where,
                "name": worst,
                "difference": sizes[worst],
                "elements": found[worst],
                "names": len(found),
            }
    return None


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers."""
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _plain(tensor: Tensor | None) -> Tensor | None:
    """Return the part of a tensor that this rank has, without gaps."""
    return None if tensor is None or tensor.is_meta else dense_part(tensor)


def _count_different(a: Tensor | None, b: Tensor | None) -> int:
    """Return how many elements of two tensors have other bits; all of them where one tensor is missing."""
    a = _plain(a)
    b = _plain(b)
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return 0 if a is b else max(each.numel() for each in (a, b) if each is not None)
    bits = _bits(a), _bits(b)
    return 0 if torch.equal(*bits) else int((bits[0] != bits[1]).sum())


def _largest_difference(a: Tensor | None, b: Tensor | None) -> float:
    """Return by how much two tensors differ at most; NaN where one of them has a NaN, or is missing."""
    a = _plain(a)
    b = _plain(b)
    if a is None or b is None or a.shape != b.shape:
        return float("nan")
    return float((a.to(torch.promote_types(a.dtype, torch.float32)) - b).abs().max())
