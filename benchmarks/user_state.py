"""What it costs to save what training changes in the objects of the user: as a run begins, in an epoch, and at a save.

    python benchmarks/user_state.py

Each figure is the median of five, in milliseconds of processor time, beside the writing of the checkpoint itself. What
is read for the first time in a process, the classes of the script for instance, is not among them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zae import Trainer
from zae.data.loader_parts import LoaderParts
from zae.data.loader_values import LoaderValues


class Block(nn.Module):
    """A module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.name = nn.Linear(8, 8), 1.0, "block"

    def forward(self, inputs: Any) -> Any:
        return self.linear(inputs) * self.scale


class Task(Trainer):
    """A task without a state of its own."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch.float()).square().mean()}

    test_step = train_step


class Replays(Task):
    """A task with 200 MB of replay buffer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replay = torch.zeros(50_000_000)

    def train_step(self, batch: Any) -> Any:
        self.replay[self.progress_checker.step] = 1.0
        return super().train_step(batch)


class Data(Dataset[Any]):
    """Few samples, with an attribute of any size."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.ones(8)


def timed(function: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        begin = time.process_time()
        function()
        times.append(1000 * (time.process_time() - begin))
    return statistics.median(times)


def measure(name: str, task: Any, held: Any) -> None:
    model = nn.Sequential(*(Block() for _ in range(75)))
    trainer = task(model, "cpu", optimizer=torch.optim.SGD, log_bar=False)
    loader = DataLoader(Data(held), 4)
    found = {}

    def look() -> None:
        state, values = trainer.user_state, LoaderValues()
        found["begins"] = timed(lambda: (state.begin(trainer, False), values.begin(loader, trainer)))
        found["epoch"] = timed(lambda: (state.open_epoch(trainer), values.capture(LoaderParts(loader))))
        found["save"] = timed(lambda: (state.state_dict(trainer), values.capture(LoaderParts(loader))))

    trainer.on_epoch_end = look
    trainer.run(1, loader)
    print(f"| {name} | {found['begins']:.1f} | {found['epoch']:.1f} | {found['save']:.1f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| | begins | each epoch | each save |\n|---|---|---|---|")
    measure("75 modules of one's own, no state", Task, None)
    measure("CIFAR in memory, one array of 154 MB", Task, np.zeros((50_000, 3072), np.uint8))
    measure(
        "ImageFolder of 1.3 M entries",
        Task,
        [(f"/data/train/class{i % 1000}/{i}.jpeg", i % 1000) for i in range(1_300_000)],
    )
    measure("50 M indices, an array", Task, np.arange(50_000_000))
    measure("50 M indices, a list", Task, list(range(50_000_000)))
    measure("200 MB of replay buffer that changes", Replays, None)
