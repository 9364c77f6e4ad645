"""MultiGPUAddon over gloo, data: which rank sees which samples, in which order, and what is refused."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from kit.rank_tasks import (
    F64,
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
from kit.ranks import on_ranks
from zae.addons import EarlyStoppingAddon, MultiGPUAddon, StateManagerAddon
from zae.errors import LoaderError


@on_ranks(2, 3)
def test_evaluation_is_bitwise_that_of_one_process(world):
    """The same batches, in the same order: metrics and kept outputs are the very same."""
    for size in (1, 4, 7, 9):
        trainer, single = build(Task, (MultiGPUAddon,)), build(Task)
        assert trainer.evaluate(loader(size, 2)) == single.evaluate(loader(size, 2))
        assert trainer.world_size == world
        assert trainer.log_test["loss"] == single.log_test["loss"]
        here, there = trainer.inference(loader(size, 2)), single.inference(loader(size, 2))
        assert same([out["output"] for out in here], [out["output"] for out in there])


@on_ranks(2)
def test_of_a_validate_that_gives_metrics_of_its_own_those_of_rank_0_count(world):
    """All ranks decide by the same: else one of them would stop alone."""

    class Own(Task):
        def validate(self):
            return {"loss": 3.0 - self.progress_checker.step * (1 - 2 * self.rank)}

    trainer = build(Own, (EarlyStoppingAddon, MultiGPUAddon), patience=1)
    trainer.run(3, loader(8, 2), loader(4, 2))
    assert trainer.world_size == world
    assert [row["valid_loss"] for row in trainer.valid_history] == [1.0, -1.0, -3.0]


@on_ranks(2, 3)
def test_orders_differ_and_are_repeated(world):
    """Another order in each epoch, the same in the same run again; validation in the dataset's own."""
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


@on_ranks(2, 3)
def test_any_sampler_and_loader(world):
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


@on_ranks(2, 3)
def test_streams_are_declared_or_refused(world):
    """An IterableDataset without declared sharding is refused; a declared one ends together."""

    class Stream(IterableDataset):
        def __iter__(self):
            yield from (dataset(10)[i] for i in range(10))

    class Own(Stream):
        is_sharded = True

        def __iter__(self):
            yield from (dataset(10)[i] for i in range(dist.get_rank(), 10, dist.get_world_size()))

    trainer = build(Task, (MultiGPUAddon,))
    for bad in (DataLoader(Stream(), 2), iter([dataset(4)[0]]), map(dataset(4).__getitem__, range(4))):
        with pytest.raises(LoaderError, match=r"(dataset|loader)\.is_sharded = True"):
            trainer.run(1, bad)
    assert trainer.progress_checker.batch == 0
    metrics = trainer.run(2, DataLoader(Own(), 2), DataLoader(Own(), 2))
    assert trainer.world_size == world
    assert agree(trainer)
    assert metrics["step"] == 2 * -(-(10 // world) // 2)
    assert metrics["valid_metrics_history"][-1]["valid_n_seen"] == 10
    with pytest.raises(LoaderError, match="None"):
        build(Task, (MultiGPUAddon,)).run(1, loader(8, 2, collate_fn=lambda samples: None))


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


@on_ranks(2, 3)
def test_a_fault_of_a_custom_sampler_loses_nothing(world):
    """Another number of batches in each epoch; what would lose samples without a word is refused."""
    trainer = build(Seen, (MultiGPUAddon,))
    trainer.run(4, DataLoader(dataset(12), batch_sampler=Budget()))
    assert trainer.world_size == world
    assert len({len(list(Budget())) % world for Budget.epoch in range(4)}) > 1
    for epoch in range(4):
        assert sorted(itertools.chain(*trainer.gather(trainer.seen.get(epoch, [])))) == list(range(12))
    for given in (10, 12):
        bad = DataLoader(dataset(12), 2, sampler=Given(range(given), 22 - given))
        with pytest.raises(LoaderError, match=f"length of {22 - given} and yielded {given} entries.*fix its __len__"):
            build(Seen, (MultiGPUAddon,)).run(1, bad)
    short = loader(2 * world - 1, 2, drop_last=True)
    with pytest.raises(LoaderError, match=f"takes {2 * world} samples, 2 each, .* has {2 * world - 1}: drop_last"):
        build(Seen, (MultiGPUAddon,)).run(1, short)
    trainer = build(Seen, (MultiGPUAddon,))
    trainer.run(2, DataLoader(Grows(dataset(2 * world + 1)), 2))
    for epoch in (0, 1):
        seen = itertools.chain(*trainer.gather(trainer.seen.get(epoch, [])))
        assert sorted(seen) == list(range(2 * world + epoch))
    own = range(dist.get_rank(), 4 * world, world)
    sharded = DataLoader(dataset(4 * world), 2, sampler=Given(own, 4))
    with pytest.raises(LoaderError, match=r"ranks have different data: loader\.sampler.*is_sharded = True"):
        build(Seen, (MultiGPUAddon,)).run(1, sharded)
    sharded.is_sharded = True
    trainer = build(Seen, (MultiGPUAddon,))
    assert trainer.run(1, sharded, sharded)["valid_metrics_history"][0]["valid_n_seen"] == 4 * world
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


@on_ranks(2, 3)
def test_a_loader_with_a_place_of_its_own_resumes(world, tmp_path):
    """An iterator, which does not begin again, and a StatefulDataLoader; many validations in between."""
    for name in ("iterator", "stateful"):

        def run(part, resume, name=name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # StatefulDataLoader calls what torch 2.13 deprecates.
                stateful = StatefulDataLoader(dataset(8 * world), 2, shuffle=True)
            trainer = build(
                Seen, (MultiGPUAddon, StateManagerAddon), seed=1, save_every=5, keep_last=None, resume=resume,
                save_path=tmp_path / name / part,
            )  # fmt: skip
            trainer.run(2, Endless() if name == "iterator" else stateful, steps_per_epoch=4)
            return trainer

        first, again = run("first", False), run("again", str(tmp_path / name / "first" / "step-00000005"))
        assert first.world_size == world
        assert again.seen[1] == first.seen[1][-len(again.seen[1]) :]
        assert same(weights(first), weights(again)), name
    trainer, training = build(Seen, (MultiGPUAddon,)), loader(4 * world, 2, 3)
    trainer.run(None, training, {str(index): loader(world, 1) for index in range(9)}, max_steps=1, valid_every=1)
    trainer.run(1, training)
    assert sorted(itertools.chain(*trainer.gather(trainer.seen[0]))) == list(range(4 * world))


@on_ranks(2)
def test_a_single_sample_under_batch_norm_names_drop_last(world):
    """The last step of 10 samples leaves one to each rank."""
    trainer = build(Task, (MultiGPUAddon,), model=network(True))
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        trainer.run(1, loader(10, 2))
    assert trainer.progress_checker.step == 2
    assert dist.get_world_size() == world
    notes = "\n".join(caught.value.__notes__)
    assert f"a single sample to rank {dist.get_rank()} of 2" in notes
    assert "DataLoader(..., drop_last=True)" in notes
