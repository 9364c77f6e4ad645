"""Replace a loader by that of one rank: each sample once, the same number of training steps on all ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
from zae.data.shards import (
    EMPTY,
    BatchShards,
    ListShards,
    Ranks,
    SampleShards,
    Shards,
    UnlessEmpty,
    check_present,
    is_of_torch,
)
from zae.data.workers import iterate
from zae.errors import LoaderError

__all__ = ["shard", "shards_of"]

_log = logging.getLogger("zae")


def shard(loader: Any, training: bool, ranks: Ranks) -> Any:
    """Return the loader of one rank.

    In training, the samples of ``size`` batches make one step: rank r gets every ``size``-th of them. So an epoch is
    the dataset exactly once, with as many steps on every rank, and a step of all ranks is the batch of one process
    with ``size`` times the batch size. The samples left at the end are shared in the same way, and a rank without any
    gets `EMPTY`. In evaluation, each rank gets whole batches, those of one process. Everything else of a DataLoader
    stays the same: its workers, collate function, pinning, generator and ``drop_last``.
    """
    if getattr(loader, "is_sharded", False):
        return _end_together(loader, training, ranks)
    if not isinstance(loader, DataLoader):
        return _shard_list(loader, training, ranks)
    if isinstance(loader.dataset, IterableDataset):
        return _shard_stream(loader, loader.dataset, training, ranks)
    return _shard_samples(loader, training, ranks)


def shards_of(loader: Any) -> Shards | None:
    """Return the shards of a loader that `shard` returned; None for a stream, whose shards are unknown."""
    for candidate in (loader, unwrap_sampler(getattr(loader, "batch_sampler", None))):
        if isinstance(candidate, Shards):
            return candidate
    return None


def _shard_list(loader: Any, training: bool, ranks: Ranks) -> Any:
    """Shard the batches of a list; refuse any other loader, which would be the same on every rank."""
    if isinstance(loader, Mapping) or not (hasattr(loader, "__getitem__") and length_of(loader) is not None):
        raise LoaderError(
            f"the loader is a {type(loader).__name__}, so each of {ranks.size} ranks would get every batch; give a "
            "DataLoader or a list of batches, or a loader that yields only the batches of its rank, and set "
            "loader.is_sharded = True"
        )
    return ListShards(loader, ranks, is_even=training)


def _shard_stream(loader: Any, dataset: Any, training: bool, ranks: Ranks) -> Any:
    """Accept a stream with ``is_sharded``; refuse any other, which would be the same on every rank."""
    if not getattr(dataset, "is_sharded", False):
        raise LoaderError(
            f"the dataset of the loader, {type(dataset).__name__}, is an IterableDataset, so each of {ranks.size} "
            "ranks would get every sample. If its __iter__ already yields different samples on each rank, set "
            "dataset.is_sharded = True. Otherwise let it yield every world_size-th sample from "
            "torch.distributed.get_rank() on, and then set it"
        )
    return _end_together(loader, training, ranks)


# ---------------------------------------------------------------------------------- a DataLoader over samples


def _shard_samples(loader: Any, training: bool, ranks: Ranks) -> Any:
    """Shard the samples of a DataLoader in training where its batches are consecutive ones, else its batches."""
    is_unbatched = loader.batch_sampler is None
    entries = loader.sampler if is_unbatched else loader.batch_sampler
    sampler = loader.sampler if is_unbatched else getattr(entries, "sampler", None)
    if isinstance(unwrap_sampler(sampler), DistributedSampler):
        if training:
            return loader
        # With its padding, samples would be evaluated twice.
        sampler = _unpadded(sampler, loader.dataset)
        entries = sampler if is_unbatched else BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
    if length_of(entries) is None:
        raise LoaderError(
            f"the {type(entries).__name__} of the loader has no length ({describe(loader)}), so {ranks.size} ranks "
            "cannot share its entries; define __len__, and let it end"
        )
    shards: SampleShards | BatchShards
    if training and type(entries) is BatchSampler:
        shards = SampleShards(entries.sampler, entries.batch_size, entries.drop_last, ranks)
        _check_steps(shards)
    else:
        shards = BatchShards(entries, is_unbatched, training, ranks)
    copied = copy_with(loader, batch_sampler=shards)
    if hasattr(loader, "load_state_dict"):
        copied.is_rank_shard = True
    if is_unbatched or (training and _needs_check(loader, shards)):
        copied.collate_fn = UnlessEmpty(loader.collate_fn, is_unbatched, training)
    if ranks.rank and loader.generator is not None and loader.num_workers:
        copied.worker_init_fn = _WorkerSeed(loader.worker_init_fn, ranks.rank)
    return copied


def _unpadded(sampler: Any, dataset: Any) -> Any:
    """Return the whole dataset in order in place of a DistributedSampler, which ``limit_batches`` may have limited."""
    in_order = SequentialSampler(dataset)
    if not isinstance(sampler, Proxy):
        return in_order
    limited = copy.copy(sampler)
    limited.passed = in_order
    return limited


def _check_steps(shards: SampleShards) -> None:
    """Refuse to drop the only step of an epoch."""
    size = shards.ranks.size
    if shards.drop_last and not len(shards):
        raise LoaderError(
            f"a step of {size} ranks takes {size * shards.batch_size} samples, {shards.batch_size} each, "
            f"and the loader's sampler has {len(shards.sampler)}: drop_last=True leaves 0 steps; use more "
            "data, a smaller batch_size, or drop_last=False"
        )


def _needs_check(loader: Any, shards: SampleShards | BatchShards) -> bool:
    """Return whether a training batch may be empty, or None."""
    # The length of a custom sampler, or of a dataset with set_epoch, may change.
    has_fixed_length = is_of_torch(shards.sampler) and not hasattr(loader.dataset, "set_epoch")
    return shards.leaves_out or not has_fixed_length or loader.collate_fn is not default_collate


class _WorkerSeed:
    """Seed the workers of each rank differently, where the loaders of all ranks draw from one generator."""

    def __init__(self, worker_init: Callable[[int], None] | None, rank: int) -> None:
        self._worker_init = worker_init
        self._rank = rank

    def __call__(self, worker: int) -> None:
        random_state.seed_everything(torch.initial_seed() + random_state.SPREAD * self._rank & (1 << 63) - 1)
        if self._worker_init is not None:
            self._worker_init(worker)


# --------------------------------------------------------------------- a loader with other batches on each rank


def _end_together(loader: Any, training: bool, ranks: Ranks) -> Any:
    """Accept a loader with other batches on each rank; in training, all ranks get the same number of steps."""
    if not training:
        return loader
    return _IteratorInStep(loader, ranks) if isinstance(loader, Iterator) else _LoaderInStep(loader, ranks)


class _LoaderInStep:
    """A loader whose epochs end on all ranks when they end on one; its attributes are those of the loader in it."""

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        self._loader = loader
        self._ranks = ranks
        self._has_warned = False

    def __iter__(self) -> Iterator[Any]:
        return _IteratorInStep(iterate(self._loader), self._ranks, self._warn_of_rest)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)

    def _warn_of_rest(self, has_ended: bool, count: int) -> None:
        """Say, once, where the stream of a rank has ended while others had more."""
        ends = self._ranks.gather((self._ranks.rank, has_ended))
        if all(is_at_end for _, is_at_end in ends) or self._ranks.rank or self._has_warned:
            return
        self._has_warned = True
        ranks = sorted({rank for rank, is_at_end in ends if is_at_end})
        _log.warning(
            "the loader of rank %s has ended after %d batches, and other ranks had more: the epoch ends on all ranks "
            "there, and the rest is not used. Let each rank yield as many batches, or write steps_per_epoch=%d",
            ", ".join(map(str, ranks[:8])),
            count,
            count,
        )


class _IteratorInStep(_LoaderInStep):
    """An iterator that ends on all ranks when it ends on one; it does not start again."""

    def __init__(
        self, iterator: Iterator[Any], ranks: Ranks, warn_of_rest: Callable[[bool, int], None] | None = None
    ) -> None:
        super().__init__(iterator, ranks)
        self._report_end = warn_of_rest or self._warn_of_rest
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._loader, EMPTY)
        has_ended = batch is EMPTY
        if self._ranks.all_agree(not has_ended):
            self._count += 1
            return check_present(batch)
        self._report_end(has_ended, self._count)
        raise StopIteration
