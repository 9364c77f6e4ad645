"""What add-ons ask of a device, they ask of the trainer's accelerator, whatever its kind."""

from __future__ import annotations

import torch

from device.on_device.tasks import DEVICE, Task, adamw, data, dense
from emulation import core
from zae.addons import AMPAddon, ProfilerAddon, ThroughputAddon
from zae.device import name_of_device
from zae.testing.watch import Settings


def test_precision_is_the_first_that_the_device_has():
    seen = []

    class Noting(Task):
        def train_step(self, batch):
            seen.append(torch.get_autocast_dtype(DEVICE) if torch.is_autocast_enabled(DEVICE) else None)
            return super().train_step(batch)

    Noting.add_on(AMPAddon)(dense(), DEVICE, optimizer=adamw, precision="auto").run(1, [data()])
    assert seen == [torch.bfloat16]


def test_memory_is_that_of_the_device():
    trainer = Task.add_on(ThroughputAddon)(dense(), DEVICE, optimizer=adamw)
    trainer.run(1, [data()] * 4)
    found = trainer.log_history[-1]["throughput/peak_memory_mib"]
    assert 0 < found <= core().peak(0) / 2**20


def test_a_profile_is_written(tmp_path):
    options = {"profile_dir": tmp_path, "profile_schedule": (1, 1, 2, 1)}
    Task.add_on(ProfilerAddon)(dense(), DEVICE, optimizer=adamw, **options).run(1, [data()] * 6)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".txt"}


def test_autocast_that_is_left_on_is_found_and_ended():
    before = Settings()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert before.restore().keys() == {"autocast"}
        assert not torch.is_autocast_enabled(DEVICE)


def test_a_run_says_on_which_device_it_is():
    assert "emulated" in name_of_device(torch.device(DEVICE, 0))
