"""A regression, its model and its batches, for loops that are written by hand beside the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from kit.hand import loader, network
from kit.table import Task
from zae import Trainer


def build(*add_ons: Any, task: type[Trainer] = Task, **options: Any) -> Any:
    model = options.pop("model", None) or network()
    options.setdefault("optimizer", AdamW(model.parameters(), lr=0.05))
    return task.add_on(*add_ons)(model, "cpu", **options)


def valid() -> Any:
    return loader(10, seed=9, shuffle=False)


class Regression(Trainer):
    """The mean squared error of a linear model."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


class NoisyNet(nn.Module):
    """Dropout draws, and BatchNorm changes buffers."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Float32Regression(Regression):
    """The same, with outputs in float32, whatever the model computes in."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs).float(), targets)}


def line(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(3, 1, dtype=dtype)


def pairs(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 3, generator=generator, dtype=dtype), torch.randn(n, 1, generator=generator, dtype=dtype))
        for n in sizes
    ]


class Unsized:
    """A loader without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Untouched(Task):
    """A task whose step may not be reached."""

    def train_step(self, batch: Any) -> Any:
        raise AssertionError("batch 1 was reached")
