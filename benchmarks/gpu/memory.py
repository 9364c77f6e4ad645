"""The peak of the device's memory, in units of the weights, is that of the loop by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device.on_device.deep import BATCHES, WEIGHTS, by_hand, by_zae, peak

from gpu.report import Report
from zae.addons import EMAAddon, GradientAccumulationAddon, StateManagerAddon

ROUNDING = 0.05
"""Of the weights: what blocks of the allocator, and small tensors, may take."""


def run(report: Report) -> None:
    """Compare each peak with what it should be: that by hand, and one more copy of the weights with EMA."""
    peak(by_hand)  # What the libraries of the device allocate once.
    expected = peak(by_hand)
    report.measured("by hand", f"{expected:.2f} of the weights", weights=expected, bytes_of_weights=WEIGHTS)
    with tempfile.TemporaryDirectory() as name:
        for title, (train, more) in trainings(Path(name)).items():
            with report.guard(title):
                found = peak(train)
                limit = expected + more + ROUNDING
                detail = f"{found:.2f} of the weights; the limit is {limit:.2f}"
                report.check(title, found <= limit, detail, weights=found, limit=limit)


def trainings(folder: Path) -> dict[str, tuple[Callable[[], None], float]]:
    """Return what is measured, with the copies of the weights that it needs beyond the loop by hand."""
    saved: dict[str, Any] = {"save_path": folder / "saved"}
    in_background: dict[str, Any] = {"save_path": folder / "background", "save_async": True}
    windows: dict[str, Any] = {"gradient_accumulation_steps": 2}
    return {
        "zae": (lambda: by_zae(), 0),
        "with a validation": (lambda: by_zae(valid=BATCHES), 0),
        "accumulation": (lambda: by_zae(GradientAccumulationAddon, **windows), 0),
        "EMA": (lambda: by_zae(EMAAddon), 1),
        "saved": (lambda: by_zae(StateManagerAddon, **saved), 0),
        "resumed": (lambda: by_zae(StateManagerAddon, resume="auto", epochs=2, **saved), 0),
        "saved in the background": (lambda: by_zae(StateManagerAddon, **in_background), 0),
    }
