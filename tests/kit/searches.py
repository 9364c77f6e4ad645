"""Searches that tests run: a straight line to fit, in milliseconds a trial."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn

from kit.hand import digest
from zae import Trainer
from zae.addons import StateManagerAddon
from zae.search import PruningAddon, search


class Line(Trainer):
    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()}

    def test_step(self, batch: torch.Tensor) -> dict[str, Any]:
        error = self.train_step(batch)["loss"]
        return {"loss": error, "accuracy": 1 / (1 + error)}


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator) for _ in range(5)]


def make_trainer(lr: float, bias: bool = True, kind: Any = Line, **options: Any) -> Any:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 1, bias=bias))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return kind(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def train_line(trial: optuna.Trial) -> float:
    """Train with parameters of all kinds; the dropout draws from the global streams."""
    lr = trial.suggest_float("lr", 1e-3, 0.3, log=True)
    trainer = make_trainer(lr, trial.suggest_categorical("bias", [True, False]))
    trainer.run(trial.suggest_int("epochs", 2, 4), batches(), batches())
    trial.set_user_attr("weights", digest(trainer.unwrap()))
    return float(trainer.history.best["score"])


def outcome(study: optuna.Study) -> list[Any]:
    """Return all of the trials that does not depend on the time."""
    return [
        (each.number, each.state.name, each.params, each.values, each.intermediate_values, each.user_attrs)
        for each in study.trials
    ]


def kill_at(place: str) -> None:
    """End this process by SIGKILL where the environment names this place; otherwise go on."""
    if os.environ.get("KILL_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)


class Dying(Line.add_on(StateManagerAddon, PruningAddon)):  # type: ignore[misc]
    """Killed in the second epoch of trial 6, or as it reports its second validation."""

    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        if self.optuna_trial.number == 6 and self.progress_checker.step == 7:
            kill_at("step")
        return super().train_step(batch)

    def stop(self, reason: str) -> None:
        if "pruned" in reason:
            kill_at("pruned")
        super().stop(reason)


def train_saved(trial: optuna.Trial, folder: Path, resume: str | bool) -> float:
    """Train with checkpoints, and with a pruner of optuna."""
    lr = trial.suggest_float("lr", 1e-3, 0.3, log=True)
    if trial.number == 6:
        kill_at("draw")
    bias = trial.suggest_categorical("bias", [True, False])
    options = {"resume": resume} if resume else {"overwrite": True}
    path = folder / str(trial.number)
    trainer = make_trainer(lr, bias, Dying, save_path=path, optuna_trial=trial, **options)
    trainer.run(trial.suggest_int("epochs", 2, 4), batches(), batches())
    if trial.number == 6:
        kill_at("end")
    if not trial.should_prune():  # One that was pruned before a kill is not trained again.
        trial.set_user_attr("weights", digest(trainer.unwrap()))
    return float(trainer.history.best["score"])


def search_saved(folder: Path, resume: str | bool) -> optuna.Study:
    return search(
        lambda trial: train_saved(trial, folder, resume),
        n_trials=9,
        folder=folder,
        seed=3,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
