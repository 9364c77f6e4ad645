"""What a loader is made of: its samplers, its datasets, its collate function, and the facts that these settle."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch.utils.data import Dataset

from zae import random_state
from zae.data.loaders import length_of, unwrap_sampler
from zae.data.shards import collate_of

__all__ = [
    "LoaderParts",
    "changes_of",
    "datasets_in",
    "datasets_with_epoch",
    "own_batch_sampler",
    "parts_of_dataset",
    "set_epoch",
]

_DEPTH = 4  # Datasets, or samplers, in one another: Subset(ConcatDataset([...])).


class LoaderParts:
    """The objects that a loader takes its batches from, as they are now.

    Attributes
    ----------
    loader : iterable or None
        The loader itself.
    samplers : dict
        Its sampler and its batch sampler, without what zae puts around them, by place.
    datasets : dict
        Its dataset, and those that this one takes samples from, by place.
    collate : callable or None
        The collate function of the user.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        sampler = getattr(batch_sampler, "sampler", None)
        if sampler is None:
            sampler = getattr(loader, "sampler", None)
        samplers = {"sampler": unwrap_sampler(sampler), "batch_sampler": unwrap_sampler(batch_sampler)}
        self.samplers = {place: part for place, part in samplers.items() if part is not None}
        dataset = getattr(loader, "dataset", None)
        self.datasets = {} if dataset is None else datasets_in(dataset)
        self.collate = collate_of(loader)

    @cached_property
    def generators(self) -> list[Any]:
        """The generators of the loader and of its samplers."""
        return random_state.generators_of(self.loader)

    @property
    def by_place(self) -> dict[str, Any]:
        """The samplers and the datasets."""
        return {**self.samplers, **self.datasets}

    def facts(self) -> dict[str, Any]:
        """Return the properties that decide the batches of an epoch, by name, as str or int."""
        settings = self.samplers.get("batch_sampler", self.loader)
        classes = {place: type(part).__name__ for place, part in self.samplers.items()}
        seeds = [dataset.seed for dataset in self.datasets.values() if type(dataset).__name__ == "SeededDataset"]
        facts = {
            "loader": type(self.loader).__name__,
            "number of batches": length_of(self.loader),
            "dataset length": length_of(self.datasets.get("dataset")),
            "batch_size": getattr(settings, "batch_size", None),
            "drop_last": getattr(settings, "drop_last", None),
            "seed of the SeededDataset": seeds[0] if seeds else None,
            "sampler": classes.get("sampler"),
            "batch sampler": classes.get("batch_sampler"),
        }
        return {name: value for name, value in facts.items() if isinstance(value, (str, int))}


def own_batch_sampler(facts: Mapping[str, Any]) -> str:
    """Return the class name of a batch sampler that is not one of torch's; else an empty string."""
    name = facts.get("batch sampler") or "BatchSampler"
    return "" if name in ("BatchSampler", "SampleShards") else str(name)


def changes_of(before: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Describe how two loaders differ, from their facts."""
    names = [name for name in {**before, **present} if before.get(name) != present.get(name)]
    return [f"{name} was {before.get(name, 'unknown')} and is {present.get(name, 'unknown')}" for name in names]


def parts_of_dataset(dataset: Any) -> dict[str, Any]:
    """Return the datasets that a dataset takes samples from, by the names after it: ``dataset``, ``datasets``."""
    if not isinstance(dataset, Dataset):
        return {}
    inner = getattr(dataset, "dataset", None)
    if inner is not None:
        return {".dataset": inner}
    several = getattr(dataset, "datasets", None)
    if isinstance(several, (list, tuple)):
        several = dict(enumerate(several))
    if not isinstance(several, Mapping):
        return {}
    return {f".datasets[{key!r}]": part for key, part in several.items()}


def datasets_in(dataset: Any, place: str = "dataset", depth: int = _DEPTH) -> dict[str, Any]:
    """Return a dataset, and those that it takes samples from, by their places."""
    datasets = {place: dataset}
    if depth:
        for name, part in parts_of_dataset(dataset).items():
            datasets |= datasets_in(part, place + name, depth - 1)
    return datasets


def datasets_with_epoch(dataset: Any, place: str = "", depth: int = _DEPTH) -> dict[str, Any]:
    """Return a dataset that has ``set_epoch``; else the datasets with ``set_epoch`` that it takes samples from."""
    if callable(getattr(dataset, "set_epoch", None)):
        return {place: dataset}
    datasets: dict[str, Any] = {}
    if depth:
        for name, part in parts_of_dataset(dataset).items():
            datasets |= datasets_with_epoch(part, place + name, depth - 1)
    return datasets


def _samplers_in(sampler: Any, depth: int = _DEPTH) -> list[Any]:
    """Return a sampler, and those in one another within it."""
    if sampler is None or not depth:
        return []
    return [sampler, *_samplers_in(getattr(sampler, "sampler", None), depth - 1)]


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its samplers and its datasets, where they have it."""
    outermost = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    samplers = [part for sampler in outermost for part in _samplers_in(sampler)]
    parts = [loader, *samplers, *datasets_with_epoch(getattr(loader, "dataset", None)).values()]
    for part in {id(part): part for part in parts}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
