"""Copies of a state on the host, so that training continues while a thread writes them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zae.common.device import can_copy_async
from zae.storage.encoding import PLAIN
from zae.storage.tensor_bytes import byte_view, view_key

__all__ = ["Snapshots"]

_PIECE = 1 << 19  # Bytes that a thread copies at a time; less than that is copied directly.
_THREADS = 4  # More do not copy faster: they wait for the memory.


class Snapshots:
    """Copies states to the host, into memory that is reused for the next one.

    New memory costs as much as the copy itself, so that the memory of the last snapshot is kept.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Any, Tensor]] = []
        self._pieces: deque[tuple[memoryview, memoryview]] = deque()

    def take(self, state: Any) -> Any:
        """Return a copy of nested dicts, lists and tuples of tensors and plain values; tied tensors stay tied."""
        spare: dict[Any, list[Tensor]] = {}
        for kind, buffer in self._buffers:
            spare.setdefault(kind, []).append(buffer)
        self._buffers = []
        self._pieces.clear()
        copied = self._copy(state, spare, {})
        _copy_pieces(self._pieces)
        for device in {device for (*_, device), _ in self._buffers if device is not None}:
            torch.accelerator.synchronize(device)  # It need not be the current one.
        return copied

    def _copy(self, value: Any, spare: dict[Any, list[Tensor]], copies: dict[Any, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), spare, copies)
        if type(value) is dict and PLAIN.issuperset(map(type, value.values())):
            return value.copy()  # A record; a long run has many of them, and their values are immutable.
        if isinstance(value, dict):
            made = {key: self._copy(each, spare, copies) for key, each in value.items()}
            return made if type(value) is dict else _like(value, made)
        if type(value) in (list, tuple):
            return type(value)(self._copy(each, spare, copies) for each in value)
        return value.copy() if hasattr(value, "dtype") and hasattr(value, "copy") else value

    def _tensor(self, value: Tensor, spare: dict[Any, list[Tensor]], copies: dict[Any, Tensor]) -> Tensor:
        key = view_key(value)
        if key is None or type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return value.clone()
        if key not in copies:
            device = value.device if can_copy_async(value.device) else None
            kind, pinned = (value.dtype, value.shape, device), device is not None
            buffers = spare.get(kind)
            buffer = buffers.pop() if buffers else torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            if value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg():
                self._plan(byte_view(buffer), byte_view(value))  # torch would synchronise its threads for each tensor.
            else:
                buffer.copy_(value, non_blocking=pinned)
            copies[key] = buffer
            self._buffers.append((kind, buffer))
        return copies[key]

    def _plan(self, target: memoryview, source: memoryview) -> None:
        """Copy a small tensor directly, and split a large one into pieces for several threads."""
        if len(source) < _PIECE:
            target[:] = source
            return
        for start in range(0, len(source), _PIECE):
            self._pieces.append((target[start : start + _PIECE], source[start : start + _PIECE]))


def _copy_pieces(pieces: deque[tuple[memoryview, memoryview]]) -> None:
    """Copy memory in a few threads, each of which takes the next piece: one thread is slower than the memory."""
    count = min(len(pieces), torch.get_num_threads(), _THREADS)
    others = [threading.Thread(target=_copy_some, args=(pieces,), daemon=True) for _ in range(count - 1)]
    for other in others:
        other.start()
    try:
        _copy_some(pieces)
    finally:  # If it is interrupted, no piece may be copied later into the memory of the next state.
        pieces.clear()
        for other in others:
            other.join()


def _copy_some(pieces: deque[tuple[memoryview, memoryview]]) -> None:
    while True:
        try:
            target, source = pieces.popleft()
        except IndexError:
            return
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # It releases the interpreter lock.


def _like(value: Any, made: dict[Any, Any]) -> Any:
    """Return a dict of the same class, which the encoder distinguishes."""
    copy = value.copy()
    for key, each in made.items():
        copy[key] = each
    return copy
