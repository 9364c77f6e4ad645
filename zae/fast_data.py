"""The exact data path: the batches of a DataLoader over tensors in memory, taken with one gather for each tensor.

A ``DataLoader`` without workers asks its dataset for one sample after another and stacks them. Over tensors in memory
that is most of a small model's step, and one ``index_select`` gives the same batch. What is walked here is the
loader's own batch sampler, and from the loader's generators is drawn what the DataLoader's iterator draws, at the same
moments: the batches, their order and every random state are bitwise those of the plain loader. Whatever is not
recognised takes the plain loader; `why_not` says what that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data._utils import collate

__all__ = ["batches_of", "why_not"]

_CUT = 256  # Pieces that are cut at once: their views are all alive.
# Types that index_select and stack treat alike: both copy the bytes.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)
_COPIED = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))


def batches_of(loader: Any, fast: bool = True) -> Iterator[Any]:
    """Begin to walk a loader, over the exact data path where that is possible.

    Parameters
    ----------
    loader : iterable
        Any loader.
    fast : bool
        False walks the loader itself, always.

    Returns
    -------
    iterator
        The batches. As with ``iter(loader)``, the random numbers of its beginning are drawn now.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
    >>> [inputs.tolist() for (inputs,) in batches_of(loader)]
    [[0, 1], [2, 3], [4]]
    """
    if not fast or why_not(loader) is not None:
        return iter(loader)
    batches, source = loader.batch_sampler, _source_of(loader.dataset)
    # First the sampler begins, then DataLoader draws the seed of its workers, also where there are none.
    entries = iter(batches)
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    if source is None:
        return _gotten(loader, entries)
    kind = type(batches.sampler) if type(batches) is BatchSampler else None
    if kind is SequentialSampler and batches.sampler.data_source is loader.dataset:
        return _in_order(batches, *source)
    if kind is RandomSampler and batches.sampler.data_source is loader.dataset and _permutes(batches.sampler):
        return _shuffled(batches, *source)
    # It knows no data; one with weights for rows that are not there is left to the dataset, and so is its error.
    if kind is WeightedRandomSampler and len(batches.sampler.weights) <= len(loader.dataset):
        return _weighted(batches, *source)
    return _sampled(loader, entries, *source)


def why_not(loader: Any) -> str | None:
    """Say why a loader is walked as it is, and not over the exact data path.

    Parameters
    ----------
    loader : object
        Any loader.

    Returns
    -------
    str or None
        The first reason; None for a loader that takes the exact data path.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> why_not(DataLoader([1, 2, 3], batch_size=2))
    'its dataset, a list, is no TensorDataset and has no __getitems__'
    """
    if type(loader) is not DataLoader:
        return f"it is a {type(loader).__name__}, not a torch.utils.data.DataLoader itself"
    reasons = {
        f"it has num_workers={loader.num_workers}": loader.num_workers,
        "it has pin_memory=True": loader.pin_memory,
        "it has a worker_init_fn": loader.worker_init_fn,
        f"it has timeout={loader.timeout}": loader.timeout,
        "it has batch_size=None": loader.batch_sampler is None,
        "it has a collate_fn of its own": loader.collate_fn is not collate.default_collate,
        "the default collate was given other functions": not _collates_as_usual(),
        "its _get_iterator was replaced": "_get_iterator" in vars(loader),
        f"torch's default device is {torch.get_default_device()}": torch.get_default_device().type != "cpu",
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or _why_not_over(loader.dataset)


def _why_not_over(dataset: Any) -> str | None:
    """Why the samples of a dataset cannot be gathered."""
    source = dataset
    while _is_subset(source):
        source = source.dataset
    if not _is_of_tensors(source):
        if getattr(dataset, "__getitems__", None):
            return None
        return f"its dataset, a {type(dataset).__name__}, is no TensorDataset and has no __getitems__"
    for index, tensor in enumerate(source.tensors):
        reason = _why_not_tensor(tensor)
        if reason is not None:
            return f"tensor {index} of its dataset {reason}"
        if len(tensor) != len(source):
            return f"tensor {index} of its dataset is of another length than tensor 0"
    return None


def _why_not_tensor(tensor: Any) -> str | None:
    """Why rows of a tensor would not be stacked into what a gather gives."""
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


def _collates_as_usual() -> bool:
    """Whether tuples of tensors are stacked: ``default_collate_fn_map`` is open to everybody."""
    functions = collate.default_collate_fn_map
    stacks = functions.get(Tensor) is collate.collate_tensor_fn
    return stacks and not any(isinstance((), kind) for kind in functions)


def _is_of_tensors(dataset: Any) -> bool:
    """Whether a dataset gives samples as TensorDataset does."""
    return (
        isinstance(dataset, TensorDataset)
        and type(dataset).__getitem__ is TensorDataset.__getitem__
        and type(dataset).__len__ is TensorDataset.__len__
        and not hasattr(dataset, "__getitems__")
    )


def _is_subset(dataset: Any) -> bool:
    """Whether a dataset is a Subset, itself, whose indices are plain whole numbers."""
    if type(dataset) is not Subset:
        return False
    indices = dataset.indices
    return isinstance(indices, range) or (isinstance(indices, (list, tuple)) and set(map(type, indices)) == {int})


def _permutes(sampler: RandomSampler) -> bool:
    """Whether a RandomSampler gives each row once."""
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _source_of(dataset: Any) -> tuple[TensorDataset, Tensor | None] | None:
    """The TensorDataset that a dataset is or is a part of, and which of its rows; None is all of them."""
    if not _is_subset(dataset):
        return (dataset, None) if _is_of_tensors(dataset) else None
    inner = _source_of(dataset.dataset)
    if inner is None:
        return None
    length = len(dataset.dataset)
    rows = torch.tensor(list(dataset.indices), dtype=torch.int64)
    if bool(((rows < -length) | (rows >= length)).any()):
        return None  # The dataset says so itself, when such a row is asked for.
    rows = torch.where(rows < 0, rows + length, rows)
    return inner[0], rows if inner[1] is None else inner[1][rows]


def _in_order(batches: Any, dataset: TensorDataset, rows: Tensor | None) -> Iterator[list[Tensor]]:
    """Batches of a SequentialSampler: slices, copied, so that a step may change its batch."""
    length, size = len(batches.sampler), batches.batch_size
    end = length // size * size if batches.drop_last else length
    if rows is None:
        for start in range(0, end, size):
            yield [tensor[start : start + size].clone() for tensor in dataset.tensors]
        return
    for chosen in _pieces(rows[:end], size):
        yield [tensor.index_select(0, chosen) for tensor in dataset.tensors]


def _shuffled(batches: Any, dataset: TensorDataset, rows: Tensor | None) -> Iterator[list[Tensor]]:
    """Batches of a RandomSampler without replacement."""
    length, size, generator = len(batches.sampler), batches.batch_size, batches.sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = torch.randperm(length, generator=generator)
    order = order if rows is None else rows[order]
    whole = length // size * size
    for chosen in _pieces(order[:whole], size):
        yield [tensor.index_select(0, chosen) for tensor in dataset.tensors]
    # Asked for more than there are, the sampler draws another order, of which it takes nothing.
    torch.randperm(length, generator=generator)
    if whole < length and not batches.drop_last:
        yield [tensor.index_select(0, order[whole:]) for tensor in dataset.tensors]


def _weighted(batches: Any, dataset: TensorDataset, rows: Tensor | None) -> Iterator[list[Tensor]]:
    """Batches of a WeightedRandomSampler, which draws all its rows at once."""
    sampler, size = batches.sampler, batches.batch_size
    count = sampler.num_samples
    order = torch.multinomial(sampler.weights, count, sampler.replacement, generator=sampler.generator)
    order = order if rows is None else rows[order]
    for chosen in _pieces(order[: count // size * size] if batches.drop_last else order, size):
        yield [tensor.index_select(0, chosen) for tensor in dataset.tensors]


def _pieces(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """A tensor in pieces of so many rows: cut many at a time, which takes a third of the time of a slice for each."""
    for start in range(0, len(tensor), _CUT * size):
        yield from tensor[start : start + _CUT * size].split(size)


def _sampled(loader: Any, entries: Iterator[Any], dataset: TensorDataset, rows: Tensor | None) -> Iterator[Any]:
    """Batches of any other sampler of row numbers."""
    length = len(loader.dataset)
    for entry in entries:
        # An entry may be anything that indexes: what is no list of rows is left to the dataset, and so are its errors.
        if type(entry) is list and set(map(type, entry)) == {int} and min(entry) >= 0 and max(entry) < length:
            chosen = torch.tensor(entry) if rows is None else rows[entry]
            yield [tensor.index_select(0, chosen) for tensor in dataset.tensors]
        elif getattr(loader.dataset, "__getitems__", None):
            yield loader.collate_fn(loader.dataset.__getitems__(entry))
        else:
            yield loader.collate_fn([loader.dataset[index] for index in entry])


def _gotten(loader: Any, entries: Iterator[Any]) -> Iterator[Any]:
    """Batches of a dataset that gives several samples at once."""
    for entry in entries:
        yield loader.collate_fn(loader.dataset.__getitems__(entry))
