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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_reduce", "gather_objects", "hold"]

_LARGEST = 1 << 20  # Bytes of a tensor that is held: memory that a run may need.

_held: deque[Any] = deque(maxlen=32)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_held))  # Never freed, also not when Python frees all modules at its end.


def hold(work: Any, *tensors: Tensor) -> None:
    """Hold an exchange that is over, with its tensors, until as many others have come after it."""
    if sum(each.nbytes for each in tensors) <= _LARGEST:
        _held.append(work)


def all_reduce(tensor: Tensor, group: Any = None) -> None:
    """Sum a tensor over the ranks of a group, in its place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if work is not None:  # This rank is not in the group.
        work.wait()
        hold(work, tensor)


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return the objects of all ranks of a group."""
    count = dist.get_world_size(group)
    if "cpu:gloo" not in dist.get_backend_config(group):
        values = [None] * count
        dist.all_gather_object(values, value, group=group)
        return values
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for size in _gather(torch.tensor([len(own)]), count, group)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = own
    found = _gather(padded, count, group)
    return [pickle.loads(each[:size].numpy().tobytes()) for each, size in zip(found, sizes)]


def _gather(tensor: Tensor, count: int, group: Any) -> list[Tensor]:
    """Return a tensor of each rank, all of one shape."""
    found = [torch.empty_like(tensor) for _ in range(count)]
    work: Any = dist.all_gather(found, tensor, group=group, async_op=True)
    work.wait()
    hold(work, tensor, *found)
    return found
