"""Predict the memory of a rank with ZeRO: what it holds of the state, and the buffers of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zae.preview.memory import Memory

__all__ = ["zero_memory"]

_SIZES = {
    "reduce_bucket_size": 5e8,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_param_persistence_threshold": 1e5,
}
"""The elements that DeepSpeed allows by default."""

_FLOAT32, _BFLOAT16 = 4, 2


def zero_memory(memory: Memory, stage: int, ranks: int, tuning: Mapping[str, Any], is_bf16: bool, is_cpu: bool) -> None:
    """Divide a state as ZeRO does, and add the buffers of a backward and of a step.

    On an accelerator a bucket is there as a whole; on a CPU only what is written to takes memory.

    Parameters
    ----------
    memory : Memory
        Of one process, in float32; changed in place.
    stage : int
        Of ZeRO, 0 to 3.
    ranks : int
        How many ranks there are.
    tuning : mapping
        The section ``zero_optimization`` of the configuration.
    is_bf16 : bool
        Whether the model computes in bfloat16.
    is_cpu : bool
        Whether the ranks are on CPUs.
    """
    sizes = {name: int(tuning.get(name, size)) for name, size in _SIZES.items() if tuning.get(name) != "auto"}
    sizes = {name: sizes.get(name, int(size)) for name, size in _SIZES.items()}
    elements = [each.count for each in memory.parts.values()]
    trained = sum(each.count for each in memory.parts.values() if each.is_trained)
    whole, largest = memory.parameters, max(elements, default=0)
    width = _BFLOAT16 if is_bf16 else _FLOAT32
    sent = min(trained, sizes["reduce_bucket_size"])
    bucket = (sent if is_cpu else sizes["reduce_bucket_size"]) * width
    if stage == 0:
        memory.peaks["averaged gradients"] = bucket + largest * width
        return
    part = -(-trained // ranks)
    slots = memory.optimizer / max(1, trained * _FLOAT32)
    for each in memory.parts.values():
        each.itemsize, each.is_trained, each.slots = width, False, 0.0
    memory.held["float32 weights and optimizer"] = round((1 + slots) * part * _FLOAT32)
    stepped = min(part, sizes["sub_group_size"]) if stage == 3 else part
    # A step has the gradients in one tensor, and two results where the optimizer keeps two slots.
    step = round((1 + min(slots, 2)) * stepped * _FLOAT32)
    memory.peaks.clear()
    if stage < 3:
        memory.peaks["the optimizer's step"] = max(step, 2 * part * _FLOAT32)
        memory.peaks["gradient buckets"] = bucket + (sent + largest) * width
        memory.start = 2 * whole
        return
    kept = sum(count for count in elements if count < sizes["stage3_param_persistence_threshold"])
    gathered = min(sum(elements), sizes["stage3_max_live_parameters"])
    around = 3 * largest * width  # A layer, its gradients, and what is sent of them.
    for each in memory.parts.values():
        each.divide(0, ranks)
    memory.held["gradients"] = part * _FLOAT32
    memory.held["parameters that stay whole"] = round(kept * (1 - 1 / ranks)) * width
    memory.peaks["the optimizer's step"] = step
    memory.peaks["gathered parameters"] = 2 * gathered * width + around // 2
    memory.peaks["gradient buckets"] = bucket + 2 * sent * width + around
    memory.start = whole + memory.parameters + 2 * part * _FLOAT32 + around
