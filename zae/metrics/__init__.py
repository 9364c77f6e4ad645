"""Typed metrics: how the numbers that a step returns are combined, where that is not their mean by samples."""

from zae.metrics.types import Last, Max, Mean, Min, Sum

__all__ = ["Last", "Max", "Mean", "Min", "Sum"]
