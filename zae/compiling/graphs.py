"""Conditions of a compiled graph: the shapes of a batch, what is not supported, and the memory of its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zae.common.optim import like_parameter_layout
from zae.common.torch_private import has_gradient_hooks
from zae.common.walk import fields_of, is_dataclass, leading_dimension
from zae.composition.introspect import slots_of
from zae.data.loaders import length_of
from zae.preview.explain import owners_of

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["add_gradients", "detach", "full_batch", "is_full", "shapes_of", "shared_gradients", "why_not"]


def shapes_of(batch: Any) -> Any:
    """Return what a graph is specialized on: shapes, types and plain values in a batch."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, shapes_of(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return tuple(map(shapes_of, batch))
    if is_dataclass(batch):
        return tuple(shapes_of(each) for each in fields_of(batch).values())
    if isinstance(batch, (str, int, float, type(None))):
        return batch
    attributes = getattr(batch, "__dict__", {})  # Not recursively: an object may refer to itself.
    return type(batch), *((name, shapes_of(value)) for name, value in attributes.items() if isinstance(value, Tensor))


def full_batch(loader: Any, world_size: int) -> tuple[int | None, int]:
    """Return the samples of a full batch, and the batches of an epoch on this rank, 0 where that is unknown."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if isinstance(loader, (list, tuple)) and loader:
        size = leading_dimension(loader[0])
    return size if isinstance(size, int) else None, (length_of(loader) or 0) if world_size == 1 else 0


def is_full(batch: Any, size: int | None, length: int, before: int, count: int) -> bool:
    """Return whether a batch has the shape to compile: it has ``size`` samples, or is not the last of the epoch.

    ``size`` and ``length`` come from `full_batch`; ``before`` batches of the epoch precede this window of ``count``.
    """
    if leading_dimension(batch) == size or before + count < length:
        return True
    return length <= count and (size is None or length > 0)  # The only one of its epoch, or size and length unknown.


def detach(value: Any) -> Any:
    """Detach all tensors in a step's output, so that the compiler does not prepare to differentiate them."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detach(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(detach, value))
    return type(value)(map(detach, value)) if type(value) in (list, tuple) else value


def why_not(trainer: Trainer, add_on: type) -> str | None:
    """Return what a graph of forward and backward does not support in a trainer, or None."""
    cls = type(trainer)
    hooked = [name for name, p in trainer.unwrap().named_parameters() if has_gradient_hooks(p)]
    inside = cls.__mro__[cls.__mro__.index(add_on) + 1 :]
    owners = [("backward", owner) for owner in owners_of(cls, "backward")]
    owners += [("micro_step", owner) for owner in owners_of(cls, "micro_step") if owner in inside]
    own = [f"{name}() of {each.__name__}" for name, each in owners if not each.__module__.startswith("zae.")]
    parallel = getattr(slots_of(cls).get("parallel"), "__name__", None)
    reasons: dict[str, Any] = {
        f"several ranks ({parallel})": trainer.world_size > 1,
        f"{len(trainer.optimizers)} optimizers": len(trainer.optimizers) > 1,
        "a float16 loss scale": getattr(trainer, "precision", None) == "fp16",
        f"hooks of the gradient of {', '.join(hooked)}": hooked,
        " and ".join(own): own,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def shared_gradients(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], others: Sequence[Any]
) -> set[int]:
    """Return the indices of gradients to copy: they share memory with each other or ``others``, or differ in strides.

    Autograd gives each ``.grad`` its own memory with the strides of the parameter; a graph does not. Clipping would
    change other tensors, or one twice, and a fused kernel reads weight and gradient in the order of memory.
    """
    taken = {each.untyped_storage().data_ptr() for each in (*parameters, *others) if _has_memory(each)}
    shared = set()
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None or not _has_memory(gradient):
            continue
        place = gradient.untyped_storage().data_ptr()
        # An expanded gradient has strides of 0, which no parameter has.
        if place in taken or _strides(gradient) != _strides(parameter):
            shared.add(index)
        taken.add(place)
    return shared


def _strides(value: Tensor) -> list[int]:
    """Return the strides of the dimensions with several entries."""
    return [step for step, size in zip(value.stride(), value.shape) if size > 1]


def add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], shared: set[int]) -> None:
    """Add the gradients that a graph returned to each ``.grad``; those of `shared_gradients` are copied."""
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if index in shared and gradient is not None:
            gradient = like_parameter_layout(gradient, parameter)
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad += gradient


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0
