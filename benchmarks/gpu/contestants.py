"""The loops that are compared: by hand, zae, Lightning and Transformers. Each trains a job's model over a loader."""

from __future__ import annotations

import gc
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zae
from gpu.networks import Clock, Job, loss_of, optimizer_of
from gpu.settings import DEVICE
from zae.addons import AMPAddon

BY_HAND = "by hand"
Train = Callable[[Job, nn.Module, Clock], None]


def by_hand(job: Job, model: nn.Module, loader: Clock) -> None:
    """Train as one writes it; the mean of the loss is kept on the device."""
    optimizer = optimizer_of(model.parameters())
    total = torch.zeros((), device=DEVICE)
    for batch in loader:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=job.is_bf16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()


class Task(zae.Trainer):
    """Train on the loss."""

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": loss_of(self.model, batch)}

    test_step = train_step


def by_zae(job: Job, model: nn.Module, loader: Clock) -> None:
    """Train with zae."""
    options: dict[str, Any] = {"precision": "bf16"} if job.is_bf16 else {}
    task = Task.add_on(AMPAddon) if job.is_bf16 else Task
    task(model, DEVICE, optimizer=optimizer_of, log_bar=False, **options).run(1, loader)


def by_lightning(job: Job, model: nn.Module, loader: Clock) -> None:
    """Train with Lightning, without what it adds by default: checkpoints, logs, a bar, a summary."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.network, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.parameters())

    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed" if job.is_bf16 else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)


def by_transformers(job: Job, model: nn.Module, loader: Clock) -> None:
    """Train with the Trainer of Transformers, without checkpoints, logs, a bar or clipping."""
    import transformers

    transformers.logging.set_verbosity_error()

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return loss_of(model, inputs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            max_grad_norm=0.0,
            bf16=job.is_bf16,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            lr_scheduler_type="constant",
        )
        optimizers = (optimizer_of(model.parameters()), None)
        trainer = Trainer(model, arguments, train_dataset=[None], optimizers=optimizers)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


PEERS: dict[str, tuple[tuple[str, ...], Train]] = {
    "Lightning": (("lightning",), by_lightning),
    "Transformers": (("transformers", "accelerate"), by_transformers),
}
"""By name: the packages that it needs, and how it trains."""


def contestants() -> dict[str, Train]:
    """Return zae and the peers that are installed, by name."""
    missing = missing_peers()
    return {"zae": by_zae} | {name: train for name, (_, train) in PEERS.items() if name not in missing}


def missing_peers() -> list[str]:
    """Return the peers that are not installed, or lack a package."""
    return [name for name, (needed, _) in PEERS.items() if None in map(importlib.util.find_spec, needed)]


def seconds_of_a_step(job: Job, train: Train) -> float:
    """Train a new model, and return the seconds of a step."""
    gc.collect()  # Trainers before this one are cycles, and hold their models.
    model = job.model()
    loader = Clock(job.batches())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(job, model, loader)
    return loader.seconds()
