"""What TensorParallelAddon refuses, and what it is composed with; its promises as an engine are in test_engines.py."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_engines import on_engine
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.data import DataLoader, TensorDataset

from kit.engines import ENGINES, PLAN, VOCABULARY, Engine, Net, Task, build, data, distance, net, weights
from kit.rank_tasks import forks
from zae import AddOnConflict, ConfigError, DistributedError, LoaderError
from zae.addons import AMPAddon, CompileAddon, EMAAddon, FSDPAddon, MultiGPUAddon, TensorParallelAddon

TENSOR = ENGINES["tensor"]
on_tensor = functools.partial(on_engine, names=["tensor"])
in_parts = functools.partial(on_engine, names=["tensor", "2-D"])
"""Layers in parts, and for `exhaustive` these in shards."""


class Dropping(nn.Module):
    """A layer in two parts, with a dropout between them or behind them."""

    def __init__(self, place: str, width: int = 8) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 4)
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if self.place == "function":
            x = nn.functional.dropout(x, 0.5, training=self.training)
        x = self.down(self.drop(x) if self.place == "module" else x)
        return self.drop(x) if self.place == "behind" else x


class Mean(Task):
    """Take the mean of the squares of what the model returns."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).square().mean()}

    test_step = train_step


HALVES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def rows(count: int = 8, add: float = 0.0) -> DataLoader[Any]:
    values = torch.randn(count, 4, generator=torch.Generator().manual_seed(3)) + add
    return DataLoader(TensorDataset(values), batch_size=4)


