"""Batches from pinned memory: copied and waited for, on the stream of the computation, or beside it.

The batches are there already, in pinned memory: no loader is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from device.on_device.deep import WIDTH, Deep, Squares, adamw
from torch import Tensor
from torch.utils.data import DataLoader

from gpu.report import Report
from gpu.settings import DEVICE, SMALL
from zae.addons import PrefetchAddon

ROWS = 64 if SMALL else 12288
"""A batch of 100 MB, whose copy takes some milliseconds."""
LAYERS = 2
"""So few that a step in float32 takes about ten milliseconds, beside which the copy is seen."""
STEPS, WARM, ROUNDS = (4, 1, 1) if SMALL else (40, 8, 5)


class Pinned(DataLoader[Tensor]):
    """A loader of batches that lie in pinned memory already, four of them again and again.

    It measures the steps between two of its batches, after waiting for the device. It says that it has a worker, whose
    batches would be in pinned memory of their own as these are; none is started.
    """

    def __init__(self) -> None:
        self.ready = [torch.randn(ROWS, WIDTH).pin_memory() for _ in range(4)]
        self.times: list[float] = []
        super().__init__(self.ready * (STEPS // 4), batch_size=None, pin_memory=True, num_workers=1)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for index in range(STEPS):
            if index in (WARM, STEPS - 1):
                torch.cuda.synchronize()
                self.times.append(time.perf_counter())
            yield self.ready[index % 4]

    def seconds(self) -> float:
        """Return the seconds of a step, and forget them."""
        began, ended = self.times
        self.times = []
        return (ended - began) / (STEPS - 1 - WARM)


def run(report: Report) -> None:
    """Take turns, and compare the medians."""
    loader = Pinned()
    ways: dict[str, Callable[[], None]] = {
        "by hand, waited for": lambda: by_hand(loader, non_blocking=False),
        "by hand, not waited for": lambda: by_hand(loader, non_blocking=True),
        "zae": lambda: by_zae(loader),
        "zae, PrefetchAddon": lambda: by_zae(loader, PrefetchAddon),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, train in ways.items():
            train()
            seconds[name].append(loader.seconds())
    size = ROWS * WIDTH * 4 / 1e6
    for name, found in seconds.items():
        step = median(found)
        detail = f"{step * 1e3:.2f} ms a step of {LAYERS} layers, with a batch of {size:.0f} MB"
        report.measured(name, detail, step_seconds=step)


def by_hand(loader: Pinned, non_blocking: bool) -> None:
    """Train in plain PyTorch."""
    model = Deep(LAYERS).to(DEVICE)
    optimizer = adamw(model.parameters())
    for batch in loader:
        model(batch.to(DEVICE, non_blocking=non_blocking)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_zae(loader: Pinned, *addons: type) -> None:
    """Train with zae."""
    Squares.add_on(*addons)(Deep(LAYERS), DEVICE, optimizer=adamw, log_bar=False, fast_data=False).run(1, loader)
