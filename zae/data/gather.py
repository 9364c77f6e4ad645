"""The exact data path: build the batches of a DataLoader over tensors in memory with one gather for each tensor.

A DataLoader without workers fetches one sample after another and stacks them. For tensors in memory that takes most
of the step of a small model, and one ``index_select`` returns the same batch. The exact data path takes the entries of
the batch sampler of the loader, and draws from its generators what the iterator of the DataLoader draws, in the same
order: the batches and every random state are bitwise those of the plain loader. A loader with anything unusual is used
unchanged; `why_not` returns the reason. An unusual entry, a negative index for instance, is fetched from the dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from zae.data.workers import iterate
from zae.torch_private import find

__all__ = ["batches_of", "why_not"]

# Types that index_select and stack treat alike: both copy the bytes.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)
_COPIED = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))
# The functions that this path replaces. Where one was patched, or does not exist, the plain loader is used.
_COLLATE = "torch.utils.data._utils.collate"
_STACK = find(_COLLATE, "collate_tensor_fn")
_NAMES: dict[Any, tuple[str, ...]] = {
    DataLoader: ("__iter__", "_get_iterator"),
    find("torch.utils.data.dataloader", "_BaseDataLoaderIter"): ("__next__",),
    TensorDataset: ("__getitem__", "__len__"),
    Subset: ("__getitem__", "__getitems__", "__len__"),
}
_METHODS = {(kind, name): getattr(kind, name, None) for kind, names in _NAMES.items() for name in names}
_IS_KNOWN = None not in (_STACK, *_METHODS.values())


def batches_of(loader: Any, fast: bool = True) -> Iterator[Any]:
    """Iterate over a loader, on the exact data path where that is possible."""
    if not fast or why_not(loader) is not None:
        return iterate(loader)
    # A DataLoader starts its sampler, and then draws the seed of its workers, even if it has none.
    entries = iter(loader.batch_sampler)
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return _gather_batches(loader, entries)


def _gather_batches(loader: Any, entries: Iterable[Any]) -> Iterator[Any]:
    """Yield a batch for each entry of the batch sampler; a step may change the dataset between two of them."""
    checked: Any = None
    for entry in entries:
        tensors, rows = _find_rows(loader.dataset, entry)
        if tensors is not checked:
            source = _innermost(loader.dataset)
            checked = tensors if _why_not_over(source) is None else None
        if rows and checked is not None and max(rows) < len(checked[0]):
            index = torch.tensor(rows)
            yield [tensor.index_select(0, index) for tensor in checked]
        else:
            yield _fetch(loader, entry)


def _find_rows(dataset: Any, entry: Any) -> tuple[Any, list[int]]:
    """Return the tensors that a dataset takes samples from, and the rows of an entry in them; none if it is unusual."""
    rows = entry if type(entry) is list else []
    while type(dataset) is Subset:
        try:
            rows = [dataset.indices[row] for row in rows]
        except (IndexError, TypeError, KeyError):  # The dataset raises its own error when it is asked.
            rows = []
        dataset = dataset.dataset
    is_plain = set(map(type, rows)) == {int} and min(rows) >= 0
    return getattr(dataset, "tensors", None), rows if is_plain else []


def _fetch(loader: Any, entry: Any) -> Any:
    """Fetch a batch from the dataset as a DataLoader does; the dataset raises its own errors."""
    if getattr(loader.dataset, "__getitems__", None):
        return loader.collate_fn(loader.dataset.__getitems__(entry))
    return loader.collate_fn([loader.dataset[index] for index in entry])


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
        return f"its dataset, a {type(source).__name__}, is not a TensorDataset"
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
