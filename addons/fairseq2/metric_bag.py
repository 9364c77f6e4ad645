"""What the metrics of a unit have counted, over all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from zae.errors import CheckpointMismatch
from zae.metrics.torchmetrics_values import numbers_of
from zae.values.host import to_host

__all__ = ["check_names", "compute_over_ranks", "metrics_of", "reset", "states_of"]

Gather = Callable[[Any], list[Any]]


def metrics_of(unit: Any) -> dict[str, Any]:
    """Return the metrics of a unit by name; those of torcheval have ``state_dict`` and ``merge_state``."""
    bag = getattr(unit, "metric_bag", {})
    return dict(getattr(bag, "metrics", bag) or {})


def states_of(unit: Any) -> dict[str, Any]:
    """Return copies of the states of the metrics of a unit, by name."""
    return {name: copy.deepcopy(metric.state_dict()) for name, metric in metrics_of(unit).items()}


def reset(unit: Any) -> None:
    """Reset the metrics of a unit."""
    for metric in metrics_of(unit).values():
        metric.reset()


def compute_over_ranks(unit: Any, gather: Gather) -> dict[str, float]:
    """Return the numbers of the metrics of a unit that have counted what all ranks have."""
    numbers: dict[str, float] = {}
    every = gather(to_host(states_of(unit)))
    for name, metric in metrics_of(unit).items():
        numbers |= numbers_of(name, _combined(metric, [values[name] for values in every]).compute())
    return numbers


def check_names(states: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Refuse states of other metrics than those of the unit."""
    if states.keys() != metrics.keys():
        raise CheckpointMismatch(
            f"the state has the metrics {', '.join(states) or 'none'} of the unit, and here they are "
            f"{', '.join(metrics) or 'none'}; build the unit as it was"
        )


def _combined(metric: Any, states: list[Any]) -> Any:
    """Return a metric that has counted what is in several states."""
    parts = [copy.deepcopy(metric) for _ in states]
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    return parts[0].merge_state(parts[1:]) if parts[1:] else parts[0]
