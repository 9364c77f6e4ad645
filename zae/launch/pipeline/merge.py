"""Put together what the steps of the micro-batches of a batch have returned."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zae.common.walk import map_tensors
from zae.launch.pipeline.rows import is_number, join
from zae.metrics.reductions import is_typed

__all__ = ["Found"]


class Found:
    """What the steps of the micro-batches of a batch have returned.

    Parameters
    ----------
    where : str
        How errors name it.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: list[tuple[Any, int, float]] = []

    def add(self, values: Any, rows: int, weight: float) -> None:
        """Add what the step returned for a micro-batch of so many rows, with its weight in means."""
        self._parts.append((map_tensors(Tensor.detach, values), rows, weight))

    def joined(self, keeps: bool) -> Any:
        """Return what the step would have returned for the whole batch, on the host, and its weight.

        Without ``keeps`` only numbers are kept; on a rank without the last stage there is nothing.
        """
        if not self._parts:
            return None
        values, rows, weights = zip(*self._parts)
        if not keeps:
            values = tuple(
                {k: value for k, value in each.items() if is_number(value) or is_typed(value)} for each in values
            )
        joined = join(values, rows, weights, self._where)
        return map_tensors(lambda each: each.cpu(), joined), sum(weights)
