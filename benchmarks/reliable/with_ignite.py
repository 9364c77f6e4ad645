"""ignite, with Checkpoint and DiskSaver (atomic), and its newest file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events
from ignite.engine.deterministic import DeterministicEngine
from ignite.handlers import Checkpoint, DiskSaver
from ignite.utils import manual_seed

from reliable.common import Report, digest, loader, loss_of, model

LIBRARY = "ignite"


def train(folder: Path, epochs: int, poison: int = 0) -> Report:
    """Train, or go on."""
    manual_seed(3)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)

    def step(engine: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(module, batch, engine.state.iteration == poison)
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = DeterministicEngine(step)
    objects = {"model": module, "optimizer": optimizer, "trainer": engine}
    found = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem.rpartition("_")[2])) if folder.exists() else []
    if found:
        Checkpoint.load_objects(objects, torch.load(found[-1], weights_only=False))
    began = engine.state.iteration
    saver = Checkpoint(objects, DiskSaver(str(folder), create_dir=True, require_empty=False), n_saved=2)
    engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
    engine.run(loader(), max_epochs=epochs)
    return Report(began, engine.state.iteration, digest(module))
