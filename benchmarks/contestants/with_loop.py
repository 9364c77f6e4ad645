"""What a loop of the user's own adds around a library's step; no contestant by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Job, loss_of, save
from tqdm.auto import tqdm


def train_with(job: Job, model: Any, loader: Any, step: Callable[[Any, Any], Any]) -> None:
    for epoch in range(job.epochs):
        model.train()
        total, seen = 0.0, 0
        bar = tqdm(total=len(loader), leave=False, mininterval=0.2, disable=not job.features)
        for batch in loader:
            loss = step(batch, loss_of)
            total, seen = total + loss.item() * len(batch[0]), seen + len(batch[0])
            if job.features:
                bar.update()
        bar.close()
        if job.features:
            evaluate_with(model, job.valid, 1)
            save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "epoch": epoch}, job.folder)


def evaluate_with(model: Any, loader: Any, epochs: int) -> None:
    for _ in range(epochs):
        model.eval()
        total, seen = 0.0, 0
        with torch.no_grad():
            for batch in loader:
                total, seen = total + loss_of(model, batch).item() * len(batch[0]), seen + len(batch[0])
