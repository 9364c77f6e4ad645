"""What PipelineAddon computes, keeps and refuses; its promises as an engine are in test_engines.py."""

from __future__ import annotations

import functools
import random
import re
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_engines import on_engine
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

from kit.engines import ENGINES, F64, Counted, Engine, Task, build, data, distance, net, sgd, weights
from kit.ranks import each_rank
from zae import AddOnBase, AddOnConflict, AddOnError, ConfigError
from zae.addons import (
    ActivationOffloadAddon,
    AMPAddon,
    CompileAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    LedgerAddon,
    MultiGPUAddon,
    PEFTAddon,
    PipelineAddon,
    TensorParallelAddon,
)
from zae.addons.pipeline.chain import chain_of
from zae.addons.pipeline.schedules import SCHEDULES, Schedule

LIMIT = 1e-12
PIPELINE = ENGINES["pipeline"]
on_pipeline = functools.partial(on_engine, names=["pipeline"], default=["pipeline"])
on_pipeline_exhaustive = functools.partial(on_engine, names=["pipeline"], default=[])


def made(**options: Any) -> Engine:
    """Return a pipeline of two ranks, with other options."""
    return Engine((PipelineAddon,), 2, 1, options)


# -------------------------------------------------------------------------------------------------------- schedules


def beside_one_process(world: int, steps: int, **options: Any) -> tuple[float, float, int]:
    """Return how far AdamW is from one process, in windows of two with a clip that bites and a short last batch."""
    assert dist.get_world_size() == world
    given = {"gradient_clip": 0.05, "gradient_accumulation_steps": 2}
    trainer, single = (
        build(each, GradientAccumulationAddon, model=net(blocks=8), **given) for each in (made(**options), None)
    )
    rows = 8 * steps - 5  # The last window has 8 rows and 3.
    here, there = (each.run(2, data(rows, 8), data(9, 4, False)) for each in (trainer, single))
    assert here["step"] == there["step"] == steps + steps % 2
    assert float(single.grad_norm) > 0.05
    assert here["valid_metrics_history"][-1] == pytest.approx(there["valid_metrics_history"][-1], rel=1e-9)
    with trainer.ready():
        own = sum(not each.is_meta for each in trainer.unwrap().parameters())
    return distance(trainer, single), abs(float(trainer.grad_norm) - float(single.grad_norm)), own


ALL = [(name, 2, 2 if stages is None else stages) for name, stages in SCHEDULES.items()]
LARGE = [("Interleaved1F1B", 4, 2), ("InterleavedZeroBubble", 4, 2), ("ZBVZeroBubble", 4, 2), ("LoopedBFS", 4, 2)]
DEFAULT = [("Interleaved1F1B", 2, 2)]


@pytest.mark.parametrize(
    ("name", "world", "stages"),
    [pytest.param(*each, marks=() if each in DEFAULT else pytest.mark.exhaustive) for each in ALL + LARGE],
)
def test_each_schedule_is_one_process(name: str, world: int, stages: int, crews: Any) -> None:
    """Weights and norm; the stages on their ranks, and nothing else."""
    steps = 4 if (name, world, stages) in DEFAULT else 20
    options = {"pipeline_schedule": name, "stages_per_rank": stages, "pipeline_microbatches": max(4, world * stages)}
    found = crews(world).call(functools.partial(beside_one_process, world, steps, **options))
    total = len(list(net(blocks=8).parameters()))
    assert sum(own for _, _, own in found) == total
    assert max(own for _, _, own in found) < total
    assert max(max(weight, norm) for weight, norm, _ in found) < LIMIT


def with_blocks(add_on: type[AddOnBase] | None, modules: dict[str, Any], **options: Any) -> tuple[Any, int]:
    """Return a pipeline that has trained a model with dropout, and how often this rank has computed a block."""
    trainer = build(made(**options), *filter(None, [add_on]), model=net(blocks=8, dropout=0.3), **modules)
    calls: list[Any] = []
    for block in trainer.unwrap().blocks:
        block.first.register_forward_hook(lambda *_: calls.append(1))
    trainer.run(1, data(16, 8))
    return trainer, len(calls)


