"""zae with its state manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from reliable.common import Report, digest, loader, loss_of, model
from zae import Trainer
from zae.addons import StateManagerAddon

LIBRARY = "zae"


class Task(Trainer):
    """The classifier."""

    poison = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(self.model, batch, self.progress_checker.step + 1 == self.poison)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


def train(folder: Path, epochs: int, poison: int = 0) -> Report:
    """Train, or go on."""
    module = model()
    trainer = Task.add_on(StateManagerAddon)(
        module, "cpu", optimizer=torch.optim.AdamW(module.parameters(), lr=0.01), seed=3, log_bar=False,
        save_path=folder, resume="auto", keep_last=2,
    )  # fmt: skip
    trainer.poison = poison
    trainer.setup()
    began = trainer.progress_checker.step
    trainer.run(epochs, loader())
    return Report(began, trainer.progress_checker.step, digest(module))
