"""`.ci/gpu` itself, which is for a machine with a GPU, runs on an emulation: every check passes. Never speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from device.emulation.build import build, compiler
from device.on_emulation import HERE, ROOT

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated device is not built")
DEFAULT = ["device", "bitwise", "resume", "waits", "memory", "speed"]
MORE = ["graphs", "saves", "out_of_memory", "compiled", "copies", "ranks"]


def run_checks(folder, *arguments):
    """Run the command with small models on the emulation, and return its status, its lines and its JSON."""
    environment = {
        **os.environ,
        "ZAE_EMULATED_DEVICE": "cuda",
        "ZAE_EMULATED_DEVICES": "1",
        "PYTHONPATH": str(HERE / "emulation" / "site"),
        "PYTHON": sys.executable,
        "SMALL": "1",
        "OMP_NUM_THREADS": "1",
        "OUT": str(folder),
    }
    command = [str(ROOT / ".ci" / "gpu"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    path = folder / "gpu.json"
    results = json.loads(path.read_text()) if path.exists() else None
    return done, results


def assert_all_passed(done, results, sections):
    failed = [each for each in results["checks"] if each["verdict"] == "failed"]
    assert not failed, f"on an emulation:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, done.stderr[-6000:]
    assert list(results["seconds"]) == sections
    done_in = {each["section"] for each in results["checks"] if each["verdict"] in ("ok", "measured")}
    assert done_in == {*sections} - {"graphs"}  # The emulation has no graphs, which the section says.
    assert results["is_emulated"]
    assert "on an emulation" in done.stdout.splitlines()[-1]


@needs_compiler
@pytest.mark.exhaustive
def test_all_checks_pass(tmp_path):
    build("cuda")
    done, results = run_checks(tmp_path)
    assert_all_passed(done, results, DEFAULT)
    assert sum(each["section"] == "bitwise" for each in results["checks"]) == 24
    page = [sys.executable, str(ROOT / "benchmarks" / "gpu_page.py"), str(tmp_path / "gpu.json")]
    shown = subprocess.run([*page, "--show"], capture_output=True, text=True, check=True).stdout
    assert "an emulation, whose times mean nothing" in shown
    for row in ("manual loop", "zae", "bitwise: 24 of 24 checks passed"):
        assert row in shown
    refused = subprocess.run(page, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "the page is about a GPU" in refused.stderr


@needs_compiler
@pytest.mark.exhaustive
def test_all_further_checks_pass(tmp_path):
    build("cuda")
    assert_all_passed(*run_checks(tmp_path, *MORE), MORE)


@needs_compiler
@pytest.mark.exhaustive
def test_a_failed_check_is_named_and_stops_nothing(tmp_path, monkeypatch):
    """Memory of the device that is too small fails each check of memory, and the next section runs all the same."""
    build("cuda")
    monkeypatch.setenv("ZAE_EMULATED_LIMIT", str(1 << 20))
    done, results = run_checks(tmp_path, "memory", "device")
    assert done.returncode == 1
    assert list(results["seconds"]) == ["memory", "device"]
    last = done.stdout.splitlines()[-1]
    assert "failed" in last
    assert "memory: the section" in last
    assert "device: " not in last


def test_without_a_gpu_it_says_so(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("ZAE_EMULATED_DEVICE", None)
    done = subprocess.run([str(ROOT / ".ci" / "gpu")], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GPU is at hand" in done.stderr
