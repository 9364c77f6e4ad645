"""Run the tests of on_device/ in a process that has the emulated device from its start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def run_tests(kind: str, *arguments: str, files: Sequence[str] = ("",)) -> None:
    """Run pytest on an emulated device of a kind, on some files or all of them, and fail with its output."""
    paths = (HERE / "emulation" / "site", ROOT, ROOT / "tests")
    environment = {
        **os.environ,
        "ZAE_EMULATED_DEVICE": kind,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short"]
    places = [str(HERE / "on_device" / name) for name in files]
    done = subprocess.run([*command, *arguments, *places], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"on an emulation of {kind}:\n{done.stdout[-12_000:]}\n{done.stderr[-4_000:]}"
