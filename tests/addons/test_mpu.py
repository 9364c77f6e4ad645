"""MultiGPUAddon over gloo: many runs inside one group of 2 ranks and one of 3, and a few that start their own."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from kit import faults
from kit.rank_tasks import (
    Counted,
    Seen,
    Task,
    agree,
    build,
    dataset,
    distance,
    forks,
    loader,
    network,
    run_checks,
    same,
    weights,
)
from zae import ConfigError, DistributedError, Trainer
from zae.addons import (
    AMPAddon,
    CompileAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.errors import CheckpointMismatch, LoaderError
from zae.launch import transfer
from zae.launch.spawn import spawn

WORLDS = (2, 3)
F64 = torch.float64


# ------------------------------------------------------------------------------- checks, called on every rank


def every_size_is_the_big_batch(world, folder):
    """P-02, P-32, P-39, P-40, P-41: sizes 1-9: weights to 1e-12, means and metrics, each sample once, equal steps."""
    kinds = ((1, Seen, 1), (2, Seen, 2), (2, Counted, 1), (1, Counted, 2))
    for size, (batch_size, task, accumulate) in itertools.product(range(1, 10), kinds):
        options = {"gradient_accumulation_steps": accumulate}
        add_ons = (GradientAccumulationAddon,)
        trainer = build(task, (*add_ons, MultiGPUAddon), model=network(dtype=F64), **options)
        single = build(task, add_ons, model=network(dtype=F64), **options)
        here = trainer.run(2, loader(size, batch_size, 3, F64), loader(size, 2, dtype=F64))
        there = single.run(2, loader(size, batch_size * world, 3, F64), loader(size, 2, dtype=F64))
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


def evaluation_is_bitwise_that_of_one_process(world, folder):
    """P-39: the same batches, in the same order: metrics and kept outputs are the very same."""
    for size in (1, 4, 7, 9):
        trainer, single = build(Task, (MultiGPUAddon,)), build(Task)
        assert trainer.evaluate(loader(size, 2)) == single.evaluate(loader(size, 2))
        assert trainer.world_size == world
        assert trainer.log_test["loss"] == single.log_test["loss"]
        here, there = trainer.inference(loader(size, 2)), single.inference(loader(size, 2))
        assert same([out["output"] for out in here], [out["output"] for out in there])


def orders_differ_and_are_repeated(world, folder):
    """P-41: another order in each epoch, the same in the same run again; validation in the dataset's own."""
    seen = []
    for _ in range(2):
        trainer = build(Seen, (MultiGPUAddon,), seed=7)
        trainer.run(3, loader(12, 2, 5))
        seen.append((trainer.seen, weights(trainer)))
        assert trainer.world_size == world
        assert agree(trainer)
    assert seen[0][0] == seen[1][0]
    assert same(seen[0][1], seen[1][1])
    assert seen[0][0][0] != seen[0][0][1]


