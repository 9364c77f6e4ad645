"""What is said once of what the steps return: metrics that are not numbers, and batches whose samples are not known."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from zae.common.walk import leading_dimension, leaves_of

__all__ = ["NotNumber", "not_number", "why_uncounted"]

_SILENT = (bool, int, float, np.number, np.bool_, type(None))  # A batch of these, in a range(100) for instance.
_INDICES = ("int64", "uint64")  # Of classes and tokens; comparisons and counts are of other types.


class NotNumber(NamedTuple):
    """An entry of a step that is not a number."""

    what: str
    """What it is, with its shape."""
    remedy: str
    """What to return for a metric."""
    may_be_metric: bool
    """Whether it looks like a metric whose mean was forgotten, and not like an output of the model."""

    def text(self, key: str) -> str:
        """Say that the entry of this name is no metric, and what to return instead."""
        return f"{key!r} as {self.what}, which is not a number; for a metric return {self.remedy}"


def not_number(key: str, value: Any) -> NotNumber:
    """Describe an entry of a step that is not a number."""
    if not isinstance(value, (Tensor, np.ndarray)):
        is_number = isinstance(value, numbers.Number)
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        are_numbers = is_list and all(isinstance(each, numbers.Number) for each in value)
        what = f"a {type(value).__name__}" + (f" of {len(value)} entries" if is_list else "")
        return NotNumber(what, "one number, for instance its mean", is_number or are_numbers)
    kind = str(value.dtype).removeprefix("torch.")
    of_shape = f"{'a tensor' if isinstance(value, Tensor) else 'an array'} of shape {tuple(value.shape)}"
    is_float = kind.startswith(("float", "bfloat"))
    to_float = ".float()" if isinstance(value, Tensor) else ""
    remedy = f"its mean: {key}{'' if is_float else to_float}.mean()"
    return NotNumber(of_shape, remedy, _looks_like_metric(value, kind, is_float))


def _looks_like_metric(value: Any, kind: str, is_float: bool) -> bool:
    """Return whether a tensor is one of numbers for samples, or tells which of many predictions are right."""
    if kind == "bool":
        return True
    if kind.startswith("complex") or kind in _INDICES:
        return False
    if value.ndim <= 1 or not is_float:
        return bool(value.ndim <= 1)
    if isinstance(value, Tensor):  # An output of the model in training has a graph.
        if value.requires_grad or value.is_meta or type(value) is not Tensor or value.layout is not torch.strided:
            return False
        return bool(((value == 0) | (value == 1)).all())
    return bool(np.isin(value, (0, 1)).all())


def why_uncounted(batch: Any) -> str:
    """Say why the number of samples in a batch is not known; an empty text where it is, or where each batch is one."""
    if isinstance(batch, PackedSequence):
        return ""
    leaves = [leaf for _, leaf in leaves_of(batch) if not isinstance(leaf, _SILENT)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray))]
    sizes = dict.fromkeys(size for size in map(leading_dimension, tensors) if size is not None)
    if len(sizes) > 1:
        several = ", ".join(map(str, [*sizes][:4]))
        return f"its tensors have different first dimensions ({several}), and the first tensor counts"
    if sizes or not leaves or len(tensors) == len(leaves):
        return ""
    return f"it has no tensor that zae knows of ({type(batch).__name__}), and so each batch counts alike"
