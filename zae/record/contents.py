"""Say which data a loader has, so that it can be compared: between the ranks, and between a run and its resume.

No sample is read, since a dataset may draw random numbers for it, or need long; and nothing is drawn from a sampler.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from zae.data.loader_parts import datasets_in, parts_of_dataset
from zae.data.loaders import length_of, unwrap_sampler
from zae.random_state import STREAMS
from zae.torch_private import fingerprint_of
from zae.user_state.owners import STATE, Walk
from zae.values.plain_values import content_digest, plain_value

__all__ = ["Contents", "contents_of"]

ROWS = 8  # Rows of a table of the library datasets that are compared.
DAY = 24 * 60 * 60
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


def contents_of(loader: Any) -> Contents:
    """Return what the dataset and the samplers of a loader hold."""
    dataset = getattr(loader, "dataset", None)
    contents = Contents({}, {})
    if dataset is not None:
        of_dataset = _of_dataset(dataset)
        contents.samples.update(of_dataset.samples)
        contents.settings.update(of_dataset.settings)
    elif isinstance(loader, Sequence):
        contents.samples[" itself"] = content_digest(loader)
    batches = getattr(loader, "batch_sampler", None)
    for place, sampler in ((".sampler", getattr(batches, "sampler", None)), (".batch_sampler", batches)):
        for name, value in getattr(unwrap_sampler(sampler), "__dict__", {}).items():
            if value is not dataset and isinstance(value, _LISTS) and not name.startswith("_"):
                contents.samples[f"{place}.{name}"] = content_digest(value)  # Entries and their weights: none is drawn.
    return contents


def _of_dataset(dataset: Any) -> Contents:
    """Return what a dataset holds; it is read once in a process, since training may fill a cache in it."""
    known = _known.get(id(dataset))
    if known is not None and known[0]() is dataset:
        return known[1]
    contents = _read(datasets_in(dataset, ".dataset"))
    key = id(dataset)
    with contextlib.suppress(TypeError):  # A list has no weak references.
        _known[key] = (weakref.ref(dataset, lambda _: _known.pop(key, None)), contents)
    return contents


def _read(datasets: Mapping[str, Any]) -> Contents:
    """Return what datasets hold, and the objects of the user in them."""
    contents = Contents({}, {})
    sizes: dict[str, int | None] = {}
    walk = Walk(datasets.values())
    for place, dataset in datasets.items():
        size = sizes[place] = None if isinstance(dataset, IterableDataset) else length_of(dataset)
        if size is not None:
            contents.samples[f"len({place})"] = size
        mark = fingerprint_of(dataset)
        if mark is not None:  # Some datasets get a new one in each process: it is named, and not refused.
            contents.settings[f"{place}.fingerprint"] = mark
        if isinstance(dataset, _LISTS):
            contents.samples[place] = content_digest(dataset)
        elif hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):  # Of the library datasets.
            contents.samples[place] = _rows_of_table(dataset, size or 0)
        else:
            walk.add(place, dataset)
    # What a trainer has, which a dataset may hold, is in its own part of the record.
    trainers = tuple(path for path, item in walk.owners.items() if "loader_position" in item.store)
    for (owner, key), entry in walk.places.items():
        if key is STATE or owner.startswith(trainers):
            continue
        value = entry.value
        where = f"{owner}.{key}"
        is_within = key in ("dataset", "datasets") and parts_of_dataset(datasets.get(owner))
        if is_within or isinstance(value, STREAMS) or isinstance(walk.owners[owner].object, nn.Module):
            continue
        if key == "tensors" and isinstance(value, (list, tuple)):
            contents.samples.update((f"{where}[{index}]", content_digest(item)) for index, item in enumerate(value))
        elif key == "indices" or _is_per_sample(value, sizes.get(owner)):
            contents.samples[where] = _digest(value)
        elif id(value) in walk.paths:  # Its attributes are settings of their own.
            contents.settings[where] = type(value).__qualname__
        elif not _is_of_process(value):
            contents.settings[where] = plain_value(value)
    return contents


def _is_per_sample(value: Any, size: int | None) -> bool:
    """Return whether a value has an entry for each sample."""
    is_sized = hasattr(value, "__len__") and not isinstance(value, (str, bytes))
    return is_sized and size is not None and length_of(value) == size


def _is_of_process(value: Any) -> bool:
    """Return whether a value is the number of this process, or a time of the last day, which each process has anew."""
    if type(value) not in (int, float):
        return False
    return value == os.getpid() or 0 <= time.time() - value < DAY


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
