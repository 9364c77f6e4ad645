"""Random tasks: classes made at random that keep random values in random objects, ended twice and resumed."""

from __future__ import annotations

import datetime
import logging
import random
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from user_state.kinds import BATCH, INPUTS, PER_EPOCH, TARGETS, VALUES, Collate, Data, Keeps, Order

from zae import Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon

EPOCHS = 3
TODAY = int(datetime.date.today().strftime("%Y%m%d"))
HOOKS = ("train_step", "on_step_begin", "on_step_end", "on_epoch_begin", "on_epoch_end", "on_validation_end", "clip")
NAMES = ("hidden", "_mean", "best_loss", "index", "batch", "records", "level", "memory", "x", "state_of_mine", "inside")
EASY = tuple(kind for kind in VALUES if "graph" not in kind)


class Holder:
    """An object of a class that is made at random."""

    def __init__(self, draw: random.Random) -> None:
        kinds = [draw.choice(EASY) for _ in range(draw.randint(1, 3))]
        names = draw.sample(NAMES, len(kinds))
        self.kinds = dict(zip(names, kinds, strict=True))
        form = draw.choice(("plain", "slots", "dataclass", "derived"))
        base = type("Base", (), {"base_count": 0})
        if form == "slots":
            cls: Any = type("Slotted", (), {"__slots__": tuple(names)})
        elif form == "dataclass":
            cls = make_dataclass("Record", [(name, Any, None) for name in names])
        else:
            cls = type("Made", (base,) if form == "derived" else (), {})
        self.object = cls()
        for name, kind in self.kinds.items():
            setattr(self.object, name, VALUES[kind].begin())

    def use(self, seen: float) -> float:
        """Return a number of all values, and change some of them."""
        total = 0.0
        for name, kind in self.kinds.items():
            value = getattr(self.object, name)
            total += VALUES[kind].number(value)
            setattr(self.object, name, VALUES[kind].change(value, seen))
        return 0.01 * total


def make(seed: int) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return a task, its model, its loader and options, the same for the same seed."""
    draw = random.Random(seed)
    of_task = [(draw.choice(HOOKS), Holder(draw)) for _ in range(draw.randint(0, 3))]
    own = {name: draw.choice(EASY) for name in draw.sample(NAMES, draw.randint(0, 4))}
    hooks = {name: draw.choice(HOOKS) for name in own}
    begun_anew = [name for name in own if draw.random() < 0.3]
    # `inside` of a class is refused: an add-on has it.
    on_class = [name for name in own if draw.random() < 0.2 and name != "inside"]
    places = [draw.choice(("attribute", "list", "dict")) for _ in of_task]

    class Task(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in own.keys() - set(on_class):
                setattr(self, name, VALUES[own[name]].begin())
            self.several: list[Any] = []
            self.by_name: dict[str, Any] = {}
            for number, (place, (_, holder)) in enumerate(zip(places, of_task, strict=True)):
                if place == "attribute":
                    setattr(self, f"object_{number}", holder.object)
                elif place == "list":
                    self.several.append(holder.object)
                else:
                    self.by_name[f"object {number}"] = holder.object

        def change(self, hook: str) -> float:
            total = 0.0
            for name, kind in own.items():
                if hooks[name] == hook:
                    value = getattr(self, name)
                    total += 0.01 * VALUES[kind].number(value)
                    setattr(self, name, VALUES[kind].change(value, 0.3))
            return total + sum(holder.use(0.2) for at, holder in of_task if at == hook)

        def factor(self) -> float:
            """Return a number of all that is kept, without changing it."""
            total = 0.0
            for name, kind in own.items():
                if "stream" not in kind:
                    total += VALUES[kind].number(getattr(self, name))
            for _, holder in of_task:
                for name, kind in holder.kinds.items():
                    if "stream" not in kind:
                        total += VALUES[kind].number(getattr(holder.object, name))
            return 1.0 + 0.1 * float(torch.tanh(torch.tensor(0.01 * total)))

        def train_step(self, batch: Any) -> Any:
            factor = self.factor() + float(torch.tanh(torch.tensor(self.change("train_step"))))
            return {"loss": nn.functional.cross_entropy(self.model(batch[0] * factor), batch[1])}

        def test_step(self, batch: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self.model(batch[0]), batch[1])}

        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            for name in begun_anew:
                setattr(self, name, VALUES[own[name]].begin())
            self.change("on_epoch_begin")

    def with_change(hook: str) -> Any:
        def call(self: Any, *args: Any) -> Any:
            result = getattr(super(Task, self), hook)(*args)
            self.change(hook)
            return result

        return call

    for hook in set(HOOKS) - {"train_step", "on_epoch_begin"}:
        setattr(Task, hook, with_change(hook))
    for name in on_class:
        setattr(Task, name, VALUES[own[name]].begin())

    class Net(Keeps, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.linear = nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros(()), persistent=draws[0] < 0.5)

        def forward(self, inputs: Any) -> Any:
            self.calls += 1
            factor = 1.0 + 0.01 * float(self.calls) if draws[1] < 0.7 else 1.0
            return self.linear(inputs * (factor + (self.use() if draws[2] < 0.5 else 0.0)))

    draws = [draw.random() for _ in range(8)]
    kinds = [draw.choice(EASY) for _ in range(4)]

    def model() -> nn.Module:
        return Net().begin(kinds[0])

    data = Data().begin(kinds[1]) if draws[3] < 0.4 else Data()
    sampler = {"sampler": Order().begin(kinds[2])} if draws[4] < 0.4 else {"shuffle": draws[5] < 0.5}
    collate = {"collate_fn": Collate().begin(kinds[3])} if draws[6] < 0.3 else {}
    add_ons = [each for each in (AMPAddon, EMAAddon, GradientAccumulationAddon) if draw.random() < 0.2]
    options: dict[str, Any] = {"add_ons": add_ons}
    if GradientAccumulationAddon in add_ons:
        options["gradient_accumulation_steps"] = 2
    if AMPAddon in add_ons:
        options["precision"] = "bf16"
    return Task, model, DataLoader(data, BATCH, **sampler, **collate), options


def train(seed: int, folder: Path, *limits: int | None) -> Any:
    for limit in limits:
        task, model, loader, options = make(seed)
        add_ons = options.pop("add_ons")
        trainer = task.add_on(StateManagerAddon, *add_ons)(
            model,
            "cpu",
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
            seed=0,
            save_path=folder,
            resume="auto",
            log_bar=False,
            **options,
        )
        trainer.run(EPOCHS, loader, [(INPUTS, TARGETS)], max_steps=limit)
    return {name: each.clone() for name, each in trainer.unwrap().state_dict().items()}


def check(seed: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that nothing differs and nothing is said; a stop lies anywhere, and two of them in one run."""
    caplog.clear()
    draw = random.Random(seed + 1)
    steps = EPOCHS * PER_EPOCH // (1 + ("gradient_accumulation_steps" in make(seed)[3]))
    first = draw.randint(1, steps - 2)
    second = draw.randint(1, steps - 1 - first)
    straight = train(seed, folder / "straight", None)
    resumed = train(seed, folder / "parts", first, second, None)
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    where = f"seed {seed}, ended after {first} and {first + second} steps"
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), f"{where}: {name} differs, and it says {said}"
    assert not said, where


@pytest.mark.parametrize("seed", range(6))
def test_a_task_made_at_random(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(seed, tmp_path, caplog)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(300))
def test_three_hundred_tasks_of_today(number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(1000 * TODAY + number, tmp_path, caplog)
