"""Predict the size of a checkpoint: its tensors, their description, and the history of the run."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zae.storage.encoding import encode

if TYPE_CHECKING:
    from zae.preview.plan import RunPreview

__all__ = ["checkpoint_bytes", "tensor_bytes"]

_MANIFEST = 780  # Bytes of a manifest without composition and tied names.
_REFERENCE = 60  # Bytes of the name of a tensor in state.json.
_IN_ZIP = 200  # Bytes that the archive of torch.save has for each tensor, beside what it takes in safetensors.
_ROWS = 1024  # More rows than that are counted, not made.


def checkpoint_bytes(
    state: Mapping[str, Any],
    stepped: Mapping[str, Any],
    plan: RunPreview,
    add_ons: list[str],
    norms: list[str],
    is_archive: bool,
) -> tuple[int, int, int]:
    """Return the size of the last checkpoint of a planned run, and what one within an epoch has more.

    That is so many bytes, and so many for each step of the epoch. ``stepped`` has the state of each optimizer after a
    step; the others are the names of the add-ons and of the gradient norms that are logged, and whether the weights are
    written by torch.save.
    """
    state = dict(state)
    model, position = state.pop("model"), state.pop("position")
    state["optimizer"] = {name: _after_a_step(state["optimizer"].get(name), each) for name, each in stepped.items()}
    state["records"], rest = _records(state["records"], plan, norms)
    random_states = plan.world_size * _stored((position[0] if isinstance(position, list) else position)["present"])
    whole = _stored(state) + tensor_bytes(model) + random_states + rest
    whole += _MANIFEST + len(json.dumps(add_ons, indent=2)) + _IN_ZIP * len(model) * is_archive
    return whole, random_states, plan.world_size * 16 * plan.batches_per_step


def _stored(state: Any) -> int:
    """Return the bytes of a state in state.json and state.safetensors."""
    stand_ins: dict[int, Tensor] = {}
    structure, tensors = encode(_without_data(state, stand_ins, {}))
    text = len(json.dumps(structure, allow_nan=False, separators=(",", ":")))
    return text + tensor_bytes({name: stand_ins.get(each.data_ptr(), each) for name, each in tensors.items()})


def tensor_bytes(tensors: Mapping[str, Tensor], reference: bool = False) -> int:
    """Return the size of a file of tensors, with their names in state.json where ``reference`` is true."""
    entries, end = {}, 0
    for name, tensor in {id(each): (name, each) for name, each in tensors.items()}.values():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = len(json.dumps(entries, separators=(",", ":"))) + 8
    return end + header + reference * _REFERENCE * len(entries)


def _after_a_step(now: Any, after: Any) -> Any:
    """Return the state of an optimizer after a step, with its groups as they are."""
    groups = now["param_groups"] if isinstance(now, Mapping) and "param_groups" in now else []
    if isinstance(after, Mapping):
        return {"state": dict(enumerate(after.values())), "param_groups": groups}
    return {"state": {0: list(after)}, "param_groups": groups}


def _records(now: Mapping[str, Any], plan: RunPreview, norms: list[str]) -> tuple[dict[str, Any], int]:
    """Return the history at the end of the run, and the bytes of the rows that were only counted."""
    names = ["loss"]  # What else the steps return is not known before they are made.
    drawn = random.Random(0)
    rates = dict.fromkeys(plan.learning_rates, 0.001)
    kinds = {
        "train_history": (len(plan.epoch_ends), [f"train_{name}" for name in names], ["epoch", "step"], rates),
        "valid_history": (len(plan.validates_at), [f"valid_{name}" for name in names], ["epoch", "step"], {}),
        "train": (len(plan.logs_at), [*(f"train/{name}" for name in names), *norms], ["step", "batch"], rates),
        "valid": (len(plan.validates_at), [f"valid/{name}" for name in names], ["step", "batch"], {}),
    }
    made, rest = dict(now), 0
    for kind, (count, floats, counters, others) in kinds.items():
        rows = [
            {**dict.fromkeys(counters, plan.last_step or 0), **{name: drawn.random() for name in floats}, **others}
            for _ in range(min(count, _ROWS))
        ]
        key = kind if kind in now else "log_history"
        made[key] = [*made[key], *rows]
        rest += max(0, count - _ROWS) * 8 * (1 + len(floats) + len(counters) + len(others))
    if plan.epoch_ends or plan.validates_at:
        last = {name: drawn.random() for name in names}
        made |= {"train_metrics": last, "test_metrics": last, "best": {**last, "score": 0.1, "epoch": 1, "step": 1}}
    return made, rest


def _without_data(value: Any, stand_ins: dict[int, Tensor], memo: dict[int, Tensor]) -> Any:
    """Copy a state with a number in place of each tensor, and note the tensor by the address of that number."""
    if isinstance(value, Tensor):
        if id(value) not in memo:
            memo[id(value)] = made = torch.zeros(1)
            stand_ins[made.data_ptr()] = value
        return memo[id(value)]
    if isinstance(value, dict):
        return {key: _without_data(each, stand_ins, memo) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_data(each, stand_ins, memo) for each in value)
    return value
