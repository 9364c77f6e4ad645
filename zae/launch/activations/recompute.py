"""Compute the forward of modules again in the backward, so that less is saved for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

__all__ = ["MATMULS", "Recomputed", "norms_in", "operation_of", "recompute", "replace_forwards"]

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


class Recomputed:
    """A forward whose activations are computed again in the backward.

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Of a graph, the compiler decides what is computed again.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        more: dict[str, Any] = {"context_fn": self._contexts} if self.keep or self.norms else {}
        return checkpoint(self.forward, *args, use_reentrant=False, **more, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what encloses the forward, and the forward in the backward."""
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if self.keep:
            policy = self.keep if callable(self.keep) else [operation_of(name) for name in self.keep]
            first, again = create_selective_checkpoint_contexts(policy)
        return first, self._with_own_statistics(again)

    @contextmanager
    def _with_own_statistics(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Move copies of the running statistics, which the first forward has moved already."""
        buffers = [(norm, name, each) for norm in self.norms for name, each in norm.named_buffers(recurse=False)]
        try:
            for norm, name, each in buffers:
                setattr(norm, name, each.clone())
            with inner:
                yield
        finally:
            for norm, name, each in buffers:
                setattr(norm, name, each)


def norms_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules within one whose forward moves statistics of batches."""
    return [each for each in module.modules() if isinstance(each, _WITH_STATISTICS)]


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
