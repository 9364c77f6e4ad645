"""Gangs of fairseq2 on real process groups: the engine that they ask for, and what does not fit."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from kit.fairseq2_parts import (
    FakeGang,
    Gangs,
    HandTrainer,
    ProcessGroupGang,
    Reader,
    ScoreUnit,
    Unit,
    batches,
    network,
    parallel_gangs,
    root_gang,
    weights,
)
from kit.ranks import each_rank, on_ranks
from zae import ConfigError
from zae.addons import FSDPAddon, MultiGPUAddon, TensorParallelAddon
from zae.addons.fairseq2 import from_arguments, task_of
from zae.addons.fairseq2.gangs import GangSizes

SIZES = ((4, 1, 3, 4, 2), (2, 3, 3, 1, 4))


def parts(share):
    """Return the unit, the optimizer, the schedule and the reader of a share of the data."""
    unit = Unit(network())
    optimizer = torch.optim.AdamW(unit.model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100)
    return unit, Reader(batches(SIZES[share], seed=share), 2), optimizer, schedule


def call(share, **more):
    """Return the call for one rank, which reads the batches of its share."""
    unit, reader, optimizer, schedule = parts(share)
    given = {"max_num_steps": 7, "max_gradient_norm": 0.5, **more}
    return from_arguments(unit=unit, data_reader=reader, optimizer=optimizer, lr_scheduler=schedule, **given)


def by_hand(share, dp=None):
    """Return the weights of the loop, on one process or with DistributedDataParallel."""
    unit, *others = parts(share)
    model = unit.model
    HandTrainer(unit, *others, steps=7, norm=0.5, dp=dp).run()
    return weights(model)


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def near(first, second):
    return all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(first, second, strict=True))


def test_two_ranks_that_are_killed_end_bitwise_as_the_loop_with_distributed_data_parallel(tmp_path):
    """Unequal batches, accumulation, clipping, a schedule, two valid units; rank 1 is killed within a step."""

    def on_rank(kill_at):
        gangs = parallel_gangs(root_gang())
        expected = by_hand(gangs.dp.rank, gangs.dp)
        unit, reader, optimizer, schedule = parts(gangs.dp.rank)
        unit.kill_at = kill_at * gangs.dp.rank
        units = [ScoreUnit(unit.model, "dev"), ScoreUnit(unit.model, "test", 3.0)]
        converted = from_arguments(
            unit=unit, data_reader=reader, optimizer=optimizer, lr_scheduler=schedule, gangs=gangs,
            max_num_steps=7, max_gradient_norm=0.5, checkpoint_manager=tmp_path, checkpoint_every_n_steps=2,
            valid_units=units, valid_data_readers=[Reader(batches((3, 2), seed=9 + gangs.dp.rank)) for _ in units],
            validate_every_n_steps=3, score_metric_name="score",
        )  # fmt: skip
        trainer = converted.trainer(log_bar=False)
        metrics = converted.train(trainer)
        assert isinstance(trainer, MultiGPUAddon)
        assert trainer.device.type == "cpu"
        return equal(weights(unit.model), expected), unit.steps, metrics["valid_metrics_history"]

    with pytest.raises(AssertionError, match="rank 1 of 2: ended with -9"):
        each_rank(2, on_rank, 9)  # The second batch of the fifth step.
    results = each_rank(2, on_rank, 0)
    assert [(is_equal, steps) for is_equal, steps, _ in results] == [(True, [5, 6, 7])] * 2
    rows = results[0][2]
    assert rows == results[1][2]
    assert [row["step"] for row in rows] == [3, 6, 7]
    assert all(row["valid/test/score"] == pytest.approx(3 * row["valid/dev/score"]) for row in rows)


@on_ranks(2)
def test_sharding_is_chosen_by_its_add_on(world):
    gangs = parallel_gangs(root_gang())
    converted = call(gangs.dp.rank, root_gang=gangs.root, dp_gang=gangs.dp, tp_gang=gangs.tp)
    trainer = converted.trainer(task_of(converted.args.unit).add_on(FSDPAddon), log_bar=False)
    converted.train(trainer)
    assert not isinstance(trainer, MultiGPUAddon)
    found = [each.full_tensor() for each in trainer.unwrap().parameters()]
    assert near(found, by_hand(gangs.dp.rank, gangs.dp))


@on_ranks(2)
def test_a_tensor_gang_asks_for_a_plan_and_trains_as_one_process(world):
    gangs = parallel_gangs(root_gang(), tp_size=2)
    with pytest.raises(ConfigError, match=r"tp_gang has 2 ranks, .*write converted\.trainer\(tensor_plan=\{'layers"):
        call(0, gangs=gangs).trainer()
    converted = call(0, gangs=gangs)  # Ranks of one tp gang read the same batches.
    trainer = converted.trainer(tensor_plan={"0": ColwiseParallel(), "3": RowwiseParallel()}, log_bar=False)
    assert isinstance(trainer, TensorParallelAddon)
    assert trainer.mesh == {"tensor": 2}
    converted.train(trainer)
    found = [getattr(each, "full_tensor", lambda own=each: own)() for each in trainer.unwrap().parameters()]
    assert near(found, by_hand(0))


@pytest.mark.exhaustive
def test_both_dimensions_shard_and_divide():
    """Two groups of two ranks: each group reads its own batches, and divides the layers."""

    def on_rank():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # Of RowwiseParallel.
        gangs = parallel_gangs(root_gang(), tp_size=2)
        converted = call(gangs.dp.rank, gangs=gangs)
        trainer = converted.trainer(tensor_plan={"0": ColwiseParallel(), "3": RowwiseParallel()}, log_bar=False)
        assert isinstance(trainer, FSDPAddon)
        assert trainer.mesh == {"shard": 2, "tensor": 2}
        converted.train(trainer)
        return [each.full_tensor() for each in trainer.unwrap().parameters()]

    found = each_rank(4, on_rank)
    expected = each_rank(2, lambda: by_hand(dist.get_rank(), root_gang()))
    assert all(near(each, expected[0]) for each in found)


@on_ranks(2)
def test_gangs_that_do_not_fit_are_refused(world):
    root, rank = root_gang(), dist.get_rank()
    gangs = parallel_gangs(root)
    reversed_group = dist.new_group([1, 0], use_local_synchronization=False)
    refused = [
        ({}, r"2 processes started, and root_gang is missing, .*; write root_gang=setup_root_gang\(device\)"),
        ({"root_gang": FakeGang()}, r"root_gang has 1 rank, and 2 processes were started; give the gang of all"),
        (
            {"root_gang": root, "tp_gang": FakeGang()},
            r"dp_gang and tp_gang have None and 1 ranks, .* the 2 of root_gang; make them with",
        ),
        (
            {"gangs": Gangs(root, FakeGang(), FakeGang())},
            r"dp_gang and tp_gang have 1 and 1 ranks, which do not divide the 2",
        ),
        (
            {"gangs": Gangs(root, gangs.dp, gangs.dp)},
            r"dp_gang and tp_gang have 2 and 2 ranks, which do not divide the 2",
        ),
        ({"gangs": SimpleNamespace(root=root, dp=gangs.dp, tp=FakeGang(), pp=gangs.dp)}, r"add_on\(PipelineAddon\)"),
    ]
    swapped = ProcessGroupGang(reversed_group)
    swapped.rank = 1 - rank
    refused.append(({"gangs": Gangs(root, swapped, FakeGang())}, r"dp_gang of rank \d has the ranks .* here they are "
                    r"\[0, 1\], since neighbouring ranks divide tensors\. Make them with"))  # fmt: skip
    for more, match in refused:
        with pytest.raises(ConfigError, match=match):
            call(rank, **more)


@on_ranks(2)
def test_an_early_stopper_of_one_rank_stops_both(world):
    """There it is called on rank 0 alone."""
    gangs = parallel_gangs(root_gang())
    unit, reader, optimizer, _ = parts(gangs.dp.rank)
    converted = from_arguments(
        unit=unit, data_reader=reader, optimizer=optimizer, root_gang=gangs.root, max_num_steps=7,
        valid_units=[ScoreUnit(unit.model, "dev")], valid_data_readers=[Reader(batches((2,)))],
        score_metric_name="score", validate_every_n_steps=2,
        early_stopper=lambda step_nr, score: step_nr == 4 and gangs.root.rank == 0,
    )  # fmt: skip
    assert converted.train(converted.trainer(log_bar=False))["step"] == 4


@on_ranks(2)
def test_published_metrics_are_those_of_both_ranks(world):
    converted = call(dist.get_rank(), root_gang=root_gang(), max_num_steps=6, publish_metrics_every_n_steps=2)
    trainer = converted.trainer(log_bar=False)
    converted.train(trainer)
    records = {row["step"]: row for row in trainer.history.log}
    assert [*records] == [2, 4, 6]
    assert all(row["train/error"] == pytest.approx(row["train/loss"], abs=1e-5) for row in records.values())


def test_hybrid_sharding_has_two_dimensions():
    assert GangSizes(world=4, data=4, sharded=2).mesh(is_sharding=True) == {"replicate": 2, "shard": 2}
    assert GangSizes(world=4, data=4, sharded=2).mesh(is_sharding=False) is None
    assert GangSizes(world=4, data=4, sharded=4).mesh(is_sharding=True) is None


def test_gangs_of_one_process_need_no_engine():
    converted = call(0, gangs=parallel_gangs(root_gang()))
    converted.train(trainer := converted.trainer(log_bar=False))
    assert str(trainer.device) == "cpu"
    assert not isinstance(trainer, MultiGPUAddon)
    assert equal(weights(trainer.unwrap()), by_hand(0))
