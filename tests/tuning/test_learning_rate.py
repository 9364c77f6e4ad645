"""find_lr: the curve, the suggestion, and a trainer that is as it was."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import zae
from kit.hand import loader, network
from kit.table import Task
from zae import ConfigError
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.display.text import number
from zae.tuning.learning_rate import RangeTest
from zae.values.walk import tensors_in

SETS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "none": ((), {}),
    "all": (
        (AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon, JSONLLoggerAddon, StateManagerAddon),
        {"precision": "bf16", "gradient_accumulation_steps": 4, "gradient_clip": 0.5, "save_every": 2, "patience": 1},
    ),
}


def make(name: str, folder: Path, scheduler: Any = None) -> Any:
    add_ons, options = SETS[name]
    if add_ons:
        options = options | {"save_path": folder / "run", "jsonl_path": folder / "log.jsonl"}
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = {"optimizer": optimizer, "scheduler": scheduler, "seed": 4, "log_bar": False}
    return Task.add_on(*add_ons)(model, "cpu", **given, **options)


def streams(batches: DataLoader[Any]) -> list[Any]:
    """Return what random streams and the loader's generator draw next, without drawing it."""
    return [
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
        random.getstate(),
        batches.generator.get_state().tolist(),
    ]


def batches_of() -> DataLoader[Any]:
    return loader(40, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("is_begun", [False, True])
def test_the_trainer_and_all_that_it_uses_stay_as_they_were(tmp_path: Path, name: str, is_begun: bool) -> None:
    trained = []
    for folder in (tmp_path / "tested", tmp_path / "plain"):
        trainer, batches = make(name, folder, zae.schedulers.cosine(total_steps=100)), batches_of()
        if is_begun:
            trainer.run(1, batches)
        if folder.name == "tested":
            torch.manual_seed(7)
            state = [each.clone() for each in tensors_in(trainer.state_dict())]
            files = sorted(folder.rglob("*"))
            before, rates = streams(batches), [g["lr"] for g in trainer.optimizer.param_groups]
            found = zae.find_lr(trainer, batches, steps=30)
            assert len(found.losses) > 10
            assert streams(batches) == before
            assert sorted(folder.rglob("*")) == files
            after = tensors_in(trainer.state_dict())
            assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
            assert [g["lr"] for g in trainer.optimizer.param_groups] == rates
            assert all(p.grad is None for p in trainer.unwrap().parameters())
        torch.manual_seed(7)
        trainer.run(1, batches)
        trained.append([*tensors_in(trainer.state_dict())])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


class Digits(zae.Trainer):
    def train_step(self, batch: Any) -> Any:
        x, y = batch
        output = self.model(x)
        return {"loss": cross_entropy(output, y), "accuracy": (output.argmax(1) == y).float().mean()}

    test_step = train_step


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)])
def test_the_suggestion_trains_digits_to_95_percent(optimizer: Any) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, valid = (TensorDataset(x[part], y[part]) for part in (order[:1400], order[1400:]))

    def make_model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def make_trainer(lr: float) -> Digits:
        return Digits(make_model, "cpu", optimizer=lambda p: optimizer(p, lr=lr), seed=0, log_bar=False)

    batches = DataLoader(train, 32, shuffle=True)
    found = zae.find_lr(make_trainer(1e-3), batches)
    assert found.suggestion is not None
    trainer = make_trainer(found.suggestion)
    trainer.run(30, batches, DataLoader(valid, 397))
    assert trainer.test_metrics["accuracy"] >= 0.95