def beside_what_is_kept(world: int, **options: Any) -> tuple[float, float, int]:
    """Return how far pipelines are that compute blocks again, or offload them, and how many more are computed."""
    assert dist.get_world_size() == world
    plain, once = with_blocks(None, {}, **options)
    again, twice = with_blocks(GradientCheckpointingAddon, {"checkpoint_modules": "blocks.*"}, **options)
    offloaded, _ = with_blocks(ActivationOffloadAddon, {"offload_modules": "blocks.*"}, **options)
    return distance(again, plain, without="!"), distance(offloaded, plain, without="!"), twice - once


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(name, n or 2, marks=() if name == "1F1B" else pytest.mark.exhaustive)
        for name, n in SCHEDULES.items()
    ],
)
def test_blocks_are_computed_again_in_each_schedule(name: str, stages: int, crews: Any) -> None:
    """Bitwise as without, dropout included: a schedule computes the backwards of its stages in an order of its own."""
    options = {"pipeline_schedule": name, "stages_per_rank": stages, "pipeline_microbatches": 4}
    for again, offloaded, more in crews(2).call(functools.partial(beside_what_is_kept, 2, **options)):
        assert again == offloaded == 0
        assert more >= 2 * 4 * 2, "two steps of four micro-batches, at least two blocks on a rank"


def divides_again(pipeline: Any, *rest: Any) -> Any:
    return ScheduleGPipe(pipeline[0], rest[0], rest[1])


def keeps(pipeline: Any, count: int, loss: Any) -> Any:
    return ScheduleGPipe(pipeline[0], count, loss, scale_grads=False)


@on_pipeline
def test_a_second_step_in_a_window_is_not_scaled_twice(engine: Engine) -> None:
    """A schedule with ``scale_grads=True``, torch's default, would be far from one process, and is refused."""
    assert dist.get_world_size() == engine.world
    options = {"gradient_accumulation_steps": 3, "optimizer": sgd}
    single = build(None, GradientAccumulationAddon, **options)
    single.run(1, data(24))
    for schedule in (keeps, ScheduleGPipe):
        trainer = build(made(pipeline_schedule=schedule), GradientAccumulationAddon, **options)
        trainer.run(1, data(24))
        assert trainer.progress_checker.step == 2
        assert distance(trainer, single) < LIMIT
    with pytest.raises(ConfigError, match="scale_grads=False"):
        build(made(pipeline_schedule=divides_again), GradientAccumulationAddon, **options).run(1, data(24))


@on_pipeline
def test_batches_that_leave_micro_batches_short_or_empty(engine: Engine) -> None:
    """Of 8 rows in 4 micro-batches, a last batch has 1 to 7; with the targets counted as well."""
    for task, rest in ((Task, 1), (Counted, 3)):
        leaves_rows_out(task, rest)


@on_pipeline_exhaustive
def test_each_count_of_rows_that_a_batch_lacks(engine: Engine) -> None:
    assert dist.get_world_size() == engine.world
    for task in (Task, Counted):
        for rest in (1, 3, 6):
            leaves_rows_out(task, rest)


