"""SpikeGuardAddon: what is a spike, that a skipped step changes nothing, and that a resumed run decides alike."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit.ranks import on_ranks
from kit.regression import Float32Regression as Task
from kit.regression import NoisyNet as Net
from zae import ConfigError
from zae.addons import (
    EMAAddon,
    FSDPAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    SpikeGuardAddon,
    StateManagerAddon,
)
from zae.checkpoint.reader import load_checkpoint
from zae.random_state import capture
from zae.testing.watch import difference

BAD = 13  # The batch with the spike: that of step 14.


class Killed(Task):
    """A process that is killed, or told to end, in one step."""

    kill: tuple[int, int] = (0, 0)

    def train_step(self, batch: Any) -> Any:
        step, number = Killed.kill
        if self.progress_checker.step + 1 == step:
            Killed.kill = (0, 0)
            os.kill(os.getpid(), number)
        return super().train_step(batch)


def batches(count: int = 24, bad: int | None = BAD, rows: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    made = [(torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator))
            for _ in range(count)]  # fmt: skip
    if bad is not None:
        made[bad] = (made[bad][0], made[bad][1] + 1e4)
    return made


def build(*add_ons: Any, task: Any = Task, model: nn.Module | None = None, device: Any = "cpu", **options: Any) -> Any:
    torch.manual_seed(1)
    made = Net() if model is None else model
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.8)
    known = {"log_bar": False, "scheduler_step_on_batch": True, "spike_warmup": 4, "spike_threshold": 100.0, **options}
    return task.add_on(SpikeGuardAddon, *add_ons)(made, device, optimizer=optimizer, scheduler=scheduler, **known)


def left(trainer: Any) -> dict[str, Any]:
    """All that decides how training continues, but for the counters."""
    state = trainer.state_dict()
    guard = {key: value for key, value in state["SpikeGuardAddon"].items() if key in ("losses", "norms")}
    kept = {key: state[key] for key in ("model", "optimizer", "scheduler", "EMAAddon", "AMPAddon") if key in state}
    return {**kept, "guard": guard, "train": trainer.history.train[-1]["loss"], "streams": capture()}


def train(trainer: Any, data: Any, n_epoch: int = 1, **options: Any) -> Any:
    torch.manual_seed(2)
    trainer.run(n_epoch, data, **options)
    return trainer


def test_a_skipped_step_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The weights and the average are those of a run in which that step did not step; it is recorded everywhere."""

    class Reference(Task):
        def should_step(self, outputs: Any) -> bool:
            return super().should_step(outputs) and self.progress_checker.step != BAD

    with caplog.at_level(logging.WARNING, "zae"):
        guarded = train(build(EMAAddon, JSONLLoggerAddon, decay=0.8, jsonl_path="log.jsonl"), batches())
    other = train(build(EMAAddon, task=Reference, decay=0.8, spike_warmup=99), batches())
    for key in ("model", "optimizer", "scheduler"):
        assert difference(guarded.state_dict()[key], other.state_dict()[key], key) is None
    assert difference(guarded.state_dict()["EMAAddon"], other.state_dict()["EMAAddon"]) is None
    assert (guarded.progress_checker.step, guarded.progress_checker.skipped_steps) == (24, 1)
    (spike,) = guarded.spikes
    assert (spike["step"], spike["batch"]) == (14, 14)
    assert spike["loss"] > 1e7
    assert spike["score"] > 1e3
    assert "step 14: the loss of " in caplog.text or "step 14: the gradient norm of " in caplog.text
    assert "The step was skipped; 1 so far" in caplog.text
    records = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records if "spike/score" in each] == [14]
    assert guarded.log_history[0]["spike/loss"] == spike["loss"]


def test_steps_without_a_spike_are_those_without_the_guard() -> None:
    """Bitwise, with clipping and without."""
    for options in ({}, {"gradient_clip": 0.5}):
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.8)
        plain: Any = Task(model, "cpu", optimizer=optimizer, scheduler=scheduler, log_bar=False,
                          scheduler_step_on_batch=True, **options)  # fmt: skip
        train(plain, batches(bad=None))
        guarded = train(build(**options), batches(bad=None))
        assert guarded.spikes == []
        assert difference(plain.state_dict()["model"], guarded.state_dict()["model"]) is None


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("kill", [12, 14, 15, 17, 21])
def test_a_run_that_is_interrupted_makes_the_same_decision(kill: int) -> None:
    """By SIGTERM before, in and after the step with the spike."""
    options: dict[str, Any] = {"save_every": 5, "keep_last": 3, "resume": "auto"}
    whole = train(build(StateManagerAddon, save_path="whole", **options), batches())
    Killed.kill = (kill, signal.SIGTERM)
    with pytest.raises(SystemExit):
        train(build(StateManagerAddon, task=Killed, save_path="parts", **options), batches())
    resumed = build(StateManagerAddon, task=Killed, save_path="parts", **options)
    resumed.run(1, batches())
    assert difference(left(whole), left(resumed)) is None
    assert resumed.spikes == whole.spikes
    assert resumed.progress_checker.skipped_steps == 1


