"""The form of a model: what a script that is started again must have of it, for a checkpoint to fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zae.checkpoint.tensor_bytes import dense, separate
from zae.errors import CheckpointError
from zae.torch_private import has_own_shapes, unsaved_buffers

__all__ = ["check_form", "check_weights", "form_of"]


def form_of(model: nn.Module) -> dict[str, Any]:
    """Return what has to be the same in a model that a checkpoint is loaded into: names, of buffers shapes and types.

    Tensors of modules that load in their own way are None, and lazy ones too.
    """
    form: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        is_free = has_own_shapes(module) or any(getattr(module, "_load_state_dict_pre_hooks", ()))
        unsaved = unsaved_buffers(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                form[prefix + name] = None if is_free else ()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in unsaved:
                is_open = is_free or nn.parameter.is_lazy(buffer)
                form[prefix + name] = None if is_open else (tuple(buffer.shape), buffer.dtype)
    return form


def check_form(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Refuse tensors that the first step has made, removed, or given another shape or type."""
    present = form_of(model)
    for name in [*present, *(name for name in before if name not in present)]:
        old = before.get(name, "absent")
        new = present.get(name, "absent")
        if old is None or new is None or old == new:
            continue
        if "absent" in (old, new):
            change = "was made" if old == "absent" else "was removed"
        else:
            change = "; ".join(f"was {a} and is {b}" for a, b in zip(old, new, strict=True) if a != b)
        raise CheckpointError(
            f"{name} of the model {change} in the first step. A script that is started again has that of before, which "
            "no checkpoint of this run fits. Make it in __init__ of its module, with this shape and type; register a "
            "buffer that need not be saved with persistent=False; or bring the model to this form in "
            "load_state_dict() of your class, before super()"
        )


def check_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Refuse weights without bytes of their own, and a module whose extra state could not be loaded."""
    tensors = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    separate(tensors)
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            dense(tensor, f"{name} of the model")  # Sparse and quantized tensors are refused.
    for path, module in model.named_modules():
        kind = type(module)
        saves = kind.get_extra_state is not nn.Module.get_extra_state
        if saves and kind.set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"{path or 'the model'} ({kind.__name__}) has get_extra_state() and no set_extra_state(): what it "
                f"saves could not be loaded; write {kind.__name__}.set_extra_state(self, state)"
            )
