"""Compute the forward of modules again in the backward, so that less is saved for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zae.errors import StepError
from zae.model.forwards import replace_forwards
from zae.values.walk import has_same_bits, tensors_in

__all__ = [
    "MATMULS",
    "Recomputed",
    "norms_in",
    "operation_of",
    "recompute",
]

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
MATMULS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
)
"""The operations that cost most to compute again: matrix products, convolutions and attention."""


class _Buffer(NamedTuple):
    """A buffer, or the value that it had."""

    holder: nn.Module
    name: str
    value: Tensor

    def with_value(self, value: Tensor) -> _Buffer:
        """Return the same buffer with another value."""
        return self._replace(value=value)


class Recomputed:
    """A forward whose activations are computed again in the backward.

    The forward in the backward begins with what the first one began with: buffers, and the random streams of Python
    and NumPy where it draws from them. What it does not change is not copied: the first call finds that out.

    Parameters
    ----------
    module : Module
        Its forward is called.
    keep : sequence of str, or callable
        Names of operations whose results are kept, or a policy of `torch.utils.checkpoint`.

    Attributes
    ----------
    in_place : set of (int, str), optional
        Which buffers the forward changes in place: the index of the module in ``others``, and the name. None before the
        first call.
    draws : bool
        Whether it draws from the streams of Python or NumPy.
    """

    def __init__(self, module: nn.Module, keep: Any = ()) -> None:
        self.name = type(module).__name__
        self.forward = module.forward
        self.keep = keep if callable(keep) else list(keep)
        self.norms = norms_in(module)
        self.others = [
            submodule for submodule in module.modules() if submodule not in self.norms and any(_buffers_of([submodule]))
        ]
        self.in_place: set[tuple[int, str]] | None = None
        self.draws = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Of a graph, the compiler decides what is computed again.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        call = _Call(self, args, kwargs)
        return checkpoint(call, *call.inputs(), use_reentrant=False, context_fn=call.contexts)


class _Call:
    """A call of a forward, and the values with which the backward makes it again."""

    def __init__(self, owner: Recomputed, args: Any, kwargs: Any) -> None:
        self.owner = owner
        items = {**dict(enumerate(args)), **kwargs}
        self.tensors = {key: item for key, item in items.items() if isinstance(item, Tensor)}
        self.names = list(self.tensors)
        # checkpoint keeps the tensors; a call holds what else there is.
        self.args = [None if isinstance(argument, Tensor) else argument for argument in args]
        self.kwargs = {key: None if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        self.is_again = False
        self.buffers: list[_Buffer] = []  # Those that the forward has changed, with their values before it.
        self.streams: Any = None

    def inputs(self) -> list[Tensor]:
        """Return what is kept for the backward, on each device whose random numbers are drawn again."""
        tensors = list(self.tensors.values())
        inside = {tensor.device for tensor in tensors_in((self.args, self.kwargs))} - {
            tensor.device for tensor in tensors
        }
        return [*tensors, *(torch.empty(0, device=device) for device in inside)]

    def __call__(self, *inputs: Tensor) -> Any:
        tensors = dict(zip(self.names, inputs)) if self.is_again else self.tensors
        args = [tensors.get(index, argument) for index, argument in enumerate(self.args)]
        return self.owner.forward(*args, **{key: tensors.get(key, argument) for key, argument in self.kwargs.items()})

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what encloses the forward, and the forward in the backward."""
        keep = self.owner.keep
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if keep:
            policy = keep if callable(keep) else [operation_of(name) for name in keep]
            first, again = create_selective_checkpoint_contexts(policy)
        return self._noting_changes(first), _Again(self, again)

    @contextmanager
    def _noting_changes(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Keep what the forward changes as it is before it; statistics of norms do not enter what is computed."""
        owner = self.owner
        is_first = self.owner.in_place is None
        present = [(index, *buffer) for index, holder in enumerate(owner.others) for buffer in _buffers_of([holder])]
        versions = (
            [_version_of(buffer) for *_, buffer in present],
            [_version_of(tensor) for tensor in self.tensors.values()],
        )
        values = {
            (index, name): buffer.detach().clone()
            for index, _, name, buffer in present
            if is_first or (index, name) in (owner.in_place or ())
        }
        streams = _host_streams() if is_first or owner.draws else None
        with inner:
            yield
        for (index, holder, name, buffer), version in zip(present, versions[0], strict=True):
            if _version_of(buffer) != version:
                if (index, name) not in values:
                    raise StepError(
                        f"{type(holder).__name__} has changed its buffer {name!r} in a forward that is computed again "
                        "in the backward, and in the first one it did not: the backward would begin with the changed "
                        "values. Leave this module out of checkpoint_modules"
                    )
                owner.in_place = {*(owner.in_place or ()), (index, name)}
                self.buffers.append(_Buffer(holder, name, values[index, name]))
            elif getattr(holder, name, None) is not buffer:
                self.buffers.append(_Buffer(holder, name, buffer))
        owner.in_place = owner.in_place or set()
        if versions[1] != [_version_of(tensor) for tensor in self.tensors.values()]:
            raise StepError(
                f"{owner.name} has changed an input in place, with which the backward would compute its forward again; "
                "write x = x + 1 instead of x += 1 (torch.nn.ReLU() instead of ReLU(inplace=True)), or leave this "
                "module out of checkpoint_modules"
            )
        self.tensors = {}
        if streams is not None and not has_same_bits(streams, _host_streams()):
            self.streams = streams
            owner.draws = True


class _Again(AbstractContextManager[None]):
    """Make a call again, with copies of what it has changed, and of the statistics that it would move again.

    It is entered once for each backward.
    """

    def __init__(self, call: _Call, inner: AbstractContextManager[Any]) -> None:
        self.call = call
        self.inner = inner
        self._values_before: tuple[list[_Buffer], Any] = ([], None)

    def __enter__(self) -> None:
        call = self.call
        copies = [buffer.with_value(buffer.value.clone()) for buffer in (*_buffers_of(call.owner.norms), *call.buffers)]
        values = [copy.with_value(getattr(copy.holder, copy.name)) for copy in copies]
        self._values_before = (values, None if call.streams is None else _host_streams())
        call.is_again = True
        self.inner.__enter__()
        for holder, name, value in copies:
            setattr(holder, name, value)
        if call.streams is not None:
            _set_host_streams(call.streams)

    def __exit__(self, *error: Any) -> bool | None:
        buffers, streams = self._values_before
        self.call.is_again = False
        for holder, name, value in buffers:
            setattr(holder, name, value)
        if streams is not None:
            _set_host_streams(streams)
        self._values_before = [], None
        return self.inner.__exit__(*error)


def _buffers_of(modules: Iterable[nn.Module]) -> Iterator[_Buffer]:
    """Yield the buffers of modules themselves."""
    return (_Buffer(module, name, value) for module in modules for name, value in module.named_buffers(recurse=False))


def _version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 where torch does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _host_streams() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_host_streams(streams: tuple[Any, Any]) -> None:
    random.setstate(streams[0])
    np.random.set_state(streams[1])


def norms_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules within one whose forward moves statistics of batches."""
    return [submodule for submodule in module.modules() if isinstance(submodule, _WITH_STATISTICS)]


def operation_of(name: str) -> Any:
    """Return an operation by its name, "aten.mm.default"; AttributeError where torch does not have it."""
    operation: Any = torch.ops
    for part in name.split("."):
        operation = getattr(operation, part)
    return operation


def recompute(blocks: Mapping[str, nn.Module], keep: Any = ()) -> Callable[[], None]:
    """Let blocks compute their forward again in the backward; return a function that undoes it."""
    changed = {name: block for name, block in blocks.items() if not isinstance(block.forward, Recomputed)}
    return replace_forwards(changed, lambda block: Recomputed(block, keep))
