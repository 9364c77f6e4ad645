"""Ranks whose weights come apart: found at each checkpoint and each epoch, and the stage is named by their ledgers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kit import engines
from kit.engines import ENGINES
from kit.rank_tasks import Task, agree, build, loader, network, same, weights
from kit.ranks import each_rank, on_ranks
from zae import DistributedError
from zae.addon import AddOnBase
from zae.addons import EMAAddon, LedgerAddon, MultiGPUAddon, StateManagerAddon
from zae.diff import compare, read_ledger
from zae.values.hashes import fingerprints


class NoiseAddon(AddOnBase):
    """Adds noise to the averaged gradient of a parameter, or to this rank's part of it, on the last rank."""

    layer = "control"
    begins, name = 3, "3.weight"

    def unscale(self):
        super().unscale()
        if self.rank == self.world_size - 1 and self.progress_checker.step + 1 >= self.begins:
            gradient = self.unwrap().get_parameter(self.name).grad
            gradient = getattr(gradient, "to_local", lambda: gradient)()
            gradient += 1e-3


@on_ranks(3)
def test_ranks_that_drift_apart_are_named(world):
    """The tensor, the ranks, the steps between; it is not saved; the ledgers of two ranks name the stage."""
    add_ons = (MultiGPUAddon, StateManagerAddon, LedgerAddon, NoiseAddon)
    options = {"save_path": "run", "save_every": 2, "ledger_path": "run/ledger-{rank}.jsonl"}
    trainer = build(Task, add_ons, **options)
    with pytest.raises(DistributedError) as caught:
        trainer.run(2, loader(12 * world, 2))
    assert trainer.world_size == world
    assert "have drifted apart: 3.weight is one thing on ranks 0, 1, another on rank 2. " in str(caught.value)
    assert "the same after step 2, and are not after step 4." in str(caught.value)
    assert trainer.gather(trainer.last_path.name) == ["step-00000002"] * world
    command = re.search(r"python -m zae diff (\S+) (\S+)$", str(caught.value))
    assert list(command.groups()) == ["run/ledger-0.jsonl", "run/ledger-2.jsonl"]
    found = compare(*map(read_ledger, command.groups()))
    assert (found.step, found.stage, found.what) == (3, "clip", "gradients")
    assert compare(*(read_ledger(f"run/ledger-{rank}.jsonl") for rank in (0, 1))) is None

    trainer = build(Task, (MultiGPUAddon, NoiseAddon))
    trainer.begins = 7
    with pytest.raises(DistributedError, match="the same after step 6, and are not after step 12"):
        trainer.run(2, loader(12 * world, 2))
    trainer = build(Task, (MultiGPUAddon, NoiseAddon))
    with pytest.raises(DistributedError, match="the same after step 0, and are not after step 4"):
        trainer.run(2, loader(12 * world, 2), max_steps=4)


def drift(engine):
    """Let the last rank drift; return the name of the tensor that the error names, and what the ledgers tell."""
    trainer = engines.build(engine, LedgerAddon, NoiseAddon, ledger_path="run/ledger-{rank}.jsonl")
    trainer.name = "blocks.0.first.weight"
    with pytest.raises(DistributedError) as caught:
        trainer.run(1, engines.data(16 * engine.shares))
    assert trainer.world_size == engine.world
    command = re.search(r"python -m zae diff (\S+) (\S+)$", str(caught.value)).groups()
    found = compare(*map(read_ledger, command))
    assert (found.step, found.stage, found.what) == (3, "clip", "gradients"), found
    others = {part for part in found.first if found.first[part] != found.second[part]}
    return re.search("apart: (.*) is one thing", str(caught.value)).group(1), command, others


NAME = "blocks.0.first.weight"
HOLDERS = {"tensor": (NAME, (0, 1), ""), "hsdp": (f"{NAME} (part shard 1)", (1, 3), "shard 1"),
           "2-D": (f"{NAME} (part shard 1)", (2, 3), "shard 1")}  # fmt: skip


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("name", ["tensor", "hsdp", pytest.param("2-D", marks=pytest.mark.exhaustive)])
def test_ledgers_of_ranks_that_hold_the_same_part_name_the_stage(name):
    """Between tensor ranks the whole tensors are compared, with HSDP and 2-D the parts that both hold."""
    what, ranks, part = HOLDERS[name]
    expected = (what, tuple(f"run/ledger-{rank}.jsonl" for rank in ranks), {part})
    world = ENGINES[name].world
    # Four ranks on a machine that does other things take longer than the time that two have.
    assert each_rank(world, drift, ENGINES[name], timeout=60.0) == [expected] * world


@on_ranks(2)
def test_a_right_run_is_bitwise_what_it_is_without_the_comparison(world):
    """Weights, random streams and history; buffers that differ by rank do not count; dropout and averages."""

    class Blind(MultiGPUAddon):
        def replicas(self):
            return {}

    class Unlike(Task):
        def on_epoch_end(self):
            super().on_epoch_end()
            self.unwrap()[1].running_mean += self.rank

    ends = []
    for add_on in (MultiGPUAddon, Blind):
        trainer = build(Unlike, (add_on, EMAAddon), model=network(True, 0.3), seed=3)
        metrics = trainer.run(2, loader(8 * world, 2, 1))
        assert trainer.world_size == world
        ends.append((weights(trainer), metrics["train_metrics_history"], torch.get_rng_state()))
        assert not agree(trainer), "its buffers"
    (first, history, random), (second, other, stream) = ends
    assert same(first, second)
    assert history == other
    assert torch.equal(random, stream)


def test_a_hash_tells_any_tensor_from_any_other():
    """Kinds and sizes of tensors, one bit, two numbers that change places, in one piece and across pieces."""
    torch.manual_seed(0)
    large = torch.randn(200_003)
    swapped = large.clone()
    swapped[[5, 150_000]] = swapped[[150_000, 5]]
    moved = torch.cat([large[131_072:], large[:131_072]])
    bit = large.clone()
    bit.view(torch.int32)[77] ^= 1
    kinds = [large, swapped, moved, bit, large.to(torch.complex64), large.bfloat16(), torch.zeros(3), torch.ones(3)]
    kinds += [torch.tensor(1.0), torch.tensor(True), torch.ones(3, dtype=torch.int64), torch.arange(12.0).view(3, 4)]
    hashes = fingerprints(kinds)
    assert len(set(hashes)) == len(kinds)
    assert fingerprints([each.clone() for each in kinds]) == hashes
    assert fingerprints([torch.arange(12.0).view(3, 4).t().contiguous().t(), torch.zeros(0)]) == [hashes[-1], 0]
    assert fingerprints([]) == []
    assert not Path("run").exists()
