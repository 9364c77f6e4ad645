"""Compositions of add-ons whose steps do not wait for the device, but for two that say why."""

from __future__ import annotations

import torch
from torch import nn

from device.on_device.tasks import Task
from zae.addons import (
    AMPAddon,
    EMAAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    SpikeGuardAddon,
    ThroughputAddon,
)


class WithMetric(Task):
    """A task with a metric beside the loss, on the device as the loss is."""

    def train_step(self, batch):
        inputs, target = batch
        prediction = self.model(inputs)
        error = (prediction - target).abs().mean().detach()
        return {"loss": nn.functional.mse_loss(prediction, target), "error": error}


class Blocks(nn.Sequential):
    """Three blocks of one class, which are computed again in the backward."""

    def __init__(self) -> None:
        block = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        super().__init__(nn.Linear(8, 16), nn.ModuleList(block), nn.Linear(16, 1))

    def forward(self, values):
        values = self[0](values)
        for block in self[1]:
            values = values + block(values)
        return self[2](values)


def per_step(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=30)


DECIDES_ON_THE_HOST = {"skip": 1, "spike_guard": 2}
"""What leaves a step out reads the loss, and the norm, before the optimizer moves: so many waits a step."""

COMPOSITIONS = {
    "plain": ((), {}),
    "clip": ((), {"gradient_clip": 1.0}),
    "skip": ((), {"on_nonfinite": "skip"}),
    "bf16": ((AMPAddon,), {"precision": "bf16"}),
    "ema": ((EMAAddon,), {}),
    "accumulation": ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 4}),
    "scheduler": ((), {"scheduler": per_step, "scheduler_step_on_batch": True}),
    "spike_guard": ((SpikeGuardAddon,), {}),
    "throughput": ((ThroughputAddon,), {}),
    "checkpointing": ((GradientCheckpointingAddon,), {"model": Blocks}),
    "together": (
        (AMPAddon, EMAAddon, GradientAccumulationAddon),
        {"precision": "bf16", "gradient_accumulation_steps": 4, "gradient_clip": 1.0},
    ),
}
