"""The exact data path: build the batches of a DataLoader over tensors in memory with one gather for each tensor.

A DataLoader without workers fetches one sample after another and stacks them. For tensors in memory that takes most
of the step of a small model, and one ``index_select`` returns the same batch. The exact data path iterates over the
batch sampler of the loader, and draws from its generators what the iterator of the DataLoader draws, in the same order:
the batches and every random state are bitwise those of the plain loader. Any other loader is used unchanged;
`why_not` returns the reason. A change of the dataset during a step shows in the next batch, as with the plain loader;
only the indices of a ``Subset`` that are changed in place are read when an epoch begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from zae.common.torch_private import find

__all__ = ["batches_of", "why_not"]

_PIECES = 256  # Batches that are split at once: all their views are alive.
# Types that index_select and stack treat alike: both copy the bytes.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)
_COPIED = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))
# The functions that this path replaces. Where one was patched, or does not exist, the plain loader is used.
_COLLATE = "torch.utils.data._utils.collate"
_STACK = find(_COLLATE, "collate_tensor_fn")
_NAMES: dict[Any, tuple[str, ...]] = {
    DataLoader: ("__iter__", "_get_iterator"),
    find("torch.utils.data.dataloader", "_BaseDataLoaderIter"): ("__next__",),
    BatchSampler: ("__iter__",),
    SequentialSampler: ("__iter__",),
    RandomSampler: ("__iter__",),
    WeightedRandomSampler: ("__iter__",),
    TensorDataset: ("__getitem__", "__len__"),
    Subset: ("__getitem__", "__getitems__", "__len__"),
}
_METHODS = {(kind, name): getattr(kind, name, None) for kind, names in _NAMES.items() for name in names}
_IS_KNOWN = None not in (_STACK, *_METHODS.values())


def batches_of(loader: Any, fast: bool = True) -> Iterator[Any]:
    """Iterate over a loader, on the exact data path where that is possible."""
    if not fast or why_not(loader) is not None:
        return iter(loader)
    batches, dataset = loader.batch_sampler, loader.dataset
    # A DataLoader starts its sampler, and then draws the seed of its workers, even if it has none.
    entries = iter(batches)
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    if not _has_tensors(_innermost(dataset)):
        return map(partial(_fetch, loader), entries)  # In a generator, a StopIteration would be an error.
    sampler: Any = batches.sampler if type(batches) is BatchSampler else None
    kind = type(sampler)
    if kind is SequentialSampler and sampler.data_source is dataset:
        return _gather_batches(loader, _sequential_rows(batches))
    if kind is RandomSampler and sampler.data_source is dataset and _is_permutation(sampler):
        return _gather_batches(loader, _random_rows(batches))
    # Where it has weights for rows that do not exist, the dataset raises the error.
    if kind is WeightedRandomSampler and len(sampler.weights) <= len(dataset):
        return _gather_batches(loader, _weighted_rows(batches))
    return _gather_batches(loader, _sampled_rows(entries, len(dataset)))


def why_not(loader: Any) -> str | None:
    """Return why a loader does not take the exact data path."""
    if type(loader) is not DataLoader:
        return f"it is a {type(loader).__name__}, not a torch.utils.data.DataLoader itself"
    if not _IS_KNOWN:
        return f"torch {torch.__version__} fetches its batches in another way"
    reasons = {
        f"it has num_workers={loader.num_workers}": loader.num_workers,
        "it has pin_memory=True": loader.pin_memory,
        "it has a worker_init_fn": loader.worker_init_fn,
        f"it has timeout={loader.timeout}": loader.timeout,
        "it has batch_size=None": loader.batch_sampler is None,
        "it has a custom collate_fn": loader.collate_fn is not default_collate,
        "the default collate was given other functions": not _stacks_tensors(),
        "its _get_iterator was replaced": "_get_iterator" in vars(loader),
        f"torch's default device is {torch.get_default_device()}": torch.get_default_device().type != "cpu",
        "its dataset is an IterableDataset": isinstance(loader.dataset, IterableDataset),
    }
    for (kind, name), method in _METHODS.items():
        if getattr(kind, name) is not method:
            reasons[f"{kind.__name__}.{name} was replaced"] = True
    return next((reason for reason, holds in reasons.items() if holds), None) or _why_not_over(loader.dataset)


def _why_not_over(dataset: Any) -> str | None:
    """Return why the samples of a dataset cannot be gathered."""
    source = _innermost(dataset)
    if not _has_tensors(source):
        if getattr(dataset, "__getitems__", None):
            return None
        return f"its dataset, a {type(dataset).__name__}, is not a TensorDataset and has no __getitems__"
    for index, tensor in enumerate(source.tensors):
        reason = _why_not_tensor(tensor)
        if reason is not None:
            return f"tensor {index} of its dataset {reason}"
        if len(tensor) != len(source):
            return f"tensor {index} of its dataset differs in length from tensor 0"
    return None


def _why_not_tensor(tensor: Any) -> str | None:
    """Return why stacking rows of a tensor would differ from gathering them."""
    if type(tensor) is not Tensor:
        return f"is a {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "is sparse or nested"
    if not tensor.is_cpu:
        return f"is on {tensor.device}"
    if tensor.dtype not in _COPIED or tensor.is_conj() or tensor.is_neg():
        return f"is of type {tensor.dtype}, or a lazy view"
    if tensor.requires_grad:
        return "requires a gradient"
    # is_contiguous() overlooks the strides of dimensions of size 1; a slice would keep them, and stack does not.
    if not tensor.numel() or tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
        return "is empty or not contiguous"
    return None


def _stacks_tensors() -> bool:
    """Return whether tuples of tensors are stacked: ``default_collate_fn_map`` is public and may be changed."""
    functions = find(_COLLATE, "default_collate_fn_map") or {}
    return functions.get(Tensor) is _STACK and not any(isinstance((), kind) for kind in functions)


def _innermost(dataset: Any) -> Any:
    """Return the dataset in a Subset, at any depth; any other dataset itself."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _has_tensors(dataset: Any) -> bool:
    """Return whether a dataset returns samples as TensorDataset does."""
    return (
        isinstance(dataset, TensorDataset)
        and type(dataset).__getitem__ is TensorDataset.__getitem__
        and type(dataset).__len__ is TensorDataset.__len__
        and not hasattr(type(dataset), "tensors")  # A property may return other tensors each time.
        and not hasattr(dataset, "__getitems__")
    )


