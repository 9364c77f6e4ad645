"""Whatever the layouts before and after, each sample of an epoch that was resharded is used exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from zae.data.batch_limits import BatchLimits
from zae.data.loader_parts import LoaderParts
from zae.data.reshard import place_of, why_not_reshard, with_placeholders
from zae.data.sharding import shard
from zae.data.shards import EMPTY, Ranks

LAYOUTS = st.tuples(st.integers(1, 5), st.integers(1, 4))  # Batch size and ranks.


def sampled(size: int, batch_size: int) -> Any:
    return DataLoader(range(size), batch_size=batch_size)


def batched(size: int, batch_size: int) -> Any:
    """By a batch sampler of the user's own."""
    return DataLoader(range(size), batch_sampler=[list(range(i, min(i + 3, size))) for i in range(0, size, 3)])


def listed(size: int, batch_size: int) -> Any:
    return [torch.arange(i, min(i + 3, size)) for i in range(0, size, 3)]


class Range:
    """A dataset that takes many indices."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


def shares(loader: Any, world: int) -> list[list[Any]]:
    """The batches of each rank, in steps."""
    made = [
        list(shard(loader, True, Ranks(rank, world, lambda value: value, lambda value: value)))
        if world > 1
        else list(loader)
        for rank in range(world)
    ]
    return [list(step) for step in zip(*made, strict=True)]


def samples(steps: list[list[Any]]) -> list[int]:
    return [int(each) for step in steps for batch in step if batch is not EMPTY for each in batch]


@given(
    size=st.integers(1, 40), first=LAYOUTS, then=LAYOUTS, last=LAYOUTS,
    parts=st.tuples(st.floats(0, 1), st.floats(0, 1)), kind=st.sampled_from([sampled, batched, listed]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_resume_in_any_layout(size: int, first: Any, then: Any, last: Any, parts: Any, kind: Any) -> None:
    """Twice resharded in one epoch, after any number of steps: the same samples, in the same order."""
    seen: list[int] = []
    pad, place, before, world = 0, 0, {}, 1
    for (batch_size, ranks), part in zip((first, then, last), (*parts, 1.0), strict=True):
        loader = kind(size, batch_size)
        if before:
            assert why_not_reshard(LoaderParts(loader), before, (world, ranks), pad, place) == []
            pad, place = place_of(loader, before, place, (world, ranks), pad)
        steps = shares(with_placeholders(loader, pad), ranks)
        until = place + round(part * (len(steps) - place))
        seen += sorted(samples(steps[place:until])) if ranks > 1 else samples(steps[place:until])
        loader = with_placeholders(loader, pad)
        wrapped = loader if ranks == 1 else shard(loader, True, Ranks(0, ranks, lambda v: v, lambda v: v))
        before, place, world = LoaderParts(wrapped).facts(), until, ranks
    assert seen == list(range(size))


def test_resume_of_what_deals_by_itself_is_refused() -> None:
    """A DistributedSampler, also under limit_batches, another number of batches, and what has no length."""
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[arg-type]
    loader = DataLoader(range(8), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    for view in (loader, BatchLimits(2).of_training(loader)):
        parts = LoaderParts(view)
        assert why_not_reshard(parts, parts.facts(), (2, 3), 0, 1) == ["a DistributedSampler shards the dataset itself"]
    before = LoaderParts(listed(12, 1)).facts()
    assert why_not_reshard(LoaderParts(listed(9, 1)), before, (1, 2), 0, 1) == ["number of batches was 4 and is 3"]
    assert why_not_reshard(LoaderParts(map(int, "12")), {"loader": "map"}, (1, 2), 0, 1) == [
        "a map has no order that can be resharded"
    ]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_resume_of_a_loader_without_batches(count: int) -> None:
    """Of batch_size=None the entries are the batches."""
    loader = DataLoader(Range(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(7)), 3, False))  # type: ignore[arg-type]
    made = with_placeholders(loader, count)
    assert len(made) == 3 + count
    assert [batch.tolist() for batch in made][count:] == [[0, 1, 2], [3, 4, 5], [6]]
