"""MultiGPUAddon over gloo, gradients: many runs inside one group of 2 ranks and one of 3, each against one process."""

from __future__ import annotations

import itertools
import math
import random
import types

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from kit.rank_tasks import (
    F64,
    Counted,
    Seen,
    Task,
    agree,
    build,
    dataset,
    distance,
    loader,
    network,
    same,
    weights,
)
from kit.ranks import each_rank, on_ranks
from zae import ConfigError, DistributedError, TaskError
from zae.addons import CompileAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon

SIZES = list(itertools.product(range(1, 10), ((1, Seen, 1), (2, Seen, 2), (2, Counted, 1), (1, Counted, 2))))


ALTERNATING = [case for at, case in enumerate(SIZES) if at % 2 == case[0] % 2]  # Of each size two of the four.


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        pytest.param(2, ALTERNATING, id="2"),
        pytest.param(2, SIZES, id="2-all", marks=pytest.mark.exhaustive),
        pytest.param(3, SIZES, id="3", marks=pytest.mark.exhaustive),
    ],
)
def test_every_size_is_the_big_batch(world, sizes):
    """Sizes 1-9: weights to 1e-12, means and metrics, each sample once, equal steps."""
    singles = []
    for size, (batch_size, task, accumulate) in sizes:
        options = {"gradient_accumulation_steps": accumulate}
        single = build(task, (GradientAccumulationAddon,), model=network(dtype=F64), **options)
        there = single.run(2, loader(size, batch_size * world, 3, F64), loader(size, 2, dtype=F64))
        singles.append((single, there))
    assert each_rank(world, compare_with_the_big_batch, world, sizes, singles) == [len(sizes)] * world


def compare_with_the_big_batch(world, sizes, singles):
    """Train on several ranks what one process has trained with all batches; return how many were compared."""
    compared = 0
    for (size, (batch_size, task, accumulate)), (single, there) in zip(sizes, singles, strict=True):
        options = {"gradient_accumulation_steps": accumulate}
        trainer = build(task, (GradientAccumulationAddon, MultiGPUAddon), model=network(dtype=F64), **options)
        here = trainer.run(2, loader(size, batch_size, 3, F64), loader(size, 2, dtype=F64))
        assert trainer.world_size == world
        assert distance(trainer, single) < 1e-12, (size, batch_size, task, accumulate)
        assert here["step"] == there["step"]
        for key in ("train_metrics_history", "valid_metrics_history"):
            for row, expected in zip(here[key], there[key], strict=True):
                assert row == pytest.approx(expected, rel=1e-9)
        assert [row["valid_n_seen"] for row in here["valid_metrics_history"]] == [size, size]
        assert len(set(trainer.gather(trainer.progress_checker.batch))) == 1
        if task is Seen:
            for epoch in (0, 1):
                seen = trainer.gather(getattr(trainer, "seen", {}).get(epoch, []))
                assert sorted(itertools.chain(*seen)) == list(range(size))
        compared += 1
    return compared


