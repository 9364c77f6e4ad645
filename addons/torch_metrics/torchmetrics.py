"""Metrics of torchmetrics: find them, save and load what they have counted, and combine it over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zae.errors import CheckpointMismatch
from zae.metrics.torchmetrics_values import metrics_in
from zae.values.host import to_host
from zae.values.walk import copy_of, has_same_bits

__all__ = [
    "combine_ranks",
    "load_states",
    "merge_states",
    "read_states",
    "was_updated",
]


def _counting(metric: Any) -> Iterator[tuple[str, Any]]:
    """Yield the metrics in a metric that count: it itself, those that a wrapper has, and a wrapper with states."""
    for name, part in metrics_in(metric):
        if part.metric_state or sum(1 for _ in metrics_in(part)) == 1:
            yield name, part


def was_updated(metric: Any) -> bool:
    """Return whether a metric has been updated since its last reset."""
    # A wrapper with states, as Running, does not count its updates.
    return any(metric_part.update_called or _has_changed(metric_part) for _, metric_part in _counting(metric))


def _has_changed(metric: Any) -> bool:
    return not has_same_bits(to_host(dict(metric.metric_state)), to_host(dict(metric._defaults)))


def read_states(metric: Any) -> dict[str, Any]:
    """Return what a metric has counted."""
    states = {}
    for name, part in _counting(metric):
        counted = {key: copy.copy(value) for key, value in part.metric_state.items()}
        states[name] = {"state": counted, "updates": _updates(part)}
    return states


def load_states(metric: Any, states: Mapping[str, Any], name: str) -> None:
    """Load what `read_states` returned, on the device of the metric; refuse that of another one."""
    counting = dict(_counting(metric))
    fits = states.keys() == counting.keys() and all(
        states[n]["state"].keys() == m.metric_state.keys() for n, m in counting.items()
    )
    if not fits:
        raise CheckpointMismatch(
            f"the state of the metric {name!r} is not that of a {type(metric).__name__}; build the trainer with the "
            "metrics that it was saved with"
        )
    metric.reset()
    for path, part in counting.items():
        for key, value in states[path]["state"].items():
            setattr(part, key, copy_of(list(value) if isinstance(value, (list, tuple)) else value, part.device))
        part._update_count = int(states[path]["updates"])


def combine_ranks(metric: Any, gather: Callable[[Any], list[Any]]) -> None:
    """Give a metric what all ranks have counted, in the order of the ranks; each rank calls it.

    torchmetrics sends one tensor at a time, and waits forever where ranks hold lists of different lengths.
    """
    for _, part in _counting(metric):
        ranks = gather({"updates": _updates(part), "state": to_host(dict(part.metric_state))})
        for key, reduction in part._reductions.items():
            values = [rank["state"][key] for rank in ranks]
            if isinstance(values[0], list) or isinstance(values[-1], list):
                combined: Any = []
                for value in values:
                    combined += value if isinstance(value, list) else [value]
                if getattr(reduction, "__name__", "") == "dim_zero_cat":
                    combined = [torch.cat([torch.atleast_1d(item) for item in combined])] if combined else []
                elif reduction is not None and combined:
                    combined = reduction(combined)
            else:
                combined = torch.stack(values)
                combined = combined if reduction is None else reduction(combined)
            setattr(part, key, copy_of(combined, part.device))
        part._update_count = sum(rank["updates"] for rank in ranks)
        part._computed = None


def merge_states(metric: Any, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ranks have counted together, each as `read_states` returned it."""
    twin = metric.clone()
    paths = iter([path for path, _ in _counting(twin)])

    def saved(_: Any) -> list[Any]:
        path = next(paths)
        return [rank[path] for rank in ranks]

    combine_ranks(twin, saved)
    return read_states(twin)


def _updates(metric: Any) -> int:
    return int(metric.update_count)
