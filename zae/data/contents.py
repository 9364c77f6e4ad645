"""Say which data a loader has, so that it can be compared: between the ranks, and between a run and its resume.

No sample is read, since a dataset may draw random numbers for it, or need long; and nothing is drawn from a sampler.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from zae.common.plain_values import content_digest, plain_value
from zae.common.random_state import STREAMS
from zae.data.loaders import length_of, parts_of_dataset, unwrap_sampler

__all__ = ["Contents", "contents_of", "fingerprint_of"]

MAX_DEPTH = 4  # Datasets in datasets: Subset(ConcatDataset([...])).
ROWS = 8  # Rows of a table of the library datasets that are compared.
_LISTS = (list, tuple, range, Tensor, np.ndarray)


class Contents(NamedTuple):
    """What a dataset holds, by place.

    Attributes
    ----------
    samples : dict
        Of what there is for each sample, files, labels or indices, the length and a hash; the lengths of datasets.
    settings : dict
        The other attributes: numbers and texts as they are.
    """

    samples: dict[str, Any]
    settings: dict[str, Any]


_known: dict[int, tuple[weakref.ref[Any], Contents]] = {}


def fingerprint_of(dataset: Any, place: str = ".dataset") -> Contents:
    """Return what a dataset holds; it is read once in a process, since training may fill a cache in it."""
    known = _known.get(id(dataset))
    if known is not None and known[0]() is dataset:
        return known[1]
    found = Contents({}, {})
    _read_dataset(dataset, place, found, MAX_DEPTH)
    key = id(dataset)
    with contextlib.suppress(TypeError):  # A list has no weak references.
        _known[key] = (weakref.ref(dataset, lambda _: _known.pop(key, None)), found)
    return found


def contents_of(loader: Any) -> Contents:
    """Return what the dataset and the samplers of a loader hold."""
    dataset = getattr(loader, "dataset", None)
    found = Contents({}, {})
    if dataset is not None:
        whole = fingerprint_of(dataset)
        found.samples.update(whole.samples)
        found.settings.update(whole.settings)
    elif isinstance(loader, Sequence):
        found.samples[" itself"] = content_digest(loader)
    batches = getattr(loader, "batch_sampler", None)
    for place, sampler in ((".sampler", getattr(batches, "sampler", None)), (".batch_sampler", batches)):
        for name, value in _attributes(unwrap_sampler(sampler)):
            if value is not dataset and isinstance(value, _LISTS) and not name.startswith("_"):
                found.samples[f"{place}.{name}"] = content_digest(value)  # Entries and their weights: none is drawn.
    return found


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, without its random streams."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if not isinstance(value, STREAMS):
            yield name, value


def _read_dataset(dataset: Any, place: str, found: Contents, depth: int) -> None:
    """Add what a dataset holds, and the datasets that it takes samples from."""
    size = None if isinstance(dataset, IterableDataset) else length_of(dataset)
    if size is not None:
        found.samples[f"len({place})"] = size
    if isinstance(dataset, _LISTS):
        found.samples[place] = content_digest(dataset)
        return
    if hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):  # Of the library datasets.
        found.samples[place] = _rows_of_table(dataset, size or 0)
        return
    inner = parts_of_dataset(dataset)
    apart = {id(each) for each in inner.values()}
    for name, value in _attributes(dataset):
        if id(value) in apart or (inner and name == "datasets"):
            continue
        where = f"{place}.{name}"
        if name == "tensors" and isinstance(value, (list, tuple)):
            found.samples.update((f"{where}[{index}]", content_digest(each)) for index, each in enumerate(value))
        elif name == "indices" or _is_per_sample(value, size):
            found.samples[where] = _digest(value)
        else:
            found.settings[where] = plain_value(value)
    if depth:
        for name, each in inner.items():
            _read_dataset(each, place + name, found, depth - 1)


def _is_per_sample(value: Any, size: int | None) -> bool:
    """Return whether a value has an entry for each sample."""
    is_sized = hasattr(value, "__len__") and not isinstance(value, (str, bytes))
    return is_sized and size is not None and length_of(value) == size


def _digest(value: Any) -> str:
    """Return the hash of a list, a tensor or a table; of a class of the user its length."""
    if isinstance(value, (*_LISTS, Mapping, set)) or hasattr(value, "iloc"):
        return content_digest(value)
    return f"{len(value)} entries of a {type(value).__qualname__}"


def _rows_of_table(dataset: Any, size: int) -> str:
    """Return the columns and the hash of some rows of a dataset of the library datasets, which may be on the disk."""
    rows: list[Any] = []
    with contextlib.suppress(Exception):
        table = dataset.with_format("arrow")
        places = sorted({*range(0, size, max(1, size // ROWS)), size - 1} - {-1})
        rows = [table[index].to_pylist() for index in places]
    return f"{dataset.column_names} {content_digest(rows)}"
