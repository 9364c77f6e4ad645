"""What LedgerAddon costs on a step of about ten milliseconds: ``python benchmarks/ledger.py``.

Every second step of a run is written, and steps with and without a line are compared with their neighbours, in seconds
of this process on its core, so that a busy machine counts little. Shown are the medians, and what a line comes to when
every 10th step is written; the limit is 5 per cent.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zae import Trainer
from zae.addons import LedgerAddon

WIDTHS = (256, 512, 1024)  # 0.1, 0.5 and 2.1 million weights.
STEP = 0.010
STEPS = 300


class Task(Trainer):
    """A small model with a large batch."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


class Clocked:
    """The same batch so many times, and when each was asked for."""

    def __init__(self, batch: torch.Tensor, steps: int) -> None:
        self.batch, self.steps = batch, steps
        self.times: list[float] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.steps):
            self.times.append(time.process_time())
            yield self.batch
        self.times.append(time.process_time())


def step_times(width: int, batch: torch.Tensor, steps: int, **options: Any) -> list[float]:
    """Seconds of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = Clocked(batch, steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        trainer = Task.add_on(LedgerAddon)(
            model, "cpu", optimizer=optimizer, log_bar=False, gradient_clip=1.0, ledger_path=path, **options
        )
        trainer.run(1, loader)
    return [after - before for before, after in zip(loader.times, loader.times[1:], strict=False)]


def batch_for(width: int) -> torch.Tensor:
    """A batch with which a bare step takes about `STEP`."""
    size = 8
    while statistics.median(step_times(width, torch.randn(size, width), 20, ledger_every=10**6)) < STEP:
        size *= 2
    return torch.randn(size, width)


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    sys.stdout.write("weights  batch  bare step  a line    at every=10\n")
    for width in WIDTHS:
        batch = batch_for(width)
        times = step_times(width, batch, STEPS, ledger_every=2)[10:]
        bare = statistics.median(times[0::2])
        line = statistics.median(b - a for a, b in zip(times[0::2], times[1::2], strict=False))
        share = line / 10 / bare
        sys.stdout.write(
            f"{2 * width * width / 1e6:5.1f} M  {len(batch):5d}  {bare * 1e3:6.1f} ms  {line * 1e3:5.2f} ms  "
            f"{share:8.1%}\n"
        )


if __name__ == "__main__":
    main()
