"""Walk the objects that a value holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: in mappings, lists and tuples, however nested.

    Parameters
    ----------
    value : object
        Any; what is not a container or a tensor is passed over.

    Yields
    ------
    Tensor
        One that is held twice comes twice.

    Examples
    --------
    >>> import torch
    >>> [each.item() for each in tensors_in({"a": torch.tensor(1), "b": [(torch.tensor(2), "text")]})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)
