"""Combine the numbers of an epoch: over batches in their order, over ranks, and over loaders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zae.errors import StepError
from zae.metrics.types import Last, Max, Mean, Min, Sum

__all__ = ["KIND_OF", "Partial", "combine_loaders", "combine_parts", "is_typed", "means_of", "merge_sums"]

KIND_OF: dict[type, str] = {Mean: "mean", Sum: "sum", Max: "max", Min: "min", Last: "last"}
"""The name of each typed metric in a checkpoint; plain numbers are of the kind "mean"."""
_START = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf, "last": math.nan}


def is_typed(value: Any) -> bool:
    """Return whether a value is a typed metric."""
    return type(value) in KIND_OF


class Partial(NamedTuple):
    """What is known of one metric after some batches.

    Attributes
    ----------
    total : float
        The weighted sum of a mean; else the result so far.
    weight : float
        The sum of the weights of the batches.
    seen : int
        How many values there were.
    kind : str
        How they are combined.
    """

    total: float
    weight: float = 0.0
    seen: int = 0
    kind: str = "mean"

    @classmethod
    def empty(cls, kind: str = "mean") -> Partial:
        """Return the one of no batch; a kind that there is not is a KeyError."""
        return cls(_START[kind], 0.0, 0, kind)

    @property
    def value(self) -> float:
        """The metric; NaN where nothing has a weight."""
        if self.kind == "mean":
            return self.total / self.weight if self.weight else math.nan
        return self.total if self.seen else math.nan

    @property
    def has_value(self) -> bool:
        """Whether it has anything to say."""
        return bool(self.weight if self.kind == "mean" else self.seen)

    def extend(self, values: Sequence[float], weights: Sequence[float]) -> Partial:
        """Return it with further values, in their order."""
        total, weight, kind = self.total, self.weight, self.kind
        # Not by `sum`, which rounds otherwise from Python 3.12 on.
        for value, item_weight in zip(values, weights, strict=True):
            if kind == "mean":
                total += value * item_weight if item_weight else 0.0  # Not NaN of a value that weighs nothing.
            else:
                total = _combine(kind, total, value)
            weight += item_weight
        return Partial(total, weight, self.seen + len(values), kind)

    def merge(self, other: Partial) -> Partial:
        """Return it together with that of the next rank, whose batches were used in turn with these."""
        if self.kind != other.kind:
            raise StepError(
                f"ranks returned the same metric as {self.kind} and as {other.kind}; return it in the same way on each"
            )
        weight = self.weight + other.weight
        if self.kind == "last":
            last = other if other.seen >= self.seen else self
            return Partial(last.total, weight, last.seen, self.kind)
        return Partial(_combine(self.kind, self.total, other.total), weight, self.seen + other.seen, self.kind)

    def as_saved(self) -> tuple[Any, ...]:
        """Return what `Partial` is called with: of a mean the first two, as all versions have saved them."""
        return tuple(self)[:2] if self.kind == "mean" else tuple(self)

    @classmethod
    def from_saved(cls, total: Any, weight: Any, seen: Any = 0, kind: Any = "mean") -> Partial:
        """Return what a state has, or raise KeyError, TypeError or ValueError where it cannot be such."""
        return cls(float(total), float(weight), int(seen), cls.empty(kind).kind)


def _combine(kind: str, first: float, second: float) -> float:
    """Combine two numbers; NaN stays NaN."""
    if kind in ("mean", "sum"):
        return first + second
    if kind == "last" or second != second:
        return second
    return second if (second > first if kind == "max" else second < first) else first


def means_of(sums: Mapping[str, Partial]) -> dict[str, float]:
    """Return the value of each metric."""
    return {key: total.value for key, total in sums.items()}


def merge_sums(parts: Sequence[Mapping[str, Partial]]) -> dict[str, Partial]:
    """Merge what the ranks know of each metric, in the order of the ranks."""
    merged = dict(parts[0])
    for part in parts[1:]:
        for key, partial in part.items():
            merged[key] = merged[key].merge(partial) if key in merged else partial
    return merged


def combine_loaders(kind: str, values: Sequence[float]) -> float:
    """Return one number for a metric of several loaders: of means, their mean."""
    if kind == "mean":
        return sum(values) / len(values)
    return Partial.empty(kind).extend(values, [1.0] * len(values)).total


def combine_parts(parts: Iterable[Any], weights: Sequence[float]) -> Any:
    """Return the typed metric of a batch from those of its parts, which have these weights."""
    metrics = list(parts)
    kind, part_weights = KIND_OF[type(metrics[0])], list(weights)
    if kind == "mean" and metrics[0].weight is not None:
        part_weights = [float(partial.weight) for partial in metrics]
    combined = Partial.empty(kind).extend([float(partial.value) for partial in metrics], part_weights)
    weight = (combined.weight,) if kind == "mean" and metrics[0].weight is not None else ()
    return type(metrics[0])(combined.value, *weight)
