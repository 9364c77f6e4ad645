"""Shard loaders over ranks: each sample once, the same number of training steps, and whole batches in evaluation."""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from zae import random_state
from zae.data.loaders import Proxy, copy_with, describe, length_of, unwrap_sampler
from zae.errors import LoaderError
from zae.values.walk import leading_dimension

__all__ = ["EMPTY", "Ranks", "Shards", "collate_of", "is_empty", "shard", "shards_of"]

_log = logging.getLogger("zae")


class _Empty(enum.Enum):
    EMPTY = "no samples"


EMPTY = _Empty.EMPTY
"""The batch of a rank without samples in a step in which other ranks have some; pickle keeps it one object."""


def is_empty(batch: Any) -> bool:
    """Return whether a batch is `EMPTY`."""
    return batch is EMPTY


class Ranks(NamedTuple):
    """This rank, and how it communicates with the other ranks."""

    rank: int
    size: int
    from_main: Callable[[Any], Any]
    all_agree: Callable[[bool], bool]
    gather: Callable[[Any], list[Any]] = lambda value: [value]


class Shards:
    """How the entries of a loader, samples or whole batches, are shared: every rank gets each size-th of them.

    Parameters
    ----------
    entries : sampler or sequence
        Those of all ranks.
    ranks : Ranks
        Who shares them.
    per_step : int
        How many entries a rank gets in a step.
    is_even : bool
        Whether all ranks have as many steps, as in training; in the last one a rank may have no entry.
    drop_last : bool
        Whether a last step of fewer entries is left out.
    """

    def __init__(
        self, entries: Any, ranks: Ranks, *, per_step: int = 1, is_even: bool = True, drop_last: bool = False
    ) -> None:
        self._entries = entries
        self._ranks = ranks
        self._is_even = is_even
        self._drops_last = drop_last
        self._per_step = per_step

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    @property
    def _together(self) -> int:
        """How many entries all ranks get in a step."""
        return self._per_step * self._ranks.size

    def __len__(self) -> int:
        count = len(self._entries)
        if self._drops_last:
            return count // self._together
        return -(-count // self._together) if self._is_even else len(self._of_rank(range(count)))

    def _of_rank(self, entries: Any) -> Any:
        """Return those of this rank, so that the entries of all ranks in a step are consecutive."""
        return entries[self._ranks.rank :: self._ranks.size]

    def _places(self, step: int) -> range:
        """Return the places of the entries of all ranks in a step."""
        return range(len(self._entries))[step * self._together : (step + 1) * self._together]

    @property
    def leaves_out(self) -> bool:
        """Whether the last step has too few entries for every rank."""
        return self._is_even and len(self) > 0 and len(self._places(len(self) - 1)) < self.size

    def samples_in(self, step: int) -> tuple[int, int]:
        """Return the number of samples of this rank, and of all ranks, in a step."""
        sizes = [self._samples_at(place) for place in self._places(step)]
        return sum(self._of_rank(sizes)), sum(sizes)

    def _samples_at(self, place: int) -> int:
        """Return how many samples an entry has."""
        raise NotImplementedError


def shards_of(loader: Any) -> Shards | None:
    """Return the shards of a loader that `shard` returned; None for a stream, whose shards are unknown."""
    for candidate in (loader, unwrap_sampler(getattr(loader, "batch_sampler", None))):
        if isinstance(candidate, Shards):
            return candidate
    return None


def shard(loader: Any, training: bool, ranks: Ranks) -> Any:
    """Return the loader of one rank.

    In training, the samples of ``size`` batches make one step: rank r gets every ``size``-th of them. So an epoch is
    the dataset exactly once, with as many steps on every rank, and a step of all ranks is the batch of one process
    with ``size`` times the batch size. The samples left at the end are shared in the same way, and a rank without any
    gets `EMPTY`. In evaluation, each rank gets whole batches, those of one process. Everything else of a DataLoader
    stays the same: its workers, collate function, pinning, generator and ``drop_last``.
    """
    if getattr(loader, "is_sharded", False):
        return _together(loader, training, ranks)
    if not isinstance(loader, DataLoader):
        return _shard_other(loader, training, ranks)
    if isinstance(loader.dataset, IterableDataset):
        return _shard_stream(loader, loader.dataset, training, ranks)
    each_is_batch = loader.batch_sampler is None
    sampler = loader.sampler if each_is_batch else getattr(loader.batch_sampler, "sampler", None)
    user_sharded = isinstance(unwrap_sampler(sampler), DistributedSampler)
    if user_sharded and training:
        return loader
    inner: Any = loader.sampler if each_is_batch else loader.batch_sampler
    if user_sharded:
        # With its padding, samples would be evaluated twice.
        entries: Any = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
        if isinstance(sampler, Proxy):  # Of limit_batches.
            limited = copy.copy(sampler)
            limited.passed = entries
            entries = limited
        inner = BatchSampler(entries, loader.batch_size or 1, loader.drop_last)
    if length_of(inner) is None:
        raise LoaderError(
            f"the {type(inner).__name__} of the loader has no length ({describe(loader)}), so {ranks.size} ranks "
            "cannot share its entries; define __len__, and let it end"
        )
    shards: Any = BatchShards(inner, each_is_batch, training, ranks)
    if training and type(inner) is BatchSampler:
        entries = inner.sampler
        shards = SampleShards(entries, inner.batch_size, inner.drop_last, ranks)
        if inner.drop_last and not len(shards):
            raise LoaderError(
                f"a step of {ranks.size} ranks takes {ranks.size * inner.batch_size} samples, {inner.batch_size} each, "
                f"and the loader's sampler has {len(entries)}: drop_last=True leaves 0 steps; use more "
                "data, a smaller batch_size, or drop_last=False"
            )
    return _with_batches(loader, shards, each_is_batch, training, ranks.rank)


# ------------------------------------------------------------------------------------------------- the shards


class SampleShards(Shards):
    """A batch sampler: the samples of this rank in each step."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, ranks: Ranks) -> None:
        super().__init__(sampler, ranks, per_step=batch_size, drop_last=drop_last)
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        entries = self._of_rank(_draw(self.sampler, self._ranks))
        for step in range(len(self)):
            yield entries[step * self.batch_size : (step + 1) * self.batch_size]

    def samples_in(self, step: int) -> tuple[int, int]:
        places = self._places(step)
        return len(self._of_rank(places)), len(places)


class BatchShards(Shards):
    """A batch sampler: whole batches of a custom batch sampler, or in evaluation."""

    def __init__(self, sampler: Any, each_is_batch: bool, is_even: bool, ranks: Ranks) -> None:
        super().__init__(sampler, ranks, is_even=is_even)
        self.sampler = sampler
        self._each_is_batch = each_is_batch
        self._sizes: list[int] = []

    def __iter__(self) -> Iterator[list[Any]]:
        entries = _draw(self.sampler, self._ranks)
        self._sizes = [1 if self._each_is_batch else len(entry) for entry in entries]
        batches = self._of_rank(entries)
        for step in range(len(self)):
            batch = batches[step : step + 1]  # Nothing, for a rank without a batch in the last step.
            yield batch if self._each_is_batch or not batch else batch[0]

    def _samples_at(self, place: int) -> int:
        return self._sizes[place]


class ListShards(Shards, Sequence[Any]):
    """Whole batches of a sequence."""

    def __getitem__(self, step: Any) -> Any:
        place = range(len(self))[step] * self.size + self._ranks.rank
        if place >= len(self._entries):
            return EMPTY
        return _present(self._entries[place]) if self._is_even else self._entries[place]

    def _samples_at(self, place: int) -> int:
        return leading_dimension(self._entries[place]) or 1


def _draw(sampler: Any, ranks: Ranks) -> list[Any]:
    """Return all entries of a sampler in this epoch, drawn on every rank from the random streams of rank 0."""
    streams = {key: value for key, value in random_state.capture().items() if key in random_state.HOST}
    # Rank 0 sends its random streams: every rank draws the order of all, and takes its own entries of it.
    main_streams, main_states = ranks.from_main((streams, random_state.capture_generators(sampler)))
    if ranks.rank == 0:
        entries = list(sampler)
    else:
        with random_state.isolated():
            random_state.restore(main_streams)
            random_state.restore_generators(sampler, main_states)
            entries = list(sampler)
    if not _is_of_torch(sampler):
        _check_entries(sampler, entries, ranks)
    return entries


def _is_of_torch(sampler: Any) -> bool:
    """Return whether a sampler, and the one in it, are classes of torch, which need no check."""
    parts = (sampler, getattr(sampler, "sampler", sampler))
    return all(type(part).__module__ == BatchSampler.__module__ for part in parts)


def _check_entries(sampler: Any, entries: list[Any], ranks: Ranks) -> None:
    """Refuse a custom sampler with which samples would be lost or repeated."""
    owner = f"the {type(sampler).__name__} of the loader"
    length = length_of(sampler)
    if length != len(entries):
        raise LoaderError(
            f"{owner} has a length of {length} and yielded {len(entries)} entries, which {ranks.size} ranks share "
            "by its length; fix its __len__"
        )
    try:
        main = ranks.from_main(entries)
        differs = bool(main != entries)
    except (RuntimeError, ValueError):  # Tensors and arrays compare by element.
        differs = False
    if not ranks.all_agree(not differs):
        raise LoaderError(
            f"{owner} yields different entries on the {ranks.size} ranks. If it shards them itself, set "
            "loader.is_sharded = True. If it draws at random, let it draw from torch, numpy.random or random directly, "
            "or from a generator with the same seed on all ranks"
        )


# ------------------------------------------------------------------------------------------------- the loaders


def _with_batches(loader: Any, batches: Any, each_is_batch: bool, training: bool, rank: int) -> Any:
    """Return a copy of a DataLoader with another batch sampler."""
    copied = copy_with(loader, batch_sampler=batches)
    if hasattr(loader, "load_state_dict"):
        copied.is_rank_shard = True
    # The length of a custom sampler, or of a dataset with set_epoch, may change.
    fixed = _is_of_torch(batches.sampler) and not hasattr(loader.dataset, "set_epoch")
    if each_is_batch or (training and (batches.leaves_out or loader.collate_fn is not default_collate or not fixed)):
        copied.collate_fn = UnlessEmpty(loader.collate_fn, each_is_batch, training)
    if rank and loader.generator is not None and loader.num_workers:
        copied.worker_init_fn = _WorkerSeed(loader.worker_init_fn, rank)
    return copied


class UnlessEmpty:
    """Call the collate function of the user, but not for empty batches."""

    def __init__(self, collate: Callable[[Any], Any], each_is_batch: bool, training: bool) -> None:
        self.collate = collate
        self._each_is_batch = each_is_batch
        self._training = training

    def __call__(self, samples: Any) -> Any:
        if not len(samples):
            return EMPTY
        batch = self.collate(samples[0] if self._each_is_batch else samples)
        return _present(batch) if self._training else batch


def collate_of(loader: Any) -> Any:
    """Return the collate function of the user, also of a loader that is divided among ranks."""
    collate = getattr(loader, "collate_fn", None)
    return collate.collate if isinstance(collate, UnlessEmpty) else collate


def _present(batch: Any) -> Any:
    """Refuse a batch that is None: this rank would have fewer steps than the others, which would wait."""
    if batch is None:
        raise LoaderError(
            "a training batch is None (the return value of the collate_fn), and with several ranks batches cannot be "
            "skipped; return the valid samples, or remove the others from the dataset"
        )
    return batch


class _WorkerSeed:
    """Seed the workers of each rank differently, where the loaders of all ranks draw from one generator."""

    def __init__(self, worker_init: Callable[[int], None] | None, rank: int) -> None:
        self._worker_init = worker_init
        self._rank = rank

    def __call__(self, worker: int) -> None:
        random_state.seed_everything(torch.initial_seed() + random_state.SPREAD * self._rank & (1 << 63) - 1)
        if self._worker_init is not None:
            self._worker_init(worker)


def _shard_other(loader: Any, training: bool, ranks: Ranks) -> Any:
    """Shard the batches of a list; refuse any other loader, which would be the same on every rank."""
    if isinstance(loader, Mapping) or not (hasattr(loader, "__getitem__") and length_of(loader) is not None):
        raise LoaderError(
            f"the loader is a {type(loader).__name__}, so each of {ranks.size} ranks would get every batch; give a "
            "DataLoader or a list of batches, or a loader that yields only the batches of its rank, and set "
            "loader.is_sharded = True"
        )
    return ListShards(loader, ranks, is_even=training)


def _shard_stream(loader: Any, dataset: Any, training: bool, ranks: Ranks) -> Any:
    """Accept a stream with ``is_sharded``; all ranks end together."""
    if not getattr(dataset, "is_sharded", False):
        raise LoaderError(
            f"the dataset of the loader, {type(dataset).__name__}, is an IterableDataset, so each of {ranks.size} "
            "ranks would get every sample. If its __iter__ already yields different samples on each rank, set "
            "dataset.is_sharded = True. Otherwise let it yield every world_size-th sample from "
            "torch.distributed.get_rank() on, and then set it"
        )
    return _together(loader, training, ranks)


def _together(loader: Any, training: bool, ranks: Ranks) -> Any:
    """Accept a loader with other batches on each rank; in training, all ranks get the same number of steps."""
    kind = _TogetherOnce if isinstance(loader, Iterator) else _Together
    return kind(loader, ranks) if training else loader


class _Together:
    """A stream that ends on all ranks when it ends on one."""

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        self._loader = loader
        self._ranks = ranks
        self._count = 0
        self._warned = [False]  # Shared with the iterators.

    def __iter__(self) -> Iterator[Any]:
        iterable = _TogetherOnce(iter(self._loader), self._ranks)
        iterable._warned = self._warned
        return iterable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)


class _TogetherOnce(_Together):
    """An iterator that ends on all ranks when it ends on one; it does not start again."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._loader, EMPTY)
        if not self._ranks.all_agree(batch is not EMPTY):
            self._warn_of_rest(batch is EMPTY)
            raise StopIteration
        self._count += 1
        return _present(batch)

    def _warn_of_rest(self, has_ended: bool) -> None:
        """Say, once, where the stream of a rank has ended while others had more."""
        ended = self._ranks.gather((self._ranks.rank, has_ended))
        if all(is_at_end for _, is_at_end in ended) or self._ranks.rank or self._warned[0]:
            return
        self._warned[0] = True
        ranks = sorted({rank for rank, is_at_end in ended if is_at_end})
        _log.warning(
            "the loader of rank %s has ended after %d batches, and other ranks had more: the epoch ends on all ranks "
            "there, and the rest is not used. Let each rank yield as many batches, or write steps_per_epoch=%d",
            ", ".join(map(str, ranks[:8])),
            self._count,
            self._count,
        )
