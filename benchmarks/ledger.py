"""What LedgerAddon costs on a step of about ten milliseconds: ``python benchmarks/ledger.py``.

Runs with and without it take turns, and the seconds are those of this process on its core, so that a busy machine
counts little; the ratio of the medians is shown.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zae import Trainer
from zae.addons import LedgerAddon

WIDTHS = (256, 512, 1024)  # 0.2, 0.8 and 3.2 million weights.
EVERY = (1, 10, 100)
STEP = 0.010
ROUNDS, STEPS = 9, 40


class Task(Trainer):
    """A step that takes as long as it is told to: a small model, repeated."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def seconds(cls: Any, width: int, batch: Any, **options: Any) -> float:
    """Seconds for `STEPS` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    trainer = cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01), log_bar=False, **options)
    start = time.process_time()
    trainer.run(1, [batch] * STEPS)
    return time.process_time() - start


def batch_for(width: int) -> torch.Tensor:
    """A batch with which a bare step takes about `STEP`."""
    size = 8
    while True:
        batch = torch.randn(size, width)
        if min(seconds(Task, width, batch) for _ in range(2)) / STEPS >= STEP or size >= 65536:
            return batch
        size *= 2


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    sys.stdout.write("weights  batch  bare step   " + "  ".join(f"every={every:<4}" for every in EVERY) + "\n")
    for width in WIDTHS:
        batch = batch_for(width)
        times: dict[int, list[float]] = {0: [], **{every: [] for every in EVERY}}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(ROUNDS):
                times[0].append(seconds(Task, width, batch))
                for every in EVERY:
                    options = {"ledger_path": Path(folder) / "ledger.jsonl", "ledger_every": every}
                    times[every].append(seconds(Task.add_on(LedgerAddon), width, batch, **options))
        bare = statistics.median(times[0])
        ratios = [statistics.median(times[every]) / bare for every in EVERY]
        count = 2 * width * width / 1e6
        cells = "  ".join(f"{ratio:<10.3f}" for ratio in ratios)
        sys.stdout.write(f"{count:5.1f} M  {len(batch):5d}  {bare / STEPS * 1e3:6.1f} ms   {cells}\n")


if __name__ == "__main__":
    main()
