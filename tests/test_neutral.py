"""Watching a run does not change it; weights and random states are bitwise those of the run nobody watched."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zae
from kit import matrix, oracle
from zae import Every, random_state
from zae.addons import EMAAddon, LedgerAddon, StateManagerAddon
from zae.display.terminal import Terminal


class Task(zae.Trainer):
    """A task whose evaluation draws from every random stream, as augmentation at test time does."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        noise = random.random() + np.random.rand()
        return {"loss": nn.functional.mse_loss(self.model(inputs + 0.01 * noise), targets)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        noise = torch.randn(()) + random.random() + np.random.rand()
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets), "output": self.model(inputs) + noise}

    def metric_on_epoch_end(self) -> dict[str, float]:
        random.shuffle(order := [1, 2, 3])
        return {"drawn": torch.rand(1).item() + order[0] - order[0]} if self.mode == "test" else {}


def train(cls: Any, generator: bool = False, workers: int = 0, valid: Any = None, **keywords: Any) -> dict[str, Any]:
    """Three epochs; everything that an observer could have disturbed."""
    random_state.seed_everything(5)
    model = oracle.Net()
    data = TensorDataset(torch.randn(20, 3), torch.randn(20, 2))
    own = torch.Generator().manual_seed(3) if generator else None
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=own, num_workers=workers)
    valid_loader = None if valid is None else DataLoader(data, batch_size=6, shuffle=True, generator=own)
    every = valid if valid is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = cls(model, "cpu", optimizer=optimizer, gradient_clip=0.5, **keywords)
    trainer.run(3, loader, valid_loader, valid_every=every)
    state = random_state.capture()
    return {
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": [row["train_loss"] for row in trainer.train_history],
        "random": repr(state),
        "generator": None if own is None else own.get_state(),
    }


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert matrix.first_difference(a, b) is None


@pytest.mark.parametrize("generator", [False, True], ids=["global", "own-generator"])
@pytest.mark.parametrize("every", [1, 2, 4, Every(epochs=1), Every(epochs=2)], ids=str)
def test_validation_at_any_cadence_is_neutral(every: Any, generator: bool) -> None:
    """With a shuffled validation that draws from every stream, even from the training loader's generator."""
    assert_same(train(Task, generator), train(Task, generator, valid=every))


@pytest.mark.parametrize("workers", [0, 1])
def test_all_observers_together_are_neutral(workers: int, tmp_path: Path) -> None:
    """Checkpoints, an average, a ledger, records at every step and validation."""
    watched = Task.add_on(StateManagerAddon, EMAAddon, LedgerAddon)
    options = {"save_path": tmp_path, "save_every": 2, "ledger_path": tmp_path / "ledger.jsonl", "log_every": 1}
    assert_same(train(Task, workers=workers), train(watched, workers=workers, valid=3, **options))


def test_the_progress_bar_is_neutral(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar that is really drawn at every step."""
    plain = train(Task)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(Terminal, "interval", 0.0)
    monkeypatch.delenv("CI", raising=False)
    assert_same(plain, train(Task, log_bar=True, valid=2))
    assert "epoch 3" in capsys.readouterr().err


def test_the_profiler_is_neutral() -> None:
    """Inside of torch's profiler."""
    plain = train(Task)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        watched = train(Task, valid=2)
    assert profiler.key_averages()
    assert_same(plain, watched)


def test_evaluate_and_inference_between_runs_are_neutral() -> None:
    """Asking a trainer for figures does not move its next run."""

    class Curious(Task):
        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            data = [(torch.ones(2, 3), torch.ones(2, 2))]
            self.evaluate(data)
            self.inference(data)

    assert_same(train(Task), train(Curious))
