"""The trainer's device is the current one of its process from setup to teardown: "cuda" in a step is that device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from device.on_device.tasks import DEVICE, Task, data, dense
from zae.addons import MultiGPUAddon


class NamesTheKind(Task):
    """A task that makes a tensor on "cuda", without an index, as scripts do."""

    def train_step(self, batch):
        weight = torch.ones(1, device=DEVICE)
        outputs = super().train_step(batch)
        return {"loss": outputs["loss"] * weight.sum(), "index": float(weight.device.index)}

    test_step = train_step


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def current():
    """Return the index of the current device, and put it back after the test."""
    module = torch.get_device_module(DEVICE)
    before = module.current_device()
    yield module.current_device
    module.set_device(before)


def test_in_one_process(current):
    before = current()
    trainer = NamesTheKind(dense(), f"{DEVICE}:1", optimizer=sgd)
    trainer.run(1, [data()], [data()])
    assert trainer.log_train["index"] == [1.0]
    assert current() == before
    trainer.evaluate([data()])
    assert trainer.log_test["index"] == [1.0]
    assert current() == before


def test_a_run_after_a_step_of_its_own(current):
    before = current()
    trainer = NamesTheKind(dense(), f"{DEVICE}:1", optimizer=sgd)
    trainer.run_batch(data())  # It sets the trainer up, and leaves it so.
    assert current() == 1
    trainer.run(1, [data()])
    assert current() == before


def test_a_kind_means_the_current_device(current):
    torch.get_device_module(DEVICE).set_device(1)
    trainer = NamesTheKind(dense(), DEVICE, optimizer=sgd)
    assert trainer.device == torch.device(DEVICE, 1)


@pytest.mark.exhaustive
def test_in_spawned_ranks():
    trainer = NamesTheKind.add_on(MultiGPUAddon)(dense(), [f"{DEVICE}:0", f"{DEVICE}:1"], optimizer=sgd)
    history = trainer.run(1, [data(), data()])
    assert history["train_metrics_history"][-1]["index"] == 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("visible", [1, 2])
def test_under_a_launcher(visible, tmp_path):
    """Each rank has its own device, or the only one that it sees, as srun shows them."""
    script = tmp_path / "script.py"
    script.write_text(
        "from device.on_device.test_current_device import *\n"
        "trainer = NamesTheKind.add_on(MultiGPUAddon)(dense(), DEVICE, optimizer=sgd)\n"
        "trainer.run(1, [data(), data()])\n"
        "print(f'rank {trainer.rank} on {trainer.device}\\n', end='', flush=True)\n"  # One write: ranks share it.
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "ZAE_EMULATED_DEVICES": str(visible)}
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank} on {DEVICE}:{rank if visible == 2 else 0}" in done.stdout
