"""Accelerate, with save_state in automatic names, and load_state of the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

from reliable.common import Report, digest, loader, loss_of, model

LIBRARY = "accelerate"


class Progress:
    """The epochs that are done."""

    epoch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


def train(folder: Path, epochs: int, poison: int = 0) -> Report:
    """Train, or go on."""
    set_seed(3)
    config = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    module = model()
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=0.01)
    module, optimizer, batches = accelerator.prepare(module, optimizer, loader())
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if (folder / "checkpoints").exists() and any((folder / "checkpoints").iterdir()):
        accelerator.load_state()
        config.iteration = progress.epoch
    steps = began = progress.epoch * len(batches)
    for epoch in range(progress.epoch, epochs):
        for batch in batches:
            steps += 1
            accelerator.backward(loss_of(module, batch, steps == poison))
            optimizer.step()
            optimizer.zero_grad()
        progress.epoch = epoch + 1
        accelerator.save_state()
    return Report(began, steps, digest(accelerator.unwrap_model(module)))
