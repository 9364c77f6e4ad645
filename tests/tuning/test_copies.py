"""A copy of a trainer trains on borrowed batches, and everything that the two reach stays as it was."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import zae
from kit.hand import digest
from zae import ConfigError, Trainer
from zae.addons import EMAAddon, JSONLLoggerAddon, StateManagerAddon


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean()}

    test_step = train_step


def batches(count: int = 3) -> Any:
    return list(torch.randn(count, 1, 4, 3, generator=torch.Generator().manual_seed(1)))


def make(task: Any = Task, add_ons: Any = (), **options: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)


class Reading(Dataset[Any]):
    """Draws from streams of all kinds."""

    def __init__(self) -> None:
        self.own = random.Random(3)

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        return (torch.rand(3) + float(np.random.rand()) + random.random() + self.own.random(),)


class Meter:
    def __init__(self) -> None:
        self.seen: list[float] = []


class Watching(Task):
    """Its train_step changes everything that it reaches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls, self.meter, self._private, self.names = 0, Meter(), Meter(), {"a": [0]}
        self.stream = np.random.default_rng(0)
        self.head = self.model[3]  # A part of the model stays a part of it.

    def train_step(self, batch: Any) -> Any:
        self.calls += 1
        for meter in (self.meter, self._private):
            meter.seen.append(float(batch[0].sum()))
        self.names["a"].append(self.calls)
        self.log({"seen": 1.0}, self.progress_checker.step)
        self.best["odd"] = 1.0
        noise = float(self.stream.random()) + float(torch.rand(())) + float(np.random.rand()) + random.random()
        with torch.no_grad():
            self.head.bias.add_(noise)
        return super().train_step(batch)


def whole(trainer: Any, loader: Any) -> Any:
    """What a step can have changed."""
    data = getattr(loader, "dataset", None)
    return (
        digest(trainer.model), trainer.calls, trainer.meter.seen, trainer._private.seen, str(trainer.names),
        trainer.stream.bit_generator.state["state"]["state"], len(trainer.log_history), dict(trainer.best),
        trainer.progress_checker.stop_reason, [module.training for module in trainer.model.modules()],
        data.own.getstate() if isinstance(data, Reading) else None, repr(torch.get_rng_state()),
        np.random.get_state()[1].tolist(), random.getstate(),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["list", "DataLoader", "workers"])
@pytest.mark.parametrize("add_ons", [(), (EMAAddon, JSONLLoggerAddon, StateManagerAddon)])
def test_training_a_copy_touches_nothing(kind: str, add_ons: Any, tmp_path: Any) -> None:
    """Weights, attributes, records, files and every stream."""
    options = {"jsonl_path": tmp_path / "log.jsonl", "save_path": tmp_path / "saved"} if add_ons else {}
    trainer, loader = make(Watching, add_ons, **options), batches(20)
    if kind != "list":
        loader = DataLoader(Reading(), batch_size=4, shuffle=True, num_workers=2 if kind == "workers" else 0)
    before = whole(trainer, loader)
    assert len(zae.find_lr(trainer, loader, steps=10).losses) > 3
    assert whole(trainer, loader) == before
    assert not list(tmp_path.iterdir())


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(3),)] * 4)


class Bound(Task):
    """Holds what cannot be copied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lines = (line for line in "ab")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("iterator", "a batch of list_iterator cannot be taken and put back"),
        ("stream", "cannot be taken and put back"),
        ("task", "the model or the task cannot be copied"),
        ("model", "the model or the task cannot be copied"),
    ],
)
def test_what_cannot_be_copied_or_put_back_is_refused(case: str, reason: str) -> None:
    trainer, loader = make(Bound if case == "task" else Task), batches()
    if case == "model":
        trainer.model.cached = threading.Lock()
    if case == "stream":
        loader = DataLoader(Endless(), batch_size=4)
    with pytest.raises(ConfigError, match=reason):
        zae.find_lr(trainer, iter(loader) if case == "iterator" else loader)
