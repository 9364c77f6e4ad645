"""When a checkpoint is written: at once, or in a thread from a copy of its tensors, while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zae.checkpoint.tensor_bytes import byte_view
from zae.checkpoint.writer import Files, SavePlan
from zae.device import can_copy_async
from zae.values.strides import view_key

__all__ = ["Saver", "Snapshots"]

_Kind: TypeAlias = "tuple[torch.dtype, torch.Size, torch.device | None]"  # The device that its memory is pinned for.


class Snapshots:
    """Copies tensors to the host, into memory that is reused for the next ones.

    New memory costs as much as the copy itself, so that the memory of the last snapshot is kept.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[_Kind, Tensor]] = []  # Those of the last snapshot.

    def take(self, files: Files) -> Files:
        """Return the same files with copies of their tensors; tied tensors stay tied."""
        spare: dict[_Kind, list[Tensor]] = {}
        for kind, buffer in self._buffers:
            spare.setdefault(kind, []).append(buffer)
        self._buffers = []
        copies: dict[tuple[object, ...], Tensor] = {}
        copied: Files = {}
        for file, content in files.items():
            if isinstance(content, dict):
                content = {name: self._copy(tensor.detach(), spare, copies) for name, tensor in content.items()}
            copied[file] = content
        for device in {device for (*_, device), _ in self._buffers if device is not None}:
            torch.accelerator.synchronize(device)  # It need not be the current one.
        return copied

    def _copy(
        self, value: Tensor, spare: dict[_Kind, list[Tensor]], copies: dict[tuple[object, ...], Tensor]
    ) -> Tensor:
        key = view_key(value)
        if key is None or type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return value.clone()
        if key in copies:
            return copies[key]
        device = value.device if can_copy_async(value.device) else None
        kind = (value.dtype, value.shape, device)
        if spare.get(kind):
            buffer = spare[kind].pop()
        else:
            buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=device is not None)
        if value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg():
            byte_view(buffer)[:] = byte_view(value)  # torch would synchronise its threads for each tensor.
        else:
            buffer.copy_(value, non_blocking=device is not None)
        copies[key] = buffer
        self._buffers.append((kind, buffer))
        return buffer


class Saver:
    """Writes checkpoints, one at a time."""

    def __init__(self, background: bool) -> None:
        self.background = background
        self.is_pending = False  # Whether some rank may not know yet what became of the last save.
        self._snapshots = Snapshots()
        self._future: Future[None] | None = None  # Of what a thread writes.
        self.has_failed = False  # Of the last save in the background.

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return {"background": self.background}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["background"])  # type: ignore[misc]

    def begin(self) -> None:
        """Note, on every rank, that one of them is about to save."""
        self.is_pending = self.background
        self.has_failed = False

    def save(self, plan: SavePlan, write: Callable[[SavePlan], None]) -> None:
        """Write a checkpoint, or begin to."""
        self.wait()
        if not self.background:
            write(plan)
            return
        copied = plan._replace(files=self._snapshots.take(plan.files))
        # A thread for each: one that waits for the next would be missing in a forked process. A script that ends waits.
        executor = ThreadPoolExecutor(1, "zae-save")
        self._future = executor.submit(write, copied)
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise what it failed with."""
        future = self._future
        if future is None:
            return
        error = future.exception()
        self._future = None
        if error is not None:
            self.has_failed = True
            raise error

    def has_ended(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Return whether nothing is being written, by any rank; all call it."""
        return all(gather(self._future is None or self._future.done()))
