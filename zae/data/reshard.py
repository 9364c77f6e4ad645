"""Continue an epoch on another number of ranks, or with another batch size: each remaining sample is used once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, DistributedSampler

from zae.data.loader_parts import LoaderParts, changes_of
from zae.data.loaders import Proxy, length_of, takes_samples, with_entries
from zae.errors import CheckpointMismatch

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["place_of", "reshard", "why_not_reshard", "with_placeholders"]

_log = logging.getLogger("zae")
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


def with_placeholders(loader: Any, count: int) -> Any:
    """Return a loader whose order begins with so many placeholders, which are never loaded: one that was resharded."""
    if not isinstance(loader, DataLoader):
        return _PaddedList(loader, count)
    return with_entries(loader, lambda entries, size: _Padded(entries, count))


def reshard(state: Mapping[str, Any], trainer: Trainer, loader: Any) -> None:
    """Let the position of a trainer, which has loaded this state, continue in another layout, if it is another one.

    The progress in the epoch is counted in the new batches from here on.
    """
    progress = trainer.progress_checker
    world = trainer.engine.dp_world_size
    before = state["facts"]
    ranks = (state.get("ranks", world), world)
    parts = LoaderParts(loader)
    facts = parts.facts()
    has_same_batches = all(before.get(key) == facts.get(key) for key in ("batch_size", "drop_last"))
    if ranks[0] == world and has_same_batches:
        return
    used = progress.epoch_batch
    reasons = why_not_reshard(parts, before, ranks, state["pad"], used)
    if used and state["loader"] is not None:
        reasons.append(f"a {type(loader).__name__} has its own position, counted in the previous batches")
    if reasons:
        raise CheckpointMismatch(
            f"reshard=True cannot reshard the rest of the epoch: {'; '.join(reasons)}. Build the loader as it was, or "
            "add mid_epoch='restart' to begin the epoch again"
        )
    present = state["present"]
    pad = state["pad"]
    if used:
        if ranks[0] != world:
            # Several ranks draw the whole order at once, one process the end of it at the end.
            present = {**present, "generators": None}
        absent = sum(after <= used for after in state["absent"])
        pad, progress.epoch_batch = place_of(loader, before, used + absent, ranks, pad)
    unchanged = {key: value for key, value in state.items() if key not in ("may_reshard", "ranks")}
    changes = {"present": present, "facts": {}, "loader": None, "pad": pad, "absent": []}
    trainer.loader_position.load_state_dict({**unchanged, **changes})
    if not used:
        return
    wrapped_loader = trainer.wrap_loader(loader, True)
    steps = trainer.steps_per_epoch(wrapped_loader) or 0
    progress.epoch_step = -(-steps * progress.epoch_batch // (length_of(wrapped_loader) or 1))  # Rounded up.
    _log.info("epoch %d is resharded: each remaining sample is used once", progress.epoch + 1)


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


def why_not_reshard(
    parts: LoaderParts, before: Mapping[str, Any], ranks: tuple[int, int], pad: int, used: int
) -> list[str]:
    """Return why the rest of an epoch cannot be resharded."""
    loader = parts.loader
    present = parts.facts()
    if not used:
        name = "dataset length"
        return changes_of({name: before.get(name)}, {name: present.get(name)})
    is_list = hasattr(loader, "__len__") and hasattr(loader, "__getitem__") and not isinstance(loader, DataLoader)
    if not (is_list or takes_samples(loader)):
        return [f"a {type(loader).__name__} has no order that can be resharded"]
    if isinstance(parts.samplers.get("sampler"), DistributedSampler):
        return ["a DistributedSampler shards the dataset itself"]
    names = ["dataset length"]
    if _is_by_sample(before) != _is_by_sample(present):
        names.append("batch sampler")
    elif _is_by_sample(before):
        names.append("sampler")
    else:
        present["number of batches"] = -(-(pad + len(loader)) // ranks[0])  # In batches of that many ranks.
        names.append("number of batches")
    compared_before = {name: before[name] for name in names if name in before}
    compared_now = {name: present[name] for name in names if name in present}
    return changes_of(compared_before, compared_now)


def _is_by_sample(facts: Mapping[str, Any]) -> bool:
    """Return whether batches are consecutive entries of a sampler, so that a batch can begin at any of them."""
    return facts.get("batch sampler") in _BY_SAMPLE
