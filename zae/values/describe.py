"""Describe values of a user in a few words, for errors: by shapes, types and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["describe_batch", "describe_value"]

MAX_ENTRIES = 8  # Of a batch that is described.
MIN_COUNTED = 3  # Equal entries after each other that are shown as one.


def describe_batch(batch: Any, depth: int = 0) -> str:
    """Describe a batch by the shapes and types in it."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return f"{type(batch).__name__}{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping) and depth < 3:
        return f"{{{_listed(f'{key}: {describe_batch(value, depth + 1)}' for key, value in batch.items())}}}"
    if isinstance(batch, (tuple, list)) and depth < 3:
        return f"{type(batch).__name__}({_listed(describe_batch(value, depth + 1) for value in batch)})"
    return type(batch).__name__


def _listed(entries: Iterable[str]) -> str:
    """Join the descriptions of the entries of a batch; equal ones after each other are one, with their number."""
    parts: list[str] = []
    for text, equal in groupby(entries):
        count = len([*equal])
        parts += [text] * count if count < MIN_COUNTED else [f"{count} times {text}"]
    return ", ".join(parts[:MAX_ENTRIES] + ["..."] * (len(parts) > MAX_ENTRIES))


def describe_value(value: Any) -> str:
    """Describe a value by its shape or length, or by the beginning of its repr."""
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"of {len(value)} entries" if isinstance(value, (tuple, list)) else repr(value)[:60]
