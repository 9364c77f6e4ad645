"""The values of one number over an epoch, read from their device late, and added up in their order."""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

from zae.metrics.reductions import Partial

__all__ = ["Series"]

_CHUNK_SIZE = 64  # Values that wait on an accelerator before they are packed into one tensor.


class _PendingDeviceValues:
    """Numbers that wait on an accelerator: reading one at once would make the host wait for the device."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._chunks: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        # A buffer that the step continues to use, or the static output of a CUDA graph, has changed until it is read.
        self._waiting.append(value.detach().clone())
        if len(self._waiting) == _CHUNK_SIZE:
            self._chunks.append(torch.stack(self._waiting))
            self._waiting = []

    def read(self) -> list[float]:
        """Copy them to the host, at once if they are of one type: not all devices have float64."""
        parts = self._chunks
        if self._waiting:
            parts.append(torch.stack(self._waiting))
        self._waiting = []
        self._chunks = []
        if len({part.dtype for part in parts}) == 1:
            parts = [torch.cat(parts)]
        numbers = []
        for part in parts:
            numbers += part.tolist()
        return numbers


class Series:
    """The values of one scalar in one epoch, and what they come to in float64, whenever they are read."""

    def __init__(self, kind: str = "mean") -> None:
        self.values = array("d")
        self.weights = array("d")
        self.kind = kind
        self.is_mean = kind == "mean"
        self.sums = Partial.empty(kind)
        self.taken_count = 0  # How many values `EpochLog.take_sums` has returned.
        self.has_pending = False  # Whether any value waits on its device.
        self.pending_values = _PendingDeviceValues()
        self.pending_weights = _PendingDeviceValues()
        self.pending_weight_indices: list[int] = []

    def add(self, value: float, weight: float | Tensor) -> None:
        if self.has_pending:  # The values before this one come first.
            self.read()
        self.values.append(value)
        self.weights.append(float(weight))

    def add_pending(self, value: Tensor, weight: float | Tensor) -> None:
        """Keep a value on its device, and its weight too where that is there."""
        self.has_pending = True
        self.pending_values.add(value)
        if isinstance(weight, Tensor):
            self.pending_weight_indices.append(len(self.weights))
            self.pending_weights.add(weight)
            weight = math.nan
        self.weights.append(weight)

    def read(self) -> None:
        """Copy the waiting values to the host, and add up what is new, always in the same order."""
        if self.has_pending:
            self.values.extend(self.pending_values.read())
            for index, weight in zip(self.pending_weight_indices, self.pending_weights.read(), strict=True):
                self.weights[index] = weight
            self.has_pending = False
            self.pending_weight_indices = []
        first_new = self.sums.seen
        self.sums = self.sums.extend(self.values[first_new:], self.weights[first_new:])

    def as_saved(self) -> list[Tensor]:
        """Return the values and their weights as a state holds them."""
        self.read()
        return [torch.tensor(numbers, dtype=torch.float64) for numbers in (self.values, self.weights)]

    @classmethod
    def from_saved(cls, kind: str, values: Tensor, weights: Tensor) -> Series:
        """Return the series of a state."""
        series = cls(kind)
        for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
            series.add(value, weight)
        return series
