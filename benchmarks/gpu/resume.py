"""A run that is killed resumes to the bits of one that is not, with dropout on the device.

python -m gpu.resume FOLDER COMPOSITION STEP    # train, and kill this process in a step
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from device.on_device import killed

from gpu.bitwise import deterministic_kernels
from gpu.report import Report
from gpu.settings import SMALL

NAMES = ("plain", "fp16_ema_accumulation") if SMALL else tuple(killed.COMPOSITIONS)


def run(report: Report) -> None:
    """Start all runs that are to be killed at once: most of their time is the import of torch."""
    with tempfile.TemporaryDirectory() as folder, deterministic_kernels():
        processes = {name: start(Path(folder) / name, name) for name in NAMES}
        for name, process in processes.items():
            with report.guard(name):
                _, errors = process.communicate(timeout=300)
                if process.returncode != -signal.SIGKILL:
                    report.check(name, False, f"the run ended with {process.returncode}: {errors[-300:]}")
                else:
                    compare(report, Path(folder) / name, name)


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    """Start a run that is killed in its second epoch, or in its first where steps are windows."""
    step = 4 if "accumulation" in name else 8
    command = [sys.executable, "-m", "gpu.resume", str(folder / "cut"), name, str(step)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def compare(report: Report, folder: Path, name: str) -> None:
    """Resume, and compare everything but times with a run that was not killed."""
    whole = killed.state(killed.train(folder / "whole", name, log_bar=False))
    resumed = killed.state(killed.train(folder / "cut", name, log_bar=False))
    differing = [path for path in whole if path not in resumed or not torch.equal(whole[path], resumed[path])]
    report.check(name, not differing, f"these differ: {differing[:3]}" if differing else "")


if __name__ == "__main__":
    with deterministic_kernels():
        killed.train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
