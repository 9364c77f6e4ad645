"""Lightning, with ModelCheckpoint(save_last=True) and ckpt_path="last"."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from reliable.common import Report, digest, loader, loss_of, model

LIBRARY = "lightning"
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Module(pl.LightningModule):
    """The classifier."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self.net, self.poison, self.began = model(), poison, 0

    def on_train_start(self) -> None:
        self.began = self.global_step

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.net, batch, self.global_step + 1 == self.poison)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(folder: Path, epochs: int, poison: int = 0) -> Report:
    """Train, or go on."""
    pl.seed_everything(3, verbose=False)
    module = Module(poison)
    saver = ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=2, monitor="step", mode="max", every_n_epochs=1)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, callbacks=[saver], default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(), ckpt_path="last")
    return Report(module.began, trainer.global_step, digest(module.net))
