"""zae with eight add-ons that have nothing to do, and the bar on a pseudo-terminal."""

from __future__ import annotations

from typing import Any

from contestants.zae_core import Task, features_of
from harness import Job

from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    GradientAccumulationAddon,
    LedgerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.addons.loggers.jsonl_logger import JSONLLoggerAddon
from zae.addons.loggers.tensorboard_logger import TensorBoardLoggerAddon
from zae.loop.cadence import Every

NAME = "zae, eight add-ons and the bar"
TERMINAL = True
FAST_DATA = False
ADD_ONS = [AMPAddon, EarlyStoppingAddon, GradientAccumulationAddon, JSONLLoggerAddon]
ADD_ONS += [LedgerAddon, MultiGPUAddon, StateManagerAddon, TensorBoardLoggerAddon]
Eight = Task.add_on(*ADD_ONS)


def options_of(job: Job) -> dict[str, Any]:
    """Nothing is due before the run is over, but for the features of the workload."""
    never = Every(steps=10**9)
    idle = {
        "precision": "fp32",
        "patience": 10**9,
        "jsonl_path": job.folder / "log.jsonl",
        "ledger_path": job.folder / "ledger",
        "ledger_every": never,
        "save_path": job.folder / "save",
        "log_dir": job.folder / "board",
    }
    if job.features:
        return {**idle, **features_of(job)}
    return {**idle, "save_every": never, "keep_best": 0, "log_every": never}


def train(job: Job, fast_data: bool = FAST_DATA) -> None:
    trainer = Eight(job.model, "cpu", optimizer=job.optimizer, fast_data=fast_data, **options_of(job))
    trainer.run(job.epochs, job.loader, job.valid)


def evaluate(job: Job, fast_data: bool = FAST_DATA) -> None:
    trainer = Eight(job.model, "cpu", mode="test", fast_data=fast_data, **options_of(job))
    for _ in range(job.epochs):
        trainer.evaluate(job.valid)
