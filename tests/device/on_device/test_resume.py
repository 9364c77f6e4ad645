"""A run that is killed on a device resumes there to the same bits, dropout of the device included."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from device.on_device import killed
from device.on_device.tasks import DEVICE, Task, adamw, assert_same, dense, loader, weights
from zae.addons import StateManagerAddon


@pytest.mark.parametrize("composition", sorted(killed.COMPOSITIONS))
@pytest.mark.sample(count=1)
def test_resumes_to_the_same_bits(tmp_path, composition):
    step = 4 if "accumulation" in composition else 8
    script = subprocess.run([sys.executable, killed.__file__, str(tmp_path / "cut"), composition, str(step)])
    assert script.returncode == -signal.SIGKILL
    whole = killed.train(tmp_path / "whole", composition)
    resumed = killed.train(tmp_path / "cut", composition)
    assert_same(killed.state(resumed), killed.state(whole))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_on_a_device_with_another_index(first, second, tmp_path):
    """The stream of the device that the trainer had goes to the one that it has now."""

    def make(index, folder, **options):
        cls = Task.add_on(StateManagerAddon)
        return cls(dense, f"{DEVICE}:{index}", optimizer=adamw, save_path=tmp_path / folder, seed=0, **options)

    whole = make(first, "whole")
    whole.run(2, loader())
    torch.get_device_module(DEVICE).manual_seed_all(77)
    make(first, "cut").run(1, loader())
    torch.get_device_module(DEVICE).manual_seed_all(99)
    resumed = make(second, "cut", resume=True)
    resumed.run(2, loader())
    assert_same(weights(resumed.model), weights(whole.model))
