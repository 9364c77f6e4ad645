"""zae without add-ons, over the plain DataLoader; with add-ons where the workload has features."""

from __future__ import annotations

from typing import Any

from harness import ACCUMULATE, CLIP, PATIENCE, Job, loss_of

import zae
from zae.addons import EarlyStoppingAddon, GradientAccumulationAddon, StateManagerAddon
from zae.addons.loggers.jsonl_logger import JSONLLoggerAddon

NAME = "zae"
FAST_DATA = False


class Task(zae.Trainer):
    """A classifier."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(self.model, batch)}

    test_step = train_step


Everything = Task.add_on(GradientAccumulationAddon, EarlyStoppingAddon, StateManagerAddon, JSONLLoggerAddon)


def features_of(job: Job) -> dict[str, Any]:
    """The options of everything."""
    return {
        "gradient_clip": CLIP,
        "gradient_accumulation_steps": ACCUMULATE,
        "patience": PATIENCE,
        "save_path": job.folder / "save",
        "jsonl_path": job.folder / "log.jsonl",
    }


def train(job: Job, fast_data: bool = FAST_DATA) -> None:
    if job.features:
        trainer = Everything(job.model, "cpu", optimizer=job.optimizer, fast_data=fast_data, **features_of(job))
    else:
        trainer = Task(job.model, "cpu", optimizer=job.optimizer, log_bar=False, fast_data=fast_data)
    trainer.run(job.epochs, job.loader, job.valid)


def evaluate(job: Job, fast_data: bool = FAST_DATA) -> None:
    trainer = Task(job.model, "cpu", mode="test", log_bar=False, fast_data=fast_data)
    for _ in range(job.epochs):
        trainer.evaluate(job.valid)
