"""What a step keeps, in counts that no noise moves: live tensors, and bytes that stay."""

from __future__ import annotations

import gc
import importlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zae import Trainer
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

ROOT = Path(__file__).resolve().parent.parent
EIGHT = (AMPAddon, EarlyStoppingAddon, GradientAccumulationAddon, LedgerAddon, MultiGPUAddon, StateManagerAddon,
         JSONLLoggerAddon, TensorBoardLoggerAddon)  # fmt: skip


class Task(Trainer):
    """The smallest step."""

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.model(batch[0]).square().mean()}

    test_step = train_step


class Batches:
    """So many batches, which are one."""

    def __init__(self, count: int) -> None:
        self.count, self.batch = count, (torch.ones(4, 2), torch.ones(4))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        for _ in range(self.count):
            yield self.batch


def build(cls: type[Trainer], **options: Any) -> Any:
    model = nn.Linear(2, 1)
    return cls(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01), log_bar=False, **options)


def idle(folder: Path) -> dict[str, Any]:
    """Options with which eight add-ons have nothing to do."""
    never = Every(steps=10**9)
    return {
        "precision": "fp32", "patience": 10**9, "ledger_path": folder / "ledger", "ledger_every": never,
        "save_path": folder / "save", "save_every": never, "log_every": never, "jsonl_path": folder / "log.jsonl",
        "log_dir": folder / "board",
    }  # fmt: skip


@pytest.mark.parametrize("cls", [Task, Task.add_on(*EIGHT)], ids=["none", "eight"])
def test_live_tensors_do_not_grow(cls: type[Trainer], tmp_path: Path) -> None:
    """After each step nothing that is kept has a graph, and a thousand steps keep as many tensors as ten."""
    counts: list[int] = []
    graphs: list[int] = []

    class Counted(cls):  # type: ignore[misc, valid-type]
        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            gc.collect()
            tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
            counts.append(len(tensors))
            graphs.append(sum(each.grad_fn is not None for each in tensors))

    trainer = build(Counted, **(idle(tmp_path) if cls is not Task else {}))
    for steps in (10, 10, 1000):
        trainer.run(1, Batches(steps))
    assert counts[2] <= counts[1]
    assert graphs[2] <= graphs[0]


def test_a_step_keeps_at_most_fifty_bytes() -> None:
    """The log of the open epoch keeps a value and a weight of each step."""
    held: list[int] = []

    class Measured(Task):
        def checkpoint(self) -> None:
            super().checkpoint()
            if self.progress_checker.step in (500, 4500):
                held.append(tracemalloc.get_traced_memory()[0])

    trainer = build(Measured)
    tracemalloc.start()
    try:
        trainer.run(1, Batches(5000))
    finally:
        tracemalloc.stop()
    assert (held[1] - held[0]) / 4000 <= 50


# ------------------------------------------------------------------------------------------ the page of performance


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/models.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("models")


def test_the_section_of_models_is_what_was_measured(models: Any) -> None:
    """The page shows models.json, and names each column in which zae is not first."""
    found = json.loads(models.FILE.read_text())
    assert models.section(found) in models.PAGE.read_text()
    slower = {**found, "saves": {**found["saves"], "zae, safetensors": [9.0, 9.1, 9.2]}}
    assert any(line.startswith("- a save, seconds: torch.save") for line in models.verdicts(slower))


def test_a_figure_is_a_median_with_its_interval(models: Any) -> None:
    rows = [{"bare": {"wall": 1.0, "cpu": 1.0, "wall_ratio": ratio, "cpu_ratio": ratio, "same": ratio < 1.2}}
            for ratio in (1.0, 1.1, 1.2)]  # fmt: skip
    assert models.summary(rows)["bare"]["wall_ratio"] == [1.0, 1.1, 1.2]
    assert not models.summary(rows)["bare"]["same"]