class Heads(nn.Module):
    """A head for each task, of which a batch uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4, dtype=F64)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 1, dtype=F64) for name in "ab"})

    def forward(self, inputs, name):
        return self.heads[name](self.body(inputs).tanh())


class Tasks(Task):
    """Each batch is of one task, whose loss has a weight."""

    weights = types.MappingProxyType({"a": 1.0, "b": 0.25})

    def train_step(self, batch):
        names, (inputs, targets) = batch
        loss = nn.functional.mse_loss(self.model(inputs, names[0]), targets) * self.weights[names[0]]
        return {"loss": loss, "num_targets": len(inputs)}


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(2, 3)
def test_ranks_train_several_tasks_in_a_step(world, accumulate):
    """Also after an epoch in whose last step a rank had no samples: the heads that it used were taken for used."""

    def train(count, *add_ons, **options):
        torch.manual_seed(0)
        data = [("a", sample) for sample in dataset(22, F64)] + [("b", sample) for sample in dataset(44, F64)]
        of_one_task = [range(i, min(i + 4, 22)) for i in range(0, 22, 4)]
        of_one_task += [range(i, i + 4) for i in range(22, 66, 4)]
        random.Random(0).shuffle(of_one_task)
        batches = DataLoader(data, batch_sampler=of_one_task)
        assert len(batches) == 17
        more = {"gradient_accumulation_steps": count} if count > 1 else {}
        add_ons += (GradientAccumulationAddon,) * (count > 1)
        trainer = build(Tasks, add_ons, model=Heads(), **more, **options)
        trainer.run(3, batches)
        return trainer

    assert distance(train(accumulate, MultiGPUAddon, find_unused_parameters=True), train(accumulate * world)) < 1e-12


@on_ranks(2, 3)
def test_unused_parameters_are_named(world):
    """Parts of the model may be called as well, which the wrapper does not see."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, inputs):
            return self.used(inputs)

    with pytest.raises(DistributedError, match=r"2 parameters \(idle.weight, idle.bias\).*find_unused_parameters=True"):
        build(Task, (MultiGPUAddon,), model=Half()).run(1, loader(4 * world, 2))
    dist.barrier()
    trainer = build(Task, (MultiGPUAddon,), model=Half(), find_unused_parameters=True)
    trainer.run(1, loader(4 * world, 2))
    assert agree(trainer)

    class Parts(Task):
        def train_step(self, batch):
            inputs, targets = batch
            return {"loss": nn.functional.mse_loss(self.model[3](self.model[0](inputs)), targets)}

    trainer, single = (build(Parts, add_ons, model=network(dtype=F64)) for add_ons in ((MultiGPUAddon,), ()))
    trainer.run(2, loader(4 * world, 2, dtype=F64))
    single.run(2, loader(4 * world, 2 * world, dtype=F64))
    assert trainer.world_size == world
    assert distance(trainer, single) < 1e-12


@on_ranks(2, 3)
def test_several_optimizers_and_parameters_outside(world):
    """A loss for each optimizer, and a learnt weight that the model does not hold."""

    class Two(Task):
        def train_step(self, batch):
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            return {"loss": {"first": loss, "last": loss * self.factor.exp()}}

    def run(add_ons, batch_size):
        model, factor = network(dtype=F64), torch.zeros((), dtype=F64, requires_grad=True)
        optimizers = {
            "first": torch.optim.SGD(model[0].parameters(), lr=0.01),
            "last": torch.optim.SGD([*model[3].parameters(), factor], lr=0.01),
        }
        trainer = Two.add_on(*add_ons)(model, "cpu", optimizer=optimizers, log_bar=False)
        trainer.factor = factor
        return trainer, factor, trainer.run(2, loader(4 * world + 1, batch_size, dtype=F64))["step"]

    trainer, factor, steps = run((MultiGPUAddon,), 2)
    single, expected, there = run((), 2 * world)
    assert trainer.world_size == world
    assert steps == there == 6
    assert distance(trainer, single) < 1e-12
    assert float((factor - expected).detach().abs()) < 1e-12


@on_ranks(2, 3)
def test_rates_are_those_of_one_process(world):
    """The learning rate as a function of the step, for accumulation over 1 and 4 batches."""
    for accumulate in (1, 4):
        rates = []
        for add_ons, factor in (((MultiGPUAddon,), 1), ((), world)):
            trainer = build(
                Task, (GradientAccumulationAddon, *add_ons), scheduler_step_on_batch=True, log_every=1,
                gradient_accumulation_steps=accumulate,
                scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            )  # fmt: skip
            trainer.run(2, loader(8 * world, 2 * factor))
            rates.append([record["lr"] for record in trainer.log_history])
        assert rates[0] == rates[1]


