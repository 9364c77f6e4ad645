"""A run that is killed on a device resumes there to the same bits, dropout of the device included."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from device.on_device import killed
from device.on_device.tasks import assert_same


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


def compare(tmp_path, composition):
    step = 4 if "accumulation" in composition else 8
    script = subprocess.run([sys.executable, killed.__file__, str(tmp_path / "cut"), composition, str(step)])
    assert script.returncode == -signal.SIGKILL
    whole = killed.train(tmp_path / "whole", composition)
    resumed = killed.train(tmp_path / "cut", composition)
    assert_same(state(resumed), state(whole))


@pytest.mark.parametrize("composition", ["plain", "fp16_ema_accumulation"])
def test_resumes_to_the_same_bits(tmp_path, composition):
    compare(tmp_path, composition)


@pytest.mark.exhaustive
@pytest.mark.parametrize("composition", sorted({*killed.COMPOSITIONS} - {"plain", "fp16_ema_accumulation"}))
def test_all_resume_to_the_same_bits(tmp_path, composition):
    compare(tmp_path, composition)
