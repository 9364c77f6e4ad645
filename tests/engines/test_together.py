"""Each engine with the other add-ons: equal to one process, or refused with the remedy."""

from __future__ import annotations

import functools
import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_engines import LIMIT, assert_same_history, check, engines, on_engine
from torch import nn

from kit.engines import ENGINES, Block, Engine, Net, Task, build, data, distance, net, sgd, weights
from kit.rank_tasks import forks
from zae import ConfigError, DistributedError
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    NeptuneLoggerAddon,
    PipelineAddon,
    PrefetchAddon,
    SpikeGuardAddon,
    StateManagerAddon,
    TensorBoardLoggerAddon,
    TensorParallelAddon,
    WandBLoggerAddon,
)
from zae.distributed.ranks import RanksEngine


def sharded(engine: Engine) -> bool:
    return FSDPAddon in engine.add_ons


class Double(Net):
    """The model in float64, made by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


@pytest.mark.exhaustive
@on_engine
def test_ema_early_stopping_and_a_logger(engine: Engine, tmp_path: Path) -> None:
    """Validation uses the average; the average is whole in a state, and goes on from it."""
    add_ons = (EMAAddon, EarlyStoppingAddon, JSONLLoggerAddon, GradientAccumulationAddon)
    options = {"decay": 0.8, "patience": 2, "delta": 0.5, "gradient_clip": 0.05, "gradient_accumulation_steps": 2}
    rows = 16 * engine.shares
    trainer = build(engine, *add_ons, jsonl_path=tmp_path / "engine.jsonl", **options)
    single = build(None, *add_ons, jsonl_path=tmp_path / f"one-{dist.get_rank()}.jsonl", **options)
    here = trainer.run(9, data(rows), data(13, 2, False))
    there = single.run(9, data(rows, 4 * engine.shares), data(13, 2, False))
    assert here["stop_reason"] == there["stop_reason"] is not None
    assert here["step"] == there["step"]
    assert distance(trainer, single) < LIMIT
    for row, expected in zip(here["valid_metrics_history"], there["valid_metrics_history"], strict=True):
        assert row == pytest.approx(expected, rel=1e-9)
    average, expected = (each.state_dict()["EMAAddon"]["average"] for each in (trainer, single))
    assert all(type(value) is torch.Tensor for value in average.values())
    for name, value in expected.items():
        assert name.endswith("key.bias") or float((average[name] - value).abs().max()) < LIMIT
    trainer.save_average(tmp_path / f"average-{dist.get_rank()}.safetensors")
    trainer.barrier()
    if trainer.is_main:
        lines = [json.loads(line) for line in (tmp_path / "engine.jsonl").read_text().splitlines()]
        others = [json.loads(line) for line in (tmp_path / "one-0.jsonl").read_text().splitlines()]
        assert len(lines) == len(others) > 5
    check(trainer, engine)


@pytest.mark.sample(count=1)
@on_engine
def test_a_run_that_was_saved_with_an_average_goes_on_bitwise(engine: Engine, tmp_path: Path) -> None:
    """EMA, AMP and accumulation, saved in the middle of an epoch by every rank together."""
    add_ons: tuple[Any, ...] = (EMAAddon, AMPAddon, GradientAccumulationAddon, StateManagerAddon)
    options = {"decay": 0.8, "precision": "bf16", "gradient_clip": 0.05, "gradient_accumulation_steps": 2}
    has_ledger = PipelineAddon not in engine.add_ons  # Which refuses it.
    add_ons += (LedgerAddon,) if has_ledger else ()

    def run(name: str, resume: Any = False, **limits: Any) -> Any:
        paths = {"save_path": tmp_path / name, "resume": resume}
        paths |= {"ledger_path": tmp_path / f"{name}.jsonl"} if has_ledger else {}
        trainer = build(engine, *add_ons, model=net(torch.float32, dropout=0.2), save_every=3, **paths, **options)
        trainer.run(2, data(16 * engine.shares), data(3, 1, False), **limits)
        return trainer

    end = run("end")
    run("begun", max_steps=3)
    again = run("again", resume=str(tmp_path / "begun"))
    assert end.progress_checker.step == again.progress_checker.step == 4
    ends = [weights(each) for each in (end, again)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    averages = [each.state_dict()["EMAAddon"]["average"] for each in (end, again)]
    assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())
    check(again, engine)


@pytest.mark.sample(count=1)
@on_engine
def test_float16_overflows_on_one_rank_are_skipped_by_all(engine: Engine) -> None:
    """The flag of the scaler is that of all ranks: they skip the same steps, and stay alike."""

    class Overflows(Task):
        def train_step(self, batch: Any) -> Any:
            loss = super().train_step(batch)["loss"]
            if self.progress_checker.step == 2 and self.rank == self.world_size - 1:
                loss = loss * float("inf")
            return {"loss": loss}

    if {TensorParallelAddon, PipelineAddon} & {*engine.add_ons}:
        with pytest.raises(ConfigError, match="precision='bf16'"):
            build(engine, AMPAddon, precision="fp16").run(1, data())
        return
    trainer = build(engine, AMPAddon, task=Overflows, model=net(torch.float32), precision="fp16", optimizer=sgd,
                    on_nonfinite="warn")  # fmt: skip
    trainer.run(1, data(16 * engine.shares))
    assert trainer.gather(trainer.progress_checker.skipped_steps) == [1] * engine.world
    assert len(set(trainer.gather(trainer.state_dict()["AMPAddon"]["scaler"]["scale"]))) == 1
    assert all(bool(value.isfinite().all()) for value in weights(trainer).values())
    check(trainer, engine)


@pytest.mark.sample(count=1)
@on_engine
def test_blocks_that_are_compiled_and_checkpointed(engine: Engine) -> None:
    """Per block, before it is sharded; the whole model is refused where it is sharded."""
    if not sharded(engine):
        return
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # By the compiler.
    backend = "aot_eager" if engine.shares != engine.world or engine.world == 2 else "eager"
    ways: list[tuple[Any, ...]] = [((GradientCheckpointingAddon,), {}), ((), {"compile_blocks": backend})]
    for add_ons, options in ways:
        trainer, single = build(engine, *add_ons, gradient_clip=0.05, **options), build(None, gradient_clip=0.05)
        valid = data(4 * engine.shares, 4, False)  # Of another size, a batch would be compiled for again.
        here = trainer.run(1, data(8 * engine.shares), valid)
        there = single.run(1, data(8 * engine.shares, 4 * engine.shares), valid)
        assert_same_history(here, there)
        assert distance(trainer, single) < LIMIT
        assert list(weights(trainer)) == list(weights(single))


@on_engine
def test_what_is_refused(engine: Engine) -> None:
    """Before the first step, with the line to write."""
    with pytest.raises(ConfigError, match=r"unknown dimension 'shards'.*shard"):
        build(engine, mesh={"shards": 2})
    other = "shard" if PipelineAddon in engine.add_ons else "pipeline"
    with pytest.raises(ConfigError, match=rf"no add-on of .* divides the work along '{other}'"):
        build(engine, mesh={other: 2})
    first, *others = engine.add_ons[0].mesh_dimensions
    with pytest.raises(ConfigError, match=f"is of 5 ranks, and this run has {engine.world}"):
        build(engine, mesh={first: 5, **dict.fromkeys(others, 1)}).run(1, data())
    if engine.add_ons != (FSDPAddon,):
        return
    with pytest.raises(ConfigError, match="cpu_offload=True"):
        build(engine, cpu_offload=True)
    with pytest.raises(ConfigError, match="no module of Net is 'Blok'"):
        build(engine, fsdp_blocks=["Blok"]).run(1, data())
    with pytest.raises(ConfigError, match="meta_init=True needs what makes the model"):
        build(engine, meta_init=True)


@engines([name for name, engine in ENGINES.items() if engine.add_ons == (FSDPAddon,)])
def test_blocks_are_found_named_and_shown(name: str) -> None:
    """By default the repeated ones; else classes, names, patterns, or a function."""
    engine = ENGINES[name]
    expected = ["blocks.0", "blocks.1"]
    ways: list[Any] = [None, Block, ["Block"], ["blocks.*"], lambda name, _: name in expected]
    for blocks in ways:
        trainer = build(engine, fsdp_blocks=blocks)
        assert list(trainer.blocks()) == expected
    assert list(build(engine, model=nn.Sequential(Net(), Net()), fsdp_blocks=None).blocks()) == ["0", "1"]
    cls = Task.add_on(*engine.add_ons)
    trainer = cls(net(), ["cpu"] * engine.world, optimizer=sgd, log_bar=False, **engine.options)
    assert "sharded in blocks: 2 of Block (blocks.0 to blocks.1)" in str(trainer.plan(1, data()))


class Fails(Task):
    """Rank 1 raises in the fourth step, while the others wait for it."""

    def train_step(self, batch: Any) -> Any:
        if self.rank == 1 and self.progress_checker.step == 3:
            raise KeyError("gone")
        return super().train_step(batch)


@engines([name for name, engine in ENGINES.items() if sharded(engine)])
def test_a_rank_that_fails_does_not_save_the_whole(name: str, tmp_path: Path) -> None:
    """Gathering needs the others: the error names the newest checkpoint, and no rank waits until its time is over."""
    engine = ENGINES[name]
    cls = Fails.add_on(*engine.add_ons, StateManagerAddon)
    trainer = cls(net(), ["cpu"] * engine.world, optimizer=sgd, save_path=tmp_path / "save", save_every=2,
                  log_bar=False, timeout=120, **engine.options)  # fmt: skip
    with forks(), pytest.raises(KeyError, match="gone") as raised:
        trainer.run(1, data(16 * engine.world))
    assert re.search(r"cannot save it; the newest regular checkpoint is .*step-00000002", str(raised.value.__notes__))
    assert sorted(path.name for path in (tmp_path / "save").iterdir() if "step" in path.name) == ["step-00000002"]


@pytest.mark.exhaustive
@engines()
def test_spawned_ranks_leave_the_result_in_the_trainer(name: str) -> None:
    """run starts the ranks; afterwards one process evaluates, and runs again."""
    engine = ENGINES[name]
    cls = Task.add_on(*engine.add_ons, EMAAddon)
    options: list[dict[str, Any]] = [{}] if engine.world == 2 else []
    for more in options + [{"meta_init": True}] * sharded(engine):
        trainer = cls(Double, ["cpu"] * engine.world, optimizer=sgd, decay=0.5, seed=0, log_bar=False, timeout=120,
                      **engine.options, **more)  # fmt: skip
        single = build(None, EMAAddon, model=Double, optimizer=sgd, decay=0.5)
        for _ in range(2):
            with forks():
                here = trainer.run(1, data(12 * engine.shares), data(3, 1, False))
            there = single.run(1, data(12 * engine.shares, 4 * engine.shares), data(3, 1, False))
            assert here["step"] == there["step"]
        assert trainer.world_size == 1
        assert distance(trainer, single) < LIMIT
        assert trainer.evaluate(data(5, 1, False)) == pytest.approx(single.evaluate(data(5, 1, False)), rel=1e-9)


@pytest.mark.exhaustive
@on_engine
def test_loggers_and_prefetched_batches(engine: Engine, tmp_path: Path) -> None:
    """The clients of W&B and Neptune, offline: rank 0 alone writes, and the weights are bitwise those without them."""
    add_ons = (TensorBoardLoggerAddon, WandBLoggerAddon, NeptuneLoggerAddon, PrefetchAddon)
    web = {"wandb": {"project": "p", "mode": "offline", "dir": str(tmp_path)}, "neptune": {"mode": "offline"}}
    options = {"log_dir": tmp_path / "events", "web_logger": web}
    before, ends = Path.cwd(), []
    os.chdir(tmp_path)  # Neptune writes there.
    try:
        os.environ["WANDB_SILENT"] = "true"
        for more, given in ((add_ons, {**options, "logger_timeout": 30.0, "log_every": 1}), ((), {})):
            trainer = build(engine, *more, optimizer=sgd, **given)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Of the clients.
                trainer.run(1, data(8 * engine.shares), data(5, 2, False))
            check(trainer, engine)
            ends.append(weights(trainer))
    finally:
        os.chdir(before)
        del os.environ["WANDB_SILENT"]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    written = ["events/events.*", "wandb/offline-run-*", ".neptune/offline/*"]
    assert [len(list(tmp_path.glob(pattern))) for pattern in written] == [1, 1, 1]


CALLS: dict[str, Any] = {
    "evaluate": lambda trainer, folder: trainer.evaluate(data(4, 2, False)),
    "inference": lambda trainer, folder: trainer.inference(data(4, 2, False)),
    "predict": lambda trainer, folder: trainer.predict(data(4, 2, False)),
    "state_dict": lambda trainer, folder: trainer.state_dict(),
    "save_state": lambda trainer, folder: trainer.save_state(),
    "save_model": lambda trainer, folder: trainer.save_model(folder / "model.safetensors"),
    "save_average": lambda trainer, folder: trainer.save_average(folder / "average.safetensors"),
    "plan": lambda trainer, folder: trainer.plan(1, data(16)),
    "explain": lambda trainer, folder: trainer.explain(),
}


@pytest.mark.sample(count=1)
@on_engine
def test_what_one_rank_calls_alone_works_or_ends_in_words(engine: Engine, tmp_path: Path) -> None:
    """A rank is told at once of another call, and within its timeout of none; afterwards the ranks train on."""
    options = {"optimizer": sgd, "decay": 0.5, "timeout": 30}
    trainer = build(engine, EMAAddon, StateManagerAddon, save_path=tmp_path / "save", **options)
    expected = build(engine, EMAAddon, StateManagerAddon, save_path=tmp_path / "expected", **options)
    works = {"plan", "explain"}
    for each in (trainer, expected):
        each.run(1, data(8 * engine.shares))
    works |= {"save_model", "save_average"} if trainer.engine.can_save_alone else set()
    ranks = trainer.engine.find(RanksEngine)
    assert ranks is not None
    trainer.timeout = ranks.timeout = 0.1
    for index, (name, call) in enumerate(CALLS.items()):
        if trainer.rank == index % 2 and name in works:
            call(trainer, tmp_path)
        elif trainer.rank == index % 2:
            with pytest.raises(DistributedError, match=rf"called {name}, .* did not within 0.1 s.*every rank"):
                call(trainer, tmp_path)
        dist.barrier()
    trainer.timeout = ranks.timeout = 30
    for each in (trainer, expected):
        each.run(1, data(8 * engine.shares))
    ends = [weights(each) for each in (trainer, expected)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    check(trainer, engine)
    with pytest.raises(DistributedError, match=r"called (evaluate|run), and another rank called (evaluate|run)"):
        trainer.evaluate(data(4)) if trainer.is_main else trainer.run(1, data(16))
    if not trainer.is_main:
        time.sleep(0.5)  # The others wait, and do not take the error that all have got for one of this call.
    trainer.run(1, data(8 * engine.shares))


class Spiky(Task):
    """The loss of one step is far above the others."""

    def train_step(self, batch: Any) -> Any:
        found = super().train_step(batch)
        return {"loss": found["loss"] * (1e4 if self.progress_checker.step == 7 else 1.0)}


@functools.partial(on_engine, default=[])
def test_a_spike_is_skipped(engine: Engine) -> None:
    """All ranks decide as one process does."""
    options: dict[str, Any] = {"spike_warmup": 4, "spike_threshold": 100.0, "gradient_clip": 0.05}
    trainer, single = (build(each, SpikeGuardAddon, task=Spiky, **options) for each in (engine, None))
    here = trainer.run(1, data(12 * 4 * engine.shares))
    there = single.run(1, data(12 * 4 * engine.shares, 4 * engine.shares))
    assert [each["step"] for each in single.spikes] == [each["step"] for each in trainer.spikes] == [8]
    assert here["step"] == there["step"] == 12
    assert trainer.progress_checker.skipped_steps == single.progress_checker.skipped_steps == 1
    assert distance(trainer, single) < LIMIT
    check(trainer, engine)
