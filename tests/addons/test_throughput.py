"""ThroughputAddon and ProfilerAddon: what is measured is right, is in every logger, and changes nothing."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit import hand
from kit.ranks import on_ranks
from kit.table import Task
from zae import ConfigError, Trainer
from zae.addons import (
    CompileAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    ProfilerAddon,
    StateManagerAddon,
    TensorBoardLoggerAddon,
    ThroughputAddon,
)

PREFIX = "throughput/"


def build(*add_ons: Any, task: Any = Task, model: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    made = nn.Linear(4, 2) if model is None else model
    cls = task.add_on(*add_ons)
    return cls(made, "cpu", optimizer=torch.optim.SGD(made.parameters(), lr=0.1), log_bar=False, **options)


def rates(record: Any) -> dict[str, float]:
    return {name.removeprefix(PREFIX): value for name, value in record.items() if name.startswith(PREFIX)}


class Slow(Task):
    """A step of at least 5 ms; the loader takes 15 ms for each batch."""

    def train_step(self, batch: Any) -> Any:
        time.sleep(0.005)
        return {**super().train_step(batch), "num_targets": 3 * len(batch[0])}


class SlowData(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


def slow(rows: int = 18, batch: int = 3) -> Any:
    return DataLoader(SlowData(*hand.data(rows).tensors), batch)


def test_the_rates_are_those_of_the_steps() -> None:
    """Three samples of 5 ms each, and a step of 5 ms: the loader takes most of the time, and a validation none."""
    trainer = build(ThroughputAddon, task=Slow)
    began = time.perf_counter()
    trainer.run(2, slow(), slow())
    whole = time.perf_counter() - began
    found = rates(trainer.log_history[-2])  # The record of the second epoch; the last is that of its validation.
    assert not rates(trainer.log_history[-1])
    seconds = 1 / found["steps_per_second"]
    assert 0.02 <= seconds <= whole / 6  # The six steps of that epoch are a part of the whole.
    assert found["samples_per_second"] == pytest.approx(3 / seconds)
    assert found["tokens_per_second"] == pytest.approx(9 / seconds)
    assert found["batches_per_second"] == pytest.approx(1 / seconds)
    assert 0.015 / seconds <= found["data_wait_share"] < 1
    assert 0.02 <= found["step_seconds_p50"] <= found["step_seconds_p99"]
    assert found["peak_memory_mib"] > 50


def test_every_logger_has_them(tmp_path: Path) -> None:
    options = {"jsonl_path": tmp_path / "log.jsonl", "log_dir": tmp_path / "events", "log_every": 2, "peak_flops": 1e9}
    trainer = build(ThroughputAddon, JSONLLoggerAddon, TensorBoardLoggerAddon, **options)
    trainer.run(1, hand.loader())
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    records = [line for line in lines if "train/loss" in line]
    assert [bool(rates(record)) for record in records] == [True, True, True]
    assert rates(records[-1]) == rates(trainer.log_history[-1])
    assert rates(records[-1])["mfu"] == pytest.approx(rates(records[-1])["flops_per_second"] / 1e9)
    events = next((tmp_path / "events").rglob("events*")).read_bytes()
    assert b"throughput/samples_per_second" in events


def test_operations_are_counted_once_and_windows_whole() -> None:
    """Forward and the gradient of the weight: 2 * 2 * inputs * outputs for each sample; of a window, of all batches."""
    trainer = build(ThroughputAddon)
    trainer.run(1, hand.loader(8))
    assert trainer.step_flops == 2 * 2 * 4 * 4 * 2
    window = build(ThroughputAddon, GradientAccumulationAddon, gradient_accumulation_steps=2)
    window.run(1, hand.loader(16))
    assert window.step_flops == 2 * trainer.step_flops
    found = rates(window.log_history[-1])
    assert found["batches_per_second"] == pytest.approx(2 * found["steps_per_second"])
    compiled = build(ThroughputAddon, CompileAddon, compile_backend="eager")
    assert "operations are not counted: a compiled step hides them" in str(compiled.plan(1, hand.loader(8)))
    compiled.run(1, hand.loader(8))
    assert compiled.step_flops is None
    assert "flops_per_second" not in rates(compiled.log_history[-1])


def test_a_resume_measures_its_own_steps(tmp_path: Path) -> None:
    """The time between two processes is not in the rates, and the weights are those of one run."""
    options = {"save_path": tmp_path / "run", "save_every": 1, "resume": "auto"}
    build(ThroughputAddon, StateManagerAddon, **options).run(2, slow(), max_steps=4)
    time.sleep(0.2)
    resumed = build(ThroughputAddon, StateManagerAddon, **options)
    began = time.perf_counter()
    resumed.run(2, slow())
    elapsed = time.perf_counter() - began
    whole = build()
    whole.run(2, slow())
    assert hand.digest(resumed.model) == hand.digest(whole.model)
    # Of twelve steps, four were made before; the first one of each process is not measured.
    assert 6 / rates(resumed.log_history[-1])["steps_per_second"] <= elapsed


@on_ranks(2)
def test_ranks_count_together(world: int, tmp_path: Path) -> None:
    """Rates are of all ranks, and each rank writes its own trace."""
    options = {"profile_dir": tmp_path / "profile", "profile_schedule": (0, 1, 1, 1)}
    trainer = build(MultiGPUAddon, ThroughputAddon, ProfilerAddon, task=Slow, **options)
    trainer.run(1, slow(24, 3))
    assert trainer.world_size == world
    found = rates(trainer.log_history[-1])
    assert found["samples_per_second"] == pytest.approx(2 * 3 * found["steps_per_second"])
    trainer.barrier()
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == [f"rank{rank}-step00000002.{end}" for rank in (0, 1) for end in ("pt.trace.json", "txt")]


def test_tokens_by_a_function() -> None:
    trainer = build(ThroughputAddon, throughput_tokens=lambda batch: batch[0].numel())
    trainer.run(1, hand.loader())
    found = rates(trainer.log_history[-1])
    assert found["tokens_per_second"] == pytest.approx(4 * found["samples_per_second"])


# ------------------------------------------------------------------------------------------------------ the profiler


def profiled(folder: Path, *add_ons: Any, **options: Any) -> Any:
    given = {"profile_dir": folder / "profile", "profile_schedule": (1, 1, 2, 1), **options}
    return build(ProfilerAddon, *add_ons, **given)


def test_a_trace_and_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the two steps that the schedule records; neutral; no profiler is left."""
    caplog.set_level(logging.INFO, "zae")
    trainer = profiled(tmp_path)
    assert "the profiler records: steps 3 to 4" in trainer.plan(2, hand.loader()).notes
    trainer.run(2, hand.loader(), hand.loader(8))
    trace, table = sorted((tmp_path / "profile").iterdir())
    assert (trace.name, table.name) == ("rank0-step00000004.pt.trace.json", "rank0-step00000004.txt")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2
    assert "aten::addmm" in names
    rows = [
        line for line in table.read_text().splitlines() if line.strip().startswith(("aten", "Profiler", "autograd"))
    ]
    assert 5 < len(rows) <= 10
    assert table.read_text().rstrip() == trainer.profile_table.rstrip()
    assert "the most expensive operations up to step 4" in caplog.text
    assert not torch.autograd.profiler._is_profiler_enabled
    plain = build()
    plain.run(2, hand.loader(), hand.loader(8))
    assert hand.digest(trainer.model) == hand.digest(plain.model)


