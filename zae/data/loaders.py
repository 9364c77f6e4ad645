"""Loaders: describe them, check them, copy a DataLoader with other samplers, and limit one to its first batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from zae.errors import ConfigError, LoaderError, kind_of
from zae.torch_private import is_loader_iterator
from zae.values.walk import leading_dimension

__all__ = [
    "BatchLimits",
    "Proxy",
    "batch_size_of",
    "check_loader",
    "check_repeatable",
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
_EXACT = ("torch.utils.data.", "zae.data.", "builtins")  # Of samplers that yield as many entries as they say.


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


def _wraps_loader(loader: Any) -> bool:
    """Return whether a dataset is a DataLoader with stages after it, as webdataset's WebLoader."""
    return isinstance(next(iter(getattr(loader, "pipeline", None) or ()), None), DataLoader)


def _is_pair(loader: Any) -> bool:
    """Return whether it is inputs and targets: two tensors of one length, of different types or dimensions."""
    if not isinstance(loader, (list, tuple)) or len(loader) != 2:
        return False
    first, second = loader
    if not all(isinstance(entry, (torch.Tensor, np.ndarray)) for entry in loader):
        return False
    is_alike = first.dtype == second.dtype and first.ndim == second.ndim
    return not is_alike and first.ndim > 0 and second.ndim > 0 and len(first) == len(second)


def check_ended(loader: Any, count: int) -> None:
    """Refuse the end of a loader after fewer batches than it has, where their number is certain.

    A DataLoader takes a StopIteration that its dataset raises for the end of the epoch.
    """
    expected = (length_of(loader) or 0) if iterates_as_torch(loader) else 0
    if count >= expected:
        return
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if all(type(unwrap_sampler(sampler)).__module__.startswith(_EXACT) for sampler in samplers):
        raise LoaderError(
            f"the loader has ended after {count} of {expected} batches ({describe(loader)}): "
            f"{type(loader.dataset).__name__}.__getitem__, a transform or the collate_fn has raised StopIteration, "
            "which ends the epoch in silence. Mostly it is next(...) of something exhausted: give it a default, or "
            "raise another error"
        )


def check_loader(loader: Any, name: str = "loader", takes_dict: bool = False) -> None:
    """Refuse an object that is not a loader, or has no batches; a dict of them may be an alternative to it."""
    is_dataset = isinstance(loader, torch.utils.data.Dataset) and not _wraps_loader(loader)
    if is_dataset or not isinstance(loader, Iterable):
        example = f": torch.utils.data.DataLoader({name}, batch_size=32)" if is_dataset else " or a list of batches"
        if isinstance(loader, IterableDataset):
            example += ", or with batch_size=None if it yields batches"
        got = "a dataset" if is_dataset else "not iterable"
        call = "call it, or " if inspect.isfunction(loader) or inspect.ismethod(loader) else ""
        raise LoaderError(f"{name} is {got} ({type(loader).__name__}); {call}give a DataLoader{example}")
    if isinstance(loader, (str, bytes)):
        raise LoaderError(f"{name} is a {type(loader).__name__}, not batches; give a DataLoader or a list of batches")
    if hasattr(loader, "__array__"):  # A tensor, an array of NumPy, or a table of pandas.
        tensor = name if isinstance(loader, torch.Tensor) else f"torch.as_tensor({name})"
        if not isinstance(loader, (torch.Tensor, np.ndarray)):
            tensor = f"torch.as_tensor({name}.to_numpy())"
        raise LoaderError(
            f"{name} is {kind_of(loader)}, not batches; give a DataLoader: "
            f"torch.utils.data.DataLoader(TensorDataset({tensor}), batch_size=32), or a list of batches"
        )
    if _is_pair(loader):
        raise LoaderError(
            f"{name} is a pair of tensors or arrays, which would be two batches; to train on inputs and targets, write "
            f"torch.utils.data.DataLoader(TensorDataset(*map(torch.as_tensor, {name})), batch_size=32, shuffle=True)"
        )
    if isinstance(loader, Mapping):
        raise LoaderError(
            f"{name} is a dict ({', '.join(map(str, loader))}), but only valid_loader may be a dict; give one loader"
        )
    if isinstance(loader, (list, tuple)) and loader and isinstance(loader[0], DataLoader):
        several = "give one loader: DataLoader(torch.utils.data.ConcatDataset(datasets), batch_size=32)"
        remedy = f"give a dict: {name}={{name: loader}}" if takes_dict else several
        raise LoaderError(f"{name} is a {type(loader).__name__} of loaders; {remedy}")
    if length_of(loader) == 0:
        remedy = "use more data, or drop_last=False" if getattr(loader, "drop_last", False) else "give it data"
        raise LoaderError(f"{name} has 0 batches ({describe(loader)}); {remedy}")


