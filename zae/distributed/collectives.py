"""Exchange tensors and objects between ranks, and hold what was exchanged last until the process has ended.

A thread of gloo gives its reference to a tensor back some time after the exchange is over. Where it has the last one of
C++, it needs the lock of the Python interpreter for that. If Python is ending by then, the process aborts ("terminate
called without an active exception"), with the exit status of a failure after a run that has finished. What is held
here has another reference, so that no thread has the last one. Exchanges within torch, of gradients for instance, come
before the last ones of a run, which are made here.
"""

from __future__ import annotations

import ctypes
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zae.errors import DistributedError
from zae.optim.optimizer_state import like_parameter_layout

__all__ = [
    "BUCKET",
    "all_reduce",
    "average",
    "broadcast",
    "gather_objects",
    "hold",
    "host_group",
    "open_host_group",
]

BUCKET = 25 * 2**20
"""Bytes of small tensors that are sent at once, as many as DistributedDataParallel averages at once."""

_LARGEST = 1 << 20  # Bytes of a tensor that is held: memory that a run may need.
_MOST_BYTES = 1 << 40  # Of an object that a rank sends.

_held: deque[Any] = deque(maxlen=32)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_held))  # Never freed, also not when Python frees all modules at its end.


_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def open_host_group(timeout: float) -> None:
    """Make a group for tensors of the host where that of the script has none; all ranks call it.

    Such a group is that of ``init_process_group("nccl")``, in which tensors of the device alone can be exchanged.
    """
    world = dist.group.WORLD
    if "cpu:" not in dist.get_backend_config(world) and world not in _host_groups:
        _host_groups[world] = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


def host_group() -> Any:
    """Return the group of all ranks that exchanges tensors of the host."""
    world = dist.group.WORLD
    return _host_groups.get(world, world)


def _group_for(tensor: Tensor) -> Any:
    """Return the group of all ranks that exchanges a tensor."""
    return host_group() if tensor.is_cpu else dist.group.WORLD


def hold(work: Any, *tensors: Tensor) -> None:
    """Hold an exchange that is over, with its tensors, until as many others have come after it."""
    if sum(tensor.nbytes for tensor in tensors) <= _LARGEST:
        _held.append(work)


def all_reduce(tensor: Tensor, group: Any = None) -> None:
    """Sum a tensor over the ranks of a group, by default of all ranks, in its place."""
    if group is None:
        group = _group_for(tensor)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if work is not None:  # This rank is not in the group.
        work.wait()
        hold(work, tensor)


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return the objects of all ranks of a group, by default of all ranks."""
    if group is None:
        group = host_group()
    count = dist.get_world_size(group)
    if "cpu:gloo" not in dist.get_backend_config(group):
        values = [None] * count
        dist.all_gather_object(values, value, group=group)
        return values
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for size in _gather(torch.tensor([len(payload)]), count, group)]
    if min(sizes) < 1 or max(sizes) > _MOST_BYTES:
        raise DistributedError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} got what another exchange has sent: an object of "
            f"{max(sizes, key=abs)} bytes. The ranks do not make the same exchanges. A step that exchanges tensors "
            "itself (a gather, gather_for_metrics) needs lockstep=True (MultiGPUAddon, AccelerateAddon), since the "
            "last batch of an epoch may leave a rank without samples"
        )
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(payload)] = payload
    parts = _gather(padded, count, group)
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes)]


def _gather(tensor: Tensor, count: int, group: Any) -> list[Tensor]:
    """Return a tensor of each rank, all of one shape."""
    parts = [torch.empty_like(tensor) for _ in range(count)]
    work: Any = dist.all_gather(parts, tensor, group=group, async_op=True)
    work.wait()
    hold(work, tensor, *parts)
    return parts


def _group_alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can be flattened into one."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors from rank 0, small ones in buckets: that takes at most `BUCKET` bytes beside them."""
    with torch.no_grad():
        for group in _group_alike(tensors):
            for bucket in _buckets(group):
                _send(bucket)


def _send(tensors: list[Tensor]) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.broadcast(tensors[0].detach(), src=0, group=_group_for(tensors[0]))
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    dist.broadcast(flat, src=0, group=_group_for(flat))
    if dist.get_rank():
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors in their order, as many as `BUCKET` bytes hold."""
    bucket = list[Tensor]()
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket = []
            size = 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def average(
    parameters: Iterable[Tensor], size: int, reduce: Callable[[Tensor], Tensor], sparse: Collection[int] = ()
) -> None:
    """Average gradients over so many ranks after the backward; one that no rank has stays None.

    ``reduce`` returns the sum of a tensor over these ranks. Parameters with an id in ``sparse`` get sparse gradients.
    """
    for alike in _group_alike(parameters):
        has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in alike])
        present = [parameter for parameter, ranks in zip(alike, reduce(has_gradient).tolist()) if ranks]
        if not present:
            continue
        gradients = [
            torch.zeros_like(present_parameter) if present_parameter.grad is None else present_parameter.grad.to_dense()
            for present_parameter in present
        ]
        flat = reduce(torch.cat([gradient.reshape(-1) for gradient in gradients])).div_(size)
        for parameter, part in zip(present, flat.split([present_parameter.numel() for present_parameter in present])):
            gradient = part.view_as(parameter)
            if not parameter.is_contiguous():  # A fused kernel needs the same memory layout for both.
                gradient = like_parameter_layout(gradient, parameter)
            parameter.grad = gradient.to_sparse(1) if id(parameter) in sparse else gradient
