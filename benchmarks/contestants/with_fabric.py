"""Lightning Fabric: the loop is the user's own, and its parts are wrapped."""

from __future__ import annotations

from typing import Any

from contestants.with_loop import evaluate_with, train_with
from harness import ACCUMULATE, CLIP, Job
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

NAME = "Lightning Fabric"
PACKAGES = ("lightning",)


def parts(job: Job) -> tuple[Any, Any, Any, Any]:
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(job.model, job.optimizer)
    loader = job.loader or job.valid
    return fabric, model, optimizer, fabric.setup_dataloaders(loader) if isinstance(loader, DataLoader) else loader


def train(job: Job) -> None:
    fabric, model, optimizer, loader = parts(job)
    every = ACCUMULATE if job.features else 1
    done = 0

    def step(batch: Any, loss_of: Any) -> Any:
        nonlocal done
        count = len(loader)
        index = done % count
        window = min(every, count - index // every * every)
        loss = loss_of(model, batch)
        fabric.backward(loss / window if window > 1 else loss)
        done += 1
        if (index + 1) % every == 0 or index + 1 == count:
            if job.features:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    train_with(job, model, loader, step)


def evaluate(job: Job) -> None:
    _, model, _, loader = parts(job)
    evaluate_with(model, loader, job.epochs)
