"""`run(..., rehearse=True)`: what would fail later is refused now, in words, and nothing is touched."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

from kit.faults import RefusingDisk, fingerprint, installed
from kit.hand import loader, network
from kit.table import Task
from zae import AddOnBase, ConfigError, Every, RehearsalError
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    StateManagerAddon,
    TensorParallelAddon,
)


def build(task: Any = Task, *add_ons: Any, **options: Any) -> Any:
    model = network()
    optimizer = options.pop("optimizer", None) or SGD(model.parameters(), lr=0.1, momentum=0.9)
    device = options.pop("device", "cpu")
    return task.add_on(*add_ons)(model, device, optimizer=optimizer, log_bar=False, **options)


def world(trainer: Any, *loaders: Any) -> Any:
    """Everything that a rehearsal could touch."""
    generators = [each.generator.get_state() for each in loaders if each.generator is not None]
    streams = (torch.get_rng_state(), generators, random.getstate(), np.random.get_state()[1].tobytes())
    grads = [each.grad for each in trainer.model.parameters()]
    return fingerprint(trainer.state_dict()), fingerprint(streams), grads, trainer.model.training


def test_a_good_run_is_rehearsed_and_nothing_changes(tmp_path: Path, monkeypatch: Any) -> None:
    """Before a run and between two; the run after it is bitwise that of a trainer without a rehearsal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    weights = []
    for rehearses in (False, True):
        torch.manual_seed(1)
        add_ons = (StateManagerAddon, EMAAddon, EarlyStoppingAddon, JSONLLoggerAddon)
        folder = tmp_path / str(rehearses)
        trainer = build(Task, *add_ons, save_path=folder, jsonl_path=folder / "log.jsonl")
        train, valid = loader(generator=torch.Generator().manual_seed(2)), loader(9)
        for epochs in (1, 2):
            if rehearses:
                before, names = world(trainer, train, valid), sorted(os.walk(tmp_path))
                metrics = trainer.run(epochs, train, valid, rehearse=True)
                assert world(trainer, train, valid) == before
                assert sorted(os.walk(tmp_path)) == names
                assert metrics["epoch"] == trainer.progress_checker.epoch == epochs - 1
            trainer.run(epochs, train, valid)
        weights.append(fingerprint(trainer.state_dict()["model"]))
    assert weights[0] == weights[1]


class Unsavable(AddOnBase):
    """An add-on with a state that no file can hold."""

    layer = "loop"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "Unsavable": {"what": object()}}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "Unsavable"}, strict)


class LaterWrong(Task):
    """Its validation, which comes after three epochs, does not work."""

    def test_step(self, batch: Any) -> Any:
        raise ValueError("no such column")


class Detached(Task):
    """Its loss has no gradient."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": super().train_step(batch)["loss"].detach()}


class Lossless(Task):
    """Its validation returns what nobody monitors."""

    def test_step(self, batch: Any) -> Any:
        return {"accuracy": 1.0}


def test_all_that_fails_later_is_in_one_error(tmp_path: Path) -> None:
    """A validation that raises, a loss without a gradient, a state that cannot be saved."""

    class Wrong(Detached, LaterWrong):
        pass

    trainer = build(Wrong, StateManagerAddon, Unsavable, save_path=tmp_path / "run")
    train, valid = loader(), loader(9)
    before = fingerprint(dict(trainer.model.state_dict()))
    with pytest.raises(RehearsalError, match="3 of 4 rehearsed parts of this run would fail") as caught:
        trainer.run(9, train, valid, valid_every=Every(epochs=3), rehearse=True)
    said = str(caught.value)
    assert "a step of training: StepError: Wrong[" in said
    assert "requires_grad=False; compute it from self.model(...)" in said
    assert "a batch of valid_loader: ValueError: no such column (in an evaluation after step 0, on cpu; " in said
    assert "object" in said.partition("a save and a load of the state: ")[2]
    assert caught.value.__cause__ is not None
    assert fingerprint(dict(trainer.model.state_dict())) == before
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("call", ["plan", "rehearsal"])
def test_a_metric_that_early_stopping_does_not_get(call: str) -> None:
    trainer = build(Lossless, EarlyStoppingAddon)
    with pytest.raises(Exception, match=r"early stopping monitors 'loss', which no step returns; available: accuracy"):
        trainer.plan(2, loader(), loader(9)) if call == "plan" else trainer.run(2, loader(), loader(9), rehearse=True)


def test_what_cannot_be_tried_is_said(caplog: Any) -> None:
    trainer = build()
    trainer.run(1, (batch for batch in loader()), loader(9), rehearse=True)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("a step of training is not rehearsed: a batch of generator")
    assert build(mode="test").run(1, loader(9), rehearse=True)["step"] == 0
    with pytest.raises(RehearsalError, match="a batch of loader: ValueError: no such column"):
        build(LaterWrong, mode="test").run(1, loader(9), rehearse=True)
    with pytest.raises(ConfigError, match="rehearse='yes'; it must be True or False"):
        trainer.run(1, loader(), rehearse="yes")


# --- staged faults: each is found before the run, and by the run itself


class Odd(torch.optim.SGD):
    """An optimizer that does not load what it saves."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class Foreign(torch.optim.SGD):
    """An optimizer whose state contains an object."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for each in self.state.values():
            each["history"] = object()


class Exhausted(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that ends after one step."""

    def get_lr(self) -> Any:
        return [[0.1, 0.05][self.last_epoch] for _ in self.base_lrs]


