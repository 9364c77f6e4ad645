"""Keep what autograd saves of a module in the memory of the host until the backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zae.common.device import can_copy_async
from zae.launch.activations.recompute import replace_forwards

__all__ = ["HostStorage", "Offloaded", "offload"]

_PLAIN = (Tensor, nn.Parameter)
_IN_FLIGHT = 4  # Copies at most that the host is ahead of the device, in each direction.


class _Kept(NamedTuple):
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


class _Copied(NamedTuple):
    """A tensor that is being copied to the host, its copy there, and the event after which that is complete."""

    kept: _Kept
    host: Tensor
    event: Any

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether this is the copy of a tensor: several operations may save the same one."""
        own = self.kept.tensor
        return (
            own.data_ptr() == tensor.data_ptr()
            and (own.dtype, own.shape, own.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            and self.kept.version == own._version == tensor._version
        )


class HostStorage:
    """The copies in the memory of the host of what autograd saves on a device.

    On a device with streams, copies are made on a second stream. A tensor stays on the device until its copy is
    complete, and the host is at most a few copies ahead of the device, so that memory is free again when more is
    needed.

    Parameters
    ----------
    device : device
        Tensors on it are copied.
    min_bytes : int
        Smaller tensors stay on the device.
    pinned : bool
        Whether the copies are in pinned memory, on a device with streams.
    """

    def __init__(self, device: torch.device, min_bytes: int, pinned: bool) -> None:
        self.device, self.min_bytes = device, min_bytes
        self.side = torch.Stream(device=device) if can_copy_async(device) else None
        self.pinned = pinned and self.side is not None
        self._leaving: deque[_Copied] = deque()  # Copies to the host that may not be complete.
        self._arrived: deque[Any] = deque()  # Events of the computation, at the last copies to the device.

    def is_moved(self, tensor: Tensor, held: set[int]) -> bool:
        """Return whether a saved tensor is copied: parameters and buffers, and views of them, stay on the device."""
        return (
            type(tensor) in _PLAIN
            and tensor.device == self.device
            and tensor.layout is torch.strided
            and tensor.nbytes >= self.min_bytes
            and not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
            and tensor.untyped_storage().data_ptr() not in held
        )

    def pack(self, tensor: Tensor, held: set[int]) -> Any:
        """Copy a tensor that autograd saves to the host, or keep it where it is."""
        kept = _Kept(tensor, tensor._version)
        if not self.is_moved(tensor, held):
            return kept
        for each in self._leaving:
            if each.is_of(tensor):
                return each.host
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.pinned, requires_grad=False)
        if self.side is None:
            host.copy_(tensor)
            return host
        self.side.wait_stream(torch.accelerator.current_stream(self.device))
        with self.side:
            host.copy_(tensor, non_blocking=True)
        self._leaving.append(_Copied(kept, host, self.side.record_event()))
        while len(self._leaving) > _IN_FLIGHT:
            self._release(0)
        return host

    def _release(self, index: int) -> Tensor:
        """Drop a tensor when its copy is complete; one that was changed meanwhile may have been copied wrongly."""
        copied = self._leaving[index]
        del self._leaving[index]
        copied.event.synchronize()
        return copied.kept.get()

    def unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor on its device."""
        if isinstance(packed, _Kept):
            return packed.get()
        if self.side is None:
            return packed.to(self.device)
        for index, each in enumerate(self._leaving):
            if each.host is packed:
                return self._release(index)
        while len(self._arrived) >= _IN_FLIGHT:
            self._arrived.popleft().synchronize()
        computing = torch.accelerator.current_stream(self.device)
        with self.side:
            found = packed.to(self.device, non_blocking=True)
        computing.wait_stream(self.side)
        # The memory belongs to the second stream, which must not reuse it before the computation is done with it.
        found.record_stream(computing)
        self._arrived.append(computing.record_event())
        return found

    def clear(self) -> None:
        """Wait for the copies, and drop what is still on the device."""
        for copied in self._leaving:
            copied.event.synchronize()
        self._leaving.clear()
        self._arrived.clear()

    def __deepcopy__(self, memo: Any) -> HostStorage:
        """Return the object itself: copies of a model share it."""
        return self


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
        self.module, self.forward, self.storage = module, module.forward, storage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Of a graph, the compiler decides what is kept.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        tensors = (*self.module.parameters(), *self.module.buffers())
        held = {each.untyped_storage().data_ptr() for each in tensors if type(each) in _PLAIN}

        def pack(tensor: Tensor) -> Any:
            return self.storage.pack(tensor, held)

        with torch.autograd.graph.saved_tensors_hooks(pack, self.storage.unpack):
            return self.forward(*args, **kwargs)


def offload(blocks: Mapping[str, nn.Module], storage: HostStorage) -> Callable[[], None]:
    """Let blocks keep what they save for the backward in the memory of the host; return a function that undoes it."""
    undo = replace_forwards(blocks, lambda block: Offloaded(block, storage))

    def restore() -> None:
        undo()
        storage.clear()

    return restore
