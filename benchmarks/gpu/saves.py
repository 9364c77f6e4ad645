"""How long training waits for a save, directly and in the background, and the peak of the device's memory."""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from device.on_device.deep import WEIGHTS, WIDTH, Deep, Squares, adamw, peak

import zae
from gpu.report import Report
from gpu.settings import DEVICE, IS_EMULATED, SMALL, free_memory
from zae.addons import StateManagerAddon

STEPS, EVERY = (12, 4) if SMALL else (512, 128)
"""So many steps that a save in the background ends before the next one begins, which would wait for it."""
GIB = 2**30


class Timed(Squares):
    """A task that notes when each step begins, after waiting for the device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.began: list[float] = []

    def on_step_begin(self, batch: Any) -> None:
        super().on_step_begin(batch)
        torch.cuda.synchronize()
        self.began.append(time.perf_counter())


def run(report: Report) -> None:
    """Save in both ways, and by torch.save for comparison."""
    with tempfile.TemporaryDirectory() as name:
        by_torch = seconds_of_torch_save(Path(name) / "by_hand.pt")
        report.measured("torch.save by hand", f"{by_torch:.2f} s, {3 * WEIGHTS / GIB:.2f} GiB", seconds=by_torch)
        stalls = {}
        for title, is_async in {"direct": False, "in the background": True}.items():
            with report.guard(title):
                stalls[title] = measure(report, title, Path(name) / title, is_async)
    if len(stalls) == 2:
        direct, background = stalls["direct"], stalls["in the background"]
        title = "the background is the shorter stall"
        if IS_EMULATED:
            report.leave_out(title, "times on an emulation mean nothing")
        else:
            report.check(title, background < direct, f"{background:.3f} s and {direct:.3f} s")


def seconds_of_torch_save(path: Path) -> float:
    """Return how long torch takes to write the weights and the state of the optimizer."""
    model = Deep().to(DEVICE)
    optimizer = adamw(model.parameters())
    model(torch.ones(4, WIDTH, device=DEVICE)).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return time.perf_counter() - began


def measure(report: Report, title: str, folder: Path, is_async: bool) -> float:
    """Train with saves; the stall is the median of the steps with a save, less that of the others.

    The first save is left out: in the background it allocates pinned memory, which later ones use again.
    """
    made: list[Any] = []

    def train() -> None:
        trainer = Timed.add_on(StateManagerAddon)(
            Deep,
            DEVICE,
            optimizer=adamw,
            seed=0,
            log_bar=False,
            save_path=folder,
            save_every=zae.Every(steps=EVERY),
            save_async=is_async,
        )
        made.append(trainer)
        trainer.run(1, [torch.ones(4, WIDTH)] * STEPS)

    highest = peak(train)
    began = made.pop().began
    free_memory()
    seconds = [end - start for start, end in pairwise(began)]
    with_save = [seconds[step] for step in range(EVERY - 1, len(seconds), EVERY)]
    first, later = with_save[0], with_save[1:]
    plain = median(seconds[step] for step in range(2, len(seconds)) if (step + 1) % EVERY)
    stall = median(later) - plain
    detail = f"stall {stall:.3f} s (the first {first - plain:.3f} s), a step {plain * 1e3:.1f} ms, peak {highest:.2f}"
    figures = {"stall_seconds": stall, "first_stall_seconds": first - plain, "step_seconds": plain, "peak": highest}
    report.measured(title, f"{detail} of the weights", **figures)
    return stall
