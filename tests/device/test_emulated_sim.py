"""zae on an emulated accelerator that is not CUDA: placement, exactness, waits, races and memory. Never speed."""

import pytest

from device.emulation.build import build, compiler
from device.on_emulation import run_tests

OF_THE_KIND = (
    "test_training.py",
    "test_any_accelerator.py",
    "test_current_device.py",
    "test_moved_model.py",
    "test_resume.py",
    "test_late_errors.py",
    "test_state_before_the_run.py",
)
"""Where CUDA and another accelerator take different ways; the rest is the same code, and runs with CUDA each time."""

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated device is not built")


@pytest.mark.exhaustive
@needs_compiler
def test_on_an_emulation():
    build("sim")
    run_tests("sim", files=OF_THE_KIND)


@needs_compiler
@pytest.mark.exhaustive
def test_all_on_an_emulation():
    run_tests("sim", "-m", "exhaustive or not exhaustive")
