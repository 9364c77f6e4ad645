"""Refuse what is no loader, one that cannot be read as often as a run reads it, and one that ends too early."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from zae.data.loaders import describe, iterates_as_torch, length_of, unwrap_sampler
from zae.errors import LoaderError, kind_of
from zae.torch_private import is_loader_iterator

__all__ = ["check_ended", "check_loader", "check_repeatable"]

_EXACT = ("torch.utils.data.", "zae.data.", "builtins")  # Of samplers that yield as many entries as they say.


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
