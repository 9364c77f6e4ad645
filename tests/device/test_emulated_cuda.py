"""zae on an emulated CUDA: placement, exactness, waits, races and memory. Never speed."""

import pytest

from device.emulation.build import build, compiler
from device.on_emulation import run_tests

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated device is not built")


@needs_compiler
def test_on_an_emulation():
    build("cuda")
    run_tests("cuda")


@needs_compiler
@pytest.mark.exhaustive
def test_all_on_an_emulation():
    run_tests("cuda", "-m", "exhaustive")