def _is_permutation(sampler: RandomSampler) -> bool:
    """Return whether a RandomSampler yields each row once."""
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _sequential_rows(batches: Any) -> Iterator[slice]:
    """Yield the rows of a SequentialSampler."""
    length, size, drops, start = len(batches.sampler), batches.batch_size, batches.drop_last, 0
    while start < length - (size - 1 if drops else 0):
        yield slice(start, min(start + size, length))  # A step may add rows to the dataset.
        start += size
        size = size if drops else batches.batch_size


def _random_rows(batches: Any) -> Iterator[Tensor]:
    """Yield the rows of a RandomSampler without replacement."""
    length, generator = len(batches.sampler), batches.sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = torch.randperm(length, generator=generator)
    # At its end, the sampler draws another order, of which it uses as many rows as steps have added.
    yield from _split_indices(
        order, batches, lambda: torch.randperm(length, generator=generator)[: batches.sampler.num_samples % length]
    )


def _weighted_rows(batches: Any) -> Iterator[Tensor]:
    """Yield the rows of a WeightedRandomSampler, which draws all of them at once."""
    sampler = batches.sampler
    yield from _split_indices(
        torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator),
        batches,
    )


def _split_indices(order: Tensor, batches: Any, more: Callable[[], Tensor] | None = None) -> Iterator[Tensor]:
    """Split an order into batches, many at a time, which is three times faster than slices.

    A BatchSampler that does not drop the last batch reads its batch size for each batch.
    """
    size, drops, start = batches.batch_size, batches.drop_last, 0
    while True:
        while whole := min((len(order) - start) // size, _PIECES):
            for piece in order[start : start + whole * size].split(size):
                yield piece
                start += size
                if not drops and batches.batch_size != size:
                    size = batches.batch_size
                    break
        if more is None:
            break
        order, start, more = torch.cat([order[start:], more()]), 0, None
    if start < len(order) and not drops:
        yield order[start:]


def _sampled_rows(entries: Iterable[Any], length: int) -> Iterator[Any]:
    """Yield the rows of any other sampler; entries that are not lists of indices are yielded in a tuple."""
    for entry in entries:
        is_plain = type(entry) is list and set(map(type, entry)) == {int} and min(entry) >= 0 and max(entry) < length
        yield torch.tensor(entry) if is_plain else (entry,)


def _gather_batches(loader: Any, pieces: Iterable[Any]) -> Iterator[Any]:
    """Yield batches of these rows; a step may replace the tensors or indices of the dataset."""
    dataset, length = loader.dataset, len(loader.dataset)
    is_subset = type(loader.dataset) is Subset
    parts: list[Any] = []
    tensors: Any = None
    source: Any = None
    for rows in pieces:
        if is_subset or dataset.tensors is not tensors:
            now = _sources_of(dataset)
            if len(now) != len(parts) or not all(map(is_, now, parts)):
                parts, tensors, source = now, now[-1], _source_of(dataset, length)
        if type(rows) is tuple:
            yield _fetch(loader, rows[0])
        elif source is not None:
            found, among = source
            yield _take_rows(found, among, rows)
        else:
            yield _fetch(loader, [*range(length)[rows]] if type(rows) is slice else rows.tolist())


def _take_rows(tensors: tuple[Tensor, ...], among: Tensor | None, rows: Tensor | slice) -> list[Tensor]:
    """Copy rows of tensors; ``among`` maps the rows of a subset to theirs."""
    if among is not None:
        rows = among[rows] if isinstance(rows, slice) else among.index_select(0, rows)
    if isinstance(rows, slice):
        return [tensor[rows].clone() for tensor in tensors]
    return [tensor.index_select(0, rows) for tensor in tensors]


def _sources_of(dataset: Any) -> list[Any]:
    """Return what a batch is built from: the indices of each Subset, and the tensors."""
    parts: list[Any] = []
    while type(dataset) is Subset:
        parts.append(dataset.indices)
        dataset = dataset.dataset
    return [*parts, getattr(dataset, "tensors", dataset)]


def _source_of(dataset: Any, length: int = 0) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """Return the tensors of a dataset and its rows in them (None for all), or None if the dataset has to be asked."""
    if type(dataset) is not Subset:
        fits = _has_tensors(dataset) and len(dataset) >= length and _why_not_over(dataset) is None
        return (dataset.tensors, None) if fits else None
    outer: Any = dataset.dataset
    inner, indices = _source_of(outer), dataset.indices
    is_plain = isinstance(indices, range) or (isinstance(indices, (list, tuple)) and set(map(type, indices)) == {int})
    if inner is None or not is_plain or len(indices) < length:
        return None
    within, rows = len(outer), torch.tensor(list(indices), dtype=torch.int64)
    if bool(((rows < -within) | (rows >= within)).any()):
        return None  # The dataset raises the error when such a row is fetched.
    rows = torch.where(rows < 0, rows + within, rows)
    return inner[0], rows if inner[1] is None else inner[1][rows]


def _fetch(loader: Any, entry: Any) -> Any:
    """Fetch a batch from the dataset, which raises its own errors."""
    if getattr(loader.dataset, "__getitems__", None):
        return loader.collate_fn(loader.dataset.__getitems__(entry))
    return loader.collate_fn([loader.dataset[index] for index in entry])
