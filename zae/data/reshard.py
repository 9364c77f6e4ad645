"""Continue an epoch on another number of ranks, or with another batch size: each remaining sample is used once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zae.data.loader_state import changes_of, facts_of
from zae.data.loaders import Proxy, with_entries

__all__ = ["own_batch_sampler", "pad_order", "place_of", "why_not_reshard"]

_BY_SAMPLE = ("BatchSampler", "SampleShards")


class _Padded(Proxy):
    """A sampler with placeholders for used entries before its own entries: they are skipped, never loaded."""

    def __init__(self, entries: Any, count: int) -> None:
        super().__init__(entries)
        self._count = count

    def __len__(self) -> int:
        return self._count + super().__len__()

    def __iter__(self) -> Iterator[Any]:
        entries = iter(self.passed)
        first = next(entries)
        for _ in range(self._count + 1):
            yield first
        yield from entries


class _PaddedList(Sequence[Any]):
    """A sequence of batches with placeholders for used ones before them."""

    def __init__(self, batches: Sequence[Any], count: int) -> None:
        self._batches = batches
        self._count = count

    def __len__(self) -> int:
        return self._count + len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[max(0, range(len(self))[index] - self._count)]


def pad_order(loader: Any, count: int) -> Any:
    """Return a loader whose order begins with placeholders, which are never loaded."""
    if not count:
        return loader
    if not isinstance(loader, DataLoader):
        return _PaddedList(loader, count)
    return with_entries(loader, lambda entries, size: _Padded(entries, count))


def place_of(loader: Any, before: Mapping[str, Any], used: int, ranks: tuple[int, int], pad: int) -> tuple[int, int]:
    """Return the placeholders and the steps before the position where an epoch continues, in the present layout."""
    ranks_before, ranks_now = ranks
    # An entry is a sample where a batch can begin at any of them, else a batch.
    used_entries = used * ranks_before - pad
    entries_in_step = ranks_now
    if _is_by_sample(before):
        used_samples = used * ranks_before * before["batch_size"] - pad
        used_entries = min(used_samples, len(loader.batch_sampler.sampler))
        entries_in_step = ranks_now * loader.batch_size
    # So many placeholders that the used entries fill whole steps.
    count = -used_entries % entries_in_step
    return count, (used_entries + count) // entries_in_step


def why_not_reshard(loader: Any, before: Mapping[str, Any], ranks: tuple[int, int], pad: int, used: int) -> list[str]:
    """Return why the rest of an epoch cannot be resharded."""
    now = facts_of(loader)
    if not used:
        name = "dataset length"
        return changes_of({name: before.get(name)}, {name: now.get(name)})
    has_length = hasattr(loader, "__len__") and hasattr(loader, "__getitem__")
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None) or getattr(loader, "sampler", None)
    if not (is_map or (has_length and not isinstance(loader, DataLoader))):
        return [f"a {type(loader).__name__} has no order that can be resharded"]
    if isinstance(sampler, DistributedSampler):
        return ["a DistributedSampler shards the dataset itself"]
    names = ["dataset length"]
    if _is_by_sample(before) != _is_by_sample(now):
        names.append("batch sampler")
    elif _is_by_sample(before):
        names.append("sampler")
    else:
        now["number of batches"] = -(-(pad + len(loader)) // ranks[0])  # In batches of that many ranks.
        names.append("number of batches")
    compared_before = {name: before[name] for name in names if name in before}
    compared_now = {name: now[name] for name in names if name in now}
    return changes_of(compared_before, compared_now)


def own_batch_sampler(facts: Mapping[str, Any]) -> str:
    """Return the class name of a batch sampler that is not one of torch's; else an empty string."""
    name = facts.get("batch sampler") or "BatchSampler"
    return "" if name in ("BatchSampler", "SampleShards") else str(name)


def _is_by_sample(facts: Mapping[str, Any]) -> bool:
    """Return whether batches are consecutive entries of a sampler, so that a batch can begin at any of them."""
    return facts.get("batch sampler") in _BY_SAMPLE
