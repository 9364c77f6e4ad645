"""There is a GPU, and it computes."""

from __future__ import annotations

import torch

from gpu.report import Report
from gpu.settings import WHERE


def run(report: Report) -> None:
    """Name the device, and multiply two matrices on it."""
    count = torch.cuda.device_count()
    report.check("device", count > 0, f"{WHERE}, {count} visible, torch {torch.__version__}")
    ones = torch.ones(64, 64, device="cuda")
    report.check("a matrix product", bool(((ones @ ones) == 64).all()))
