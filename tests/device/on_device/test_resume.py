"""A run that is killed on a device resumes there to the same bits, dropout of the device included."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from device.on_device import killed
from device.on_device.tasks import assert_same


def compare(tmp_path, composition):
    step = 4 if "accumulation" in composition else 8
    script = subprocess.run([sys.executable, killed.__file__, str(tmp_path / "cut"), composition, str(step)])
    assert script.returncode == -signal.SIGKILL
    whole = killed.train(tmp_path / "whole", composition)
    resumed = killed.train(tmp_path / "cut", composition)
    assert_same(killed.state(resumed), killed.state(whole))


@pytest.mark.parametrize("composition", ["plain", "fp16_ema_accumulation"])
def test_resumes_to_the_same_bits(tmp_path, composition):
    compare(tmp_path, composition)


@pytest.mark.exhaustive
@pytest.mark.parametrize("composition", sorted({*killed.COMPOSITIONS} - {"plain", "fp16_ema_accumulation"}))
def test_all_resume_to_the_same_bits(tmp_path, composition):
    compare(tmp_path, composition)