def test_the_curve_is_exponential_smoothed_and_ends_where_the_loss_diverges() -> None:
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.3}, {"params": [model.bias], "lr": 0.1}]
    seen: list[list[float]] = []

    class Quadratic(zae.Trainer):
        def train_step(self, batch: Any) -> Any:
            return {"loss": (self.model(batch) - 3).square().mean()}

        def step_one(self, optimizer: Any) -> bool:
            seen.append([group["lr"] for group in optimizer.param_groups])
            return super().step_one(optimizer)

        test_step = train_step

    trainer = Quadratic(model, "cpu", optimizer=torch.optim.SGD(groups, lr=1.0), log_bar=False)
    found = zae.find_lr(trainer, [torch.ones(4, 2)] * 3, min_lr=1e-4, max_lr=1e3, steps=71)
    assert "diverged at" in found.stopped
    assert len(found.losses) < 71
    assert found.learning_rates == pytest.approx([1e-4 * 10 ** (i / 10) for i in range(len(found.losses))])
    assert [big for big, _ in seen[: len(found.losses)]] == pytest.approx(found.learning_rates)
    assert all(small == pytest.approx(big / 3) for big, small in seen)
    average, beta = 0.0, 0.98
    for at, loss in enumerate(found.losses):  # fastai's and Lightning's, step by step.
        average = beta * average + (1 - beta) * loss
        assert found.smoothed[at] == pytest.approx(average / (1 - beta ** (at + 1)))
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 0.5

    assert str(found) == repr(found) == f"suggestion: lr={number(found.suggestion, 3)}; {found.stopped}"


def test_a_loss_that_is_not_finite_or_does_not_fall_has_no_suggestion() -> None:
    class Flat(Task):
        def train_step(self, batch: Any) -> Any:
            return {"loss": sum(p.sum() for p in self.model.parameters()) * 0 + self.value}

    trainer = Flat(network(), "cpu", optimizer=torch.optim.AdamW, log_bar=False)
    for trainer.value, text in ((1.0, "the highest rate, 10, was tried"), (math.nan, "the loss was nan at 1e-7")):
        found = zae.find_lr(trainer, loader(), steps=12)
        assert found.suggestion is None
        assert found.stopped == text
        assert text in str(found)
    assert RangeTest().suggestion is None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.ones(2)])


class Saving(JSONLLoggerAddon, StateManagerAddon, GradientAccumulationAddon, Task):
    """A class that derives from add-ons that write, and calls them."""

    def train_step(self, batch: Any) -> Any:
        assert not self.clients
        assert self.last_path is None
        return super().train_step(batch)


def test_a_class_that_derives_from_what_writes_is_tried_without_it(tmp_path: Path) -> None:
    """The add-ons that take part in a step stay: the losses are those of windows of two batches."""
    losses = []
    paths = {"save_path": tmp_path / "run", "jsonl_path": tmp_path / "log.jsonl"}
    for task, options in ((Task.add_on(GradientAccumulationAddon), {}), (Saving, paths)):
        options = {
            "optimizer": torch.optim.AdamW,
            "log_bar": False,
            "gradient_accumulation_steps": 2,
            "seed": 1,
            **options,
        }
        losses.append(zae.find_lr(task(network(), "cpu", **options), loader(), steps=10).losses)
    assert losses[0] == losses[1]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_tried_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    def refused(text: str, trainer: Any, batches: Any = None, **options: Any) -> None:
        with pytest.raises(ConfigError, match=re.escape(text)):
            zae.find_lr(trainer, loader() if batches is None else batches, **options)

    def build(task: Any = Task, **options: Any) -> Any:
        return task(network(), "cpu", **{"optimizer": torch.optim.AdamW, "log_bar": False} | options)

    two = {"a": lambda p: torch.optim.SGD([*p][:1], 0.1), "b": lambda p: torch.optim.SGD([*p][1:], 0.1)}
    refused("write two numbers, 0 < min_lr < max_lr", build(), min_lr=1.0, max_lr=0.1)
    refused("steps=3; it must be a whole number of at least 10", build(), steps=3)
    refused("this trainer has the optimizers a, b", build(optimizer=two))
    refused("give a DataLoader, or a list of batches", build(), DataLoader(Stream()))
    refused("give a DataLoader, or a list of batches", build(), (each for each in loader()))
    refused("write trainer.toggle('train') first", build(mode="test", optimizer=None))
    refused("call it with the trainer without its parallel add-on", build(Task.add_on(MultiGPUAddon)))
