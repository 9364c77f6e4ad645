"""The request of any rank to stop, agreed on by all of them without a step that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["StopFlag"]

PATIENCE = 2.0
"""Seconds that a rank that fails waits for the others."""


class StopFlag:
    """Whether any rank asks to stop; all ranks call `agree` at the same steps.

    A copy, pickled or not, has asked nothing.

    Attributes
    ----------
    reason : str or None
        What this rank asks to stop for.
    is_meeting : bool
        Whether the ranks have waited for each other since the last step, so that they may do so again.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_meeting = False
        self._work: Any = None
        self._total: Tensor | None = None

    def __reduce__(self) -> Any:
        return StopFlag, ()

    def agree(self, waits: bool, gather: Callable[[Any], list[Any]]) -> str | None:
        """Return the reason to stop, the same on all ranks, or None.

        It is what a rank asked before the last call of this method, so that no step waits for the others; with
        ``waits``, or in a meeting, what one asks now.
        """
        waits, self.is_meeting = waits or self.is_meeting, False
        stops = self._read()
        if not stops:
            self._send()
            stops = waits and self._read()
        if not stops:
            return None
        found = next(each for each in gather(self.reason) if each is not None)
        self.reason = None
        return str(found)

    def _send(self) -> None:
        self._total = torch.tensor(float(self.reason is not None))
        group: Any = dist.group.WORLD
        self._work = group.allreduce([self._total])  # What all_reduce(async_op=True) calls, in half of its time.

    def _read(self) -> bool:
        """Wait for what was sent last, and return whether any rank has asked; False where nothing was sent."""
        work, total, self._work, self._total = self._work, self._total, None, None
        if work is None or total is None:
            return False
        work.wait()
        return total.item() > 0

    def drop(self, *, is_failing: bool) -> None:
        """Wait for what was sent, so that nothing is left on the process group; briefly where a rank fails."""
        work, self._work, self._total = self._work, None, None
        if work is not None and dist.is_initialized():
            with suppress(RuntimeError):  # The others may be gone, or not get that far.
                work.wait(timedelta(seconds=PATIENCE)) if is_failing else work.wait()
