"""Two ranks with a device each train as one process, and draw different masks of dropout."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from device.on_device.tasks import DEVICE, Task, dense, loader, weights
from zae.addons import FSDPAddon, MultiGPUAddon

BOTH = [f"{DEVICE}:0", f"{DEVICE}:1"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


class Noting(Task):
    """A task that returns the sum of a mask of dropout, which each rank draws on its own device."""

    def train_step(self, batch):
        outputs = super().train_step(batch)
        mask = nn.functional.dropout(torch.ones(4096, device=self.device), 0.5)
        place = (mask * torch.arange(4096, device=self.device)).sum()
        places = self.gather(place.item())
        return {**outputs, "difference": max(places) - min(places)}


def train(task, devices, *addons, batch_size):
    torch.manual_seed(0)
    trainer = task.add_on(*addons)(dense(0.0), devices, optimizer=sgd, seed=0)
    history = trainer.run(1, loader(batch_size=batch_size))
    return trainer, history["train_metrics_history"][-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", [MultiGPUAddon, FSDPAddon], ids=["ddp", "fsdp"])
def test_two_ranks_train_as_one_process(engine):
    alone, _ = train(Task, DEVICE, batch_size=32)
    together, _ = train(Task, BOTH, engine, batch_size=16)
    one, two = weights(alone.model), weights(together.unwrap())
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_ranks_draw_different_masks():
    _, metrics = train(Noting, BOTH, MultiGPUAddon, batch_size=16)
    assert metrics["difference"] > 0


OWN_GROUP = """
import os
import torch
import torch.distributed as dist
from device.on_device.tasks import DEVICE, Task, dense, loader
from zae.addons import EarlyStoppingAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon

class Counting(Task):
    def train_step(self, batch):
        outputs = super().train_step(batch)
        return {**outputs, "num_targets": len(batch[0])}

torch.get_device_module(DEVICE).set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(dist.get_default_backend_for_device(DEVICE))
cls = Counting.add_on(MultiGPUAddon, GradientAccumulationAddon, StateManagerAddon, EarlyStoppingAddon)
options = {"gradient_accumulation_steps": 2, "save_path": "run", "on_nonfinite": "skip"}
trainer = cls(dense(), DEVICE, optimizer=torch.optim.SGD, **options)
history = trainer.run(1, loader(batch_size=8), loader())
if trainer.is_main:
    print("steps", history["step"], flush=True)
"""


@pytest.mark.exhaustive
def test_a_group_of_the_script_that_is_for_the_device_alone(tmp_path):
    """The script has called init_process_group("nccl"): numbers of the host go over a group of zae."""
    script = tmp_path / "script.py"
    script.write_text(OWN_GROUP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "steps 2" in done.stdout
