"""Compare the data of a loader over the ranks: what a script has divided by rank would be divided a second time."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from zae.common.walk import leaves_of, sample
from zae.data.loaders import length_of, parts_of_dataset, unwrap_sampler
from zae.errors import LoaderError

__all__ = ["check_same_data", "marks_of"]

_log = logging.getLogger("zae")

_DEPTH = 4  # Datasets in datasets: Subset(ConcatDataset([...])).
_ENTRIES = 8  # Entries of a list that are compared, and numbers of a tensor.


class _Numbers(tuple[int, str]):
    """The mark of numbers in tensors or arrays, which a script may have drawn at random."""

    __slots__ = ()


def marks_of(loader: Any) -> dict[str, Any]:
    """Return what says which data a loader has, by its place: lengths, and marks of lists with an entry per sample.

    No sample is read, since a dataset may draw random numbers for it, or need long.
    """
    found: dict[str, Any] = {}
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):  # It says itself whether it is divided.
        return found
    if dataset is not None:
        _mark_dataset(dataset, ".dataset", found, _DEPTH)
    elif isinstance(loader, Sequence):
        found[" itself"] = _mark_of(loader)
    batches = getattr(loader, "batch_sampler", None)
    for place, sampler in ((".sampler", getattr(batches, "sampler", None)), (".batch_sampler", batches)):
        for name, value in vars(unwrap_sampler(sampler)).items() if hasattr(sampler, "__dict__") else ():
            if value is dataset:
                continue
            if isinstance(value, (list, tuple, range, Tensor, np.ndarray)) and not name.startswith("_"):
                found[f"{place}.{name}"] = tuple(_mark_of(value))  # Of entries and their weights: none is drawn.
    return found


def _mark_dataset(dataset: Any, place: str, found: dict[str, Any], depth: int) -> None:
    """Add the marks of a dataset, and of the datasets that it takes samples from."""
    size = length_of(dataset)
    if size is None:
        return
    found[f"len({place})"] = size
    if isinstance(dataset, (list, tuple, range, Tensor, np.ndarray)):
        found[place] = _mark_of(dataset)
    elif hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):  # Of the library datasets: its table.
        with contextlib.suppress(Exception):
            rows = dataset.with_format("arrow")
            found[place] = _digest([rows[index].to_pylist() for index in _some(size)])
    for name, value in vars(dataset).items() if hasattr(dataset, "__dict__") else ():
        values = value if name == "tensors" and isinstance(value, (list, tuple)) else [value]
        for index, each in enumerate(values):
            if hasattr(each, "__len__") and not isinstance(each, (str, bytes)) and length_of(each) == size:
                mark = _mark_of(each)
                at = f"{place}.{name}" + f"[{index}]" * (name == "tensors")
                found[at] = tuple(mark) if name == "indices" else mark
    if depth:
        for name, inner in parts_of_dataset(dataset).items():
            _mark_dataset(inner, place + name, found, depth - 1)


def _some(size: int) -> list[int]:
    """Return some indices of so many, the first and the last among them."""
    return sorted({*range(0, size, max(1, size // _ENTRIES)), size - 1} - {-1})


def _mark_of(value: Any) -> Any:
    """Return a mark of a list, a tensor or a table: its length, and a digest of some entries."""
    size = len(value)
    indices = _some(size)
    if isinstance(value, Mapping):
        keys = list(value)
        return size, _digest([keys[index] for index in indices])
    try:
        if hasattr(value, "iloc"):  # A table of pandas.
            return size, repr(value.iloc[indices])
        entries = [value[index] for index in indices]
        mark = (size, _digest(entries))
        return _Numbers(mark) if any(map(_has_numbers, entries)) else mark
    except Exception:  # Of a class of the user: its length is all that is compared.
        return size, ""


def _has_numbers(entry: Any) -> bool:
    """Return whether a tensor, or an array, is in an entry."""
    return any(isinstance(leaf, (Tensor, np.ndarray, np.generic)) for _, leaf in leaves_of(entry))


def _digest(entries: Sequence[Any]) -> str:
    return hashlib.sha256(repr([[*_plain(each)] for each in entries]).encode()).hexdigest()


def _plain(entry: Any) -> Iterator[Any]:
    """Yield what is compared of an entry: its numbers and texts, and the class of any other object."""
    for _, leaf in leaves_of(entry):
        if isinstance(leaf, (Tensor, np.ndarray)):
            shape = tuple(leaf.shape)
            with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # A sparse one.
                yield sample(leaf, _ENTRIES).tolist()
            yield shape
        elif isinstance(leaf, (bool, int, float, complex, str, bytes, np.generic, type(None))):
            yield leaf if not isinstance(leaf, (str, bytes)) else leaf[:1000]
        else:
            yield type(leaf).__name__


def check_same_data(of_ranks: Sequence[Mapping[str, Any]], is_main: bool) -> None:
    """Refuse a loader whose data differ between the ranks; ``of_ranks`` is what `marks_of` returned on each.

    Where only the numbers of tensors differ, the script may have drawn them on each rank: that is a warning.
    """
    main = of_ranks[0]
    found = []
    for rank, marks in enumerate(of_ranks):
        found += [(place, rank) for place in {**main, **marks} if main.get(place) != marks.get(place)]
    certain = [(place, rank) for place, rank in found if not isinstance(main.get(place), _Numbers)]
    if not found:
        return
    place, rank = (certain or found)[0]
    is_length = place.startswith("len(")
    where = place.replace("len(.", "len(loader.") if is_length else f"loader{place}"
    values = f" ({main.get(place)} and {of_ranks[rank].get(place)})" if is_length else ""
    text = (
        f"the ranks have different data: {where} differs between rank 0 and rank {rank}{values}, and what the script "
        "has divided by rank would be divided again. Give each rank the whole dataset, which is divided for you; or "
        "set loader.is_sharded = True, and each rank gets all that its own loader yields. Data that the script draws "
        "at random are made with the same seed on all ranks"
    )
    if certain:
        raise LoaderError(text)
    if is_main:
        _log.warning("%s", text)
