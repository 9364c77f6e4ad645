"""A call of run that goes back to an earlier state, and continues as a script that resumes from it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from kit.faults import everything
from kit.hand import data, loader, network
from kit.ranks import on_ranks
from zae import Every, Trainer
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.errors import CheckpointMismatch, ConfigError

STEP, BACK = 8, 3  # Of six steps in an epoch: the second one is open, and the first one.


class Task(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


class Returning(Task):
    """Goes back once, in the method that is asked for, to what it held or saved at an earlier step."""

    where, at, back, way = "on_step_end", STEP, BACK, "state"
    has_returned = False
    held: Any = None
    unsaved_attributes = ("has_returned", "held")

    def look(self, name: str) -> None:
        progress = self.progress_checker
        if name == "checkpoint" and progress.step == self.back and self.held is None:
            self.held = copy.deepcopy(self.state_dict())
        if name == self.where and progress.step >= self.at and not self.has_returned:
            self.has_returned = True
            self.go_back()

    def go_back(self) -> None:
        if self.way == "load":  # At once, between two steps.
            self.load_state_dict(copy.deepcopy(self.held))
        elif self.way == "load path":
            self.load_state(self.save_path / f"step-{self.back:08d}")
        elif self.way == "path":
            self.continue_from(self.save_path / f"step-{self.back:08d}")
        else:
            self.continue_from(self.held)

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.look("train_step")
        return super().train_step(batch)

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.look("test_step")
        return super().train_step(batch)

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)
        self.look("on_step_end")

    def checkpoint(self) -> None:
        super().checkpoint()
        self.look("checkpoint")

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.look("on_epoch_begin")

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.look("on_epoch_end")

    def on_validation_end(self, metrics: Any) -> None:
        super().on_validation_end(metrics)
        self.look("on_validation_end")


def build(task: Any, *add_ons: Any, **options: Any) -> Any:
    known: dict[str, Any] = {"seed": 0, "log_bar": False, **options}
    scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)  # noqa: E731
    return task.add_on(*add_ons)(
        network(), "cpu", optimizer=torch.optim.AdamW, scheduler=scheduler, scheduler_step_on_batch=True, **known
    )


def train(trainer: Any, batches: Any = None, **options: Any) -> dict[str, Any]:
    batches = loader() if batches is None else batches
    torch.manual_seed(5)
    trainer.run(3, batches, loader(10, shuffle=False), valid_every=Every(steps=4), **options)
    return everything(trainer)


PLACES = ["train_step", "on_step_end", "checkpoint", "on_epoch_begin", "on_epoch_end", "on_validation_end", "test_step"]


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("way", ["state", "path"])
@pytest.mark.parametrize("where", PLACES)
def test_a_run_that_goes_back_ends_as_one_that_never_went_on(where: str, way: str, tmp_path: Path) -> None:
    """Weights, optimizer, schedule, counters, history and random streams: what was left counts nowhere."""
    options = {"save_path": tmp_path / "a", "save_every": 1, "keep_last": None}
    returning = build(Returning, StateManagerAddon, EMAAddon, **options)
    returning.where, returning.way = where, way
    found = train(returning)
    assert returning.has_returned
    straight = build(Task, StateManagerAddon, EMAAddon, **{**options, "save_path": tmp_path / "b"})
    assert found == train(straight)
    names = [sorted(path.name for path in (tmp_path / each).glob("step-*")) for each in "ab"]
    assert names[0] == names[1]


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("back", [2, 6, 7])
@pytest.mark.parametrize("at", [7, 8, 12, 18])
def test_from_any_step_to_any_other(at: int, back: int) -> None:
    """The last step of an epoch and of the run, and back to the end of an epoch."""
    returning = build(Returning)
    returning.at, returning.back = at, min(back, at - 1)
    assert train(returning) == train(build(Task))
    assert returning.has_returned


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("way", ["load", "load path"])
@pytest.mark.parametrize("where", ["checkpoint", "on_epoch_begin", "on_epoch_end", "on_validation_end"])
def test_a_state_that_is_loaded_between_two_steps_is_continued_from(where: str, way: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_path": tmp_path / "a", "save_every": 1, "keep_last": None}
    returning = build(Returning, StateManagerAddon, **options)
    returning.where, returning.way = where, way
    assert train(returning) == train(build(Task, StateManagerAddon, **{**options, "save_path": tmp_path / "b"}))


@pytest.mark.parametrize("way", ["load", "load path"])
@pytest.mark.parametrize("where", ["train_step", "on_step_end", "test_step"])
def test_a_load_within_a_step_is_refused(where: str, way: str, tmp_path: Path) -> None:
    returning = build(Returning, StateManagerAddon, save_path=tmp_path, save_every=1, keep_last=None)
    returning.where, returning.way = where, way
    with pytest.raises(ConfigError, match=r"within (a step|an evaluation), .*continue_from\(state\)"):
        train(returning)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data()


class Own:
    def __iter__(self) -> Iterator[Any]:
        return iter(loader())


LOADERS: dict[str, Any] = {
    "list": lambda: list(loader(shuffle=False)),
    "workers": lambda: loader(num_workers=1),
    "persistent": lambda: loader(num_workers=1, persistent_workers=True),
    "stateful": lambda: StatefulDataLoader(data(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "stream": lambda: DataLoader(Stream(), 4),
    "own": Own,
    "own generator": lambda: loader(generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", list(LOADERS))
def test_every_kind_of_loader_goes_back(name: str) -> None:
    assert train(build(Returning), LOADERS[name]()) == train(build(Task), LOADERS[name]())


def test_an_iterator_cannot_go_back() -> None:
    with pytest.raises(ConfigError, match="yields each batch once"):
        train(build(Returning), (batch for _ in range(9) for batch in loader()), steps_per_epoch=6)


SETS: list[Any] = [
    ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 2}),
    ((AMPAddon, EMAAddon), {"precision": "fp16", "loss_scale": (8.0, 1.0), "decay": 0.5}),
    ((EarlyStoppingAddon,), {"patience": 30}),
]


@pytest.mark.parametrize(("add_ons", "options"), SETS)
def test_beside_add_ons(add_ons: Any, options: Any) -> None:
    returning = build(Returning, *add_ons, **options)
    accumulates = "gradient_accumulation_steps" in options
    returning.at, returning.back = (5, 2) if accumulates else (STEP, BACK)
    assert train(returning) == train(build(Task, *add_ons, **options))
    assert returning.has_returned


def test_a_log_has_each_step_once(tmp_path: Path) -> None:
    logs = []
    for task in (Returning, Task):
        path = tmp_path / f"{task.__name__}.jsonl"
        train(build(task, JSONLLoggerAddon, jsonl_path=path, log_every=1))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        # A row with "run" says that the log is continued, as after a resume.
        logs.append([(row["step"], *(key for key in row if "/" in key)) for row in rows if "run" not in row])
    assert logs[0] == logs[1]


def test_in_a_later_call_of_run(tmp_path: Path) -> None:
    """A state of this call is continued from, and one of the call before is refused."""
    made = []
    for task in (Returning, Task):
        trainer = build(task)
        trainer.at, trainer.back = 24, 20
        train(trainer)
        made.append(train(trainer))
        assert trainer.progress_checker.step == 36
    assert made[0] == made[1]
    trainer = build(Returning)
    trainer.at, trainer.back = 24, 4
    train(trainer)
    with pytest.raises(CheckpointMismatch, match=r"of 1 calls of run\(\), and this is call 2"):
        train(trainer)


def test_outside_of_a_run_it_says_what_to_call() -> None:
    trainer = build(Task)
    with pytest.raises(ConfigError, match=r"load_state_dict\(state\)"):
        trainer.continue_from(trainer.state_dict())
    with pytest.raises(ConfigError, match="add StateManagerAddon"):
        trainer.continue_from("runs/first")


@pytest.mark.parametrize("way", ["state", "path"])
def test_a_run_that_went_back_is_resumed(way: str, tmp_path: Path) -> None:
    """It ends after it went back, and is resumed from there, not from the later steps that it has left."""

    class Ending(Returning):
        def on_step_end(self, outputs: Any) -> None:
            super().on_step_end(outputs)
            if self.has_returned and self.progress_checker.step == BACK + 3:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"save_every": 1, "keep_last": None, "resume": "auto", "save_path": tmp_path / "a"}
    first = build(Ending, StateManagerAddon, **options)
    first.way = way
    with pytest.raises(KeyboardInterrupt):
        train(first)
    assert max(path.name for path in (tmp_path / "a").glob("step-*")) == f"step-{BACK + 2:08d}"
    straight = train(build(Task, StateManagerAddon, **{**options, "save_path": tmp_path / "b"}))
    assert train(build(Task, StateManagerAddon, **options)) == straight


@pytest.mark.sample(count=1)
@on_ranks(2)
@pytest.mark.parametrize("way", ["state", "path"])
def test_on_ranks(world: int, way: str, tmp_path: Path) -> None:
    """Each rank continues with its own streams and its own part of the data."""
    options: dict[str, Any] = {"save_every": 1, "keep_last": None}
    made = []
    for task in (Returning, Task):
        trainer = build(task, MultiGPUAddon, StateManagerAddon, save_path=tmp_path / task.__name__, **options)
        trainer.at, trainer.back, trainer.way = 5, 2, way
        made.append(train(trainer))
    assert made[0] == made[1]
