"""The sources and the weights of a mixture, and when an epoch of it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zae.common.argument_checks import check_number
from zae.errors import ConfigError

__all__ = ["FIRST", "ONCE", "check_sources", "check_strategy"]

FIRST, _ALL, ONCE = _STRATEGIES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
"""What ends an epoch: the first source that has ended, or all of them, again from their beginning or once."""


def check_strategy(strategy: Any) -> str:
    """Return a known strategy, or refuse it."""
    if strategy not in _STRATEGIES:
        raise ConfigError(f"stopping_strategy={strategy!r}; it must be one of {', '.join(map(repr, _STRATEGIES))}")
    return str(strategy)


def check_sources(sources: Any, weights: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Return sources and weights by name, or refuse what does not fit."""
    if isinstance(sources, (list, tuple)):
        sources = {str(index): source for index, source in enumerate(sources)}
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError(
            f"a mixture takes a dict of datasets by name, or a list of them, not {type(sources).__name__}"
            + (" without entries" if isinstance(sources, Mapping) else "")
        )
    if hasattr(weights, "tolist"):  # An array or a tensor.
        weights = weights.tolist()
    if isinstance(weights, (list, tuple)) and len(weights) == len(sources):
        weights = dict(zip(sources, weights, strict=True))
    if not isinstance(weights, Mapping) or {*weights} != {*sources}:
        found = list(weights) if isinstance(weights, (Mapping, list, tuple)) else weights
        raise ConfigError(f"weights must have one number for each of {', '.join(map(str, sources))}; it has {found}")
    for name, weight in weights.items():
        if not check_number(f"weights[{name!r}]", weight):
            raise ConfigError(f"weights[{name!r}]={weight!r}; leave a dataset of weight 0 out")
    return {str(name): each for name, each in sources.items()}, {str(name): float(weights[name]) for name in sources}
