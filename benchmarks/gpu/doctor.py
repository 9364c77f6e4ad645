"""`python -m zae doctor` finds the GPU, and nothing wrong."""

from __future__ import annotations

import subprocess
import sys

import torch

from gpu.report import Report
from gpu.settings import WHERE


def run(report: Report) -> None:
    """Name the device, and run the command."""
    count = torch.cuda.device_count()
    report.check("device", count > 0, f"{WHERE}, {count} visible, torch {torch.__version__}")
    done = subprocess.run([sys.executable, "-m", "zae", "doctor"], capture_output=True, text=True, timeout=120)
    detail = "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-600:]
    report.check("python -m zae doctor", done.returncode == 0, detail)