def any_sampler_and_loader(world, folder):
    """The user's own sampler, batch sampler, loader without batches, list; workers, collate function, drop_last."""
    data = dataset(11, F64)
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    together = [list(itertools.chain(*batches[i : i + world])) for i in range(0, len(batches), world)]
    listed = [tuple(torch.stack(part) for part in zip(*[data[i] for i in batch])) for batch in batches]
    whole = [tuple(torch.stack(part) for part in zip(*[data[i] for i in batch])) for batch in together]

    def draws():
        return WeightedRandomSampler([1.0] * 11, 9, generator=torch.Generator().manual_seed(2))

    def one_by_one(b):
        return DataLoader(data, sampler=BatchSampler(RandomSampler(data), b, False), batch_size=None)

    pairs = [
        (DataLoader(data, batch_sampler=batches), DataLoader(data, batch_sampler=together)),
        (listed, whole),
        (DataLoader(data, 2, sampler=draws()), DataLoader(data, 2 * world, sampler=draws())),
        (loader(11, 2, 4, F64, drop_last=True), loader(11, 2 * world, 4, F64, drop_last=True)),
        (loader(11, 2, 4, F64, collate_fn=flipped), loader(11, 2 * world, 4, F64, collate_fn=flipped)),
        (loader(11, 2, 4, F64, num_workers=1), loader(11, 2 * world, 4, F64)),
    ]
    for mine, expected in pairs:
        trainer = build(Task, (MultiGPUAddon,), model=network(dtype=F64))
        single = build(Task, model=network(dtype=F64))
        torch.manual_seed(9)
        trainer.run(2, mine)
        torch.manual_seed(9)
        single.run(2, expected)
        assert trainer.world_size == world
        assert distance(trainer, single) < 1e-12
    trainer = build(Task, (MultiGPUAddon,), model=network(dtype=F64))
    assert trainer.run(1, one_by_one(2))["step"] == -(-6 // world)
    assert agree(trainer)


def flipped(samples):
    inputs, targets = torch.utils.data.default_collate(samples)
    return -inputs, targets


def streams_are_declared_or_refused(world, folder):
    """P-43, P-40: an IterableDataset without declared sharding is refused; a declared one ends together."""

    class Stream(IterableDataset):
        def __iter__(self):
            yield from (dataset(10)[i] for i in range(10))

    class Own(Stream):
        is_sharded = True

        def __iter__(self):
            yield from (dataset(10)[i] for i in range(dist.get_rank(), 10, dist.get_world_size()))

    trainer = build(Task, (MultiGPUAddon,))
    for bad in (DataLoader(Stream(), 2), iter([dataset(4)[0]]), map(dataset(4).__getitem__, range(4))):
        with pytest.raises(LoaderError, match="is_sharded = True"):
            trainer.run(1, bad)
    assert trainer.progress_checker.batch == 0
    metrics = trainer.run(2, DataLoader(Own(), 2), DataLoader(Own(), 2))
    assert trainer.world_size == world
    assert agree(trainer)
    assert metrics["step"] == 2 * -(-(10 // world) // 2)
    assert metrics["valid_metrics_history"][-1]["valid_n_seen"] == 10
    with pytest.raises(LoaderError, match="None"):
        build(Task, (MultiGPUAddon,)).run(1, loader(8, 2, collate_fn=lambda samples: None))


def every_add_on_resumes_bitwise(world, folder):
    """F-B3, P-12: AMP fp16, accumulation, EMA, early stopping, dropout, batch norm, clipping: from any checkpoint."""
    add_ons = (AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon)

    def run(name, resume, size, batch_norm):
        trainer = build(
            Task, add_ons, model=network(batch_norm, 0.3), seed=4, gradient_clip=1.0, precision="fp16",
            loss_scale=(128.0, 1.0), gradient_accumulation_steps=2, patience=50, decay=0.9,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            save_path=folder / name, save_every=1, keep_last=None, resume=resume, timeout=20.0,
        )  # fmt: skip
        return trainer, trainer.run(3, loader(size, 3, 2), loader(7, 3))

    # With batch norm no rank may have a single sample; without, one rank has none in the last step.
    for size, batch_norm in ((8 * world, True), (6 * world + 1, False)):
        first, expected = run(f"first-{size}", False, size, batch_norm)
        assert first.world_size == world
        assert agree(first)
        saved = sorted(path.name for path in (folder / f"first-{size}").glob("step-*"))
        assert len(saved) == expected["step"]
        for name in (saved[0], saved[1], saved[2], saved[-1]):
            again, metrics = run(f"again-{size}-{name}", str(folder / f"first-{size}" / name), size, batch_norm)
            assert same(weights(first), weights(again)), name
            assert metrics["train_metrics_history"] == expected["train_metrics_history"]
            assert metrics["valid_metrics_history"] == expected["valid_metrics_history"]
            assert all(torch.equal(first.average[key], again.average[key]) for key in first.average)
            assert first.optimizer.state_dict()["state"].keys() == again.optimizer.state_dict()["state"].keys()


def a_ledger_changes_nothing(world, folder):
    """P-48, P-02: where ranks have unlike shares of the last batch, and where one has none; kept ones go on there."""
    ledger = {"ledger_path": folder / "ledger.jsonl"}
    for size in (4 * world + 1, 6 * world - 1):
        plain, noted = build(Task, (MultiGPUAddon,)), build(Task, (MultiGPUAddon, LedgerAddon), **ledger)
        for trainer in (plain, noted):
            trainer.run(2, loader(size, 2, 5))
            assert trainer.world_size == world
        assert same(weights(plain), weights(noted)), size
    add_ons = (MultiGPUAddon, StateManagerAddon)
    first = build(Task, (*add_ons, LedgerAddon), save_path=folder / "noted", **ledger)
    first.run(2, loader(size, 2, 5), max_steps=2)
    again = build(Task, add_ons, save_path=folder / "noted", resume=True)
    again.run(2, loader(size, 2, 5))
    assert same(weights(plain), weights(again))


def another_number_of_ranks_is_refused(world, folder):
    """F-B5, P-24: the state of one process, and back; with reshard=True each sample that was left comes once."""
    size, batch_size = 24, 2
    alone = build(Seen, (StateManagerAddon,), save_path=folder / f"alone-{dist.get_rank()}")
    alone.run(2, loader(size, batch_size * world, 6), max_steps=2)
    dist.barrier()
    options = {"save_path": folder / "together", "resume": str(folder / "alone-0")}
    with pytest.raises(CheckpointMismatch, match=rf"of 1 ranks?, and this run has {world}.*reshard=True"):
        build(Seen, (MultiGPUAddon, StateManagerAddon), **options).run(2, loader(size, batch_size, 6))
    trainer = build(Seen, (MultiGPUAddon, StateManagerAddon), **options, reshard=True)
    before = list(alone.seen[0])
    trainer.run(1, loader(size, batch_size, 6))
    assert trainer.world_size == world
    assert agree(trainer)
    assert trainer.progress_checker.epoch == 1
    after = list(itertools.chain(*trainer.gather(getattr(trainer, "seen", {}).get(0, []))))
    assert sorted([*before, *after]) == list(range(size)), "each sample exactly once"


def stopping_is_agreed(world, folder):
    """P-36: only the last rank asks for the end; early stopping by a metric of all; both at the same step."""

    class LastRankStops(Task):
        def train_step(self, batch):
            if self.rank == world - 1 and self.progress_checker.step == 2:
                self.stop("enough")
            return super().train_step(batch)

    trainer = build(LastRankStops, (MultiGPUAddon,))
    metrics = trainer.run(9, loader(12, 2))
    assert trainer.gather((metrics["step"], metrics["stop_reason"])) == [(3, "enough")] * world

    class OneRankIsBad(Task):
        def test_step(self, batch):
            return {"loss": float(self.progress_checker.epoch if self.rank == world - 1 else 1)}

        def metric_on_epoch_end(self):
            return {}

    trainer = build(OneRankIsBad, (MultiGPUAddon, EarlyStoppingAddon), patience=2)
    metrics = trainer.run(9, loader(12, 2), loader(12, 1))
    assert trainer.gather(metrics["epoch"]) == [3] * world


def a_bad_step_of_one_rank_is_left_out_by_all(world, folder):
    """F-D1, P-34: NaN on the last rank alone: no rank steps, schedules or averages; as in one process."""

    class OneIsBad(Task):
        def train_step(self, batch):
            out = super().train_step(batch)
            if self.progress_checker.step in (1, 4) and self.rank == self.world_size - 1:
                out["loss"] = out["loss"] * math.nan
            return out

    def run(add_ons, batch_size):
        trainer = build(
            OneIsBad, (EMAAddon, *add_ons), model=network(dtype=F64), on_nonfinite="skip", decay=0.9,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            scheduler_step_on_batch=True,
        )  # fmt: skip
        return trainer, trainer.run(2, loader(6 * world, batch_size, 3, F64))

    (trainer, here), (single, there) = run((MultiGPUAddon,), 2), run((), 2 * world)
    assert trainer.world_size == world
    assert agree(trainer), "bitwise on all ranks"
    assert distance(trainer, single) < 1e-12
    assert here["step"] == there["step"] == 6
    assert trainer.gather(here["nonfinite_steps"]) == [there["nonfinite_steps"]] * world == [2] * world
    assert trainer.scheduler.state_dict() == single.scheduler.state_dict()
    averages = trainer.gather(list(trainer.average.values()))
    assert all(same(averages[0], each) for each in averages)


def a_bad_step_of_one_rank_is_counted_by_all(world, folder):
    """F-D1: with "warn" only the last rank sees its loss: what is returned, logged and saved counts it all the same."""

    class OneIsBad(Task):
        def train_step(self, batch):
            out = super().train_step(batch)
            if self.rank in {1: (world - 1,), 4: (0, world - 1)}.get(self.progress_checker.step, ()):
                out["loss"] = out["loss"] + math.inf  # Its gradient is finite.
            return out

    trainer = build(OneIsBad, (MultiGPUAddon,), on_nonfinite="warn", log_every=1)
    metrics = trainer.run(2, loader(6 * world, 2))
    assert trainer.world_size == world
    assert trainer.gather(metrics["nonfinite_steps"]) == [2] * world
    assert trainer.gather(trainer.state_dict()["progress"]["nonfinite_steps"]) == [2] * world
    assert [each.get("nonfinite_steps") for each in trainer.log_history] == [None, 1.0, 1.0, 1.0, 2.0, 2.0]

    class Saved(OneIsBad):
        def checkpoint(self):
            super().checkpoint()
            saved.append(self.state_dict()["progress"]["nonfinite_steps"])

    saved = []
    trainer = build(Saved, (MultiGPUAddon,), on_nonfinite="warn")
    trainer.run(2, loader(6 * world, 2))
    assert trainer.gather(saved) == [[0, 1, 1, 1, 1, 2, 2, 2]] * world, "in the midst of an epoch too"


def unused_parameters_are_named(world, folder):
    """P-45; and parts of the model may be called, which the wrapper does not see."""

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


def several_optimizers_and_parameters_outside(world, folder):
    """P-03; a loss for each optimizer, and a learnt weight that the model does not hold."""

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


def rates_are_those_of_one_process(world, folder):
    """P-04: the learning rate as a function of the step, for accumulation over 1 and 4 batches."""
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


def saved_keys_are_the_model_s(world, folder):
    """P-14; buffers are those of rank 0 on every rank; one writer."""
    trainer = build(
        Task, (MultiGPUAddon, StateManagerAddon), model=network(True), save_path=folder / "run", keep_last=None
    )
    trainer.run(2, loader(6 * world, 3))
    assert trainer.world_size == world
    assert agree(trainer)
    assert list(trainer.state_dict()["model"]) == list(network(True).state_dict())
    assert isinstance(trainer.model, nn.Sequential)
    if trainer.is_main:
        network(True).load_state_dict(torch.load(trainer.save_model(folder / "m.ckpt"), weights_only=True))
    assert trainer.rank == dist.get_rank()


def one_rank_logs(world, folder):
    """P-29, F-C8: one run, one file, each record once, with the means over all ranks."""
    trainer = build(Task, (MultiGPUAddon, JSONLLoggerAddon), jsonl_path=folder / "log.jsonl", log_every=1)
    trainer.run(2, loader(4 * world, 2), loader(5, 2))
    dist.barrier()
    assert trainer.world_size == world
    assert [path.name for path in folder.iterdir()] == ["log.jsonl"]
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "train/loss" in record] == [1, 2, 3, 4]
    assert len(records) == len(trainer.log_history)


def a_compiled_model_is_averaged(world, folder):
    """P-04: it is compiled inside of the wrapper; a graph of the whole step, which no wrapper sees, is refused."""
    options = {"compile_backend": "eager", "compile_mode": "model"}
    trainer = build(Task, (MultiGPUAddon, CompileAddon), model=network(dtype=F64), gradient_clip=0.05, **options)
    trainer.run(2, loader(4 * world, 2, dtype=F64))
    single = build(Task, (), model=network(dtype=F64), gradient_clip=0.05)
    single.run(2, loader(4 * world, 2 * world, dtype=F64))
    assert trainer.world_size == world
    assert trainer.compile_report["graphs"] == 1
    assert distance(trainer, single) < 1e-12
    options["compile_mode"] = "graph"
    with pytest.raises(ConfigError, match=r"several ranks \(MultiGPUAddon\); write compile_mode='model'"):
        build(Task, (MultiGPUAddon, CompileAddon), **options).run(1, loader(4 * world, 2))


def a_schedule_free_optimizer_evaluates_with_its_own_weights(world, folder):
    """P-02, P-20: the score and the saved weights are those of one process, and training goes on as without them."""
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


def what_is_trained_may_change_meanwhile(world, folder):
    """P-37, P-45: layers frozen and thawed between epochs, all of the model frozen, optimizers that take turns."""
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


def a_step_sees_the_model_itself(world, folder):
    """P-14: what a step sets on the model is set, names are those of the model, and so is what it has of its own."""

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


def buffers_are_those_of_rank_0(world, folder):
    """P-14: a buffer that a forward replaces, and those of a step that was left out."""

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


def any_kind_of_gradient(world, folder):
    """P-37: sparse embeddings and complex weights; a rank without samples in the last step; a static graph."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding.from_pretrained(torch.ones(8, 1), freeze=False, sparse=True)
            self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

        def forward(self, inputs):
            return self.table((inputs[:, 0] * 9).long() % 8) * self.phase.abs()

    def run(add_ons, batch_size, **options):
        model = Net()
        optimizers = [torch.optim.SparseAdam([model.table.weight], 0.1), torch.optim.SGD([model.phase], 0.01)]
        trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=optimizers, log_bar=False, **options)
        return trainer, trainer.run(2, loader(4 * world + 1, batch_size))

    for options in ({}, {"static_graph": True}):
        (trainer, here), (single, there) = run((MultiGPUAddon,), 2, **options), run((), 2 * world)
        assert trainer.world_size == world
        assert agree(trainer)
        assert here["step"] == there["step"] == 6
        assert distance(trainer, single) < 1e-5


def a_gradient_lies_in_memory_as_its_weight(world, folder):
    """P-37: a fused kernel goes through both number by number, also where ranks have no samples in the last step."""

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


def a_static_graph_resumes_bitwise(world, folder):
    """P-02, P-12, F-B3: the order of a sum over three ranks hangs on how gradients are put together; windows of two."""

    def run(resume):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 33), nn.Tanh(), nn.Linear(33, 170), nn.Tanh(), nn.Linear(170, 1))
        trainer = build(
            Task, (MultiGPUAddon, StateManagerAddon), model=model, static_graph=True, seed=1, save_every=1,
            keep_last=None, save_path=folder / str(bool(resume)), resume=resume,
        )  # fmt: skip
        trainer.run(1, loader(4 * world, 2, 3))
        return trainer

    first, again = run(False), run(str(folder / "False" / "step-00000001"))
    assert first.world_size == world
    assert same(weights(first), weights(again))
    options = {"gradient_accumulation_steps": 2, "model": network(dtype=F64)}
    trainer = build(Task, (GradientAccumulationAddon, MultiGPUAddon), static_graph=True, **options)
    single = build(Task, (GradientAccumulationAddon,), **{**options, "model": network(dtype=F64)})
    trainer.run(1, loader(10 * world, 2, dtype=F64))
    single.run(1, loader(10 * world, 2 * world, dtype=F64))
    assert distance(trainer, single) < 1e-12


def a_parameter_left_out_of_the_last_batch_is_refused(world, folder):
    """P-45: before the optimizer steps: what it had of the batches before is not averaged."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.seldom, self.calls = nn.Linear(3, 1), nn.Linear(3, 1), 0

        def forward(self, inputs):
            self.calls += 1
            return self.used(inputs) + (self.seldom(inputs) if self.calls % 2 else 0)

    trainer = build(Task, (MultiGPUAddon, GradientAccumulationAddon), model=Half(), gradient_accumulation_steps=2)
    with pytest.raises(DistributedError, match="left out parameters in the last batch of a step"):
        trainer.run(1, loader(4 * world, 2))
    assert trainer.progress_checker.step == 0
    dist.barrier()


class Budget:
    """Batches of at most so much in all: how many there are hangs on the epoch's order."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batch = []
        for index in torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            if batch and sum(batch) + index > 20:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def __len__(self):
        return len(list(iter(self)))


class Grows:
    """A dataset that shows one sample more in its second epoch."""

    def __init__(self, samples):
        self.samples, self.shown = samples, len(samples) - 1

    def set_epoch(self, epoch):
        self.shown = len(self.samples) - 1 + epoch

    def __len__(self):
        return self.shown

    def __getitem__(self, index):
        return self.samples[index]


class Given(Sampler):
    """What it was told to give, with the length that it was told."""

    def __init__(self, entries, length):
        self.entries, self.length = entries, length

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return self.length


def a_sampler_of_one_s_own_loses_nothing(world, folder):
    """P-41, P-43, F-D11: another number of batches in each epoch; what would lose samples without a word is refused."""
    trainer = build(Seen, (MultiGPUAddon,))
    trainer.run(4, DataLoader(dataset(12), batch_sampler=Budget()))
    assert trainer.world_size == world
    assert len({len(list(Budget())) % world for Budget.epoch in range(4)}) > 1
    for epoch in range(4):
        assert sorted(itertools.chain(*trainer.gather(trainer.seen.get(epoch, [])))) == list(range(12))
    for given in (10, 12):
        bad = DataLoader(dataset(12), 2, sampler=Given(range(given), 22 - given))
        with pytest.raises(LoaderError, match=f"length of {22 - given} and gave {given} entries.*mend its __len__"):
            build(Seen, (MultiGPUAddon,)).run(1, bad)
    short = loader(2 * world - 1, 2, drop_last=True)
    with pytest.raises(LoaderError, match=f"takes {2 * world} samples, 2 each, .* gives {2 * world - 1}: drop_last"):
        build(Seen, (MultiGPUAddon,)).run(1, short)
    trainer = build(Seen, (MultiGPUAddon,))
    trainer.run(2, DataLoader(Grows(dataset(2 * world + 1)), 2))
    for epoch in (0, 1):
        seen = itertools.chain(*trainer.gather(trainer.seen.get(epoch, [])))
        assert sorted(seen) == list(range(2 * world + epoch))
    own = range(dist.get_rank(), 4 * world, world)
    dealt = DataLoader(dataset(4 * world), 2, sampler=Given(own, 4))
    with pytest.raises(LoaderError, match=r"the Given .* not give every one .* same entries.*is_sharded = True"):
        build(Seen, (MultiGPUAddon,)).run(1, dealt)
    dealt.is_sharded = True
    trainer = build(Seen, (MultiGPUAddon,))
    assert trainer.run(1, dealt, dealt)["valid_metrics_history"][0]["valid_n_seen"] == 4 * world
    assert sorted(itertools.chain(*trainer.gather(trainer.seen[0]))) == list(range(4 * world))


class Endless:
    """An iterator over every world-size-th sample."""

    is_sharded = True

    def __init__(self):
        self.each = itertools.count(dist.get_rank(), dist.get_world_size())

    def __iter__(self):
        return self

    def __next__(self):
        index = next(self.each)
        return dataset(99)[index : index + 1]


def a_loader_with_a_place_of_its_own_resumes(world, folder):
    """P-12: an iterator, which does not begin again, and a StatefulDataLoader; many validations in between."""
    for name in ("iterator", "stateful"):

        def run(part, resume, name=name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # StatefulDataLoader calls what torch 2.13 deprecates.
                stateful = StatefulDataLoader(dataset(8 * world), 2, shuffle=True)
            trainer = build(
                Seen, (MultiGPUAddon, StateManagerAddon), seed=1, save_every=5, keep_last=None, resume=resume,
                save_path=folder / name / part,
            )  # fmt: skip
            trainer.run(2, Endless() if name == "iterator" else stateful, steps_per_epoch=4)
            return trainer

        first, again = run("first", False), run("again", str(folder / name / "first" / "step-00000005"))
        assert first.world_size == world
        assert again.seen[1] == first.seen[1][-len(again.seen[1]) :]
        assert same(weights(first), weights(again)), name
    trainer, training = build(Seen, (MultiGPUAddon,)), loader(4 * world, 2, 3)
    trainer.run(None, training, {str(index): loader(world, 1) for index in range(9)}, max_steps=1, valid_every=1)
    trainer.run(1, training)
    assert sorted(itertools.chain(*trainer.gather(trainer.seen[0]))) == list(range(4 * world))


def all_ranks_begin_and_judge_alike(world, folder):
    """P-36: a metric that one rank has, or that each draws for itself; a checkpoint that only rank 0 finds."""

    class Own(Task):
        def metric_on_epoch_end(self):
            return {"drawn": torch.rand(()).item() - self.progress_checker.epoch} if self.is_main else {}

    options = {"monitor": "drawn", "monitor_mode": "min", "patience": 3, "save_path": folder / "0", "seed": 1}
    trainer = build(Own, (MultiGPUAddon, StateManagerAddon, EarlyStoppingAddon), **options)
    metrics = trainer.run(2, loader(4 * world, 2), loader(4 * world, 2))
    assert trainer.world_size == world
    assert trainer.gather(metrics) == [metrics] * world
    options = {"save_path": folder / str(dist.get_rank()), "resume": "auto"}
    stand = ", ".join(f"rank {rank} at step {0 if rank else 4}" for rank in range(world))
    with pytest.raises(DistributedError, match=f"{stand}.*a folder that all machines share"):
        build(Task, (MultiGPUAddon, StateManagerAddon, EarlyStoppingAddon), **options).run(3, loader(4 * world, 2))
    dist.barrier()


def a_disk_that_refuses_ends_no_run(world, folder):
    """F-D2, P-36: only rank 0 sees that a save fails: all know by the next, and decide alike what is to be saved."""
    for save_async in (False, True):
        trainer = build(
            Task, (MultiGPUAddon, StateManagerAddon), save_path=folder / str(save_async), save_every=1,
            on_save_error="warn", save_async=save_async,
        )  # fmt: skip
        with faults.installed(faults.RefusingDisk(20, errno.ENOSPC)) as disk:
            trainer.run(1, loader(4 * world, 2), loader(3, 2))
        assert trainer.world_size == world
        assert trainer.is_main == (disk.now > 20)
        assert trainer.run(1, loader(4 * world, 2))["step"] == 4
        assert trainer.gather(trainer.last_path.name) == ["step-00000004"] * world


CHECKS = (
    one_rank_logs,
    every_size_is_the_big_batch,
    evaluation_is_bitwise_that_of_one_process,
    orders_differ_and_are_repeated,
    any_sampler_and_loader,
    streams_are_declared_or_refused,
    every_add_on_resumes_bitwise,
    a_ledger_changes_nothing,
    another_number_of_ranks_is_refused,
    stopping_is_agreed,
    a_bad_step_of_one_rank_is_left_out_by_all,
    a_bad_step_of_one_rank_is_counted_by_all,
    several_optimizers_and_parameters_outside,
    rates_are_those_of_one_process,
    saved_keys_are_the_model_s,
    a_compiled_model_is_averaged,
    a_schedule_free_optimizer_evaluates_with_its_own_weights,
    unused_parameters_are_named,
    all_ranks_begin_and_judge_alike,
    a_disk_that_refuses_ends_no_run,
    a_sampler_of_one_s_own_loses_nothing,
    a_loader_with_a_place_of_its_own_resumes,
    what_is_trained_may_change_meanwhile,
    a_step_sees_the_model_itself,
    buffers_are_those_of_rank_0,
    any_kind_of_gradient,
    a_gradient_lies_in_memory_as_its_weight,
    a_static_graph_resumes_bitwise,
    a_parameter_left_out_of_the_last_batch_is_refused,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    found = {}

    def outcome_of(world):
        if world not in found:
            sent = {"checks": CHECKS, "world": world, "folder": str(tmp_path_factory.mktemp(f"ranks{world}"))}
            with forks():
                found[world] = spawn(run_checks, sent, [torch.device("cpu")] * world, timeout=30)
        return found[world]

    return outcome_of


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_faults_and_resumes_on_every_rank(outcomes, check, world):
    """P-02 P-03 P-04 P-14 P-32 P-24 P-34 P-36 P-39 P-40 P-41 P-43 P-45 F-B3 F-B5 F-D1 F-D11: each check says which."""
    text = outcomes(world)[check.__name__]
    assert not text, text


# --------------------------------------------------------------------------------- runs that start their own ranks


def spawned(devices, **options):
    return build(
        Seen, (MultiGPUAddon, EMAAddon, EarlyStoppingAddon, JSONLLoggerAddon), devices, patience=50, timeout=20.0,
        jsonl_path="log.jsonl", log_every=1,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), **options,
    )  # fmt: skip


def test_the_caller_s_objects_hold_what_rank_0_ended_with(recwarn):
    """P-29, P-37, P-38, P-55, X-7: two runs of two ranks are those of one process, in the same objects; one log."""
    options = {"model": network(dtype=F64)}
    trainer = spawned(["cpu", "cpu"], **options)
    model, optimizer, scheduler = trainer.model, trainer.optimizer, trainer.scheduler
    single = build(
        Seen, (EMAAddon, EarlyStoppingAddon), model=network(dtype=F64), patience=50,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )  # fmt: skip
    for n_epoch, start in ((1, contextlib.nullcontext()), (2, forks())):
        with start:
            here = trainer.run(n_epoch, loader(13, 2, 3, F64), loader(7, 2, dtype=F64))
        there = single.run(n_epoch, loader(13, 4, 3, F64), loader(7, 2, dtype=F64))
    assert dist.is_initialized() is False
    assert trainer.state_dict()["MultiGPUAddon"]["world_size"] == len(trainer.state_dict()["MultiGPUAddon"]["ranks"])
    assert len(trainer.devices) == trainer.state_dict()["MultiGPUAddon"]["world_size"] == 2
    assert (trainer.model, trainer.optimizer, trainer.scheduler) == (model, optimizer, scheduler)
    assert distance(trainer, single) < 1e-12
    assert here["step"] == there["step"] == 12
    assert here["valid_metrics_history"][-1] == pytest.approx(there["valid_metrics_history"][-1])
    assert trainer.metrics == here
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert optimizer.state[model[0].weight]["step"] == single.optimizer.state[single.model[0].weight]["step"]
    assert scheduler.last_epoch == single.scheduler.last_epoch == 3
    for key, average in single.average.items():
        assert torch.allclose(trainer.average[key], average, rtol=0, atol=1e-12)
    assert len(trainer.log_test["loss"]) == 4
    records = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "train/loss" in record] == list(range(1, 13))
    assert len(records) == len(trainer.log_history)
    assert [str(each.message) for each in recwarn] == []


def test_a_sampler_that_draws_by_itself_goes_on_in_the_next_run():
    """P-41: ``run(1); run(1)`` is ``run(2)``, though the sampler that drew was in other processes."""

    def run(*calls):
        data, drawn = dataset(12), Drawn(12)
        trainer = build(Task, (MultiGPUAddon,), ["cpu", "cpu"], timeout=20.0)
        with forks():
            for n_epoch in calls:
                trainer.run(n_epoch, DataLoader(data, 2, sampler=drawn))
        assert trainer.state_dict()["MultiGPUAddon"]["world_size"] == 2
        return weights(trainer), drawn.source.random()

    (first, after), (second, there) = run(1, 1), run(2)
    assert same(first, second)
    assert after == there


def test_p55_what_the_caller_does_between_two_runs_stays(tmp_path):
    """P-55, P-12: resume="auto" is for the first run of a script: the ranks of a second one begin from the caller's."""
    trainer = build(Task, (MultiGPUAddon, StateManagerAddon), ["cpu", "cpu"], timeout=20.0, save_path=tmp_path / "run",
                    resume="auto")  # fmt: skip
    with forks():
        trainer.run(1, loader(8, 2))
        trainer.apply_weights({name: torch.zeros_like(value) for name, value in trainer.model_state().items()})
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        trainer.run(1, loader(8, 2))
    assert trainer.state_dict()["MultiGPUAddon"]["world_size"] == 2
    assert trainer.progress_checker.epoch == 2
    assert not any(weight.any() for weight in trainer.unwrap().parameters())


class Drawn(Sampler):
    """A sampler with a generator of NumPy's, which nobody else seeds."""

    def __init__(self, size):
        self.size, self.source = size, np.random.default_rng(5)

    def __iter__(self):
        return iter(self.source.permutation(self.size).tolist())

    def __len__(self):
        return self.size


def test_e15_what_cannot_travel_is_named_before_anything_starts():
    """E15, P-38: the attribute's path and the remedy."""
    trainer = spawned(["cpu", "cpu"])
    trainer.hooks = {"end": [lambda: None]}
    with pytest.raises(ConfigError, match=re.escape("trainer.hooks['end'][0] cannot travel")):
        trainer.run(1, loader(4, 2))
    del trainer.hooks
    with open(__file__) as trainer.source, pytest.raises(ConfigError, match=r"trainer.source .*open file"):
        trainer.run(1, loader(4, 2))
    del trainer.source
    # What torch refuses to pickle nobody can define elsewhere.
    trainer.spare = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"trainer.spare .*parametrized(.|\n)*begin the whole script with torchrun"):
        trainer.run(1, loader(4, 2))
    del trainer.spare
    with pytest.raises(ConfigError, match=r"loader cannot travel .*generator"):
        trainer.run(1, (batch for batch in loader(4, 2)))

    class Local(Task):
        pass

    with pytest.raises(ConfigError, match=r"class .*Local.*top level of a module"):
        build(Local, (MultiGPUAddon,), ["cpu", "cpu"]).run(1, loader(4, 2))
    assert trainer.world_size == 1


def test_p38_what_the_main_script_defines_too_late_is_named(monkeypatch, tmp_path):
    """P-38: below the guard of a script a class is there in the script's own process only."""
    late = type("Late", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Late", late, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    transfer.pack({"sample": late()}, tmp_path / "begin")
    assert type(transfer.unpack(tmp_path / "begin")["sample"]) is late
    monkeypatch.delattr(sys.modules["__main__"], "Late")
    with pytest.raises(ConfigError, match=r"Late is not there when another process .* not under if __name__"):
        transfer.unpack(tmp_path / "begin")


def test_p44_devices_are_those_asked_for():
    """P-44: a list without the add-on is refused, and so is one rank where two were meant."""
    with pytest.raises(ConfigError, match="MultiGPUAddon"):
        build(Task, (), ["cpu", "cpu"])
    trainer = build(Task, (MultiGPUAddon,), ["cpu", "cpu"])
    with pytest.raises(ConfigError, match=r"call run\(\)"):
        trainer.run_epoch(loader(4, 2))
    alone = build(Task, (MultiGPUAddon,), ["cpu"])
    assert alone.run(1, loader(4, 2))["step"] == 2
    assert alone.world_size == 1
    for option, value in (
        ("backend", 3),
        ("backend", "glo"),
        ("backend", "cpu:glo"),
        ("timeout", 0),
        ("init_method", 5),
    ):
        with pytest.raises(ConfigError, match=f"^{option}="):
            build(Task, (MultiGPUAddon,), **{option: value})
    build(Task, (MultiGPUAddon,), backend="cpu:gloo,cuda:nccl")


def test_the_state_of_two_ranks_is_named_where_one_loads_it(tmp_path):
    """F-B5: distributed to one process: refused by name; with the add-on and reshard=True it goes on."""
    trainer = build(Task, (MultiGPUAddon, StateManagerAddon), ["cpu", "cpu"], save_path=tmp_path / "two", timeout=20.0)
    with forks():
        trainer.run(1, loader(8, 2))
    assert trainer.state_dict()["MultiGPUAddon"]["world_size"] == 2
    options = {"save_path": tmp_path / "one", "resume": str(tmp_path / "two")}
    with pytest.raises(CheckpointMismatch, match="of 2 ranks, and this run has 1"):
        build(Task, (StateManagerAddon,), **options).run(1, loader(8, 4))
    with pytest.raises(CheckpointMismatch, match=r"of 2 ranks, and this run has 1.*reshard=True"):
        build(Task, (MultiGPUAddon, StateManagerAddon), **options).run(1, loader(8, 4))
    again = build(Task, (MultiGPUAddon, StateManagerAddon), **options, reshard=True)
    assert again.run(2, loader(8, 4))["step"] == 4


def test_trainer_without_the_add_on_is_untouched():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Trainer.add_on(MultiGPUAddon) is Trainer.add_on(MultiGPUAddon)
