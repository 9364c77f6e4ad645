"""The program that these tests run, what it ends with where nothing disturbs it, and the jobs of the pages."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from cluster.hosts import TESTS
from kit.engines import ENGINES, build, data, net, weights
from kit.rank_tasks import forks

EPOCHS = 5
TRAIN = str(Path(__file__).with_name("train.py"))
DOCS = TESTS.parent / "docs"


@functools.cache
def undisturbed(engine: str | None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights with which the program ends on two ranks, or without an engine on one, undisturbed."""
    devices = ["cpu", "cpu"] if engine else "cpu"
    with forks():
        trainer = build(ENGINES[engine] if engine else None, model=net(dropout=0.1), device=devices, seed=seed)
        trainer.run(EPOCHS, data())
        return weights(trainer)


def has_ended_as_undisturbed(folder: str, engine: str | None = "ddp", seed: int = 0) -> bool:
    """Whether the program that wrote to a folder ended with bitwise these weights."""
    end, other = torch.load(f"{folder}.pt", weights_only=True), undisturbed(engine, seed)
    return end.keys() == other.keys() and all(torch.equal(end[name], other[name]) for name in other)


def checkpoints(folder: str) -> set[str]:
    """Return the names of the checkpoints in a folder."""
    return {path.name for path in Path(folder).glob("step-*")}
