"""What lies on the rank of its stage alone: divide a model, and make states whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zae.distributed.collectives import all_reduce
from zae.values.walk import leaves_of, map_tensors

__all__ = ["check_loss", "fill_states", "gradient_norm", "keep_own", "make_whole"]


def keep_own(model: nn.Module, ids_to_keep: Collection[int]) -> None:
    """Put tensors of the meta device in the place of all parameters and buffers but those with these ids."""
    twin_by_id: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in ids_to_keep:
                twin = twin_by_id.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                )
                setattr(module, name, twin)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) not in ids_to_keep:
                setattr(module, name, twin_by_id.setdefault(id(buffer), buffer.to("meta")))


def make_whole(value: Any, keeps: bool, gather: Callable[[Any], list[Any]], device: torch.device) -> Any:
    """Return a value in which tensors of the meta device are those that other ranks have; all ranks call it.

    What was received is in the memory of the host. A rank that does not keep it gets its own value.
    """
    parts = {place: leaf for place, leaf in leaves_of(value, "value") if isinstance(leaf, Tensor)}
    absent = {path: _kind_of(tensor) for path, tensor in parts.items() if tensor.is_meta}
    # Each rank tells which tensors it lacks, and whether it needs them.
    ranks = gather((absent, keeps))
    rank = dist.get_rank()
    whole = dict[int, Tensor]()
    kinds: dict[str, _Kind] = {}
    for absent_there, _ in ranks:
        kinds |= absent_there
    # One after another, in an order that all ranks know: the first rank that has a tensor sends it to those that need
    # it.
    for path, kind in kinds.items():
        holders = [index for index, (held_paths, _) in enumerate(ranks) if path not in held_paths]
        if not holders:
            continue
        takers = [index for index, (held_paths, takes) in enumerate(ranks) if takes and path in held_paths]
        if rank in takers:
            received = torch.empty(kind.shape, dtype=kind.dtype, device=device)
            _send(received, holders[0], takers, rank)
            whole[id(parts[path])] = received.cpu()
        elif rank == holders[0]:
            _send(parts[path].detach().to(device).contiguous(), holders[0], takers, rank)
    return map_tensors(lambda tensor: whole.get(id(tensor), tensor), value)


def _send(tensor: Tensor, source: int, takers: Iterable[int], rank: int) -> None:
    """Send a tensor from one rank to some others, which receive it into theirs."""
    if rank != source:
        dist.recv(tensor, src=source)
        return
    for taker in takers:
        dist.send(tensor, dst=taker)


def fill_states(
    states: Mapping[int, Mapping[str, Any]], gather: Callable[[Any], list[Any]]
) -> dict[int, dict[str, Any]]:
    """Return the states of all parameters of an optimizer by index: those of other ranks are on the meta device."""
    named: dict[Any, Any] = {key: state for key, state in states.items() if type(key) is not int}  # Of no parameter.
    described = {index: _described(state) for index, state in states.items() if index not in named}
    states_found: dict[int, dict[str, Any]] = {}
    # Each rank lists which parameters of its stages have a state, with the shape and the type of each tensor in it.
    for rank in gather(described):
        for index, state in rank.items():
            states_found.setdefault(index, {key: _empty(entry) for key, entry in state.items()})
    whole = {index: dict(states[index]) if index in states else states_found[index] for index in sorted(states_found)}
    return whole | named


class _Kind(NamedTuple):
    """What is sent in place of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _described(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of a parameter without its tensors."""
    return {key: _kind_of(entry) if isinstance(entry, Tensor) else entry for key, entry in state.items()}


def _kind_of(tensor: Tensor) -> _Kind:
    return _Kind(tuple(tensor.shape), tensor.dtype)


def _empty(value: Any) -> Any:
    """Return a tensor on the meta device in place of what was sent for one; any other value itself."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Kind) else value


def check_loss(loss: Any) -> None:
    """Refuse a loss without a graph, of which torch would leave the backward out."""
    if not getattr(loss, "requires_grad", False):
        raise TypeError("the loss cannot be differentiated")


def gradient_norm(gradients: Iterable[Tensor], parameters: Iterable[Tensor], group: Any, device: Any) -> Tensor:
    """Return the norm over the gradients of all stages, in the widest type of the parameters."""
    squares = [torch.linalg.vector_norm(gradient).double().square() for gradient in gradients]
    square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    # Each rank of the pipeline has squared the gradients of its stages.
    all_reduce(square, group)
    dtypes = [parameter.dtype for parameter in parameters]
    return square.sqrt().to(max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32))
