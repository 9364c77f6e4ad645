"""A model that is weights and next to nothing else, and how much of a device's memory it takes to train it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from device.on_device.tasks import DEVICE, Task

SMALL = os.environ.get("SMALL") == "1" or "ZAE_EMULATED_DEVICE" in os.environ
WIDTH, DEPTH = (1100, 16) if SMALL else (2048, 16)
"""Weights above 64 MiB: StateManagerAddon tries the state of smaller ones on a copy, which is no leak."""


class Deep(nn.Module):
    """Many layers and few rows: weights, and activations of next to nothing."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values + torch.relu(layer(values))
        return values


class Squares(Task):
    """Make the outputs small."""

    def train_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


WEIGHTS = sum(parameter.numel() * parameter.element_size() for parameter in Deep().parameters())
BATCHES = [torch.ones(4, WIDTH)] * (2 if SMALL else 4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def by_hand() -> None:
    """Train in plain PyTorch."""
    model = Deep().to(DEVICE)
    optimizer = adamw(model.parameters())
    for batch in BATCHES:
        model(batch.to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_zae(*addons: type, valid: Any = None, epochs: int = 1, **options: Any) -> None:
    """Train with zae."""
    trainer = Squares.add_on(*addons)(Deep, DEVICE, optimizer=adamw, seed=0, log_bar=False, **options)
    trainer.run(epochs, BATCHES, valid)


def free_memory() -> None:
    """Give back the memory of what is not used any more."""
    gc.collect()
    torch.get_device_module(DEVICE).empty_cache()


def peak(train: Callable[[], object]) -> float:
    """Return the peak of the device's memory while a function trains, in units of the weights."""
    memory = torch.get_device_module(DEVICE)
    free_memory()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    train()
    return (memory.max_memory_allocated() - before) / WEIGHTS
