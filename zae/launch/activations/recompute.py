"""Compute the forward of modules again in the backward, so that less is saved for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zae.errors import StepError

__all__ = [
    "MATMULS",
    "Recomputed",
    "find_own_checkpointing",
    "norms_in",
    "operation_of",
    "recompute",
    "replace_forwards",
]

_WITH_STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
MATMULS = (
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
)  # fmt: skip
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

    Buffers that the forward changes are changed once: the forward in the backward has copies, with their values before.

    Parameters
    ----------
    module : Module
        Its forward is called.
    keep : sequence of str, or callable
        Names of operations whose results are kept, or a policy of `torch.utils.checkpoint`.
    """

    def __init__(self, module: nn.Module, keep: Any = ()) -> None:
        self.forward = module.forward
        self.keep = keep if callable(keep) else list(keep)
        self.norms = norms_in(module)
        self.others = [each for each in module.modules() if each not in self.norms and any(_buffers_of([each]))]
        self.in_place: set[tuple[int, str]] | None = None  # Those that it changes in place; None before the first call.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Of a graph, the compiler decides what is computed again.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        more: dict[str, Any] = {"context_fn": self._contexts} if self.keep or self.norms or self.others else {}
        return checkpoint(self.forward, *args, use_reentrant=False, **more, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what encloses the forward, and the forward in the backward."""
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if self.keep:
            policy = self.keep if callable(self.keep) else [operation_of(name) for name in self.keep]
            first, again = create_selective_checkpoint_contexts(policy)
        if not self.norms and not self.others:
            return first, again
        before: list[_Buffer] = []
        return self._noting_changes(first, before), _OnCopies(again, self.norms, before)

    @contextmanager
    def _noting_changes(self, inner: AbstractContextManager[Any], before: list[_Buffer]) -> Iterator[None]:
        """Keep the buffers that the forward changes as they are before it; statistics of norms are not needed."""
        present = [(index, *each) for index, holder in enumerate(self.others) for each in _buffers_of([holder])]
        versions = [_version_of(each) for *_, each in present]
        # Which of them are changed in place is known after the first call.
        copies = {
            (index, name): each.detach().clone()
            for index, _, name, each in present
            if self.in_place is None or (index, name) in self.in_place
        }
        with inner:
            yield
        in_place = set()
        for (index, holder, name, each), version in zip(present, versions, strict=True):
            if _version_of(each) != version:
                in_place.add((index, name))
                _check_copied(copies, (index, name), holder)
                before.append(_Buffer(holder, name, copies[index, name]))
            elif getattr(holder, name, None) is not each:
                before.append(_Buffer(holder, name, each))
        self.in_place = in_place | (self.in_place or set())


class _OnCopies(AbstractContextManager[None]):
    """Let a forward change copies of buffers, of running statistics and of those that had other values before.

    It is entered once for each backward.
    """

    def __init__(self, inner: AbstractContextManager[Any], norms: list[nn.Module], before: list[_Buffer]) -> None:
        self.inner, self.norms, self.before = inner, norms, before
        self._held: list[_Buffer] = []

    def __enter__(self) -> None:
        copies = [each.with_value(each.value.clone()) for each in (*_buffers_of(self.norms), *self.before)]
        self._held = [each.with_value(getattr(each.holder, each.name)) for each in copies]
        self.inner.__enter__()
        for holder, name, value in copies:
            setattr(holder, name, value)

    def __exit__(self, *error: Any) -> bool | None:
        for holder, name, value in self._held:
            setattr(holder, name, value)
        self._held = []
        return self.inner.__exit__(*error)


def _buffers_of(modules: Iterable[nn.Module]) -> Iterator[_Buffer]:
    """Yield the buffers of modules themselves."""
    return (_Buffer(each, name, value) for each in modules for name, value in each.named_buffers(recurse=False))


def _version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 where torch does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _check_copied(copies: Mapping[Any, Tensor], key: tuple[int, str], holder: nn.Module) -> None:
    """Refuse a change that no earlier forward has made."""
    if key not in copies:
        raise StepError(
            f"{type(holder).__name__} has changed its buffer {key[1]!r} in a forward that is computed again in the "
            "backward, and in the first one it did not: the backward would begin with the changed values. Leave this "
            "module out of checkpoint_modules"
        )


def norms_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules within one whose forward moves statistics of batches."""
    return [each for each in module.modules() if isinstance(each, _WITH_STATISTICS)]


def find_own_checkpointing(model: nn.Module) -> str:
    """Return the name and class of a model of Transformers that checkpoints its layers itself, if one does."""
    for name, each in model.named_modules():
        kind = type(each)
        for flag in ("is_activation_checkpointing", "is_gradient_checkpointing"):  # The second until Transformers 5.
            if hasattr(kind, flag) or flag in vars(each):
                if getattr(each, flag) is True:
                    return f"{name} ({kind.__name__})" if name else kind.__name__
                break
    return ""


def operation_of(name: str) -> Any:
    """Return an operation by its name, "aten.mm.default"; AttributeError where torch does not have it."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def recompute(blocks: Mapping[str, nn.Module], keep: Any = ()) -> Callable[[], None]:
    """Let blocks compute their forward again in the backward; return a function that undoes it."""
    changed = {name: each for name, each in blocks.items() if not isinstance(each.forward, Recomputed)}
    return replace_forwards(changed, lambda block: Recomputed(block, keep))


def replace_forwards(
    blocks: Mapping[str, nn.Module], make: Callable[[nn.Module], Callable[..., Any]]
) -> Callable[[], None]:
    """Set the forwards of blocks; return a function that restores them, those of single modules included."""
    before = [(block, vars(block).get("forward")) for block in blocks.values()]
    for block in blocks.values():
        block.forward = make(block)

    def undo() -> None:
        for block, own in before:
            vars(block).pop("forward", None)
            if own is not None:
                block.forward = own

    return undo
