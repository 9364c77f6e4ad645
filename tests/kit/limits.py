"""Limits on what hostile input may cost, and on the memory of a process."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["leave_memory", "within"]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail where the processor works for longer, or where something waits for ever.

    The limit is many times what is needed, and a small part of what a step for each pair of bytes would take.
    """

    def stop(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(600)
    begun = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - begun < seconds


def leave_memory(size: int, *, files: bool = True) -> list[Tensor]:
    """Let this process take `size` bytes more than it has; the memory is short as long as the list is held.

    What tests freed before stays in the heap that a fork inherits, in pieces of any size, and no limit counts it. So
    the list takes these pieces first. Its tensors are never written, and cost no memory. Mapped files count if `files`.
    """
    held: list[Tensor] = []
    _limit_memory(0, files)
    with contextlib.suppress(RuntimeError):
        while True:
            held.append(torch.empty(4 << 20, dtype=torch.uint8))
    _limit_memory(size, files)
    return held


def _limit_memory(size: int, files: bool) -> None:
    """Set the limit to what is mapped now and `size` bytes."""
    kind, name = (resource.RLIMIT_AS, "VmSize") if files else (resource.RLIMIT_DATA, "VmData")
    (mapped,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(kind, ((int(mapped) << 10) + size, resource.RLIM_INFINITY))
