"""Searches that tests run: a straight line to fit, in milliseconds a trial. Other processes import this file."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zae import Trainer
from zae.addons import StateManagerAddon

SPACE: dict[str, Any] = {"lr": (1e-3, 0.3, "log"), "bias": [True, False], "epochs": (2, 4)}


class Line(Trainer):
    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()}

    def test_step(self, batch: torch.Tensor) -> dict[str, Any]:
        error = self.train_step(batch)["loss"]
        return {"loss": error, "accuracy": 1 / (1 + error)}


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator) for _ in range(5)]


def make_trainer(trial: Any, **options: Any) -> Any:
    def model() -> nn.Module:
        return nn.Linear(4, 1, bias=trial["bias"])

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=trial["lr"])

    return Line(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def run(trainer: Any, trial: Any) -> Any:
    return trainer.run(trial["epochs"], batches(), batches())


class Dying(Line.add_on(StateManagerAddon)):  # type: ignore[misc]
    """Killed in the second epoch of trial 2, where the folder of the search has a file ``die``; it is removed first."""

    mark: Path | None = None

    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        if self.mark is not None and self.mark.exists() and self.progress_checker.step == 7:
            self.mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)


def make_saved(trial: Any, **options: Any) -> Any:
    """With checkpoints in the folder of the trial, to resume from."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 1, bias=trial["bias"]))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=trial["lr"], momentum=0.5)

    given = {"save_path": trial.folder / "checkpoints", "resume": "auto", "log_bar": False, **options}
    trainer = Dying(model, "cpu", optimizer=optimizer, **given)
    if trial.number == 2:
        trainer.mark = trial.folder.parent / "die"
    return trainer


def make_again(trial: Any) -> Any:
    """With checkpoints, and without a resume."""
    return make_saved(trial, resume=False)
