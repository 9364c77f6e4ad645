"""Accelerate: the loop is the user's own, and its parts are prepared."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from contestants.with_loop import evaluate_with, train_with
from harness import ACCUMULATE, CLIP, Job
from torch.utils.data import DataLoader

NAME = "Accelerate"
PACKAGES = ("accelerate",)


def parts(job: Job) -> tuple[Any, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE if job.features else 1)
    model, optimizer = accelerator.prepare(job.model, job.optimizer)
    loader = job.loader or job.valid
    return accelerator, model, optimizer, accelerator.prepare(loader) if isinstance(loader, DataLoader) else loader


def train(job: Job) -> None:
    accelerator, model, optimizer, loader = parts(job)

    def step(batch: Any, loss_of: Any) -> Any:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if job.features and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    train_with(job, model, loader, step)


def evaluate(job: Job) -> None:
    _, model, _, loader = parts(job)
    evaluate_with(model, loader, job.epochs)