class Forgetful(AddOnBase):
    """An add-on that does not take back what it saves."""

    layer = "loop"
    state_attributes = ("count",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = 0

    def optimizer_step(self) -> bool:
        self.count += 1
        return super().optimizer_step()

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        super().load_state_dict(state, strict)
        self.count = 0


class Refusing(AddOnBase):
    """An observer whose load raises."""

    state_attributes = ("count",)
    count = 3

    def adapt_state(self, entry: Any) -> Any:
        return 1 / 0


class Opening(AddOnBase):
    """An observer that writes a file."""

    def setup(self) -> None:
        super().setup()
        Path("seen.txt").write_text("")


class WrongMetric(Task):
    """Its validation returns nothing."""

    def test_step(self, batch: Any) -> Any:
        return None


class Logging(Task):
    """Its steps call the methods of its loggers."""

    def test_step(self, batch: Any) -> Any:
        self.log_image("first", torch.rand(8, 8))
        self.save_state()
        return super().test_step(batch)

    train_step = test_step


class Stateful(SGD):
    """An optimizer with an attribute that ``copy.deepcopy`` leaves out."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.inner = SGD(self.param_groups[0]["params"], lr=lr)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class WrongEnd(Task):
    """A metric of the end of a validation that is wrong."""

    def metric_on_epoch_end(self) -> Any:
        return {"best": "yes"} if self.mode == "test" else {}


FAULTS: dict[str, tuple[str, Any]] = {
    "a step of training: IndexError: list index out of range": lambda model: {"scheduler": Exhausted},
    "a save and a load of the state: CheckpointError: optimizer 0 (Odd) does not load its own state": lambda model: {
        "optimizer": Odd(model.parameters(), lr=0.1, momentum=0.9)
    },
    "a save and a load of the state: CheckpointError: optimizer['0'][": lambda model: {
        "optimizer": Foreign(model.parameters(), lr=0.1, momentum=0.9)
    },
    "the state differs after it was saved and loaded: Forgetful['count'] was 2 and is 0": Forgetful,
    "a save and a load of the state: ZeroDivisionError": Refusing,
    "a batch of valid_loader: StepError: WrongMetric": WrongMetric,
    "a batch of valid_loader: StepError: WrongEnd": WrongEnd,
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_staged_fault_is_found(words: str, tmp_path: Path) -> None:
    made, model = FAULTS[words], network()
    options: Any = {"optimizer": SGD(model.parameters(), lr=0.1, momentum=0.9), "save_path": tmp_path / "run"}
    is_class = isinstance(made, type)
    task, add_ons = (made, ()) if is_class and not issubclass(made, AddOnBase) else (Task, (made,) * is_class)
    options |= {} if is_class else made(model)
    trainer = task.add_on(StateManagerAddon, *add_ons)(model, "cpu", log_bar=False, **options)
    before = world(trainer)
    with pytest.raises(RehearsalError, match="of 4 rehearsed parts of this run would fail") as caught:
        trainer.run(2, loader(), loader(9), rehearse=True)
    assert words in str(caught.value)
    assert str(caught.value).startswith("2 of" if "IndexError" in words else "1 of")  # plan() steps schedules too.
    assert world(trainer) == before
    assert not os.listdir(tmp_path)


class Fit(Opening, JSONLLoggerAddon, EMAAddon, StateManagerAddon, Logging):  # type: ignore[misc]
    """A class that derives from add-ons that write."""


def test_what_writes_takes_no_part(tmp_path: Path, monkeypatch: Any) -> None:
    """Loggers, checkpoints and other observers; a class may derive from them, and call their methods."""
    monkeypatch.chdir(tmp_path)
    model, paths = network(), {"save_path": "run", "jsonl_path": "log.jsonl"}
    trainer = Fit(model, "cpu", optimizer=Stateful(model.parameters(), lr=0.1), log_bar=False, **paths)
    before = world(trainer)
    trainer.run(2, loader(), {"a": loader(9), "b": loader(5)}, rehearse=True)
    trainer.plan(2, loader(), loader(9))
    assert world(trainer) == before
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_refuses(number: int, tmp_path: Path) -> None:
    trainer, disk = build(Task, StateManagerAddon, save_path=tmp_path / "run"), RefusingDisk(3, number)
    with installed(disk), pytest.raises(RehearsalError, match="a save and a load of the state: CheckpointError"):
        trainer.run(2, loader(), rehearse=True)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("engine", [MultiGPUAddon, FSDPAddon, TensorParallelAddon])
def test_no_process_is_started(engine: Any, tmp_path: Path) -> None:
    trainer = build(Task, engine, StateManagerAddon, save_path=tmp_path / "run", device=["cpu", "cpu"])
    before = world(trainer)
    trainer.run(2, loader(), loader(9), rehearse=True)
    assert world(trainer) == before
    assert not os.listdir(tmp_path)


def test_factories_windows_and_schedules_of_the_whole_run(tmp_path: Path, caplog: Any) -> None:
    """What is made later is made for the copy, with the steps of the true run."""
    seen = []

    def schedule(optimizer: Any, total_steps: int) -> Any:
        seen.append(total_steps)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps)

    trainer = Task.add_on(StateManagerAddon, AMPAddon, GradientAccumulationAddon)(
        network, "cpu", optimizer=torch.optim.AdamW, scheduler=schedule, scheduler_step_on_batch=True, log_bar=False,
        precision="fp16", gradient_accumulation_steps=2, save_path=tmp_path / "run", seed=1, resume="auto",
    )  # fmt: skip
    trainer.run(3, loader(), loader(9), rehearse=True)
    assert set(seen) == {9}
    assert trainer.optimizer is torch.optim.AdamW
    assert not caplog.records
    assert trainer.run(3, loader(), loader(9))["step"] == 9
    with pytest.raises(RehearsalError, match=r"the plan of the run: .* ends after 9 steps, but this run has 6"):
        trainer.run(2, loader(), rehearse=True)