@pytest.mark.parametrize("kill", [13, 16, pytest.param(19, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_killed_makes_the_same_decision(kill: int) -> None:
    """SIGKILL, before and after the spike."""
    options: dict[str, Any] = {"save_every": 5, "resume": "auto"}
    whole = train(build(StateManagerAddon, save_path="whole", **options), batches())
    child = os.fork()
    if not child:
        Killed.kill = (kill, signal.SIGKILL)
        train(build(StateManagerAddon, task=Killed, save_path="parts", **options), batches())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    resumed = build(StateManagerAddon, save_path="parts", **options)
    resumed.run(1, batches())
    assert difference(left(whole), left(resumed)) is None
    assert resumed.spikes == whole.spikes


@pytest.mark.sample(count=1)
@on_ranks(2, 4)
@pytest.mark.parametrize("engine", [MultiGPUAddon, FSDPAddon])
def test_all_ranks_decide_alike(world: int, engine: Any, tmp_path: Path) -> None:
    """The spike is in the samples of one rank; the weights are those of one process, which decides the same."""
    rows = 4 * world
    x, y = (torch.cat([each[part] for each in batches(16, None, rows)]) for part in (0, 1))
    y[12 * rows + 1] += 1e4

    def run(add_ons: list[Any], size: int, folder: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        trainer = build(*add_ons, model=model, save_path=tmp_path / folder, save_every=5)
        trainer.run(1, DataLoader(TensorDataset(x.double(), y.double()), size))
        assert [each["step"] for each in trainer.spikes] == [13]
        assert trainer.progress_checker.skipped_steps == 1
        return trainer

    ranks = run([StateManagerAddon, engine], 4, "ranks")
    assert ranks.world_size == world
    saved = load_checkpoint(tmp_path / "ranks" / "step-00000016")[1]
    one = run([StateManagerAddon], rows, f"one-{ranks.rank}")
    for name, value in one.unwrap().state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-12, atol=1e-12)
    assert {each["score"] for each in ranks.gather(ranks.spikes[0])} == {ranks.spikes[0]["score"]}


def test_the_level_that_changes_ends_the_run() -> None:
    """After max_spikes spikes one after the other; a step that is taken begins the count again."""
    data = batches(40, None)
    for index in (6, 7, 9, 10, 11, 12):
        data[index] = (data[index][0], data[index][1] + 1e4)
    trainer = train(build(max_spikes=3), data)
    assert trainer.progress_checker.step == 12
    assert trainer.metrics["stop_reason"] == "3 spikes one after the other (max_spikes=3)"


def test_a_loss_that_is_not_finite_is_a_spike() -> None:
    """Where it does not raise: the batch is passed over."""
    data = batches(bad=None)
    data[BAD] = (data[BAD][0] * float("nan"), data[BAD][1])
    guarded = train(build(on_nonfinite="skip"), data)
    assert [each["step"] for each in guarded.spikes] == [BAD + 1]
    assert all(each.isfinite().all() for each in guarded.unwrap().state_dict().values() if each.is_floating_point())


WRONG: dict[str, dict[str, Any]] = {
    r"spike_threshold has 'los'; it may have 'loss' and 'grad_norm'; did you mean 'loss'\?": {
        "spike_threshold": {"los": 3}
    },
    "watches nothing": {"spike_threshold": {}},
    "spike_warmup=50 is more than spike_window=20": {"spike_window": 20, "spike_warmup": 50},
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**WRONG[words])


def test_only_what_has_a_threshold_is_watched() -> None:
    trainer = train(build(spike_threshold={"grad_norm": 1e12}), batches())
    assert trainer.spikes == []
    trainer = train(build(spike_threshold={"loss": 10.0}), batches())
    assert [each["of"] for each in trainer.spikes] == ["loss"]