def leaves_rows_out(task: type[Task], rest: int) -> None:
    trainer, single = (build(each, task=task, gradient_clip=0.05) for each in (made(pipeline_microbatches=4), None))
    here, there = (each.run(2, data(8 + rest, 8), data(rest, 8, False)) for each in (trainer, single))
    assert distance(trainer, single) < LIMIT, rest
    for key in ("train_metrics_history", "valid_metrics_history"):
        for row, expected in zip(here[key], there[key], strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


# ------------------------------------------------------------------------------------------------ models and steps


class Reads(nn.Linear):
    """Read one entry of the inputs of the model."""

    def forward(self, inputs: Any) -> torch.Tensor:
        return super().forward(inputs["x"]).tanh()


class Masked(nn.Linear):
    def forward(self, x: torch.Tensor, mask: Any, *, twice: bool) -> torch.Tensor:
        y = super().forward(x)
        if mask is not None:
            y = y * mask[:, None]
        return y + y if twice else y


class Answers(nn.Linear):
    """Return several things, one of which is of an input of the model."""

    def forward(self, y: torch.Tensor, inputs: Any) -> Any:
        return {"logits": super().forward(y), "sum": y.sum(-1) + inputs["x"].sum(-1), "rows": len(y)}


class Skips(nn.Module):
    """Each stage reads inputs of the model; a number decides in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Reads(4, 6), Masked(6, 6), Answers(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Any, mask: Any = None, *, twice: bool = False) -> Any:
        return self.third(self.second(self.first(inputs), mask, twice=twice), inputs)


class Structured(Task):
    """Call the model with a dict, a keyword and a number; draw noise before the call, which the loss needs too."""

    def train_step(self, batch: Any) -> Any:
        x, mask, y = batch["x"], batch["mask"], batch["y"]
        noise = torch.rand_like(x) + random.random() + np.random.rand()
        out = self.model({"x": x + noise}, mask=mask, twice=self.progress_checker.step % 2 == 1)
        loss = (out["logits"] - y - noise[:, :3]).square().mean() + 0.1 * out["sum"].square().mean()
        return {"loss": loss, "largest": out["logits"].detach().abs().mean(), "names": batch["name"]}

    def test_step(self, batch: Any) -> Any:
        out = self.model({"x": batch["x"]}, batch["mask"])
        return {"loss": (out["logits"] - batch["y"]).square().mean(), "sum": out["sum"], "names": batch["name"]}

    def predict_step(self, batch: Any) -> Any:
        return self.model({"x": batch["x"]})["sum"]

    def metric_on_epoch_end(self) -> dict[str, float]:
        return {}


def structured(rows: int = 8, size: int = 8) -> DataLoader[Any]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(3), dtype=F64)
    samples = [{"x": x[i], "mask": x[i, 0] * 0 + i % 2, "y": x[i, :3], "name": f"row {i}"} for i in range(rows)]
    return DataLoader(samples, size)  # type: ignore[arg-type]


@on_pipeline_exhaustive
def test_a_step_with_inputs_of_its_own_and_a_model_that_returns_a_dict(engine: Engine) -> None:
    """Noise is that of the micro-batches, as with one process that accumulates them; results keep their order."""
    assert dist.get_world_size() == engine.world
    torch.manual_seed(0)
    model = Skips().double()
    options = {"task": Structured, "optimizer": sgd, "gradient_clip": 0.5}
    state = {name: each.clone() for name, each in model.state_dict().items()}
    trainer = build(made(split=["second"], pipeline_microbatches=4), model=model, **options)
    single = build(None, GradientAccumulationAddon, model=Skips().double(), gradient_accumulation_steps=4, **options)
    single.unwrap().load_state_dict(state)
    trainer.run(3, structured())
    single.run(3, structured(size=2))
    assert trainer.evaluate(structured()) == pytest.approx(single.evaluate(structured()), rel=1e-12)
    assert distance(trainer, single) < LIMIT
    assert trainer.train_history[-1]["train_largest"] == pytest.approx(single.train_history[-1]["train_largest"])
    for size in (8, 3, 1):
        here, there = (each.inference(structured(7, size)) for each in (trainer, single))
        for own, expected in zip(here, there, strict=True):
            torch.testing.assert_close(own["output"], expected["output"], rtol=1e-12, atol=1e-12)
        assert trainer.predict(structured(7, size))["output"].shape == (7,)


class Drops(nn.Module):
    """Dropout by a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Mean(Task):
    """Take the mean of the squares of what the model returns."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean()}

    test_step = train_step

    def metric_on_epoch_end(self) -> dict[str, float]:
        return {}


def rows(count: int = 8, size: int = 4) -> DataLoader[Any]:
    values = torch.randn(count, 4, generator=torch.Generator().manual_seed(3), dtype=F64)
    return DataLoader(TensorDataset(values), size)


def dropped() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), Drops(), nn.Linear(8, 4))
    return nn.Sequential(*layers).double()


@on_pipeline_exhaustive
def test_dropout_draws_from_streams_of_stages_and_micro_batches(engine: Engine) -> None:
    """The same masks with each schedule, others in each step and micro-batch, and none in an evaluation."""
    ends = []
    for schedule in ("GPipe", "1F1B", "1F1B"):
        trainer = build(made(split=["2"], pipeline_schedule=schedule), task=Mean, model=dropped(), optimizer=sgd)
        trainer.run(2, rows())
        ends.append(weights(trainer))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert all(torch.equal(value, ends[2][name]) for name, value in ends[1].items())
    frozen = build(made(split=["2"]), task=Mean, model=dropped(), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    same = DataLoader(TensorDataset(torch.ones(8, 4, dtype=F64)), 4)
    losses: list[float] = []
    for _ in range(3):
        losses.append(frozen.run(1, same)["train_metrics_history"][-1]["train_loss"])
    assert len(set(losses)) == 3
    plain = build(None, task=Mean, model=dropped())
    assert frozen.evaluate(rows()) == pytest.approx(plain.evaluate(rows()), rel=1e-12)
    assert engine.world == dist.get_world_size()


@on_pipeline
def test_a_parameter_outside_of_the_model_is_refused(engine: Engine) -> None:
    """A learnt weight of the loss: no stage has it."""
    model, outside = dropped(), nn.Parameter(torch.tensor(2.0, dtype=F64))
    trainer = build(made(split=["2"]), task=Mean, model=model, optimizer=sgd([*model.parameters(), outside]))
    with pytest.raises(ConfigError, match=r"a parameter that is not of the model.*train with MultiGPUAddon"):
        trainer.run(1, rows())
    assert engine.world == 2


class Rounded(Task):
    """Note in which type the blocks and the loss are computed."""

    def train_step(self, batch: Any) -> Any:
        out = self.model(batch[0][:, :-1])
        self.seen = out.dtype
        return {"loss": nn.functional.cross_entropy(out.float().flatten(0, 1), batch[0][:, 1:].flatten())}

    test_step = train_step

    def metric_on_epoch_end(self) -> dict[str, float]:
        return {}


@on_pipeline
def test_autocast_is_in_each_stage(engine: Engine) -> None:
    """The same as one process that accumulates the micro-batches in bfloat16; a loss scale is refused."""
    warnings.filterwarnings("ignore", "precision='bf16'")
    options = {"task": Rounded, "precision": "bf16", "optimizer": sgd}
    seen: list[list[torch.dtype]] = []
    for kind, size, steps in ((PIPELINE, 4, 1), (None, 2, 2)):
        model = net(torch.float32)
        kinds: list[torch.dtype] = []
        for block in model.blocks:
            block.up.register_forward_hook(lambda module, inputs, out, kinds=kinds: kinds.append(out.dtype))
        trainer = build(
            kind, AMPAddon, GradientAccumulationAddon, model=model, gradient_accumulation_steps=steps, **options
        )
        trainer.run(1, data(16, size, False))
        seen.append(kinds)
        if kind is None:
            single = trainer
        else:
            piped = trainer
    assert {*seen[0], *seen[1]} == {torch.bfloat16}
    assert distance(piped, single) < 1e-6
    full = build(None, task=Rounded, model=net(torch.float32), optimizer=sgd)
    full.run(1, data(16, 4, False))
    assert distance(piped, full) > 1e-6
    with pytest.raises(ConfigError, match=r"precision='fp16' needs a loss scale.*write precision='bf16'"):
        build(PIPELINE, AMPAddon, model=net(torch.float32), task=Rounded, precision="fp16").run(1, data(8))
    assert engine.world == dist.get_world_size()


# ------------------------------------------------------------------------------------------------------- the split


def test_stages_are_named_counted_or_given_by_a_function() -> None:
    """By default they are balanced by parameters; what no stage computes with is in the first one."""
    model = net(blocks=8)
    for count in (2, 3, 4, 8):
        chain = chain_of(model, None, count)
        sizes = [sum(each.numel() for each in chain.parameters([stage])) for stage in range(count)]
        assert sum(sizes) == sum(each.numel() for each in model.parameters())
        block = sum(each.numel() for each in model.blocks[0].parameters())
        assert max(sizes) - min(sizes) <= 2 * block
    assert chain_of(model, ["blocks.3", "blocks.6", "norm"], 4).begins == ["blocks.3", "blocks.6", "norm"]
    deep = chain_of(
        nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), nn.Linear(2, 2)), ["0.2"], 2
    )
    assert [sorted(each) for each in deep.names] == [["0.0.bias", "0.0.weight"],
                                                     ["0.2.bias", "0.2.weight", "1.bias", "1.weight"]]  # fmt: skip
    own = chain_of(dropped(), lambda model, count: [nn.Sequential(model[0], model[1]), nn.Sequential(*model[2:])], 2)
    assert [sorted(each) for each in own.names] == [["0.bias", "0.weight"],
                                                    ["2.bias", "2.weight", "4.bias", "4.weight"]]  # fmt: skip


@on_pipeline_exhaustive
def test_a_function_gives_the_stages(engine: Engine) -> None:
    """Of a model whose forward cannot be divided."""

    class Decides(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > -1e9 else -x)

    torch.manual_seed(0)
    model = Decides(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    again = Decides(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    again.load_state_dict(model.state_dict())
    with pytest.raises(ConfigError, match=r"forward of Decides cannot be divided .*give split=a function"):
        build(made(split=["2"]), task=Mean, model=model, optimizer=sgd).run(1, rows())

    def halves(model: Any, count: int) -> list[nn.Module]:
        return [nn.Sequential(*model[:2]), model[2]]

    trainer = build(made(split=halves), task=Mean, model=model, optimizer=sgd)
    single = build(None, task=Mean, model=again, optimizer=sgd)
    trainer.run(2, rows(7))
    single.run(2, rows(7))
    assert distance(trainer, single) < LIMIT
    assert engine.world == dist.get_world_size()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


class Forward(nn.Module):
    """Two layers, and a forward that a test gives."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def without_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = model.a(x)
    return model.b(x)


def past(model: Any, x: torch.Tensor) -> torch.Tensor:
    first = model.a(x)
    model.b(first)
    return first


def hooked() -> nn.Module:
    model = Forward(lambda model, x: model.b(model.a(x)))
    model.register_forward_hook(lambda *_: None)
    return model


SPLITS = {
    "tied": (Tied, ["b"], r"a.weight \(stage 0\) and c.weight \(stage 1\) are one parameter.*train with FSDPAddon"),
    "twice": (lambda: Forward(lambda m, x: m.a(m.b(m.a(x)))), ["b"], r"a.weight is used in stage 0 and in stage 1"),
    "order": (lambda: Forward(lambda m, x: m.a(m.b(x))), ["b"], r"stage 0 of 2 has no parameter|does not call"),
    "unused": (lambda: Forward(lambda m, x: m.a(x)), ["b"], "does not call 'b'"),
    "unknown": (Tied, ["d"], r"Tied has no module 'd'; its modules are a, b, c"),
    "many": (Tied, ["b", "c"], r"on 2 ranks gives 3 stages"),
    "no_grad": (lambda: Forward(without_gradient), ["b"], r"calls a under no_grad or autocast"),
    "random": (lambda: Forward(lambda m, x: m.b(m.a(x + torch.randn(4)))), ["b"], r"cannot be divided \(.*randn"),
    "in place": (lambda: Forward(lambda m, x: m.b(m.a(x.mul_(2)))), ["b"], r"cannot be divided \(.*mul_"),
    "past": (lambda: Forward(past), ["b"], "gives its caller something else than what b, before it, has returned"),
    "made": (lambda: Forward(lambda m, x: m.b(m.a(torch.ones(4)))), ["b"], r"gives a a Tensor that it has made"),
    "number": (lambda: Forward(lambda m, x: m.b(m.a(x))), 2, r"is no nn\.Sequential, and has no list .*split=\['b'\]"),
    "a hook": (hooked, ["b"], r"the model \(Forward\) has a forward hook"),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), ["2"], "1 is a batch normal"),
    "too few": (lambda: nn.Sequential(nn.Linear(4, 4)), None, r"1 modules|0 modules"),
}  # fmt: skip