def check_repeatable(loader: Any, name: str, epochs: int) -> None:
    """Refuse an iterator that has ended, or that would be read in several epochs: what Python makes ends once."""
    is_of_python = isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools")
    if not is_of_python and not is_loader_iterator(loader):
        return
    remedy = "give a list, a DataLoader, or a class with __iter__"
    if inspect.isgenerator(loader) and inspect.getgeneratorstate(loader) == inspect.GEN_CLOSED:
        raise LoaderError(f"{name} is a generator that has ended, and yields nothing any more; {remedy}")
    if epochs > 1:
        raise LoaderError(
            f"{name} is {kind_of(loader)}, which can be read once, and this run reads it in {epochs} epochs; {remedy}, "
            "or end the epochs of a stream by steps_per_epoch=..."
        )


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


# ---------------------------------------------------------------------------------------- the first batches


class BatchLimits(NamedTuple):
    """How many batches of the loaders a call of ``run`` takes in an epoch; None is all.

    Attributes
    ----------
    train, valid : int or None
        Batches of the ``loader``, and of each ``valid_loader``.
    repeats : bool
        Whether each epoch has the same training batches.
    """

    train: int | None = None
    valid: int | None = None
    repeats: bool = False

    def check(self, loader: Any, valid_loader: Any) -> None:
        """Refuse loaders that cannot be limited."""
        limited = []
        if self.train is not None:
            limited.append(loader)
        if self.valid is not None:
            limited += valid_loader.values() if isinstance(valid_loader, Mapping) else [valid_loader]
        for part in limited:
            if isinstance(part, Iterator):
                raise ConfigError(
                    f"the first batches of a {type(part).__name__} come once, so that limit_batches and "
                    "overfit_batches cannot take them in each epoch; give a list, a DataLoader or a class with "
                    "__iter__, or write steps_per_epoch=..., which ends the epochs of a stream"
                )
        if self.repeats and iterates_as_torch(loader) and type(loader.batch_sampler) not in (BatchSampler, type(None)):
            raise ConfigError(
                "overfit_batches takes the first samples of the dataset in each epoch, and the batches of this loader "
                f"are those of its {type(loader.batch_sampler).__name__} ({describe(loader)}); give a DataLoader with "
                "batch_size=..., or a list of batches"
            )

    def of_training(self, loader: Any) -> Any:
        """Return the view of a training loader."""
        return loader if self.train is None else _first_of(loader, self.train, self.repeats)

    def of_validation(self, loader: Any) -> Any:
        """Return the view of a validation loader, or of each of several."""
        if self.valid is None or loader is None:
            return loader
        if isinstance(loader, Mapping):
            return {name: _first_of(part, self.valid) for name, part in loader.items()}
        return _first_of(loader, self.valid)


def takes_samples(loader: Any) -> bool:
    """Return whether a loader is a DataLoader over a dataset that is read by index."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def iterates_as_torch(loader: Any) -> bool:
    """Return whether a DataLoader has the loop of torch, which takes its batches from a sampler, for samples."""
    return takes_samples(loader) and type(loader).__iter__ is DataLoader.__iter__


def _first_of(loader: Any, count: int, repeats: bool = False) -> Any:
    """Return a loader of the first batches of a loader; with ``repeats``, in the order of the dataset."""
    if isinstance(loader, (list, tuple)):
        return loader[:count]
    if iterates_as_torch(loader):
        if repeats:
            loader = with_entries(loader, lambda entries, size: SequentialSampler(loader.dataset))
        return with_entries(loader, partial(_FirstEntries, count))
    return _FirstOfStream(loader, count)


class _FirstEntries(Proxy):
    """A sampler, or a batch sampler, without the entries after the first batches."""

    def __init__(self, batches: int, entries: Any, batch_size: int) -> None:
        super().__init__(entries)
        self._count = batches * batch_size

    def __len__(self) -> int:
        return min(self._count, super().__len__())

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.passed), self._count)


class _FirstOfStream(Proxy):
    """The first batches of an iterable; where each rank reads a stream by itself, the first batches of each rank."""

    def __init__(self, loader: Any, count: int) -> None:
        super().__init__(loader)
        self.count = count

    def __len__(self) -> int:
        return min(self.count, super().__len__())

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.passed), self.count)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # That of the loader knows no end of an epoch at these batches.
            raise AttributeError(name)
        return super().__getattr__(name)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank gets other batches without help."""
        dataset = getattr(self.passed, "dataset", None)
        return any(getattr(part, "is_sharded", False) for part in (self.passed, dataset))
