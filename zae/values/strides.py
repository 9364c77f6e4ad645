"""The order in memory of a tensor's elements: kernels round differently in another one, so it belongs to a state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = [
    "axes_in_memory",
    "can_have_strides",
    "check_strides",
    "contiguous_strides",
    "copy_with_strides",
    "has_own_elements",
    "is_laid_out",
    "repeat_again",
    "span",
    "strides_to_save",
    "view_key",
    "with_strides",
    "without_repeats",
]

_MOST_GAPS = 64  # A tensor of n elements is given back in memory for 64 n at most: a small file may be hostile.


def view_key(tensor: Tensor) -> tuple[object, ...] | None:
    """Return a key that is equal for two tensors that are the same view of the same memory.

    None for an empty tensor, and for one without its own memory: they are not compared.
    """
    try:
        pointer = tensor.untyped_storage().data_ptr()
        if not pointer or not tensor.numel():
            return None
        place = (str(tensor.device), pointer, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
    except (RuntimeError, NotImplementedError, ValueError):
        return None


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives to a new tensor of this shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_laid_out(tensor: Tensor) -> bool:
    """Return whether a tensor has strides of its own: sparse, quantized and lazy ones have none to save."""
    return (
        not torch.nn.parameter.is_lazy(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and not hasattr(tensor, "device_mesh")  # Each rank has its own part, in whatever order the engine needs.
    )


def has_own_elements(tensor: Tensor) -> bool:
    """Return whether each element has its own place in memory, so that it can be written to."""
    return not is_laid_out(tensor) or _is_free_of_overlap(tensor.shape, tensor.stride())


def strides_to_save(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor if they are not those of a new one, and `with_strides` can give them back."""
    if not is_laid_out(tensor):
        return None
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride())
    if strides == contiguous_strides(shape) or not can_have_strides(shape, strides):
        return None
    return strides


def axes_in_memory(tensor: Tensor) -> list[int] | None:
    """Return the dimensions in the order in which a tensor is contiguous; None if there is no such order."""
    strides = tensor.stride()
    axes = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    return axes if tensor.permute(axes).is_contiguous() else None


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor with the same values in another order of memory; a new one where that order differs.

    Raise ValueError for strides that `strides_to_save` does not return. A dimension with stride 0 takes its first
    element.
    """
    return tensor if tensor.stride() == tuple(strides) else copy_with_strides(tensor, strides)


def copy_with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of a tensor in an order of memory; arguments and errors as for `with_strides`."""
    shape = tuple(tensor.shape)
    strides = tuple(strides)
    check_strides(shape, strides)
    base = without_repeats(tensor, strides)
    memory = torch.zeros(span(shape, strides), dtype=tensor.dtype, device=tensor.device)
    memory.as_strided(base.shape, strides).copy_(base)
    return memory.as_strided(shape, strides)


def repeat_again(tensor: Tensor, strides: Sequence[int]) -> None:
    """Let a tensor repeat its elements again by strides of 0, unless it has others by now."""
    if can_have_strides(tensor.shape, strides):
        view = with_strides(tensor.detach(), strides)
        if torch.equal(view, tensor):
            tensor.data = view


def without_repeats(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """Return the first element alone of each dimension with stride 0: in full there may be no memory for them."""
    strides = tensor.stride() if strides is None and is_laid_out(tensor) else strides or ()
    for axis, (size, stride) in enumerate(zip(tensor.shape, strides)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory lie between the first and the last element."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def check_strides(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Raise ValueError for strides that a tensor of this shape cannot have."""
    if not can_have_strides(shape, strides):
        raise ValueError(f"a tensor of shape {tuple(shape)!s:.80} cannot have the strides {strides!s:.80}")


def can_have_strides(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor of this shape can be given these strides."""
    count = math.prod(shape)
    if len(shape) != len(strides) or not count or any(not 0 <= stride < 2**62 for stride in strides):
        return False
    spread = [(size, stride) for size, stride in zip(shape, strides, strict=True) if stride or size == 1]
    if span(shape, strides) > _MOST_GAPS * count:
        return False
    return _is_free_of_overlap([size for size, _ in spread], [stride for _, stride in spread])


def _is_free_of_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether no two elements share a place."""
    reach = 0  # Of the dimensions with smaller strides.
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
