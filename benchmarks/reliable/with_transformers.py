"""Transformers' Trainer, with resume_from_checkpoint=True where there is a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from reliable.common import Report, data, digest, loss_of, model

LIBRARY = "transformers"
transformers.logging.set_verbosity_error()


class Wrapped(nn.Module):
    """The classifier as the Trainer calls it."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self.net, self.poison, self.calls = model(), poison, 0

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        self.calls += 1
        return {"loss": loss_of(self.net, (inputs, labels), self.calls == self.poison)}


def train(folder: Path, epochs: int, poison: int = 0) -> Report:
    """Train, or go on."""
    module = Wrapped(poison)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=4, learning_rate=0.01, seed=3,
        save_strategy="epoch", save_total_limit=2, report_to=[], disable_tqdm=True, use_cpu=True,
        lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    rows = [{"inputs": inputs, "labels": label} for inputs, label in data()]
    trainer = transformers.Trainer(
        module, arguments, train_dataset=rows, optimizers=(torch.optim.AdamW(module.parameters(), lr=0.01), None)
    )
    there = folder.exists() and any(folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if there else None)
    return Report(trainer.state.global_step - module.calls, trainer.state.global_step, digest(module.net))
