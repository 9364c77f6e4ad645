"""Train with dropout on a device, as a script that a test kills: killed.py FOLDER COMPOSITION STEP."""

from __future__ import annotations

import os
import signal
import sys

import torch

import zae
from device.on_device.tasks import DEVICE, Task, adamw, dense, loader
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon

COMPOSITIONS = {
    "plain": ((), {}),
    "asynchronous": ((), {"save_async": True}),
    "fp16_ema_accumulation": (
        (AMPAddon, EMAAddon, GradientAccumulationAddon),
        {"precision": "fp16", "gradient_accumulation_steps": 2, "gradient_clip": 0.5},
    ),
    "bf16": ((AMPAddon,), {"precision": "bf16"}),
    "fused": ((), {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True)}),
    "capturable": ((), {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, capturable=True)}),
}


class Killed(Task):
    """A task that kills its process in the forward of a step."""

    kill_at = -1

    def train_step(self, batch):
        if self.progress_checker.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)


def train(folder, composition, kill_at=-1):
    """Train for two epochs of twelve batches, or resume."""
    addons, options = COMPOSITIONS[composition]
    task = type("Task", (Killed,), {"kill_at": kill_at})
    trainer = task.add_on(StateManagerAddon, *addons)(
        dense,
        DEVICE,
        **{"optimizer": adamw, "seed": 0, "save_path": folder, "resume": "auto", **options},
        save_every=zae.Every(steps=3),
    )
    batches = loader(samples=96, batch_size=8)
    trainer.run(2, batches, batches)
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
