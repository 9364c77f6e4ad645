"""Loaders: describe them, check them, and copy a DataLoader with other samplers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader

from zae.errors import LoaderError

__all__ = [
    "SamplerProxy",
    "check_loader",
    "copy_with",
    "describe",
    "has_pinned_batches",
    "is_stateful",
    "length_of",
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


def has_pinned_batches(loader: Any) -> bool:
    """Return whether each batch of a loader has its own pinned memory, so that copies can be asynchronous."""
    return isinstance(loader, DataLoader) and bool(loader.pin_memory) and loader.num_workers > 0


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


def check_loader(loader: Any, name: str = "loader") -> None:
    """Refuse an object that is not a loader, or has no batches."""
    is_dataset = isinstance(loader, torch.utils.data.Dataset)
    if is_dataset or not isinstance(loader, Iterable):
        example = f": torch.utils.data.DataLoader({name}, batch_size=32)" if is_dataset else " or a list of batches"
        got = "a dataset" if is_dataset else "not iterable"
        raise LoaderError(f"{name} is {got} ({type(loader).__name__}); give a DataLoader{example}")
    if isinstance(loader, (str, bytes, torch.Tensor)):
        raise LoaderError(f"{name} is a {type(loader).__name__}, not batches; give a DataLoader or a list of batches")
    if isinstance(loader, Mapping):
        raise LoaderError(
            f"{name} is a dict ({', '.join(map(str, loader))}), but only valid_loader may be a dict; give one loader"
        )
    if isinstance(loader, (list, tuple)) and loader and isinstance(loader[0], DataLoader):
        raise LoaderError(f"{name} is a {type(loader).__name__} of loaders; give a dict: valid_loader={{name: loader}}")
    if length_of(loader) == 0:
        remedy = "use more data, or drop_last=False" if getattr(loader, "drop_last", False) else "give it data"
        raise LoaderError(f"{name} has 0 batches ({describe(loader)}); {remedy}")


def copy_with(loader: _Loader, **changes: Any) -> _Loader:
    """Return a copy of a DataLoader with other attributes: samplers, or a number of workers.

    A DataLoader refuses to change these because of its workers and iterator, which the copy does not have.
    """
    made = copy.copy(loader)
    if not hasattr(loader, "_iterator"):  # With persistent workers a copy would use the iterator of the loader.
        changes.setdefault("persistent_workers", False)
    for name, value in {"_iterator": None, **changes}.items():
        object.__setattr__(made, name, value)
    return made


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


def is_stateful(loader: Any) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class SamplerProxy:
    """A sampler with the entries and attributes of another one."""

    def __init__(self, entries: Any) -> None:
        self.passed = entries

    def __len__(self) -> int:
        return len(self.passed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "passed":
            raise AttributeError(name)
        return getattr(self.passed, name)


def unwrap_sampler(sampler: Any) -> Any:
    """Return the sampler in a `SamplerProxy`, at any depth; any other sampler unchanged."""
    while isinstance(sampler, SamplerProxy):
        sampler = sampler.passed
    return sampler