@on_ranks(2, 3)
def test_a_compiled_model_is_averaged(world):
    """It is compiled inside of the wrapper; a graph of the step, with the wrapper in it, is refused."""
    options = {"compile_backend": "eager"}
    trainer = build(Task, (MultiGPUAddon, CompileAddon), model=network(dtype=F64), gradient_clip=0.05, **options)
    trainer.run(2, loader(4 * world, 2, dtype=F64))
    single = build(Task, (), model=network(dtype=F64), gradient_clip=0.05)
    single.run(2, loader(4 * world, 2 * world, dtype=F64))
    assert trainer.world_size == world
    assert trainer.compile_report["graphs"] == 1
    assert distance(trainer, single) < 1e-12
    options["compile_target"] = "step"
    with pytest.raises(ConfigError, match=r"compile_target='step' with \d ranks: .*; write compile_target='model'"):
        build(Task, (MultiGPUAddon, CompileAddon), **options).run(1, loader(4 * world, 2))


@on_ranks(2, 3)
def test_a_schedule_free_optimizer_evaluates_with_its_own_weights(world):
    """The score and the saved weights are those of one process, and training continues as without them."""
    trainers = []
    for add_ons, ranks, valid in (((MultiGPUAddon,), 1, True), ((), world, True), ((MultiGPUAddon,), 1, False)):
        model = network(dtype=F64)
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
        trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False)
        trainer.run(2, loader(4 * world, 2 * ranks, dtype=F64), loader(6, 2, dtype=F64) if valid else None)
        trainers.append(trainer)
    first, single, unwatched = trainers
    assert agree(first)
    assert same(weights(first), weights(unwatched))
    assert distance(first, single) < 1e-12
    assert first.valid_history[-1]["valid_loss"] == pytest.approx(single.valid_history[-1]["valid_loss"], rel=1e-9)
    saved = [list(each.state_dict()["model"].values()) for each in (first, single)]
    assert not same(saved[0], weights(first))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*saved))


def frozen(model, until):
    """Freeze the first layer before an epoch, and train it from that one on; with a negative one, the other way."""

    class Thaws(Task):
        def on_epoch_begin(self):
            super().on_epoch_begin()
            trained = self.progress_checker.epoch >= until if until >= 0 else self.progress_checker.epoch < -until
            self.unwrap()[0].requires_grad_(trained)

    model[0].requires_grad_(until < 0)
    return Thaws, model


@on_ranks(2, 3)
def test_what_is_trained_may_change_meanwhile(world):
    """Layers frozen and thawed between epochs, all of the model frozen, optimizers that take turns."""
    for until in (1, -1):
        ends = []
        for add_ons, batch_size in (((MultiGPUAddon,), 2), ((), 2 * world)):
            cls, model = frozen(network(dtype=F64), until)
            ends.append(build(cls, add_ons, model=model))
            ends[-1].run(3, loader(4 * world + 1, batch_size, 3, F64))
        assert ends[0].world_size == world
        assert agree(ends[0]), until
        assert distance(*ends) < 1e-12, until

    class Head(Task):
        def train_step(self, batch):
            return {"loss": nn.functional.mse_loss(self.model(batch[0]) * self.head, batch[1])}

    class Turns(Task):
        def train_step(self, batch):
            return {"loss": {("first", "last")[self.progress_checker.step % 2]: super().train_step(batch)["loss"]}}

    def run(add_ons, batch_size, **options):
        model, head = network(dtype=F64).requires_grad_(False), torch.ones(1, dtype=F64, requires_grad=True)
        trainer = Head.add_on(*add_ons)(model, "cpu", optimizer=lambda _: torch.optim.SGD([head], 0.01), log_bar=False)
        trainer.head = head
        trainer.run(1, loader(4 * world + 1, batch_size, dtype=F64))
        model = network(dtype=F64)
        optimizers = {name: torch.optim.SGD(model[at].parameters(), 0.01) for name, at in (("first", 0), ("last", 3))}
        turns = Turns.add_on(*add_ons)(model, "cpu", optimizer=optimizers, log_bar=False, **options)
        turns.run(2, loader(4 * world + 1, batch_size, dtype=F64))
        return head.detach(), turns

    (head, turns), (expected, single) = run((MultiGPUAddon,), 2, find_unused_parameters=True), run((), 2 * world)
    assert float((head - expected).abs()) < 1e-12
    assert distance(turns, single) < 1e-12


