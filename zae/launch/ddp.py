"""The DistributedDataParallel of `MultiGPUAddon`, which forwards attributes to the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zae.common.torch_private import arrange_buckets, can_arrange_buckets

__all__ = ["BUCKET", "Replica", "broadcast", "group_alike", "sparse_in"]

BUCKET = 25 * 2**20
"""Bytes of small tensors that are sent at once, as many as DistributedDataParallel averages at once."""

_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"  # torch < 2.13


class Replica(DistributedDataParallel):
    """DistributedDataParallel that records whether it was called, and forwards attributes to its model."""

    _used = False
    _made = False
    _step = -1

    def __init__(self, module: nn.Module, **options: Any) -> None:
        if not can_arrange_buckets():  # torch would arrange them after the first step, unless it looks for unused ones.
            options["find_unused_parameters"] = True
        # The last parameters come first, where buckets are arranged at once: their gradients are there first.
        vars(self)["_step"] = 1 if options["find_unused_parameters"] else -1
        options[_SYNC_BUFFERS] = False
        super().__init__(module, **options)
        if hasattr(module, "dim"):
            del self.dim  # Used for several devices in one process; a model may have an attribute of this name.
        self._held = {id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad}
        # torch arranges the buckets of gradients after the first step, in the order in which its gradients came. The
        # order of a sum over three or more ranks depends on it: the first step after a resume would differ in its
        # last bits.
        arrange_buckets(self.reducer)
        self._made = True

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()
        return parameters[:: self._step], expect_sparse[:: self._step]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["_used"] = True  # Not through __setattr__, which takes longer.
        return super().forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes that the wrapper does not have on the model."""
        if type(value) is bool and name in vars(self):  # The wrapper sets one in each step.
            vars(self)[name] = value
            return
        own = not self._made or name == "module" or name in vars(self) or hasattr(type(self), name)
        if own or (name.startswith("_") and not hasattr(self.module, name)):
            super().__setattr__(name, cast(Any, value))
        else:
            setattr(self.module, name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True


def group_alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can be flattened into one."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors from rank 0, small ones in buckets: that takes at most `BUCKET` bytes beside them."""
    with torch.no_grad():
        for group in group_alike(tensors):
            for bucket in _buckets(group):
                _send(bucket)


def _send(tensors: list[Tensor]) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.broadcast(tensors[0].detach(), src=0)
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    dist.broadcast(flat, src=0)
    if dist.get_rank():
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors in their order, as many as `BUCKET` bytes hold."""
    bucket, size = list[Tensor](), 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def sparse_in(model: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients are sparse."""
    tables = [each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    return {id(each.weight) for each in tables if each.sparse}
