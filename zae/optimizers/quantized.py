"""Save the quantized states of torchao's optimizers as plain tensors, and make them again of these."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zae.errors import CheckpointError, CheckpointMismatch, ConfigError

__all__ = ["bytes_of", "check_replicated", "flatten_states", "quantize_states"]

_KINDS = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
"""The classes of torchao, by name, with their modules: a checkpoint names no others."""

_TAG = "torchao"


def flatten_states(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with the parts of each quantized tensor in its place."""
    entries = state.get("state")
    if not isinstance(entries, Mapping) or not any(map(_has_quantized, entries.values())):
        return state
    made = {
        key: {name: _parts_of(value) for name, value in each.items()} if isinstance(each, dict) else each
        for key, each in entries.items()
    }
    return {**state, "state": made}


def quantize_states(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of an optimizer with the tensors of which `flatten_states` has returned the parts."""
    entries = state.get("state")
    if not isinstance(entries, Mapping) or not any(map(_has_parts, entries.values())):
        return state
    made = {
        key: {name: _join(value) for name, value in each.items()} if isinstance(each, Mapping) else each
        for key, each in entries.items()
    }
    return {**state, "state": made}


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor, of a quantized one those of its parts."""
    if _is_quantized(tensor):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


def _has_quantized(entry: Any) -> bool:
    values = entry.values() if isinstance(entry, dict) else ()
    return any(_is_quantized(_local(each)) for each in values)


def _local(value: Any) -> Any:
    """Return what this rank has of a tensor that lies in parts on several; anything else itself."""
    return value.to_local() if isinstance(value, Tensor) and hasattr(value, "to_local") else value


def _is_quantized(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, Tensor) and _KINDS.get(kind.__name__) == kind.__module__


def check_replicated(optimizers: Mapping[str, Any]) -> None:
    """Refuse to round at random where each rank steps the same weights: they would become different ones."""
    for name, optimizer in optimizers.items():
        if getattr(optimizer, "bf16_stochastic_round", False) is True:
            raise ConfigError(
                f"optimizer {name} ({type(optimizer).__name__}) has bf16_stochastic_round=True, and each rank would "
                "draw other numbers, so that their weights differ; write FSDPAddon, where each rank steps other "
                "weights, or MasterWeights(torch.optim.AdamW(...)) of zae.optimizers"
            )


def _parts_of(value: Any) -> Any:
    local = _local(value)
    if local is not value and _is_quantized(local):
        raise CheckpointError(
            f"the optimizer keeps an {type(local).__name__} in parts on the ranks, which a checkpoint "
            "does not contain; with FSDPAddon, save with another optimizer, torch.optim.AdamW for instance, or train "
            "with MultiGPUAddon"
        )
    if not _is_quantized(value):
        return value
    names, context = value.__tensor_flatten__()
    return {_TAG: type(value).__name__, "context": list(context), **{name: getattr(value, name) for name in names}}


def _has_parts(entry: Any) -> bool:
    return isinstance(entry, Mapping) and any(isinstance(each, Mapping) and _TAG in each for each in entry.values())


def _join(value: Any) -> Any:
    if not (isinstance(value, Mapping) and _TAG in value):
        return value
    kind = value[_TAG]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointMismatch(f"the state of an optimizer contains a {kind!r:.40}, which is not a class of torchao")
    try:
        made = getattr(importlib.import_module(_KINDS[kind]), kind)
        parts = {name: value[name] for name in made.tensor_attrs}
        found = made.__tensor_unflatten__(parts, list(value["context"]), None, None)
        found.dequantize()  # What does not fit together raises here.
    except Exception as error:
        is_absent = isinstance(error, ImportError)
        why = "of torchao, which cannot be imported" if is_absent else "whose parts do not fit together"
        raise CheckpointMismatch(
            f"the state of an optimizer contains a {kind} {why} ({type(error).__name__}: {error}); pip install torchao "
            "of the version that saved it, load another checkpoint, or load only the weights: apply_weights(path)"
        ) from error
    return found
