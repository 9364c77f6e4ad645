"""What every engine promises, each against one process on the same global batch; kit/engines.py is the table.

The default run has the engines on two ranks; the whole table has the marker `exhaustive`.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.engines import ENGINES, Counted, Engine, Net, Task, adamw, build, data, distance, layout, net, sgd, weights
from zae import ConfigError
from zae.addons import (
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    PipelineAddon,
    StateManagerAddon,
)

LIMIT = 1e-12
SMALL = [name for name, engine in ENGINES.items() if engine.world == 2 and not engine.is_sampled]
LARGE = [name for name in ENGINES if name not in SMALL]


def engines(names: Iterable[str] = ENGINES, default: Iterable[str] = SMALL) -> Any:
    """Parametrize a test with engines, of which some run by default."""
    marks = {name: () if name in default else pytest.mark.exhaustive for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def on_engine(test: Any, names: Iterable[str] = ENGINES, default: Iterable[str] = SMALL) -> Any:
    """Run a test function on the ranks of every engine."""

    @functools.wraps(test)
    def run(name: str, tmp_path: Path, crews: Any) -> None:
        crews(ENGINES[name].world).call(on_rank, test.__module__, test.__name__, name, tmp_path)

    del run.__wrapped__
    run.on_rank = test  # type: ignore[attr-defined]
    return engines(names, default)(run)


def on_rank(module: str, test: str, name: str, tmp_path: Path) -> None:
    """Call a test function, which the ranks know by its name, with an engine."""
    function = getattr(sys.modules[module], test).on_rank
    fixtures = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(function).parameters else {}
    function(ENGINES[name], **fixtures)


def check(trainer: Any, engine: Engine) -> None:
    """Assert that it is this engine that has trained."""
    assert dist.get_world_size() == trainer.world_size == engine.world
    assert trainer.engine.dp_world_size == engine.shares
    assert set(map(layout, trainer.unwrap().parameters())) == engine.layouts
    with trainer.ready():
        assert type(trainer.model).__name__ == engine.wrapper


def assert_same_history(here: Any, there: Any) -> None:
    """Assert that two runs have recorded the same metrics, but for rounding."""
    for key in ("train_metrics_history", "valid_metrics_history"):
        for row, expected in zip(here[key], there[key], strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


@functools.partial(on_engine, default=["fsdp"])
def test_the_weights_are_those_of_one_process(engine: Engine) -> None:
    """20 steps of AdamW, with a clip that bites and two batches in a window."""
    assert train_beside_one_process(engine, 20) == [20, 2]


@functools.partial(on_engine, default=["tensor"])
def test_the_first_weights_are_those_of_one_process(engine: Engine) -> None:
    """The same with fewer steps, for the default run."""
    assert train_beside_one_process(engine, 4) == [4, 2]


def train_beside_one_process(engine: Engine, many: int) -> list[int]:
    """Return how many steps were compared, of a task and of one that counts its targets."""
    compared = []
    for task, steps, clip in ((Task, many, 0.05), (Counted, 2, math.inf)):
        options = {"task": task, "gradient_clip": clip, "gradient_accumulation_steps": 2}
        trainer, single = (build(each, GradientAccumulationAddon, **options) for each in (engine, None))
        rows = 4 * engine.shares * steps
        here = trainer.run(2, data(rows), data(9, 2, False))
        there = single.run(2, data(rows, 4 * engine.shares), data(9, 2, False))
        assert here["step"] == there["step"] == steps
        assert float(single.grad_norm) > 0.05
        assert abs(float(trainer.grad_norm) - float(single.grad_norm)) < LIMIT
        assert distance(trainer, single) < LIMIT
        assert_same_history(here, there)
        check(trainer, engine)
        compared.append(trainer.progress_checker.step)
    return compared


@functools.partial(on_engine, default=["fsdp"])  # Ranks that divide layers alone all have samples.
def test_ranks_without_samples(engine: Engine) -> None:
    """A last window in which some ranks have no sample."""
    for task in (Task, Counted):
        for rows in (1, 4 * engine.shares + 1):
            trainer, single = (build(each, task=task, gradient_clip=0.05) for each in (engine, None))
            here = trainer.run(2, data(rows), data(1, 1, False))
            there = single.run(2, data(rows, 4 * engine.shares), data(1, 1, False))
            assert here["step"] == there["step"]
            assert trainer.progress_checker.batch == here["step"]
            assert distance(trainer, single) < LIMIT
            assert_same_history(here, there)
            check(trainer, engine)


@pytest.mark.sample(count=1)
@on_engine
def test_an_instance_of_an_optimizer_trains_the_wrapped_parameters(engine: Engine) -> None:
    """An optimizer that holds the parameters of before would move nothing: ENGINES.md, the first silent fault."""
    begun, trainers = {}, []
    for kind in (engine, None):
        model = net()
        optimizer = sgd(model.parameters())
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        optimizer.step()  # It has a state already, which sharding has to divide.
        begun = {name: value.detach().clone() for name, value in model.named_parameters()}
        trainers.append(build(kind, model=model, optimizer=optimizer))
    trainer, single = trainers
    trainer.run(2, data(8 * engine.shares))
    single.run(2, data(8 * engine.shares, 4 * engine.shares))
    own = weights(trainer)
    assert all(bool((own[name] != begun[name]).any()) for name in begun if not name.endswith("key.bias"))
    assert distance(trainer, single) < LIMIT
    held = {id(each) for each in trainer.unwrap().parameters()}
    assert all(id(each) in held for group in trainer.optimizer.param_groups for each in group["params"])


class Several(Task):
    """Return a loss for each optimizer; evaluation records one."""

    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)["loss"]
        return {"loss": {"a": loss, "b": 2 * loss}}

    def test_step(self, batch: Any) -> Any:
        return {**Task.train_step(self, batch), "rows": batch[0][:, 0].clone()}


@pytest.mark.sample(count=1)
@on_engine
def test_a_loss_for_each_of_several_optimizers(engine: Engine) -> None:
    """In windows of two batches, of which the last has unequal shares; refused where parameters are on other ranks."""
    trainers = []
    for kind in (engine, None):
        model = net()
        parts: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for name, each in model.named_parameters():
            parts[name.startswith("blocks")].append(each)
        optimizers = {"a": sgd(parts[True]), "b": adamw(parts[False])}
        options = {"gradient_clip": 0.05, "gradient_accumulation_steps": 2, "task": Several}
        if kind is not None and PipelineAddon in kind.add_ons:
            with pytest.raises(ConfigError, match=r"several optimizers.*train with MultiGPUAddon"):
                build(kind, GradientAccumulationAddon, model=model, optimizer=optimizers, **options)
            return
        trainers.append(build(kind, GradientAccumulationAddon, model=model, optimizer=optimizers, **options))
    trainer, single = trainers
    if FSDPAddon in engine.add_ons:
        with pytest.raises(ConfigError, match=r"Return one loss, or train with MultiGPUAddon"):
            trainer.run(1, data())
        return
    trainer.run(2, data(8 * engine.shares + 3))
    single.run(2, data(8 * engine.shares + 3, 4 * engine.shares))
    assert distance(trainer, single) < LIMIT
    check(trainer, engine)


@functools.partial(on_engine, default=["ddp"])
def test_two_runs_are_bitwise_the_same_and_a_second_run_goes_on(engine: Engine) -> None:
    """Wrapping happens once: run, evaluate, toggle and run again use the same module."""
    ends, rows = [], 8 * engine.shares
    for _ in range(2):
        trainer = build(engine, gradient_clip=0.05, model=net(dropout=0.5))
        trainer.run(1, data(rows))
        trainer.evaluate(data(9, 2, False))
        trainer.toggle()
        trainer.toggle()
        trainer.run(1, data(rows))
        ends.append(weights(trainer))
        check(trainer, engine)
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    trainer, single = (build(each) for each in (engine, None))
    for each, size in ((trainer, 4), (single, 4 * engine.shares)):
        each.run(1, data(rows, size))
        each.run(1, data(rows, size))
    assert distance(trainer, single) < LIMIT


@functools.partial(on_engine, default=["ddp"])
def test_evaluation_of_unequal_shares(engine: Engine) -> None:
    """Five batches on two ranks, before a run and after it; inference keeps the order."""
    trainer, single = (build(each) for each in (engine, None))
    for step in range(2):
        for rows, size in ((9, 2), (1, 1), (2, 1))[: 1 if step else 3]:
            valid = data(rows, size, False)
            assert trainer.evaluate(valid) == pytest.approx(single.evaluate(valid), rel=1e-12)
            here, there = (each.inference(valid) for each in (trainer, single))
            assert [out["rows"].tolist() for out in here] == [out["rows"].tolist() for out in there]
            assert trainer.predict(valid)["rows"].tolist() == single.predict(valid)["rows"].tolist()
        if not step:
            trainer.run(1, data(8 * engine.shares))
            single.run(1, data(8 * engine.shares, 4 * engine.shares))
    check(trainer, engine)


@functools.partial(on_engine, default=["fsdp"])
def test_the_initial_weights_are_those_of_one_process(engine: Engine) -> None:
    """Of a factory and a seed; with meta_init too, where the engine has it."""
    expected = weights(build(None, model=Net, seed=7))
    kinds: list[dict[str, Any]] = [{}, {"meta_init": True}] if FSDPAddon in engine.add_ons else [{}]
    for options in kinds:
        trainer = build(engine, model=Net, seed=7, **options)
        assert not options or all(each.is_meta for each in trainer.unwrap().parameters())
        with trainer.ready():
            own = weights(trainer)
            assert set(map(layout, trainer.unwrap().parameters())) == engine.layouts
        assert all(torch.equal(value, expected[name]) for name, value in own.items())
        trainer.run(1, data(4 * engine.shares))


@pytest.mark.sample(count=1)
@on_engine
def test_whole_states_load_into_every_engine(engine: Engine, tmp_path: Path) -> None:
    """From one process and DDP to this engine, back to DDP, and into the class without an engine: to the same end."""
    ddp = Engine((MultiGPUAddon,), engine.world, engine.world, wrapper="Replica")
    kinds = {"one": None, "engine": engine, "ddp": ddp}

    def run(kind: Engine | None, folder: str, **options: Any) -> Any:
        path = tmp_path / (folder if kind else f"{folder}-{dist.get_rank()}")
        trainer = build(kind, StateManagerAddon, gradient_clip=0.05, save_path=path, save_every=3, **options)
        size = 4 * engine.world // (1 if kind is None else kind.shares)
        limits = {} if "resume" in options else {"max_steps": 3}
        trainer.run(3, data(8 * engine.world, size, False), **limits)
        return trainer

    end = build(None, gradient_clip=0.05)
    end.run(3, data(8 * engine.world, 4 * engine.world, False))
    for name, kind in kinds.items():
        run(kind, name)
    dist.barrier()
    pairs = ("one", "engine"), ("engine", "engine"), ("ddp", "engine"), ("engine", "ddp"), ("engine", "one")
    for saved, loaded in pairs:  # Pairs without this engine are those of DDP.
        found = tmp_path / (saved if saved != "one" else "one-0")
        trainer = run(kinds[loaded], f"{saved}-{loaded}", resume=str(found), reshard=saved != loaded)
        assert trainer.progress_checker.step == 6
        assert distance(trainer, end) < LIMIT, (saved, loaded)
        if (kind := kinds[loaded]) is not None:
            check(trainer, kind)


@pytest.mark.sample(count=1)
@on_engine
def test_weights_alone(engine: Engine, tmp_path: Path) -> None:
    """save_model writes the plain weights, once; one process and the engine load them."""
    trainer, single, again = build(engine), build(None), build(engine)
    trainer.run(1, data(8 * engine.shares))
    trainer.save_model(tmp_path / "model.safetensors")
    trainer.barrier()
    single.apply_weights(tmp_path / "model.safetensors")
    assert distance(trainer, single, without="none") == 0
    again.evaluate(data(4, 2))
    again.apply_weights(tmp_path / "model.safetensors")
    assert distance(trainer, again, without="none") == 0
    assert again.evaluate(data(9, 2)) == pytest.approx(single.evaluate(data(9, 2)), rel=1e-12)


class Alone(Task):
    """Note on each rank what the steps returned and drew; the second loss of the last rank is not finite."""

    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)["loss"]
        if len(self.seen) == 1 and self.rank == self.world_size - 1:
            loss = loss * float("nan")
        return {"loss": loss}

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.seen: list[tuple[bool, float]] = []

    def should_step(self, outputs: Any) -> bool:
        may = super().should_step(outputs)
        self.seen.append((may, float(torch.rand(()))))
        return may


@pytest.mark.sample(count=1)
@on_engine
def test_a_uniform_average_and_the_summary_are_those_of_one_process(engine: Engine) -> None:
    """Stochastic weight averaging of whole epochs; the parameters are counted whole."""
    trainer, single = (build(each, EMAAddon, averaging="uniform") for each in (engine, None))
    trainer.run(3, data(8 * engine.shares))
    single.run(3, data(8 * engine.shares, 4 * engine.shares))
    here, there = (each.state_dict()["EMAAddon"] for each in (trainer, single))
    assert here["averaged_epochs"] == there["averaged_epochs"] == 3
    for name, average in there["average"].items() if trainer.is_main else ():
        assert name.endswith("key.bias") or float((here["average"][name] - average).abs().max()) < LIMIT
    check(trainer, engine)


@pytest.mark.sample(count=1)
@on_engine
def test_what_ranks_must_agree_on(engine: Engine) -> None:
    """Whether a step is made, the norm, the random numbers of ranks with the same batches; the module is not copied."""
    trainer = build(engine, task=Alone, gradient_clip=0.05, on_nonfinite="skip")
    trainer.run(1, data(12 * engine.shares))
    module, wrapped = trainer.unwrap(), type(trainer.unwrap())
    seen = trainer.gather(trainer.seen)
    assert [may for may, _ in seen[0]] == [True, False, True]
    assert len({tuple(may for may, _ in each) for each in seen}) == 1
    assert len(set(trainer.gather(float(trainer.grad_norm)))) == 1
    drawn = dict(zip(trainer.gather(trainer.engine.dp_rank), ([number for _, number in each] for each in seen)))
    assert len(drawn) == engine.shares
    for share, numbers in zip(trainer.gather(trainer.engine.dp_rank), seen):
        assert [number for _, number in numbers] == drawn[share]
    assert len({tuple(numbers) for numbers in drawn.values()}) == engine.shares
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        str(trainer.plan(1, data(), data(4, 2, False)))
    with trainer.ready():
        assert trainer.unwrap() is module
    assert trainer.unwrap() is module
    assert type(module) is wrapped
    held = {id(each) for each in module.parameters()}
    assert all(id(each) in held for group in trainer.optimizer.param_groups for each in group["params"])
    check(trainer, engine)
