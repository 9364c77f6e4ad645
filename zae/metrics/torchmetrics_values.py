"""Metrics of torchmetrics, which need not be imported: find those of a module, and read what they have computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from zae.errors import StepError

__all__ = ["is_metric", "metrics_in", "numbers_of"]


def is_metric(value: Any) -> bool:
    """Return whether a value is a metric of torchmetrics."""
    return any(c.__name__ == "Metric" and c.__module__.startswith("torchmetrics.") for c in type(value).__mro__)


def metrics_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of torchmetrics in a module, by name; a metric itself has the name ""."""
    for name, part in module.named_modules():
        if is_metric(part):
            yield name, part


def numbers_of(name: str, value: Any) -> dict[str, float]:
    """Return what a metric computed as numbers by name: ``name``, or ``name/<class>`` of a vector or a dict."""
    if isinstance(value, Mapping):
        numbers: dict[str, float] = {}
        for inner, item in value.items():
            numbers |= numbers_of(f"{name}/{inner}", item)
        return numbers
    if isinstance(value, Tensor) and value.ndim == 1 and value.numel() != 1:
        return {f"{name}/{index}": float(item) for index, item in enumerate(value)}
    is_real = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if is_real or isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        return {name: float(value)}
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise StepError(
        f"the metric {name!r} computed {kind}, and a record holds numbers; give a metric with average='macro' or the "
        "like, or compute it in metric_on_epoch_end"
    )
