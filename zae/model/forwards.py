"""Forwards of modules that are replaced, to save memory in the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

__all__ = ["find_own_checkpointing", "replace_forwards"]


def replace_forwards(
    blocks: Mapping[str, nn.Module], make: Callable[[nn.Module], Callable[..., Any]]
) -> Callable[[], None]:
    """Set the forwards of blocks; return a function that restores them, those of single modules included."""
    before = [(block, vars(block).get("forward")) for block in blocks.values()]
    for block in blocks.values():
        block.forward = make(block)

    def undo() -> None:
        for block, forward in before:
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward

    return undo


def find_own_checkpointing(model: nn.Module) -> str:
    """Return the name and class of a model of Transformers that checkpoints its layers itself, if one does."""
    for name, module in model.named_modules():
        kind = type(module)
        for flag in ("is_activation_checkpointing", "is_gradient_checkpointing"):  # The second until Transformers 5.
            if hasattr(kind, flag) or flag in vars(module):
                if getattr(module, flag) is True:
                    return f"{name} ({kind.__name__})" if name else kind.__name__
                break
    return ""