def test_several_cycles_and_a_run_that_ends_early(tmp_path: Path) -> None:
    trainer = profiled(tmp_path, profile_schedule=(0, 1, 1, 2), profile_shapes=True, profile_memory=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run(1, hand.loader())
    assert len([*(tmp_path / "profile").glob("*.json")]) == 2
    short = profiled(tmp_path / "short", profile_schedule=(3, 1, 9, 1))
    short.run(1, hand.loader())
    assert [path.name for path in (tmp_path / "short" / "profile").glob("*.txt")] == ["rank0-step00000006.txt"]


class Fails(Trainer):
    def train_step(self, batch: Any) -> Any:
        if self.progress_checker.step == 3:
            raise KeyError("labels")
        return {"loss": self.model(batch[0]).square().mean()}

    test_step = train_step


def test_an_error_of_the_run_is_raised_and_the_profiler_stops(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="labels"):
        profiled(tmp_path, task=Fails, profile_schedule=(0, 1, 9, 1)).run(1, hand.loader())
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_folder_that_cannot_be_written_costs_the_profile_alone(tmp_path: Path, caplog: Any) -> None:
    trainer = profiled(tmp_path)
    (tmp_path / "profile").write_text("a file")
    metrics = trainer.run(1, hand.loader())
    assert metrics["step"] == 6
    assert "cannot be written" in caplog.text
    assert "training continues" in caplog.text
    assert os.listdir(tmp_path) == ["profile"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((1, 1), r"profile_schedule=\(1, 1\); write \(wait, warmup, active, repeat\)"),
        ((1, 1, 0, 1), "active of profile_schedule=0"),
        ((-1, 1, 1, 1), "wait of profile_schedule=-1"),
    ],
)
def test_a_schedule_that_cannot_be_meant(given: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        profiled(tmp_path, profile_schedule=given)


@pytest.mark.parametrize(
    ("schedule", "recorded", "files"),
    [
        ((3, 1, 9, 1), "5 to 6", ["rank0-step00000006"]),
        ((0, 1, 2, 3), "2 to 3, 5 to 6", ["rank0-step00000003", "rank0-step00000006"]),
        ((0, 1, 3, 2), "2 to 4, 6 to 6", ["rank0-step00000004", "rank0-step00000006"]),
        ((5, 1, 3, 1), None, []),
        ((0, 1, 4, 2), "2 to 5", ["rank0-step00000005"]),
    ],
)
def test_the_plan_says_what_a_run_of_six_steps_records(
    schedule: Any, recorded: Any, files: list[str], tmp_path: Path
) -> None:
    """Also where it ends within a window, or before its first step."""
    trainer = profiled(tmp_path, profile_schedule=schedule)
    needed = schedule[0] + schedule[1] + 1
    nothing = f"the profiler records: nothing, as profile_schedule={schedule} needs {needed} steps or more"
    expected = nothing if recorded is None else f"the profiler records: steps {recorded}"
    assert expected in trainer.plan(1, hand.loader()).notes
    trainer.run(1, hand.loader())
    assert sorted(path.stem for path in (tmp_path / "profile").glob("*.txt")) == files


@pytest.mark.parametrize("wait", [0, 1])
def test_another_profiler_of_the_process_keeps_running(wait: int, tmp_path: Path, caplog: Any) -> None:
    """torch has one at a time: the run goes on without a profile of ProfilerAddon, and that of the process is whole."""
    trainer = profiled(tmp_path, profile_schedule=(wait, 1, 2, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as outer:
        trainer.run(1, hand.loader())
    assert trainer.progress_checker.step == 6
    assert f"ProfilerAddon does nothing from step {wait + 1} on: torch.profiler cannot start" in caplog.text
    assert "aten::addmm" in {event.key for event in outer.key_averages()}
    assert not (tmp_path / "profile").exists()


class Nested(Task):
    """The fourth step is profiled by the task itself."""

    def train_step(self, batch: Any) -> Any:
        if self.progress_checker.step != 3:
            return super().train_step(batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return super().train_step(batch)


def test_a_profiler_of_a_step_leaves_an_empty_profile(tmp_path: Path, caplog: Any) -> None:
    trainer = profiled(tmp_path, task=Nested)
    assert trainer.run(1, hand.loader())["step"] == 6
    assert "the profile up to step 4 is empty: another profiler was started within the run" in caplog.text
    assert not (tmp_path / "profile").exists()


def test_a_file_that_cannot_be_replaced_leaves_no_part(tmp_path: Path, caplog: Any) -> None:
    trainer = profiled(tmp_path)
    (tmp_path / "profile" / "rank0-step00000004.pt.trace.json").mkdir(parents=True)
    trainer.run(1, hand.loader())
    assert "cannot be written" in caplog.text
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank0-step00000004.pt.trace.json"]


# ------------------------------------------------------------------------------------- what throughput cannot know


class Box:
    """A batch that does not say how many samples it has."""

    def __init__(self) -> None:
        self.inputs = torch.ones(4, 4)

    def to(self, *args: Any, **kwargs: Any) -> Box:
        return self


class Boxed(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch.inputs).square().mean()}

    test_step = train_step


def test_samples_that_are_not_known_are_left_out() -> None:
    trainer = build(ThroughputAddon, task=Boxed)
    trainer.run(1, [Box() for _ in range(4)])
    found = rates(trainer.log_history[-1])
    assert "samples_per_second" not in found
    assert found["flops_per_second"] == pytest.approx(trainer.step_flops * found["steps_per_second"])


def test_operations_go_by_samples() -> None:
    """Batches of 4 and 2 samples, in turn: half of the steps have half of the operations."""
    trainer = build(ThroughputAddon)
    trainer.run(4, hand.loader(6))
    found = rates(trainer.log_history[-1])
    assert found["samples_per_second"] == pytest.approx(3 * found["steps_per_second"])
    assert found["flops_per_second"] == pytest.approx(trainer.step_flops / 4 * found["samples_per_second"])


def test_tokens_that_are_no_number_and_an_absent_key_are_explained() -> None:
    trainer = build(ThroughputAddon, throughput_tokens=lambda batch: None)
    with pytest.raises(ConfigError, match="throughput_tokens returned None; return the number of tokens"):
        trainer.run(1, hand.loader())
    absent = build(ThroughputAddon, throughput_tokens=lambda batch: batch["input_ids"].numel())
    with pytest.raises(TypeError) as raised:
        absent.run(1, hand.loader())
    assert absent.progress_checker.step == 0
    assert "throughput_tokens, for the batch list(Tensor[4, 4] float32, Tensor[4] int64)" in str(raised.value.__notes__)


class Late(Task):
    """Reading the record of training takes 50 ms, as where the host waits for a device, and a validation 300 ms."""

    def metric_on_epoch_end(self) -> dict[str, float]:
        time.sleep(0.05 if self.mode == "train" else 0.3)
        return {}


def test_the_wait_for_a_record_is_in_its_rates() -> None:
    """On an accelerator that is where the host waits for the steps. A validation between them and it is not."""
    trainer = build(ThroughputAddon, task=Late)
    trainer.run(1, hand.loader(8), hand.loader(8), valid_every=1)
    found = [rates(record) for record in trainer.log_history if rates(record)][-1]
    assert found["step_seconds_p99"] < 0.3
    assert 0.05 <= 1 / found["steps_per_second"] < 0.3