@on_ranks(2, 3)
def test_a_step_sees_the_model_itself(world):
    """What a step sets on the model is set, names are those of the model, and so is what it has of its own."""

    class Scaled(nn.Sequential):
        dim, scale = 3, 1.0

        def forward(self, inputs):
            return super().forward(inputs) * self.scale

    class Writes(Task):
        def train_step(self, batch):
            assert (len(self.model), len(list(self.model)), self.model.dim) == (4, 4, 3)
            assert list(self.model.state_dict()) == list(self.unwrap().state_dict())
            self.model.scale = self.model.dim + self.progress_checker.step
            first = sum(p.square().sum() for name, p in self.model.named_parameters() if name.startswith("0."))
            return {"loss": super().train_step(batch)["loss"] + first}

    trainer, single = (build(Writes, each, model=Scaled(*network(dtype=F64))) for each in ((MultiGPUAddon,), ()))
    trainer.run(2, loader(4 * world, 2, dtype=F64))
    single.run(2, loader(4 * world, 2 * world, dtype=F64))
    assert trainer.world_size == world
    assert trainer.unwrap().scale == single.unwrap().scale == 6
    assert distance(trainer, single) < 1e-12


@on_ranks(2)
def test_an_evaluation_finds_the_model_as_one_process_does(world):
    """Its class, its children, and attributes that have names of DistributedDataParallel, also within a run."""

    class Named(nn.Module):
        device, logger, join = "own device", "own logger", "own join"

        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 1, dtype=F64)

        def forward(self, inputs):
            return 2 * self.module(inputs)

    class Looks(Task):
        def test_step(self, batch):
            assert type(self.model) is Named
            assert [*self.model.children()] == [self.model.module]
            assert (self.model.device, self.model.logger, self.model.join) == ("own device", "own logger", "own join")
            output = self.model.module(batch[0])
            return {"loss": nn.functional.mse_loss(output, batch[1]), "output": output}

    def made(*add_ons):
        torch.manual_seed(0)
        return build(Looks, add_ons, model=Named())

    trainer, single = made(MultiGPUAddon), made()
    trainer.run(2, loader(4 * world, 2, dtype=F64), loader(4, 2, dtype=F64))
    single.run(2, loader(4 * world, 2 * world, dtype=F64), loader(4, 2, dtype=F64))
    assert distance(trainer, single) < 1e-12
    assert trainer.evaluate(loader(6, 2, dtype=F64)) == pytest.approx(single.evaluate(loader(6, 2, dtype=F64)))


@on_ranks(2, 3)
def test_buffers_are_those_of_rank_0(world):
    """A buffer that a forward replaces, and those of a step that was left out."""

    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.register_buffer("mean", torch.zeros(1))
            self.register_buffer("mask", torch.ones(1, dtype=torch.bool))

        def forward(self, inputs):
            self.mean = (self.mean + inputs.mean().detach()) / 2
            return super().forward(inputs)

    class OneIsBad(Task):
        def train_step(self, batch):
            bad = self.rank == world - 1 and self.progress_checker.step == 1
            return {"loss": super().train_step(batch)["loss"] * (math.nan if bad else 1)}

        def on_epoch_end(self):
            super().on_epoch_end()
            self.agreed = agree(self)

    trainer = build(OneIsBad, (MultiGPUAddon,), model=Counts(), on_nonfinite="skip")
    trainer.run(1, loader(4 * world, 2))
    assert trainer.world_size == world
    assert trainer.agreed
    assert trainer.metrics["nonfinite_steps"] == 1
    assert float(trainer.unwrap().mean) != 0


