"""PyTorch-Ignite: an Engine and its handlers."""

from __future__ import annotations

import json
from typing import Any

from harness import ACCUMULATE, CLIP, PATIENCE, Job, loss_of
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, ProgressBar
from ignite.metrics import Average
from torch import nn, no_grad

NAME = "ignite"
PACKAGES = ("ignite",)


def evaluator_of(job: Job) -> Engine:
    def step(engine: Engine, batch: Any) -> float:
        job.model.eval()
        with no_grad():
            return loss_of(job.model, batch).item()

    engine = Engine(step)
    Average().attach(engine, "loss")
    return engine


def train(job: Job) -> None:
    every = ACCUMULATE if job.features else 1

    def step(engine: Engine, batch: Any) -> float:
        job.model.train()
        loss = loss_of(job.model, batch)
        index, count = (engine.state.iteration - 1) % engine.state.epoch_length, engine.state.epoch_length
        window = min(every, count - index // every * every)
        (loss / window if window > 1 else loss).backward()
        if (index + 1) % every == 0 or index + 1 == count:
            if job.features:
                nn.utils.clip_grad_norm_(job.model.parameters(), CLIP)
            job.optimizer.step()
            job.optimizer.zero_grad()
        return loss.item()

    engine = Engine(step)
    Average().attach(engine, "loss")
    if job.features:
        add_features(job, engine)
    engine.run(job.loader, max_epochs=job.epochs)


def add_features(job: Job, engine: Engine) -> None:
    evaluator = evaluator_of(job)
    ProgressBar().attach(engine)
    stopping = EarlyStopping(PATIENCE, lambda e: -e.state.metrics["loss"], engine)
    evaluator.add_event_handler(Events.COMPLETED, stopping)
    saver = DiskSaver(str(job.folder), require_empty=False)
    state = {"model": job.model, "optimizer": job.optimizer}
    engine.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(state, saver, n_saved=1))

    @engine.on(Events.EPOCH_COMPLETED)
    def validate(engine: Engine) -> None:
        evaluator.run(job.valid)
        with (job.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps([engine.state.metrics["loss"], evaluator.state.metrics["loss"]]) + "\n")


def evaluate(job: Job) -> None:
    evaluator = evaluator_of(job)
    for _ in range(job.epochs):
        evaluator.run(job.valid)
