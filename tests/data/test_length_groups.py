"""Batches of similar length, and the loaders of a run from its datasets."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from kit import faults, hand
from kit.faults import KillAddon, everything, forked
from kit.rank_tasks import Seen, build, dataset, same, weights
from kit.ranks import on_ranks
from zae import CheckpointMismatch, ConfigError, LoaderError
from zae.addons import MultiGPUAddon, StateManagerAddon
from zae.data import LengthGroupedBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 100, 200).tolist()


def wasted(batches: list[list[int]]) -> float:
    used = sum(LENGTHS[index] for index in itertools.chain(*batches))
    return 1 - used / sum(len(batch) * max(LENGTHS[index] for index in batch) for batch in batches)


@pytest.mark.parametrize("options", [{"batch_size": 8}, {"max_tokens": 400}, {"batch_size": 7, "group_size": 70}])
def test_each_sample_once_with_little_padding(options: Any) -> None:
    """Less than 15 % of a batch is padding, where random batches have 40 %; another order in each epoch."""
    sampler = LengthGroupedBatchSampler(LENGTHS, seed=1, **options)
    first = list(sampler)
    assert len(first) == len(sampler)
    assert sorted(itertools.chain(*first)) == list(range(200))
    order = np.random.default_rng(2).permutation(200).tolist()
    assert wasted([order[start : start + 8] for start in range(0, 200, 8)]) > 0.4
    assert wasted(first) < 0.15
    if "max_tokens" in options:
        assert all(len(batch) * max(LENGTHS[index] for index in batch) <= 400 for batch in first)
    sampler.set_epoch(1)
    assert list(sampler) != first
    again = LengthGroupedBatchSampler(LENGTHS, seed=1, **options)
    assert list(again) == first
    assert list(LengthGroupedBatchSampler(LENGTHS, seed=2, **options)) != first


def test_in_order_the_longest_comes_first() -> None:
    batches = list(LengthGroupedBatchSampler(LENGTHS, 8, shuffle=False))
    sizes = [LENGTHS[index] for index in itertools.chain(*batches)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(list(LengthGroupedBatchSampler(LENGTHS, 7, drop_last=True))) == 28
    assert {len(batch) for batch in LengthGroupedBatchSampler(LENGTHS, 7, drop_last=True)} == {7}
    assert sorted(itertools.chain(*LengthGroupedBatchSampler([0, 0, 0], max_tokens=1))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give one of batch_size and max_tokens"),
        ({"batch_size": 2, "max_tokens": 9}, "give one of batch_size and max_tokens"),
        ({"max_tokens": 50}, r"sample \d+ has length 99, and a batch max_tokens=50"),
        ({"batch_size": 0}, "it must be a whole number of at least 1"),
        ({"max_tokens": 400, "drop_last": True}, "drop_last=True is for batches of batch_size"),
    ],
)
def test_what_does_not_fit_is_refused(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LengthGroupedBatchSampler(LENGTHS, **options)
    with pytest.raises(ConfigError, match=r"lengths must have a number for each sample, .* shape is \(0,\)"):
        LengthGroupedBatchSampler([], 2)


@pytest.mark.parametrize("lengths", [["long", "short"], None, [[1], [1, 2]]])
def test_lengths_that_are_no_numbers_are_refused(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="lengths must have a whole number for each sample"):
        LengthGroupedBatchSampler(lengths, 2)


def test_lengths_of_another_dataset_are_refused() -> None:
    """Fewer lengths than samples would leave samples out, silently."""
    with pytest.raises(LoaderError, match="LengthGroupedBatchSampler of 8 lengths, and a dataset of 22 samples"):
        faults.build(faults.Task).run(1, DataLoader(hand.data(22), batch_sampler=LengthGroupedBatchSampler([1] * 8, 4)))


def grouped(kind: Any = DataLoader, seed: int = 0, first: int = 0, **options: Any) -> Any:
    lengths = LENGTHS[first : first + 22]
    sampler = LengthGroupedBatchSampler(lengths, max_tokens=400, group_size=12, seed=seed)
    return kind(hand.data(22), batch_sampler=sampler, **options)


@pytest.mark.sample(count=2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("at", [2, 5, 7])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_killed_in_mid_epoch_it_resumes_bitwise(kind: Any, at: int, tmp_path: Path) -> None:
    """The number of batches differs between epochs."""

    def train(folder: Path, seed: int = 0, first: int = 0, **more: Any) -> Any:
        made = faults.build(
            faults.Task, StateManagerAddon, KillAddon, save_path=folder, save_every=at, resume="auto", **more
        )
        made.run(3, grouped(kind, seed, first))
        return everything(made)

    faults.ambient(1)
    whole = train(tmp_path / "whole")
    assert forked(lambda: train(tmp_path / "run", kill_at=at)).status == -signal.SIGKILL
    faults.ambient(2)
    if kind is DataLoader:
        with pytest.raises(CheckpointMismatch, match=r"order of the batch sampler was max_tokens 400, .* seed 0 and"):
            train(tmp_path / "run", seed=1)
        with pytest.raises(CheckpointMismatch, match=r"order of the batch sampler was .*, lengths \w{8}, .* and is"):
            train(tmp_path / "run", first=1)
    assert train(tmp_path / "run") == whole


@on_ranks(2, 3)
def test_ranks_take_batches_in_turn(world, tmp_path):
    """Each sample of an epoch once, and resumed bitwise in mid-epoch."""

    def run(part, resume):
        sampler = LengthGroupedBatchSampler(LENGTHS[:40], 3)
        trainer = build(
            Seen, (MultiGPUAddon, StateManagerAddon), seed=1, save_every=2, keep_last=None, resume=resume,
            save_path=tmp_path / part,
        )  # fmt: skip
        trainer.run(2, DataLoader(dataset(40), batch_sampler=sampler))
        return trainer

    first, again = run("first", False), run("again", str(tmp_path / "first" / "step-00000002"))
    assert first.world_size == world
    assert same(weights(first), weights(again))
    for epoch in (0, 1):
        assert sorted(itertools.chain(*first.gather(first.seen[epoch]))) == list(map(float, range(40)))