@on_ranks(2, 3)
def test_any_kind_of_gradient(world):
    """Sparse embeddings and complex weights; a rank without samples in the last step; a static graph."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding.from_pretrained(torch.ones(8, 1), freeze=False, sparse=True)
            self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

        def forward(self, inputs):
            return self.table((inputs[:, 0] * 9).long() % 8) * self.phase.abs()

    def run(add_ons, batch_size):
        model = Net()
        optimizers = [torch.optim.SparseAdam([model.table.weight], 0.1), torch.optim.SGD([model.phase], 0.01)]
        trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=optimizers, log_bar=False)
        return trainer, trainer.run(2, loader(4 * world + 1, batch_size))

    (trainer, here), (single, there) = run((MultiGPUAddon,), 2), run((), 2 * world)
    assert trainer.world_size == world
    assert agree(trainer)
    assert here["step"] == there["step"] == 6
    assert distance(trainer, single) < 1e-5


@on_ranks(2, 3)
def test_a_gradient_lies_in_memory_as_its_weight(world):
    """A fused kernel goes through both number by number, also where ranks have no samples in the last step."""

    def run(add_ons, batch_size, fused=False):
        model = network(dtype=F64)
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=fused)
        trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False)
        trainer.run(2, loader(4 * world + 1, batch_size, dtype=F64))
        return trainer

    trainer = run((MultiGPUAddon,), 2, fused=True)
    assert trainer.world_size == world
    assert distance(trainer, run((), 2 * world)) < 1e-12


@on_ranks(2, 3)
def test_buckets_are_arranged_as_in_the_run_that_is_resumed(world, tmp_path):
    """The order of a sum over three ranks hangs on how gradients are put together; windows of two."""

    def run(resume):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 33), nn.Tanh(), nn.Linear(33, 170), nn.Tanh(), nn.Linear(170, 1))
        trainer = build(
            Task, (MultiGPUAddon, StateManagerAddon), model=model, seed=1, save_every=1,
            keep_last=None, save_path=tmp_path / str(bool(resume)), resume=resume,
        )  # fmt: skip
        trainer.run(1, loader(4 * world, 2, 3))
        return trainer

    first, again = run(False), run(str(tmp_path / "False" / "step-00000001"))
    assert first.world_size == world
    assert same(weights(first), weights(again))
    options = {"gradient_accumulation_steps": 2, "model": network(dtype=F64)}
    trainer = build(Task, (GradientAccumulationAddon, MultiGPUAddon), **options)
    single = build(Task, (GradientAccumulationAddon,), **{**options, "model": network(dtype=F64)})
    trainer.run(1, loader(10 * world, 2, dtype=F64))
    single.run(1, loader(10 * world, 2 * world, dtype=F64))
    assert distance(trainer, single) < 1e-12


@on_ranks(2, 3)
def test_a_parameter_left_out_of_the_last_batch_is_refused(world):
    """Before the optimizer steps: what it had of the batches before is not averaged."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.seldom, self.calls = nn.Linear(3, 1), nn.Linear(3, 1), 0

        def forward(self, inputs):
            self.calls += 1
            return self.used(inputs) + (self.seldom(inputs) if self.calls % 2 else 0)

    trainer = build(Task, (MultiGPUAddon, GradientAccumulationAddon), model=Half(), gradient_accumulation_steps=2)
    with pytest.raises(DistributedError, match="did not use parameters in the last batch of a step"):
        trainer.run(1, loader(4 * world, 2))
    assert trainer.progress_checker.step == 0
    dist.barrier()


class SyncsSeldom(Seen):
    """Would average gradients in no step, as in local SGD."""

    def sync_context(self, last):
        return super().sync_context(False)


@on_ranks(2)
def test_a_task_does_not_decide_when_ranks_average(world):
    with pytest.raises(TaskError, match=r"SyncsSeldom.sync_context has no effect with MultiGPUAddon.*; remove it"):
        build(SyncsSeldom, (MultiGPUAddon,)).run(1, loader(8, 2))
