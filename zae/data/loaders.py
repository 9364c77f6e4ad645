"""Loaders of any kind: what they say of themselves, and copies of a DataLoader with another order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from zae.values.walk import leading_dimension

__all__ = [
    "Proxy",
    "batch_size_of",
    "copy_with",
    "describe",
    "has_order",
    "has_pinned_batches",
    "is_stateful",
    "iterates_as_torch",
    "length_of",
    "takes_samples",
    "unwrap_sampler",
    "with_entries",
]

_Loader = TypeVar("_Loader", bound="DataLoader[Any]")


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None where it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples in a batch of a loader, where it states it."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    is_list = isinstance(loader, Sequence) and not isinstance(loader, str)
    return leading_dimension(loader[0]) if is_list and loader else None


def has_pinned_batches(loader: Any) -> bool:
    """Return whether each batch of a loader has its own pinned memory, so that copies can be asynchronous.

    A DataLoader pins a copy of each batch, without workers too.
    """
    return isinstance(loader, DataLoader) and bool(loader.pin_memory)


def has_order(loader: Any) -> bool:
    """Return whether the place of a batch in the epoch says which samples it has, however long a worker takes."""
    return bool(getattr(loader, "in_order", True)) or getattr(loader, "num_workers", 0) < 2


def describe(loader: Any) -> str:
    """Describe a loader for an error: its class, the length of its dataset, batch size and ``drop_last``."""
    parts = [type(loader).__name__]
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        size = length_of(dataset)
        name = "dataset" if type(dataset).__name__.lower() == "dataset" else f"dataset {type(dataset).__name__}"
        parts.append(f"{name} of unknown length" if size is None else f"{name} of length {size}")
    for name in ("batch_size", "drop_last"):
        if getattr(loader, name, None) is not None:
            parts.append(f"{name}={getattr(loader, name)}")
    return ", ".join(parts)


def takes_samples(loader: Any) -> bool:
    """Return whether a loader is a DataLoader over a dataset that is read by index."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def iterates_as_torch(loader: Any) -> bool:
    """Return whether a DataLoader has the loop of torch, which takes its batches from a sampler, for samples."""
    return takes_samples(loader) and type(loader).__iter__ is DataLoader.__iter__


def copy_with(loader: _Loader, **changes: Any) -> _Loader:
    """Return a copy of a DataLoader with other attributes: samplers, or a number of workers.

    A DataLoader refuses to change these because of its workers and iterator, which the copy does not have.
    """
    copied = copy.copy(loader)
    if not hasattr(loader, "_iterator"):  # With persistent workers a copy would use the iterator of the loader.
        changes.setdefault("persistent_workers", False)
    for name, value in {"_iterator": None, **changes}.items():
        object.__setattr__(copied, name, value)
    return copied


def with_entries(loader: _Loader, wrap: Callable[[Any, int], Any]) -> _Loader:
    """Return a copy of a DataLoader with another sampler: ``wrap(sampler, entries of a batch)``.

    The sampler is that of the samples where batches are consecutive ones, else the batch sampler.
    """
    batches: Any = loader.batch_sampler
    if batches is None:
        return copy_with(loader, sampler=wrap(loader.sampler, 1))
    if type(batches) is not BatchSampler:
        return copy_with(loader, batch_sampler=wrap(batches, 1))
    sampler = wrap(batches.sampler, batches.batch_size)
    return copy_with(loader, batch_sampler=BatchSampler(sampler, batches.batch_size, batches.drop_last))


def is_stateful(loader: Any) -> TypeGuard[Any]:
    """Return whether an object has a state; that of one rank's shard is a position in the order of this rank alone."""
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return has_state and not getattr(loader, "is_rank_shard", False)


class Proxy:
    """A sampler, or a loader, with the length and the attributes of another one."""

    def __init__(self, entries: Any) -> None:
        self.passed = entries

    def __len__(self) -> int:
        return len(self.passed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "passed":
            raise AttributeError(name)
        return getattr(self.passed, name)


def unwrap_sampler(sampler: Any) -> Any:
    """Return the sampler in a `Proxy`, at any depth; any other sampler unchanged."""
    while isinstance(sampler, Proxy):
        sampler = sampler.passed
    return sampler
