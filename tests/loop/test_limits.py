"""The ends of a run that are asked for: a time limit, and where early stopping begins."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit import faults, hand
from kit.faults import build, everything
from kit.ranks import on_ranks
from zae import ConfigError, Every
from zae.addons import EarlyStoppingAddon, MultiGPUAddon, StateManagerAddon
from zae.checkpoint.folder import newest_valid

HOUR = 3600.0


class Slow(faults.Task):
    """A task that takes an hour for one of its steps, or for the validation after one."""

    def __init__(self, *args: Any, at: int = 0, where: str = "train", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at, self.where = at, where

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.where == "train" and self.progress_checker.step + 1 == self.at:
            self.current_run.extent.began -= HOUR
        return super().train_step(batch)

    def test_step(self, batch: Any) -> dict[str, Any]:
        if self.where == "test" and self.progress_checker.step == self.at:
            self.current_run.extent.began -= HOUR
        return super().test_step(batch)


def valid() -> Any:
    return hand.loader(9, 4, seed=8, shuffle=False)


def saved(folder: Path, at: int, where: str = "train", **limits: Any) -> Any:
    options = {"save_path": folder / "run", "save_every": Every(epochs=9), "resume": "auto"}
    trainer = build(Slow, StateManagerAddon, at=at, where=where, **options)
    trainer.run(3, hand.loader(), valid(), **limits)
    return trainer


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize(("at", "where"), [(7, "train"), (12, "train"), (6, "test")])
@pytest.mark.parametrize("limit", [HOUR, timedelta(hours=1)])
def test_the_run_ends_after_the_step_that_passes_max_time(tmp_path: Path, at: int, where: str, limit: Any) -> None:
    """The state is saved, and a resumed run has all of the time again and ends as one without a limit."""
    first = saved(tmp_path, at, where, max_time=limit)
    assert (first.metrics["step"], first.metrics["stop_reason"]) == (at, "max_time has passed")
    newest = newest_valid(tmp_path / "run")
    assert newest is not None
    assert newest[1]["step"] == at
    resumed = saved(tmp_path, 0, max_time=limit)
    whole = saved(tmp_path / "whole", 0)
    assert everything(resumed) == everything(whole)
    assert resumed.metrics["stop_reason"] is None


def test_max_time_alone_ends_a_run_and_is_in_its_plan() -> None:
    trainer = build(Slow, at=8)
    plan = trainer.plan(None, hand.loader(), max_time=HOUR)
    assert plan.last_step is None
    assert "may end earlier: after the step in which max_time=3600 s have passed" in plan.notes
    assert trainer.run(None, hand.loader(), max_time=HOUR)["step"] == 8


@on_ranks(2)
def test_all_ranks_end_together_where_the_time_of_one_is_over(world: int, tmp_path: Path) -> None:
    trainer = build(Slow, MultiGPUAddon, at=4 if dist.get_rank() == 1 else 0)
    trainer.run(5, hand.loader(40, batch_size=2), max_time=HOUR)
    steps = trainer.gather(trainer.progress_checker.step)
    assert steps[0] == steps[1] <= 5
    assert trainer.gather(trainer.metrics["stop_reason"]) == ["max_time has passed"] * world


class Stops(faults.Task):
    """Asks one rank to stop after a step, without a reason."""

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)
        if self.progress_checker.step == 2 and self.rank == self.world_size - 1:
            self.stop()


def test_a_run_is_stopped_without_a_reason() -> None:
    metrics = build(Stops).run(1, hand.loader())
    assert (metrics["step"], metrics["stop_reason"]) == (2, "stop() was called")


@on_ranks(2)
def test_a_rank_stops_all_without_a_reason(world: int) -> None:
    trainer = build(Stops, MultiGPUAddon)
    trainer.run(1, hand.loader(40, batch_size=2))
    assert trainer.gather(trainer.metrics["stop_reason"]) == ["stop() was called"] * world


@pytest.mark.parametrize("limit", [-1, "1h", float("nan"), timedelta(seconds=-1)])
def test_a_time_that_cannot_be_meant(limit: Any) -> None:
    with pytest.raises(ConfigError, match="max_time"):
        build(faults.Task).run(1, hand.loader(), max_time=limit)


@pytest.mark.parametrize(("least", "ends"), [(0, 3), (2, 3), (5, 5), (9, 9)])
def test_early_stopping_waits_for_min_epochs(least: int, ends: int) -> None:
    """Each call of run counts its own epochs; the limits of run itself do not wait."""

    class Worse(faults.Task):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": torch.tensor(float(self.progress_checker.step))}

    trainer = build(Worse, EarlyStoppingAddon, patience=2, min_epochs=least)
    for call in (1, 2):
        metrics = trainer.run(9, hand.loader(8), valid())
        assert metrics["epoch"] == call * ends
        assert metrics["stop_reason"] == f"loss has not improved on {2 * (1 + (call - 1) * ends)} for " + (
            f"{ends - 1} validations"
        )
    assert build(Worse, EarlyStoppingAddon, min_epochs=9).run(9, hand.loader(8), valid(), max_steps=3)["step"] == 3
