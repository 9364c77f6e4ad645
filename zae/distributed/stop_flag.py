"""What any rank asks for, to stop for instance, agreed on by all of them without a step that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zae.distributed.collectives import hold, host_group

__all__ = ["StopFlag"]

PATIENCE = 2.0
"""Seconds that a rank that fails waits for the others."""

Gather = Callable[[Any], list[Any]]


class StopFlag:
    """Whether any rank asks to stop, or for something else; all ranks call `agree` at the same steps.

    An asynchronous all_reduce is launched by one call of `agree` and read by the next, so that no step waits for it. A
    copy, pickled or not, has asked nothing.

    Attributes
    ----------
    reason : str or None
        What this rank asks to stop for.
    requests : set of str
        What this rank asks for beside the end.
    is_at_rendezvous : bool
        Whether the ranks have waited for each other since the last step, so that they may do so again.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.requests: set[str] = set()
        self.is_at_rendezvous = False
        self._work: Any = None  # The exchange that is under way.
        self._total: Tensor | None = None  # How many ranks ask for something, once it is over.

    def __reduce__(self) -> Any:
        return StopFlag, ()

    def agree(self, waits: bool, gather: Gather) -> tuple[str | None, list[str]]:
        """Return the reason to stop, or None, and the requests: the same on all ranks.

        It is what a rank asked before the last call of this method, so that no step waits for the others; with
        ``waits``, or in a meeting, what one asks now.
        """
        waits = waits or self.is_at_rendezvous
        self.is_at_rendezvous = False
        if not waits:
            had_asked = self._receive()
            self._send()
            if not had_asked:
                return None, []
        reasons, requests = zip(*gather((self.reason, self.requests)))
        self._receive()
        self.reason = None
        self.requests = set()
        return next((reason for reason in reasons if reason is not None), None), sorted(set().union(*requests))

    def drop(self, *, is_failing: bool) -> None:
        """Leave nothing under way on the process group; wait only briefly for the others where this rank fails."""
        if dist.is_initialized():
            with suppress(RuntimeError):  # The others may be gone, or not get that far.
                self._receive(PATIENCE if is_failing else None)

    def _send(self) -> None:
        """Tell the others whether this rank asks for something."""
        self._total = torch.tensor(float(self.reason is not None or bool(self.requests)))
        group = host_group()
        self._work = group.allreduce([self._total])  # What all_reduce(async_op=True) calls, in half of its time.

    def _receive(self, patience: float | None = None) -> bool:
        """Wait for what was sent last, and return whether any rank had asked; False where nothing was sent."""
        work = self._work
        total = self._total
        self._work = None
        self._total = None
        if work is None or total is None:
            return False
        work.wait() if patience is None else work.wait(timedelta(seconds=patience))
        hold(work, total)
        return total.item() > 0