def test_plans_that_cannot_be_meant_are_refused() -> None:
    """When the trainer is made, with the names that there are."""
    for plan, message in (
        ({"blocks.*.uq": ColwiseParallel()}, r"no module of Net is 'blocks\.\*\.uq'.* blocks\.1\.up"),
        ({"blocks.*.up": ColwiseParallel(), "*.1.up": RowwiseParallel()}, r"both match blocks\.1\.up; keep one"),
        ({"head": "columns"}, r"tensor_plan\['head'\] is 'columns'"),
        ([ColwiseParallel()], "give a dict of styles"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(TENSOR, tensor_plan=plan)
    with pytest.raises(AddOnConflict, match=r"MultiGPUAddon do not go together.*use FSDPAddon"):
        Task.add_on(MultiGPUAddon, TensorParallelAddon)
    with pytest.raises(AddOnConflict, match=r"CompileAddon do not go together.*leave CompileAddon out"):
        Task.add_on(TensorParallelAddon).add_on(CompileAddon)
    names = [each.__name__ for each in Task.add_on(TensorParallelAddon, FSDPAddon).__mro__]
    assert names.index("FSDPAddon") < names.index("TensorParallelAddon")


def test_one_process_trains_as_without_it() -> None:
    """With one device the plan does nothing."""
    trainer, single = build(Engine((TensorParallelAddon,)), tensor_plan=PLAN), build(None)
    assert trainer.run(1, data()) == single.run(1, data())
    assert distance(trainer, single, without="none") == 0


class Penalized(Mean):
    """Add the norm of a gradient to the loss: gradients of gradients."""

    def train_step(self, batch: Any) -> Any:
        (gradient,) = torch.autograd.grad(super().train_step(batch)["loss"], [self.parameters[-1]], create_graph=True)
        return {"loss": gradient.square().sum()}


@on_tensor
def test_what_ranks_refuse_in_a_run(engine: Engine) -> None:
    """Each refusal takes place on all ranks, and names the remedy."""
    assert dist.get_world_size() == engine.world == 2

    def refused(message: str, kind: type[Exception] = ConfigError, loader: Any = None, **options: Any) -> None:
        composed = Engine((TensorParallelAddon, *options.pop("add_ons", ())))
        given = {"model": Dropping("none"), "tensor_plan": HALVES, "task": Mean, **options}
        with pytest.raises(kind, match=message):
            build(composed, **given).run(1, loader or rows())

    for place in ("module", "function"):
        refused("dropout draws random numbers.*Move it behind", model=Dropping(place))
    build(engine, task=Mean, model=Dropping("behind"), tensor_plan=HALVES).run(1, rows())
    refused(r"create_graph=True.*train with MultiGPUAddon", task=Penalized)
    own = rows(add=float(dist.get_rank()))
    refused(r"loader\.dataset\.tensors\[0\] differs between rank 0 and rank 1", LoaderError, own)
    own.is_sharded = True  # Its data are not compared then, but its batches.
    refused("has another batch than the ranks", DistributedError, own)
    refused(r"drop \(Dropout\): ColwiseParallel currently only", tensor_plan={"drop": ColwiseParallel()})
    refused("tensor_plan divides no parameter", tensor_plan={})
    hooked = Dropping("none")
    hooked.up.bias.register_hook(lambda gradient: gradient)
    refused(r"up\.bias has a hook of its gradient", model=hooked)
    narrow = Dropping("none", 9)
    refused(r"up \(Linear\) computes 9 features, which 2 ranks .*Make it 10 wide", model=narrow)
    refused("has another loss than the ranks", tensor_plan={"down": ColwiseParallel()})
    kept = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    build(engine, task=Mean, model=narrow, tensor_plan=kept).run(1, rows())
    refused("precision='fp16' needs a loss scale", add_ons=(AMPAddon,), precision="fp16")
    tied = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    refused("0.weight and 1.weight are one parameter", model=tied, tensor_plan={"1": ColwiseParallel()})


class Bare(Net):
    """The model in float64, which returns what its last layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class HeadNorms(nn.Module):
    """Attention with a norm of the queries and of the keys of each head, as in Qwen3, Gemma3 and OLMo2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.query_norm, self.key_norm = nn.RMSNorm(2), nn.RMSNorm(2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        query, key, value = (
            each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        x = nn.functional.scaled_dot_product_attention(self.query_norm(query), self.key_norm(key), value)
        return self.head(self.out(x.transpose(1, 2).flatten(2)))


class Gated(nn.Module):
    """The whole of an activation meets a part of it, and each parameter before it is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.third(x)) * torch.sigmoid(x.mean(-1, keepdim=True)))


@in_parts
def test_what_a_plan_has_left_out_is_named(engine: Engine) -> None:
    """In the first step, whether or not gradients are clipped; with the entry the weights are those of one process."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # Nothing changes it in place.

    def normed() -> nn.Module:
        torch.manual_seed(0)
        return HeadNorms().double()

    attention = dict.fromkeys(("query", "key", "value"), ColwiseParallel()) | {"out": RowwiseParallel()}
    norms = dict.fromkeys(("query_norm", "key_norm"), SequenceParallel(sequence_dim=1, use_local_output=True))
    entry = r"key_norm \(RMSNorm\), the last of 2 .*'key_norm': SequenceParallel\(sequence_dim=1, use_local_output=True"
    for clip in (0.0, 0.05):
        with pytest.raises(ConfigError, match=rf"query_norm\.weight, key_norm\.weight: {entry}"):
            build(engine, model=normed(), gradient_clip=clip, tensor_plan=attention).run(1, data(4 * engine.shares))
        trainer = build(engine, model=normed(), gradient_clip=clip, tensor_plan={**attention, **norms})
        single = build(None, model=normed(), gradient_clip=clip)
        trainer.run(1, data(8 * engine.shares))
        single.run(1, data(8 * engine.shares, 4 * engine.shares))
        assert distance(trainer, single) < 1e-12


@in_parts
def test_a_whole_activation_that_meets_a_part_is_refused(engine: Engine) -> None:
    """Where no parameter would tell, the gradient of what a column-parallel layer takes does."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # Nothing changes it in place.
    columns, sums = dict.fromkeys(("first", "third"), ColwiseParallel()), ("second", "last")
    trainer = build(engine, task=Mean, model=Gated(), tensor_plan=columns | dict.fromkeys(sums, RowwiseParallel()))
    with pytest.raises(ConfigError, match=r"gradients of what third \(Linear\) takes.*RowwiseParallel"):
        trainer.run(1, rows(4 * engine.shares))


class Scaled(Task):
    """Scale the loss by a parameter that only the optimizer holds."""

    def train_step(self, batch: Any) -> Any:
        (outside,) = self.optimizer.param_groups[1]["params"]
        return {"loss": super().train_step(batch)["loss"] * outside.exp()}


@in_parts
def test_a_parameter_outside_of_the_model_is_that_of_rank_0(engine: Engine) -> None:
    """Without a seed, each process of a launcher makes other numbers."""
    ends = []
    for number in (dist.get_rank(), 0):
        model, outside = net(), nn.Parameter(torch.tensor(0.1 * number, dtype=torch.float64))
        optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [outside]}], lr=0.1)
        trainer = build(engine, task=Scaled, model=model, optimizer=optimizer)
        trainer.run(1, data(4 * engine.shares))
        assert trainer.world_size == engine.world
        ends.append(outside.detach())
    assert torch.equal(*ends)
    assert ends[0] != 0


@in_parts
def test_a_loss_of_logits_in_parts(engine: Engine) -> None:
    """Where the plan leaves them so, the cross entropy is computed in parts, in training and in evaluation."""
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    options = {**engine.options, "tensor_plan": {**PLAN, "head": head}}
    trainer = build(engine, model=Bare, gradient_clip=0.05, **options)
    single = build(None, model=Bare, gradient_clip=0.05)
    here = trainer.run(1, data(8 * engine.shares), data(5, 2, False))
    there = single.run(1, data(8 * engine.shares, 4 * engine.shares), data(5, 2, False))
    assert dist.get_world_size() == engine.world
    assert distance(trainer, single) < 1e-12
    assert here["valid_metrics_history"][0] == pytest.approx(there["valid_metrics_history"][0], rel=1e-9)


@pytest.mark.exhaustive
@on_tensor
def test_blocks_that_the_user_has_compiled(engine: Engine) -> None:
    """Compiled code that takes what a divided layer is still sending has wrong gradients of it, by torch alone."""
    assert dist.get_world_size() == 2
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # By the compiler.
    model = net()
    model.blocks[1].compile(backend="aot_eager")
    trainer, single = build(engine, model=model), build(None)
    trainer.run(1, data(8))
    single.run(1, data(8))
    assert distance(trainer, single) < 1e-12


@pytest.mark.exhaustive
@in_parts
def test_sequence_parallel_layers(engine: Engine) -> None:
    """Norms on parts of the sequence leave gradients in parts, which are added up."""
    whole, parts = Replicate(), Shard(1)
    enter, leave = ColwiseParallel(input_layouts=parts), RowwiseParallel(output_layouts=parts)
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=parts),
        **dict.fromkeys(["blocks.*.first", "blocks.*.second", "norm"], SequenceParallel()),
        **dict.fromkeys(["blocks.*.query", "blocks.*.key", "blocks.*.value", "blocks.*.up"], enter),
        **dict.fromkeys(["blocks.*.out", "blocks.*.down"], leave),
        "head": ColwiseParallel(input_layouts=parts, output_layouts=whole),
    }
    tokens = torch.randint(VOCABULARY, (16, 7), generator=torch.Generator().manual_seed(1))
    trainer = build(engine, gradient_clip=0.05, **{**engine.options, "tensor_plan": plan})
    single = build(None, gradient_clip=0.05)
    trainer.run(2, DataLoader(TensorDataset(tokens), 4 // engine.shares))
    single.run(2, DataLoader(TensorDataset(tokens), 4))
    assert dist.get_world_size() == engine.world
    assert trainer.progress_checker.step == 8
    assert distance(trainer, single) < 1e-12


@pytest.mark.exhaustive
@in_parts
def test_composed_with_averages_and_autocast(engine: Engine) -> None:
    """Averages are those of one process; bfloat16 rounds, so that two runs of the same engine are compared."""
    trainer, single = (build(each, EMAAddon, decay=0.5, gradient_clip=0.05) for each in (engine, None))
    rows = 16 * engine.shares
    trainer.run(2, data(rows), data(9, 2, False))
    single.run(2, data(rows, 4 * engine.shares), data(9, 2, False))
    assert distance(trainer, single) < 1e-12
    average = {name: trainer.engine.full_tensors(value) for name, value in trainer.average.items()}
    for name, value in single.average.items():
        assert name.endswith("key.bias") or float((average[name] - value).abs().max()) < 1e-12
    assert trainer.evaluate(data(9, 2, False)) == pytest.approx(single.evaluate(data(9, 2, False)), rel=1e-9)
    ends = []
    for _ in range(2):
        model = net(torch.float32)
        trainer = build(engine, AMPAddon, precision="bf16", model=model)
        trainer.run(1, data(rows))
        ends.append(weights(trainer))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    single = build(None, AMPAddon, precision="bf16", model=net(torch.float32))
    single.run(1, data(rows, 4 * engine.shares))
    assert 0 < distance(trainer, single) < 0.1


def test_processes_that_run_starts() -> None:
    """The plan is sent to the ranks, and the caller's model gets the weights."""
    engine = Engine((TensorParallelAddon,), options={"tensor_plan": PLAN})
    single = build(None)
    cls = Task.add_on(*engine.add_ons)
    trainer = cls(net(), ["cpu", "cpu"], optimizer=torch.optim.SGD, log_bar=False, seed=0, tensor_plan=PLAN)
    reference = Task(net(), "cpu", optimizer=torch.optim.SGD, log_bar=False, seed=0)
    with forks():
        trainer.run(1, data())
    reference.run(1, data())
    assert distance(trainer, reference) < 1e-12
    assert distance(trainer, single) > 1e-5
    assert "divided layers: RowwiseParallel of embed" in str(trainer.plan(1, data()))