@on_pipeline_exhaustive
def test_models_without_such_stages_are_refused(engine: Engine) -> None:
    """On all ranks, before the first step."""
    assert dist.get_world_size() == engine.world
    for name, (model, split, message) in SPLITS.items():
        with pytest.raises(ConfigError, match=message):  # noqa: PT012
            build(made(split=split), task=Mean, model=model().double(), optimizer=sgd).run(1, rows())
            pytest.fail(name)


def test_a_plan_shows_the_stages_and_refuses_what_ranks_would() -> None:
    """Before any process begins: stages, parameters, bytes, and how long a rank waits."""
    cls = Task.add_on(PipelineAddon)
    options = {"optimizer": sgd, "log_bar": False}
    trainer = cls(net(blocks=4), ["cpu", "cpu"], pipeline_microbatches=4, **options)
    text = str(trainer.plan(1, data()))
    assert "2 stages on 2 ranks, 1F1B with 4 micro-batches; if all stages take as long, a rank waits for 20%" in text
    assert "stage 0 (rank 0 of the pipeline): embed, blocks.0, blocks.1; 1,2" in text
    explained = str(cls.explain())
    assert "PipelineAddon" in explained
    with pytest.raises(ConfigError, match=r"a\.weight"):
        Mean.add_on(PipelineAddon)(Tied(), ["cpu", "cpu"], split=["b"], **options).plan(1, rows())
    with pytest.raises(ConfigError, match=r"1F1B with pipeline_microbatches=1: .*microbatches"):
        cls(net(), ["cpu", "cpu"], pipeline_microbatches=1, **options).plan(1, data())


