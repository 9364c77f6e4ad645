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


def train(folder, composition, kill_at=-1, **more):
    """Train for two epochs of twelve batches, or resume."""
    addons, options = COMPOSITIONS[composition]
    task = type("Task", (Killed,), {"kill_at": kill_at})
    trainer = task.add_on(StateManagerAddon, *addons)(
        dense,
        DEVICE,
        **{"optimizer": adamw, "seed": 0, "save_path": folder, "resume": "auto", **options},
        save_every=zae.Every(steps=3),
        **more,
    )
    batches = loader(samples=96, batch_size=8)
    trainer.run(2, batches, batches)
    return trainer


def tensors(value, name=""):
    """Return all tensors and floats of a state by their paths, on the host."""
    if isinstance(value, torch.Tensor):
        return {name: value.detach().cpu()}
    if isinstance(value, float):
        return {name: torch.tensor(value, dtype=torch.float64)}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    return {path: found for key, part in value.items() for path, found in tensors(part, f"{name}/{key}").items()}


def state(trainer):
    """Return the state of a run but for its times."""
    return {path: found for path, found in tensors(trainer.state_dict()).items() if "time" not in path}


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
