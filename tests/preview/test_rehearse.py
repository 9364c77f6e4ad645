"""`run(..., rehearse=True)`: what would fail later is refused now, in words, and nothing is touched."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

from kit.faults import fingerprint
from kit.hand import loader, network
from kit.table import Task
from zae import AddOnBase, ConfigError, Every, RehearsalError
from zae.addons import EarlyStoppingAddon, EMAAddon, JSONLLoggerAddon, StateManagerAddon


def build(task: Any = Task, *add_ons: Any, **options: Any) -> Any:
    model = network()
    optimizer = options.pop("optimizer", None) or SGD(model.parameters(), lr=0.1, momentum=0.9)
    return task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def world(trainer: Any, *loaders: Any) -> Any:
    """Everything that a rehearsal could touch."""
    generators = [each.generator.get_state() for each in loaders if each.generator is not None]
    streams = (torch.get_rng_state(), generators, random.getstate(), np.random.get_state()[1].tobytes())
    grads = [each.grad for each in trainer.model.parameters()]
    return fingerprint(trainer.state_dict()), fingerprint(streams), grads, trainer.model.training


@pytest.mark.covers("X-13")
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
    assert "a batch of valid_loader: ValueError: no such column (the batch was" in said
    assert "a save of the state: " in said
    assert "object" in said.partition("a save of the state: ")[2]
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
