"""What the metrics of a unit have counted, in its epoch and since they were last published, over all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from zae.errors import CheckpointMismatch
from zae.interop.torchmetrics import numbers_of
from zae.loop.epoch_log import to_host

__all__ = ["BagCounts", "check_names", "compute_over_ranks", "metrics_of", "reset", "states_of"]

Gather = Callable[[Any], list[Any]]


def metrics_of(unit: Any) -> dict[str, Any]:
    """Return the metrics of a unit by name; those of torcheval have ``state_dict`` and ``merge_state``."""
    bag = getattr(unit, "metric_bag", {})
    return dict(getattr(bag, "metrics", bag) or {})


def states_of(unit: Any) -> dict[str, Any]:
    """Return copies of the states of the metrics of a unit, by name."""
    return {name: copy.deepcopy(each.state_dict()) for name, each in metrics_of(unit).items()}


def reset(unit: Any) -> None:
    """Reset the metrics of a unit."""
    for each in metrics_of(unit).values():
        each.reset()


def compute_over_ranks(unit: Any, states: Mapping[str, Any], gather: Gather) -> dict[str, float]:
    """Return the numbers of metrics that have counted what is in the states of all ranks."""
    found: dict[str, float] = {}
    every = gather(to_host(dict(states)))
    for name, metric in metrics_of(unit).items():
        found |= numbers_of(name, _combined(metric, [each[name] for each in every]).compute())
    return found


class BagCounts:
    """The counts of the metrics of a training unit, of which the metrics themselves hold the newest.

    Attributes
    ----------
    of_epoch, unpublished : dict of str to dict
        States of what was counted before that, in the open epoch and since the last publication.
    """

    def __init__(self, unit: Any) -> None:
        self._unit = unit
        self.of_epoch: dict[str, Any] = {}
        self.unpublished: dict[str, Any] = {}

    def begin_epoch(self, is_publishing: bool) -> None:
        """Reset the metrics; what is to be published is kept."""
        self.unpublished = self._with_newest(self.unpublished) if is_publishing else {}
        self.of_epoch = {}
        reset(self._unit)

    def publish(self, gather: Gather) -> dict[str, float]:
        """Return what was counted since the last time, over all ranks."""
        found = compute_over_ranks(self._unit, self._with_newest(self.unpublished), gather)
        self.of_epoch, self.unpublished = self._with_newest(self.of_epoch), {}
        reset(self._unit)
        return found

    def compute_epoch(self, gather: Gather) -> dict[str, float]:
        """Return what was counted in the open epoch, over all ranks."""
        return compute_over_ranks(self._unit, self._with_newest(self.of_epoch), gather)

    def _with_newest(self, earlier: Mapping[str, Any]) -> dict[str, Any]:
        """Return states with what the metrics have counted after them."""
        newest = states_of(self._unit)
        if not earlier:
            return newest
        metrics = metrics_of(self._unit)
        return {
            name: copy.deepcopy(_combined(metrics[name], [earlier[name], newest[name]]).state_dict()) for name in newest
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the states before the newest ones; they are empty where nothing was published."""
        return {"of_epoch": self.of_epoch, "unpublished": self.unpublished}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for each in state.values():
            check_names(each, metrics_of(self._unit), is_optional=True)
        self.of_epoch, self.unpublished = dict(state["of_epoch"]), dict(state["unpublished"])


def check_names(states: Mapping[str, Any], metrics: Mapping[str, Any], is_optional: bool = False) -> None:
    """Refuse states of other metrics than those of the unit."""
    if states.keys() != metrics.keys() and not (is_optional and not states):
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
