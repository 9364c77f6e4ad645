"""Keep what autograd saves of a module in the memory of the host until the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zae.device import can_copy_async
from zae.model.forwards import replace_forwards

__all__ = ["HostStorage", "Offloaded", "offload"]

_PLAIN = (Tensor, nn.Parameter)


class _KeptOnDevice(NamedTuple):
    """A saved tensor that stays where it is, with the version that was saved: with hooks, torch does not check it."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        """Return the tensor; refuse one that was changed in place, as autograd does without hooks."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {self.tensor.dtype} tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


class HostStorage:
    """The copies in the memory of the host of what autograd saves on a device.

    They are made on the stream of the computation, which orders them: a tensor is copied before what comes after may
    use its memory, and its copy is there when the backward asks for it.

    Parameters
    ----------
    device : device
        Tensors on it are copied.
    min_bytes : int
        Smaller tensors stay on the device.
    pinned : bool
        Whether the copies are in pinned memory, on a device with streams: the host does not wait for them then.
    """

    def __init__(self, device: torch.device, min_bytes: int, pinned: bool) -> None:
        self.device = device
        self.min_bytes = min_bytes
        self.pinned = pinned and can_copy_async(device)

    def is_moved(self, tensor: Tensor, addresses: set[int]) -> bool:
        """Return whether a saved tensor is copied: parameters and buffers, and views of them, stay on the device."""
        return (
            type(tensor) in _PLAIN
            and tensor.device == self.device
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.min_bytes
            and not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
            and tensor.untyped_storage().data_ptr() not in addresses
        )

    def pack(self, tensor: Tensor, addresses: set[int]) -> Any:
        """Copy a tensor that autograd saves to the host, or keep it where it is."""
        if not self.is_moved(tensor, addresses):
            return _KeptOnDevice(tensor, tensor._version)
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.pinned, requires_grad=False)
        return host.copy_(tensor, non_blocking=self.pinned)

    def unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor on its device."""
        return packed.get() if isinstance(packed, _KeptOnDevice) else packed.to(self.device, non_blocking=self.pinned)


class Offloaded:
    """A forward whose saved tensors are kept in the memory of the host.

    Parameters
    ----------
    module : Module
        Its forward is called.
    storage : HostStorage
        Where the copies are.
    """

    def __init__(self, module: nn.Module, storage: HostStorage) -> None:
        self.module = module
        self.forward = module.forward
        self.storage = storage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Of a graph, the compiler decides what is kept.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        tensors = (*self.module.parameters(), *self.module.buffers())
        addresses = {source.untyped_storage().data_ptr() for source in tensors if type(source) in _PLAIN}

        def pack(tensor: Tensor) -> Any:
            return self.storage.pack(tensor, addresses)

        with torch.autograd.graph.saved_tensors_hooks(pack, self.storage.unpack):
            return self.forward(*args, **kwargs)


def offload(blocks: Mapping[str, nn.Module], storage: HostStorage) -> Callable[[], None]:
    """Let blocks keep what they save for the backward in the memory of the host; return a function that undoes it."""
    return replace_forwards(blocks, lambda block: Offloaded(block, storage))