def test_how_long_ranks_wait() -> None:
    """The share of a step, where each rank has one stage; of other schedules nothing is said."""
    shares = {name: Schedule(name).idle_share(2 * (each or 2), 2, 8) for name, each in SCHEDULES.items()}
    assert shares.pop("GPipe") == shares.pop("1F1B") == pytest.approx(1 / 9)
    assert set(shares.values()) == {None}
    assert Schedule(keeps).idle_share(2, 2, 4) is None


# -------------------------------------------------------------------------------------------------------- refusals


def test_options_and_compositions_that_cannot_be_meant() -> None:
    """When the class or the trainer is made, with the line to write."""
    for options, message in (
        ({"pipeline_schedule": "1f2b"}, r"'1f2b' is not known; available: GPipe, 1F1B"),
        ({"pipeline_schedule": 3}, "give a name"),
        ({"split": 1.5}, r"split=1.5; give paths of modules"),
        ({"split": [1]}, r"give paths of modules"),
        ({"pipeline_microbatches": 0}, "pipeline_microbatches"),
        ({"stages_per_rank": -1}, "stages_per_rank"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(made(**options))
    for other, message in (
        (MultiGPUAddon, r"write mesh=\{'replicate': 2, 'pipeline': 2\}"),
        (FSDPAddon, "several pipelines"),
        (TensorParallelAddon, "take one of the two"),
        (CompileAddon, "leave CompileAddon out"),
        (LedgerAddon, "train with MultiGPUAddon or FSDPAddon"),
        (PEFTAddon, "train adapters with FSDPAddon"),
    ):
        with pytest.raises(AddOnConflict, match=message):
            Task.add_on(PipelineAddon, other)

    class Differentiates(Task):
        def backward(self, loss: Any, **kwargs: Any) -> None:
            super().backward(loss, **kwargs)

    with pytest.raises((ConfigError, AddOnError), match="Differentiates overrides backward"):
        build(PIPELINE, task=Differentiates)


class Twice(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"loss": (self.model(batch[0]) + self.model(batch[0])).square().mean()}


class Never(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model.module[0](batch[0]).square().mean()}


class Shapes(Mean):
    """Cut each micro-batch by its values."""

    def train_step(self, batch: Any) -> Any:
        width = 2 + int(batch[0][0, 0] > 1.5)
        return {"loss": self.model(batch[0][:, :width, None].expand(-1, -1, 4)).square().mean()}


class Table(Mean):
    def test_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean(), "table": torch.zeros(5, 5)}


class Missing(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"los": self.model(batch[0]).square().mean()}


class Detached(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean().detach()}


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise ArithmeticError("in a backward") from ValueError("what it was")


class FailsBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Fails.apply(x)


def fails_backward() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), FailsBackward(), nn.Linear(4, 1)).double()


