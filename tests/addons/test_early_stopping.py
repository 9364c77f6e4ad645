"""Early stopping: at which validation, by which metric, and at the same one after a resume."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD

from kit.hand import digest, loader, network
from kit.table import Task
from zae import ConfigError, MonitorError
from zae.addons import EarlyStoppingAddon


class Scored(Task):
    """Its validations score what is told, by the number of the step."""

    scores: tuple[float, ...] = ()
    name = "loss"

    def test_step(self, batch: Any) -> Any:
        return {self.name: self.scores[self.progress_checker.step // 2 - 1]}


def build(scores: Any, name: str = "loss", **options: Any) -> Any:
    task = type("Told", (Scored,), {"scores": tuple(scores), "name": name, "__module__": __name__})
    model = network()
    return task.add_on(EarlyStoppingAddon)(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), **options)


def stop_of(scores: Any, patience: int, delta: float = 0.0, larger: bool = False) -> int:
    """After how many validations the run ends, as the docstring has it."""
    best, waited = None, 0
    for number, score in enumerate(scores, start=1):
        gain = None if best is None else (score - best if larger else best - score)
        if not math.isnan(score) and (gain is None or gain > delta):
            best, waited = score, 0
        else:
            waited += 1
        if waited >= patience:
            return number
    return len(scores)


@given(
    scores=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, math.nan]), min_size=1, max_size=8),
    patience=st.integers(1, 3),
    delta=st.sampled_from([0.0, 0.5, 0.75]),
    larger=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_it_stops_where_it_says(scores: Any, patience: int, delta: float, larger: bool) -> None:
    """For any scores; NaN never counts as better."""
    name = "accuracy" if larger else "loss"
    trainer = build(scores, name, patience=patience, delta=delta, monitor=name)
    metrics = trainer.run(len(scores), loader(8), loader(4))
    expected = stop_of(scores, patience, delta, larger)
    assert metrics["epoch"] == expected
    assert (metrics["stop_reason"] is not None) == (stop_of([*scores, *scores], patience, delta, larger) <= len(scores))


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("by_steps", [False, True])
@pytest.mark.parametrize("stop", range(1, 6))
def test_it_stops_at_the_same_update_after_a_resume(stop: int, by_steps: bool) -> None:
    """At each epoch; a stopped run that is resumed does not train."""
    scores, every = (3.0, 2.0, 2.5, 2.5, 2.5, 0.0), 2 if by_steps else None
    whole = build(scores, patience=3)
    whole.run(6, loader(8), loader(4), valid_every=every)
    assert (whole.progress_checker.epoch, whole.progress_checker.step) == (5, 10)
    states: list[Any] = []
    first = build(scores, patience=3)
    first.checkpoint = lambda: states.append((first.progress_checker.step, copy.deepcopy(first.state_dict())))
    first.run(6, loader(8), loader(4), valid_every=every)
    state = [state for step, state in states if step == 2 * stop][-1]
    resumed = build(scores, patience=3)
    resumed.load_state_dict(state)
    resumed.progress_checker.run_calls.index = 0
    before = digest(resumed.model)
    metrics = resumed.run(6, loader(8), loader(4), valid_every=every)
    assert metrics["step"] == 10
    assert metrics["stop_reason"] == "loss has not improved on 2 for 3 validations"
    assert (digest(resumed.model) == before) == (stop == 5)


def test_each_run_counts_from_the_start() -> None:
    """A run that was stopped can be gone on with by another call."""
    trainer = build([1.0] * 20, patience=2)
    assert trainer.run(9, loader(8), loader(4))["epoch"] == 3
    assert trainer.run(9, loader(8), loader(4))["epoch"] == 6
    assert trainer.run(1, loader(8), loader(4))["stop_reason"] is None


def test_it_watches_training_where_nothing_is_validated() -> None:
    trainer = build([], patience=1, delta=100.0)
    assert trainer.run(9, loader(8))["epoch"] == 2
    trainer = build([5.0] * 9, patience=1, delta=100.0, monitor="train/loss")
    assert trainer.run(9, loader(8), loader(4), valid_every=1)["epoch"] == 2


def test_a_function_of_one_s_own_decides() -> None:
    calls: list[Any] = []

    def stopper(step: int, score: float) -> bool:
        calls.append((step, score))
        return len(calls) == 3

    metrics = build([4.0, 3.0, 2.0, 1.0], early_stopper=stopper, patience=1).run(4, loader(8), loader(4))
    assert calls == [(2, 4.0), (4, 3.0), (6, 2.0)]
    assert metrics["stop_reason"] == "early_stopper said so at step 6 (loss 2)"


@pytest.mark.parametrize(
    "options", [{"patience": 0}, {"patience": 1.5}, {"delta": -1.0}, {"delta": "x"}, {"early_stopper": 3}]
)
def test_options_that_cannot_be_meant(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        build([], **options)


def test_a_metric_that_is_not_there() -> None:
    """With the names there are."""
    with pytest.raises(MonitorError, match=r"monitors 'loss', which no step returns; available: score; give monitor="):
        build([1.0] * 3, "score").run(3, loader(8), loader(4))
    with pytest.raises(MonitorError, match="did you mean 'score'"):
        build([1.0] * 3, "score", monitor="scor", monitor_mode="max").run(3, loader(8), loader(4))
