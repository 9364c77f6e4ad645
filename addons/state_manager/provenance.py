"""Describe the options and the data of a run, for the manifests of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zae.data.loader_state import FINGERPRINT, facts_of
from zae.description import describe_options

__all__ = ["describe_run"]


def describe_run(instance: Any, hide: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what the manifest of a checkpoint has of a trainer: "monitor", "options" and "data"."""
    data = _describe_data(instance.loader_position.loader)
    return {"monitor": instance.monitor, "options": describe_options(instance, hide), "data": data}


def _describe_data(loader: Any) -> dict[str, Any]:
    """Return what decides the batches of an epoch, and the kind and the fingerprint of the dataset if it has one."""
    if loader is None:
        return {}
    found = {"fingerprint" if name == FINGERPRINT else name: value for name, value in facts_of(loader).items()}
    if hasattr(loader, "dataset"):
        found["dataset"] = type(loader.dataset).__name__
    return found
