"""The tests of the project, with "cpu" replaced by an emulated device: `mapped.py` says which of them cannot hold."""

import pytest

from device.emulation.build import KINDS, build, compiler
from device.on_emulation import ROOT, run_tests

ADDONS = (
    "accumulation", "amp", "amp_weights", "early_stopping", "ema", "gradient_checkpointing", "prefetch",
    "spike_guard", "torch_metrics", "uniform_average",
)  # fmt: skip
"""Those whose tests neither start ranks nor kill what they have forked, nor ask how long something takes."""
FILES = {
    "loop": ["loop"],
    "optim": ["optim"],
    "addons": [*(f"addons/test_{name}.py" for name in ADDONS), "addons/state_manager/test_module_state.py"],
}

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated device is not built")


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_holds_on_the_cpu_holds_on_a_device(kind, name, monkeypatch):
    build(kind)
    monkeypatch.setenv("ZAE_EMULATED_LENIENT", "1")
    run_tests(kind, "-p", "device.mapped", files=[str(ROOT / "tests" / each) for each in FILES[name]])
