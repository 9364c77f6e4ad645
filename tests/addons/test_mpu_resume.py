"""MultiGPUAddon over gloo, agreement: what ranks save, resume, log, leave out and stop at together."""

from __future__ import annotations

import errno
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kit import faults
from kit.loggers import lines
from kit.rank_tasks import (
    F64,
    Seen,
    Task,
    agree,
    build,
    distance,
    loader,
    network,
    same,
    weights,
)
from kit.ranks import on_ranks
from zae import DistributedError
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.errors import CheckpointMismatch


@pytest.mark.exhaustive
@on_ranks(2, 3)
def test_every_add_on_resumes_bitwise(world, tmp_path):
    """AMP fp16, accumulation, EMA, early stopping, dropout, batch norm, clipping: from any checkpoint."""
    add_ons = (AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon)

    def run(name, resume, size, batch_norm):
        trainer = build(
            Task, add_ons, model=network(batch_norm, 0.3), seed=4, gradient_clip=1.0, precision="fp16",
            loss_scale=(128.0, 1.0), gradient_accumulation_steps=2, patience=50, decay=0.9,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            save_path=tmp_path / name, save_every=1, keep_last=None, resume=resume, timeout=120.0,
        )  # fmt: skip
        return trainer, trainer.run(3, loader(size, 3, 2), loader(7, 3))

    # With batch norm no rank may have a single sample; without, one rank has none in the last step.
    for size, batch_norm in ((8 * world, True), (6 * world + 1, False)):
        first, expected = run(f"first-{size}", False, size, batch_norm)
        assert first.world_size == world
        assert agree(first)
        saved = sorted(path.name for path in (tmp_path / f"first-{size}").glob("step-*"))
        assert len(saved) == expected["step"]
        for name in (saved[0], saved[1], saved[2], saved[-1]):
            again, metrics = run(f"again-{size}-{name}", str(tmp_path / f"first-{size}" / name), size, batch_norm)
            assert same(weights(first), weights(again)), name
            assert metrics["train_metrics_history"] == expected["train_metrics_history"]
            assert metrics["valid_metrics_history"] == expected["valid_metrics_history"]
            assert all(torch.equal(first.average[key], again.average[key]) for key in first.average)
            assert first.optimizer.state_dict()["state"].keys() == again.optimizer.state_dict()["state"].keys()


@on_ranks(2, 3)
def test_a_ledger_changes_nothing(world, tmp_path):
    """Where ranks have unequal shares of the last batch, or none; kept ones continue there."""
    ledger = {"ledger_path": tmp_path / "ledger.jsonl"}
    for size in (4 * world + 1, 6 * world - 1):
        plain, noted = build(Task, (MultiGPUAddon,)), build(Task, (MultiGPUAddon, LedgerAddon), **ledger)
        for trainer in (plain, noted):
            trainer.run(2, loader(size, 2, 5))
            assert trainer.world_size == world
        assert same(weights(plain), weights(noted)), size
    add_ons = (MultiGPUAddon, StateManagerAddon)
    first = build(Task, (*add_ons, LedgerAddon), save_path=tmp_path / "noted", **ledger)
    first.run(2, loader(size, 2, 5), max_steps=2)
    again = build(Task, add_ons, save_path=tmp_path / "noted", resume=True)
    again.run(2, loader(size, 2, 5))
    assert same(weights(plain), weights(again))


@on_ranks(2, 3)
def test_another_number_of_ranks_is_refused(world, tmp_path):
    """The state of one process, and back; with reshard=True each sample that was left comes once."""
    size, batch_size = 24, 2
    alone = build(Seen, (StateManagerAddon,), save_path=tmp_path / f"alone-{dist.get_rank()}")
    alone.run(2, loader(size, batch_size * world, 6), max_steps=2)
    dist.barrier()
    options = {"save_path": tmp_path / "together", "resume": str(tmp_path / "alone-0")}
    with pytest.raises(CheckpointMismatch, match=rf"was saved by 1 rank .* and this run has {world}.*reshard=True"):
        build(Seen, (MultiGPUAddon, StateManagerAddon), **options).run(2, loader(size, batch_size, 6))
    trainer = build(Seen, (MultiGPUAddon, StateManagerAddon), **options, reshard=True)
    before = list(alone.seen[0])
    trainer.run(1, loader(size, batch_size, 6))
    assert trainer.world_size == world
    assert agree(trainer)
    assert trainer.progress_checker.epoch == 1
    after = list(itertools.chain(*trainer.gather(getattr(trainer, "seen", {}).get(0, []))))
    assert sorted([*before, *after]) == list(range(size)), "each sample exactly once"


