"""Each owner with each kind of value, ended anywhere and resumed: bitwise the run that was not, and nothing is said."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from user_state.kinds import INPUTS, OWNERS, PER_EPOCH, TARGETS, VALUES, make

from kit.faults import forked
from kit.ranks import on_ranks
from zae import Every
from zae.addons import FSDPAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon

VALID = [(INPUTS, TARGETS)]
EPOCHS = 2
STOPS = {"first epoch": 2, "end of an epoch": PER_EPOCH, "second epoch": PER_EPOCH + 3}


def train(folder: Path, owner: str, kind: str, *limits: int | None, add_ons: Any = (), **options: Any) -> Any:
    """Return the weights of a run in as many processes as there are limits, each of which makes all anew."""
    for limit in limits:
        task, model, loader = make(owner, kind)
        trainer = task.add_on(StateManagerAddon, *add_ons)(
            model,
            "cpu",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
            seed=0,
            save_path=folder,
            resume="auto",
            save_every=Every(epochs=9),
            log_bar=False,
            **options,
        )
        trainer.run(EPOCHS, loader, VALID, max_steps=limit)
    return {name: each.clone() for name, each in trainer.model_state().items()}


def assert_same(one: Any, other: Any, what: object) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), f"{what}: {name} differs"


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_value_resumes(owner: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = train(tmp_path / "straight", owner, kind, None)
    for name, stop in STOPS.items():
        assert_same(train(tmp_path / name, owner, kind, stop, None), straight, name)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_value_resumes_twice_and_within_windows(owner: str, kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"add_ons": [GradientAccumulationAddon], "gradient_accumulation_steps": 2}
    straight = train(tmp_path / "straight", owner, kind, None, **options)
    assert_same(train(tmp_path / "parts", owner, kind, 1, 4, None, **options), straight, "in windows")


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("owner", ["task", "module", "object of the task", "class of the task"])
def test_a_signal_in_a_validation(owner: str, kind: str, tmp_path: Path) -> None:
    """The state is that from before the validation, which the resumed run makes again; it may change the value."""

    def run(folder: Path, stops: bool) -> Any:
        task, model, loader = make(owner, kind)

        class Tests(task):
            def test_step(self, batch: Any) -> Any:
                if stops and self.progress_checker.epoch == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                return self.train_step(batch)

        trainer = Tests.add_on(StateManagerAddon)(
            model, "cpu", optimizer=torch.optim.SGD, seed=0, save_path=folder, resume="auto", log_bar=False
        )
        trainer.run(EPOCHS, loader, VALID * 3)
        return {name: each.clone() for name, each in trainer.model_state().items()}

    straight = run(tmp_path / "straight", False)
    outcome = forked(lambda: run(tmp_path / "parts", True) and None)
    assert outcome.status in (-signal.SIGTERM, 128 + signal.SIGTERM), outcome.error
    assert_same(run(tmp_path / "parts", False), straight, "in a validation")


@on_ranks(2)
@pytest.mark.sample(count=1)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("owner", [*OWNERS[:-2], "two attributes"])
def test_each_rank_has_its_own(world: int, owner: str, kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"add_ons": [MultiGPUAddon]}
    straight = train(tmp_path / "straight", owner, kind, None, **options)
    for stop in (1, 3, 4):
        assert_same(train(tmp_path / f"from {stop}", owner, kind, stop, None, **options), straight, stop)


@on_ranks(2)
@pytest.mark.sample(count=1)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("owner", ["task", "module", "object of a module", "dataset", "two attributes"])
def test_each_rank_of_divided_weights(world: int, owner: str, kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"add_ons": [FSDPAddon]}
    straight = train(tmp_path / "straight", owner, kind, None, **options)
    assert_same(train(tmp_path / "parts", owner, kind, 1, 4, None, **options), straight, "divided")
