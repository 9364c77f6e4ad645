"""What any rank asks for, to stop for instance, agreed on by all of them without a step that waits for it."""

from __future__ import annotations

import mmap
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zae.errors import DistributedError
from zae.launch.collectives import hold

__all__ = ["StopFlag"]

PATIENCE = 2.0
"""Seconds that a rank that fails waits for the others."""

_PAUSE = 1e-4  # Seconds between two looks at ranks that are behind.

Gather = Callable[[Any], list[Any]]


class StopFlag:
    """Whether any rank asks to stop, or for something else; all ranks call `agree` at the same steps.

    Ranks on one host exchange requests in shared memory, others in an asynchronous all_reduce: in two processes on CPUs
    it takes up to a third of a small step. A copy, pickled or not, has asked nothing.

    Attributes
    ----------
    reason : str or None
        What this rank asks to stop for.
    requests : set of str
        What this rank asks for beside the end.
    is_meeting : bool
        Whether the ranks have waited for each other since the last step, so that they may do so again.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.requests: set[str] = set()
        self.is_meeting = False
        self._exchange: _SharedMemory | _Reduction | None = None

    def __reduce__(self) -> Any:
        return StopFlag, ()

    def agree(self, waits: bool, gather: Gather, timeout: float) -> tuple[str | None, list[str]]:
        """Return the reason to stop, or None, and the requests: the same on all ranks.

        It is what a rank asked before the last call of this method, so that no step waits for the others; with
        ``waits``, or in a meeting, what one asks now.
        """
        waits, self.is_meeting = waits or self.is_meeting, False
        if self._exchange is None:
            self._exchange = _SharedMemory.of_one_host(gather, timeout) or _Reduction()
        if not waits and not self._exchange.update(self.reason is not None or bool(self.requests)):
            return None, []
        reasons, requests = zip(*gather((self.reason, self.requests)))
        self._exchange.reset()
        self.reason, self.requests = None, set()
        return next((each for each in reasons if each is not None), None), sorted(set().union(*requests))

    def drop(self, *, is_failing: bool) -> None:
        """Leave nothing under way on the process group; wait only briefly for the others where this rank fails."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and dist.is_initialized():
            with suppress(RuntimeError):  # The others may be gone, or not get that far.
                exchange.reset(PATIENCE if is_failing else None)


class _SharedMemory:
    """A number for each rank: its last call of `update`; negative from the call on at which it asked to stop."""

    def __init__(self, file: int, rank: int, world: int, timeout: float) -> None:
        self._calls = memoryview(mmap.mmap(file, 8 * world)).cast("q")  # Each is read and written in one piece.
        self._rank, self._timeout, self._count = rank, timeout, 0

    @classmethod
    def of_one_host(cls, gather: Gather, timeout: float) -> _SharedMemory | None:
        """Map a file that all ranks see, and remove its name; None where the ranks cannot share one."""
        rank, world, path, made = dist.get_rank(), dist.get_world_size(), "", None
        if rank == 0:
            with suppress(OSError):
                file, path = tempfile.mkstemp(prefix="zae-stop-")
                with open(file, "wb") as opened:  # Written, not truncated: a full disk raises here, not in a step.
                    opened.write(bytes(8 * world))
        hosts, paths = zip(*gather((_host(), path)))
        if paths[0] and len(set(hosts)) == 1:
            with suppress(OSError, ValueError), open(paths[0], "r+b") as shared:
                made = cls(shared.fileno(), rank, world, timeout)
        all_share = all(gather(made is not None))
        if path:
            Path(path).unlink(missing_ok=True)
        return made if all_share else None

    def update(self, asks: bool) -> bool:
        """Publish whether this rank asks; return whether any had asked by its call before.

        A rank that is behind its call before is waited for. Ranks that average gradients in each step never are.
        """
        calls, self._count = self._calls, self._count + 1
        if calls[self._rank] >= 0:
            calls[self._rank] = -self._count if asks else self._count
        if min(calls) >= self._count - 1:
            return False
        began = time.monotonic()
        while min(map(abs, now := calls.tolist())) < self._count - 1:
            if time.monotonic() - began > self._timeout:
                behind = ", ".join(str(rank) for rank, each in enumerate(now) if abs(each) < self._count - 1)
                raise DistributedError(f"rank {behind} has not ended its step within timeout={self._timeout:g} s")
            time.sleep(_PAUSE)
        return any(-self._count < each < 0 for each in now)

    def reset(self, patience: float | None = None) -> None:
        """Take the request of this rank back; all ranks call it, after they have met."""
        self._calls[self._rank] = self._count


class _Reduction:
    """An asynchronous all_reduce that is launched by one call of `update` and read by the next."""

    def __init__(self) -> None:
        self._work: Any = None
        self._total: Tensor | None = None

    def update(self, asks: bool) -> bool:
        """Send whether this rank asks; return whether any had asked at its call before."""
        before = self.reset()
        self._total = torch.tensor(float(asks))
        group: Any = dist.group.WORLD
        self._work = group.allreduce([self._total])  # What all_reduce(async_op=True) calls, in half of its time.
        return before

    def reset(self, patience: float | None = None) -> bool:
        """Wait for what was sent last, and return whether any rank had asked; False where nothing was sent."""
        work, total, self._work, self._total = self._work, self._total, None, None
        if work is None or total is None:
            return False
        work.wait() if patience is None else work.wait(timedelta(seconds=patience))
        hold(work, total)
        return total.item() > 0


def _host() -> str:
    """Identify this host: containers and hosts of one name have the file in common, or not."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()
