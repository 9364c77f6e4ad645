"""The peak of the device's memory, in units of the weights, is that of the loop by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zae
from gpu.report import Report
from gpu.settings import DEVICE, SMALL, free_memory
from zae.addons import EMAAddon, GradientAccumulationAddon, SilentFaultGuardAddon, StateManagerAddon

WIDTH, DEPTH = (1100, 16) if SMALL else (2048, 16)
"""Weights above 64 MiB: StateManagerAddon tries the state of smaller ones on a copy, which is no leak."""
ROUNDING = 0.05
"""Of the weights: what blocks of the allocator, and small tensors, may take."""


class Deep(nn.Module):
    """Many layers and few rows: weights, and activations of next to nothing."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values + torch.relu(layer(values))
        return values


class Squares(zae.Trainer):
    """Make the outputs small."""

    def train_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


WEIGHTS = sum(parameter.numel() * parameter.element_size() for parameter in Deep().parameters())
BATCHES = [torch.ones(4, WIDTH)] * (2 if SMALL else 4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


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
        "silent fault guard": (lambda: by_zae(SilentFaultGuardAddon, fault_check_every=2), 1),
    }


def by_zae(*addons: type, valid: Any = None, epochs: int = 1, **options: Any) -> None:
    """Train with zae."""
    trainer = Squares.add_on(*addons)(Deep, DEVICE, optimizer=adamw, seed=0, log_bar=False, **options)
    trainer.run(epochs, BATCHES, valid)


def by_hand() -> None:
    """Train in plain PyTorch."""
    model = Deep().to(DEVICE)
    optimizer = adamw(model.parameters())
    for batch in BATCHES:
        model(batch.to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak(train: Callable[[], None]) -> float:
    """Return the peak of memory while a function trains, in units of the weights."""
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train()
    return (torch.cuda.max_memory_allocated() - before) / WEIGHTS