def failing(task: type[Task], loader: Any = None, valid: Any = None, **options: Any) -> str:
    given = {"split": ["2"], **options}
    model = given.pop("model", None) or dropped()
    build(made(**given), task=task, model=model, optimizer=sgd).run(1, loader or rows(), valid)
    return "nothing was refused"


STEPS = {
    "twice": (Twice, {}, "StepError: the step has called self.model 2 times. .*torch.cat"),
    "never": (Never, {}, "self.model"),
    "missing": (Missing, {}, "StepError: .*rename 'los' to 'loss'"),
    "table": (Table, {"valid": rows()}, r"StepError: .*\['table'\] is a Tensor of shape \(5, 5\).*one row"),
    "no rows": (Mean, {"loader": [(torch.tensor(1.0, dtype=F64),)]}, "ConfigError: a batch of type .* does not say"),
    "unequal": (Mean, {"loader": [(torch.ones(4, 4, dtype=F64), torch.ones(3))]}, r"batch\[1\] has 3 rows and the b"),
    "not divided": (Mean, {"loader": rows(9, 3)}, r"a batch of 3 samples cannot be .*=2; write batch_size=4"),
    "stages": (Mean, {"stages_per_rank": 2}, "stages_per_rank=2 gives 2 stages to each rank, and the schedule 1F1B "
               "computes 1 stage there; write pipeline_schedule='Interleaved1F1B'"),
    "detached": (Detached, {}, "StepError: .*returned a loss with requires_grad=False; compute it from self.model"),
    "backward": (Mean, {"model": fails_backward()}, "ValueError: what it was.*ArithmeticError: in a backward"),
    "few": (Mean, {"pipeline_microbatches": 1}, "1F1B with pipeline_microbatches=1"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("twice", "table") else pytest.mark.exhaustive) for n in STEPS]
)
def test_steps_and_batches_that_cannot_be_divided(name: str) -> None:
    """The rank that finds it says it, and all ranks end at once."""
    task, options, message = STEPS[name]
    began = time.monotonic()
    found = each_rank_failing(task, options)
    assert time.monotonic() - began < 100  # A rank that waited for another would do so for 300 s.
    assert any(re.search(message, each, re.DOTALL) for each in found), found


def each_rank_failing(task: type[Task], options: dict[str, Any]) -> list[str]:
    try:
        return each_rank(2, functools.partial(failing, task, **options), timeout=300.0)
    except AssertionError as error:
        return [str(error)]