@on_ranks(2, 3)
def test_stopping_is_agreed(world):
    """Only the last rank asks for the end; early stopping by a metric of all; all ranks at the same step.

    That is the step after the request, for no step waits for it; at once where the ranks meet in any case: at the end
    of an epoch and of the run, and after a validation.
    """

    class LastRankStops(Task):
        at = 0

        def train_step(self, batch):
            if self.rank == world - 1 and self.progress_checker.step + 1 == self.at:
                self.stop("enough")
            return super().train_step(batch)

    cases = (  # The step of the request, further arguments of run, and the last step.
        (2, {}, 3), (5, {}, 5), (4, {"max_steps": 4}, 4), (6, {"valid_loader": loader(6, 2), "valid_every": 2}, 6),
        (1, {"valid_loader": loader(6, 2), "valid_every": 2}, 2), (3, {"steps_per_epoch": 3}, 3),
    )  # fmt: skip
    for at, options, last in cases:
        trainer = build(LastRankStops, (MultiGPUAddon,))
        trainer.at = at
        metrics = trainer.run(9, loader(10 * world, 2), **options)
        assert trainer.gather((metrics["step"], metrics["stop_reason"])) == [(last, "enough")] * world, at
        assert agree(trainer)
        assert trainer.run(9, loader(10 * world, 2), max_steps=7)["step"] == last + 7, "and the next run goes on"

    class OneRankIsBad(Task):
        def test_step(self, batch):
            return {"loss": float(self.progress_checker.epoch if self.rank == world - 1 else 1)}

        def metric_on_epoch_end(self):
            return {}

    trainer = build(OneRankIsBad, (MultiGPUAddon, EarlyStoppingAddon), patience=2)
    metrics = trainer.run(9, loader(12, 2), loader(12, 1))
    assert trainer.gather(metrics["epoch"]) == [3] * world


@on_ranks(2, 3)
def test_a_bad_step_of_one_rank_is_left_out_by_all(world):
    """NaN on the last rank alone: no rank steps, schedules or averages; as in one process."""

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


@on_ranks(2, 3)
def test_saved_keys_are_the_model_s(world, tmp_path):
    """Buffers are those of rank 0 on every rank; one writer."""
    trainer = build(
        Task, (MultiGPUAddon, StateManagerAddon), model=network(True), save_path=tmp_path / "run", keep_last=None
    )
    trainer.run(2, loader(6 * world, 3))
    assert trainer.world_size == world
    assert agree(trainer)
    assert list(trainer.state_dict()["model"]) == list(network(True).state_dict())
    assert isinstance(trainer.model, nn.Sequential)
    if trainer.is_main:
        network(True).load_state_dict(torch.load(trainer.save_model(tmp_path / "m.ckpt"), weights_only=True))
    assert trainer.rank == dist.get_rank()


@on_ranks(2, 3)
def test_one_rank_logs(world, tmp_path):
    """One run, one file, each record once, with the means over all ranks."""
    trainer = build(Task, (MultiGPUAddon, JSONLLoggerAddon), jsonl_path=tmp_path / "log.jsonl", log_every=1)
    trainer.run(2, loader(4 * world, 2), loader(5, 2))
    dist.barrier()
    assert trainer.world_size == world
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    records = lines(tmp_path / "log.jsonl")
    assert [record["step"] for record in records if "train/loss" in record] == [1, 2, 3, 4]
    assert len(records) == len(trainer.log_history)


@on_ranks(2, 3)
def test_all_ranks_begin_and_judge_alike(world, tmp_path):
    """A metric that one rank has, or that each draws for itself; a checkpoint that only rank 0 finds."""

    class Own(Task):
        def metric_on_epoch_end(self):
            return {"drawn": torch.rand(()).item() - self.progress_checker.epoch} if self.is_main else {}

    options = {"monitor": "drawn", "monitor_mode": "min", "patience": 3, "save_path": tmp_path / "0", "seed": 1}
    trainer = build(Own, (MultiGPUAddon, StateManagerAddon, EarlyStoppingAddon), **options)
    metrics = trainer.run(2, loader(4 * world, 2), loader(4 * world, 2))
    assert trainer.world_size == world
    assert trainer.gather(metrics) == [metrics] * world
    options = {"save_path": tmp_path / str(dist.get_rank()), "resume": "auto"}
    stand = ", ".join(f"rank {rank} at step {0 if rank else 4}" for rank in range(world))
    with pytest.raises(DistributedError, match=f"{stand}.*a folder that all machines share"):
        build(Task, (MultiGPUAddon, StateManagerAddon, EarlyStoppingAddon), **options).run(3, loader(4 * world, 2))
    dist.barrier()


@on_ranks(2, 3)
def test_a_disk_that_refuses_ends_no_run(world, tmp_path):
    """Only rank 0 sees that a save fails: all know by the next, and decide alike what is to be saved."""
    for save_async in (False, True):
        trainer = build(
            Task, (MultiGPUAddon, StateManagerAddon), save_path=tmp_path / str(save_async), save_every=1,
            on_save_error="warn", save_async=save_async,
        )  # fmt: skip
        with faults.installed(faults.RefusingDisk(20, errno.ENOSPC)) as disk:
            trainer.run(1, loader(4 * world, 2), loader(3, 2))
        assert trainer.world_size == world
        assert trainer.is_main == (disk.now > 20)
        assert trainer.run(1, loader(4 * world, 2))["step"] == 4
        assert trainer.gather(trainer.last_path.name) == ["step-00000004"] * world
