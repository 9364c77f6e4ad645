"""Take a batch apart into micro-batches, and put what steps return for them together again."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zae.errors import ConfigError, StepError
from zae.metrics.reductions import combine_parts, is_typed
from zae.values.walk import children_of, fields_of, is_dataclass, map_tensors, with_items

__all__ = ["JoinedOutput", "fill_up", "first_rows", "take_apart"]

_TEXT = (str, bytes)
_ROWS = (Tensor, np.ndarray, list, tuple)


def _map(value: Any, change: Callable[[Any, str], Any], place: str = "") -> Any:
    """Change the tensors, arrays and lists of other values in a structure, whose types are kept."""
    if isinstance(value, (Tensor, np.ndarray)):
        return change(value, place)
    if isinstance(value, Mapping):
        return with_items(value, {key: _map(entry, change, f"{place}[{key!r}]") for key, entry in value.items()})
    if isinstance(value, (list, tuple)):
        if value and not any(isinstance(item, (Tensor, np.ndarray)) or children_of(item) for item in value):
            return change(value, place)
        names = [f".{name}" for name in getattr(value, "_fields", ())] or [f"[{index}]" for index in range(len(value))]
        return with_items(value, [_map(entry, change, place + name) for name, entry in zip(names, value)])
    if is_dataclass(value):
        return with_items(value, {k: _map(v, change, f"{place}.{k}") for k, v in fields_of(value).items()})
    return value


def take_apart(batch: Any, rows: int | None, count: int) -> tuple[list[Any], list[int], int]:
    """Return the micro-batches of a batch, how many rows each has, and how many the first has: none has more.

    Parameters
    ----------
    batch : object
        Tensors, arrays and lists with one row for each sample, in containers.
    rows : int or None
        How many samples it has.
    count : int
        How many micro-batches; the last ones may have fewer rows, or none.

    Raises
    ------
    ConfigError
        Something in the batch does not have one row for each sample.
    """
    if not rows:
        raise ConfigError(
            f"a batch of type {type(batch).__name__} does not say how many samples it has, and cannot be divided into "
            "micro-batches; let the loader yield tensors with one row for each sample"
        )
    size = -(-rows // count)
    parts = []
    lengths = []
    for index in range(count):
        start = min(rows, index * size)
        end = min(rows, start + size)
        parts.append(_take_rows(batch, rows, start, end))
        lengths.append(end - start)
    return parts, lengths, size


def _take_rows(batch: Any, rows: int, start: int, end: int) -> Any:
    """Return a batch with some of its samples, from ``start`` to ``end``; the types of its containers are kept."""

    def cut(value: Any, place: str) -> Any:
        length = _length_of(value)
        if length != rows:
            raise ConfigError(
                f"batch{place} has {'no rows' if length is None else f'{length} rows'} and the batch has {rows} "
                "samples: it cannot be divided into micro-batches. Give one row for each sample, and keep what is "
                "the same for all samples on the trainer or in the model"
            )
        return value[start:end]

    return _map(batch, cut)


def _length_of(value: Any) -> int | None:
    """Return the rows of a list, a tensor or an array; None for one without dimensions."""
    if isinstance(value, (list, tuple)):
        return len(value)
    return int(value.shape[0]) if value.ndim else None


def fill_up(values: Any, full: Any, rows: int, size: int) -> Any:
    """Repeat the last row of tensors of few rows, in the same structure as ``full``; refuse other differences."""
    if isinstance(values, Tensor) and isinstance(full, Tensor):
        if values.shape == full.shape:
            return values
        is_short = values.ndim and values.shape[0] == rows < size == full.shape[0]
        if not is_short or values.shape[1:] != full.shape[1:]:
            raise ConfigError(
                f"the inputs of the model differ in shape between the micro-batches of a batch: {tuple(full.shape)} "
                f"and {tuple(values.shape)}. Stages exchange tensors of one shape; pad the batch in the collate_fn of "
                "the loader, not in the step"
            )
        return torch.cat([values, values[-1:].expand(size - rows, *values.shape[1:])])
    if isinstance(values, Mapping) and isinstance(full, Mapping) and values.keys() == full.keys():
        return with_items(values, {key: fill_up(entry, full[key], rows, size) for key, entry in values.items()})
    if isinstance(values, (list, tuple)) and isinstance(full, (list, tuple)) and len(values) == len(full):
        return with_items(values, [fill_up(entry, full_entry, rows, size) for entry, full_entry in zip(values, full)])
    return values


def first_rows(values: Any, size: int, rows: int) -> Any:
    """Return what the model returned for the first rows; the rows after them were repeated to fill a micro-batch."""

    def cut(value: Any, place: str) -> Any:
        if not isinstance(value, Tensor) or (value.ndim and value.shape[0] == size):
            return value[:rows] if isinstance(value, Tensor) else value
        raise ConfigError(
            f"the model returned a tensor of shape {tuple(value.shape)}, which has not one row for each sample, and "
            f"the last micro-batch of a short batch has {rows} samples and {size - rows} repeated ones. Write "
            "drop_last=True in the DataLoader, or a batch size that the micro-batches divide"
        )

    return _map(values, cut)


def _join(parts: Sequence[Any], rows: Sequence[int], weights: Sequence[float], owner: str, place: str = "") -> Any:
    """Return what a step would have returned for the whole batch.

    Numbers are means by these weights, and typed metrics what their type says; ``num_targets`` is a sum, and what has
    one row for each sample is concatenated.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Mapping) and all(isinstance(part, Mapping) and part.keys() == first.keys() for part in parts):
        joined = {}
        for key in first:
            values = [part[key] for part in parts]
            if key == "num_targets" and not place and first[key] is not None:
                joined[key] = sum(float(value) for value in values)
            else:
                joined[key] = _join(values, rows, weights, owner, f"{place}[{key!r}]")
        return joined
    if is_typed(first) and all(type(part) is type(first) for part in parts):
        return combine_parts(parts, weights)
    if all(map(_is_number, parts)):
        total = sum(weights)
        mean = float(first)
        if total:
            mean = sum(float(part) * weight for part, weight in zip(parts, weights)) / total
        if isinstance(first, Tensor) and first.is_floating_point():
            return torch.tensor(mean, dtype=first.dtype)
        return mean
    if isinstance(first, _ROWS) and all(
        isinstance(part, type(first)) and _length_of(part) == count for part, count in zip(parts, rows)
    ):
        if isinstance(first, Tensor):
            return torch.cat(list(parts))
        return np.concatenate(parts) if isinstance(first, np.ndarray) else type(first)(itertools.chain(*parts))
    if first is None or isinstance(first, _TEXT):
        return first
    shape = f" of shape {tuple(first.shape)}" if isinstance(first, (Tensor, np.ndarray)) else ""
    raise StepError(
        f"{owner}{place} is a {type(first).__name__}{shape} for a micro-batch of {rows[0]} samples, and those of a "
        "batch cannot be put together; return numbers, or one row for each sample"
    )


def _is_number(value: Any) -> bool:
    """Return whether a value is averaged."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, (numbers.Real, np.number, np.bool_)) or (isinstance(value, np.ndarray) and not value.ndim)


class JoinedOutput:
    """What the steps of the micro-batches of a batch have returned.

    Parameters
    ----------
    where : str
        How errors name it.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: list[tuple[Any, int, float]] = []

    def add(self, values: Any, rows: int, weight: float) -> None:
        """Add what the step returned for a micro-batch of so many rows, with its weight in means."""
        self._parts.append((map_tensors(Tensor.detach, values), rows, weight))

    def joined(self, keeps: bool) -> Any:
        """Return what the step would have returned for the whole batch, on the host, and its weight.

        Without ``keeps`` only numbers are kept; on a rank without the last stage there is nothing.
        """
        if not self._parts:
            return None
        values, rows, weights = zip(*self._parts)
        if not keeps:
            values = tuple(map(_numbers_in, values))
        joined = _join(values, rows, weights, self._where)
        return map_tensors(lambda tensor: tensor.cpu(), joined), sum(weights)


def _numbers_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a step that are recorded as numbers."""
    return {key: value for key, value in values.items() if _is_number(value) or is_typed(value)}
