"""Steps in which ranks exchange tensors themselves: also a rank without samples calls them as often as the others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_engines import LIMIT, on_engine
from torch import Tensor, nn

from kit.engines import Engine, Task, build, data, distance, sgd
from zae import Every
from zae.addons import FSDPAddon, GradientAccumulationAddon, StateManagerAddon

KINDS = ["ddp", "accelerate", "fsdp", "hsdp"]
on_kinds = functools.partial(on_engine, names=KINDS, default=KINDS[:1])


def lockstep(engine: Engine) -> dict[str, Any]:
    """Return the option that asks for it, where the engine does not need it anyway."""
    return {} if engine.add_ons == (FSDPAddon,) else {"lockstep": True}


def gather(value: Tensor) -> list[Tensor]:
    """Return a tensor of every rank, which all of them must ask for."""
    found = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.detach().clone())
    return found


class Gathering(Task):
    """Both steps exchange the sum of what the model returns, as contrastive losses and metrics of ranks do."""

    def train_step(self, batch: Any) -> Any:
        out = super().train_step(batch)
        if self.world_size > 1:
            gather(out["loss"])
        return out


@on_kinds
def test_steps_may_gather(engine: Engine, tmp_path: Path) -> None:
    """The last window, with accumulation, and the last batch of an evaluation leave a rank without samples."""
    more = {"gradient_accumulation_steps": 2, "gradient_clip": 0.05}
    for rows in (1, 4 * engine.shares + 1, 12 * engine.shares + 2):
        trainer = build(engine, GradientAccumulationAddon, task=Gathering, **more, **lockstep(engine))
        single = build(None, GradientAccumulationAddon, **more)
        here = trainer.run(2, data(rows), data(9, 2, False))
        there = single.run(2, data(rows, 4 * engine.shares), data(9, 2, False))
        assert here["step"] == there["step"]
        assert trainer.progress_checker.batch == single.progress_checker.batch
        assert distance(trainer, single) < LIMIT
        for key in ("train_metrics_history", "valid_metrics_history"):
            for row, expected in zip(here[key], there[key], strict=True):
                assert row == pytest.approx(expected, rel=1e-9)
        assert (
            trainer.predict(data(9, 2, False))["rows"].tolist() == data(9, 9, False).dataset.tensors[0][:, 0].tolist()
        )


@on_kinds
def test_a_run_that_gathers_resumes_within_an_epoch(engine: Engine, tmp_path: Path) -> None:
    """It ends bitwise as one that was not interrupted, right before the step that leaves a rank without samples too."""
    rows = 12 * engine.shares + 1
    own = lockstep(engine) | {"save_every": Every(steps=1), "resume": "auto"}

    def trainer(name: str) -> Any:
        return build(engine, StateManagerAddon, task=Gathering, save_path=tmp_path / name, **own)

    whole = trainer("whole")
    whole.run(2, data(rows), data(3, 1, False))
    for steps in (2, 3, 6):
        trainer("parts").run(2, data(rows), data(3, 1, False), max_steps=steps)
    resumed = trainer("parts")
    resumed.run(2, data(rows), data(3, 1, False))
    assert resumed.progress_checker.step == whole.progress_checker.step == 8
    assert distance(resumed, whole, without="none") == 0


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOfRanks.apply(gradient)


class SyncNorm(nn.SyncBatchNorm):
    """A synchronized batch normalization of CPUs, which torch's own one refuses: the same sums over all ranks."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or not SyncNorm.is_parallel:
            return nn.functional.batch_norm(
                inputs,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                self.momentum,
                self.eps,
            )
        own = torch.stack([inputs.sum(0), inputs.square().sum(0), torch.full_like(inputs[:1].sum(0), len(inputs))])
        total, squares, count = SumOfRanks.apply(own)
        mean = total / count
        variance = squares / count - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        return (inputs - mean) / (variance + self.eps).sqrt() * self.weight + self.bias

    is_parallel = False


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norms = nn.ModuleList(SyncNorm(8) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norms[0](self.first(inputs)))
        return self.third(torch.tanh(self.norms[1](self.second(hidden))))


class Regression(Task):
    def train_step(self, batch: Any) -> Any:
        inputs = batch[0].double()
        SyncNorm.is_parallel = self.world_size > 1
        return {"loss": (self.model(inputs) - inputs.mean(1, keepdim=True)).square().mean()}

    def test_step(self, batch: Any) -> Any:
        return Regression.train_step(self, batch)

    def metric_on_epoch_end(self) -> dict[str, float]:
        return {}


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


@functools.partial(on_engine, names=["fsdp", "hsdp"], default=["fsdp"])
def test_synchronized_statistics_are_those_of_one_process(engine: Engine) -> None:
    """A rank without a batch takes part in the exchanges, and has no part in the statistics."""
    batches = [rows for (rows,) in data(4 * engine.shares + 4, 4, False)]
    steps = [torch.cat(batches[first : first + engine.shares]) for first in range(0, len(batches), engine.shares)]
    trainer, single = (build(each, task=Regression, model=normed(), optimizer=sgd) for each in (engine, None))
    trainer.run(3, [[rows] for rows in batches], data(9, 2, False))
    single.run(3, [[rows] for rows in steps], data(9, 2, False))
    assert distance(trainer, single) < LIMIT
    assert [name for name in trainer.model_state() if "running" in name]


@functools.partial(on_engine, names=["ddp", "accelerate"], default=["ddp"])
def test_it_is_on_where_the_model_synchronizes(engine: Engine) -> None:
    """DistributedDataParallel of torch refuses such a model on a CPU: here it is asked before that."""
    found = [
        build(engine, model=model, **options).build_engine().needs_lockstep_forward
        for model in (None, normed())
        for options in ({}, {"lockstep": True}, {"lockstep": False})
    ]
    assert found == [False, True, False, True, True, False]
