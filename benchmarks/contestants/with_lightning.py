"""Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
from harness import ACCUMULATE, CLIP, PATIENCE, Job, loss_of
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

NAME = "Lightning"
PACKAGES = ("lightning",)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Module(lightning.LightningModule):
    """A classifier."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.inner = job, job.model

    def training_step(self, batch: Any, index: int) -> Any:
        loss = loss_of(self.inner, batch)
        if self.job.features:
            self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("valid", loss_of(self.inner, batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return self.job.optimizer


def trainer_of(job: Job) -> Any:
    options: dict[str, Any] = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False}
    if job.features:
        callbacks = [EarlyStopping("valid", patience=PATIENCE), ModelCheckpoint(job.folder, save_top_k=1)]
        options = {"logger": CSVLogger(job.folder), "callbacks": callbacks, "gradient_clip_val": CLIP}
        options["accumulate_grad_batches"] = ACCUMULATE
    return lightning.Trainer(
        accelerator="cpu", max_epochs=job.epochs, enable_model_summary=False, num_sanity_val_steps=0, **options
    )


def train(job: Job) -> None:
    trainer_of(job).fit(Module(job), job.loader, job.valid)


def evaluate(job: Job) -> None:
    trainer, module = trainer_of(job), Module(job)
    for _ in range(job.epochs):
        trainer.validate(module, job.valid, verbose=False)
