"""Iterate over a loader from a batch on, without loading the batches before where that is possible."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from zae.common.plain_values import content_digest, plain_value
from zae.common.torch_private import version_of
from zae.common.walk import leaves_of
from zae.data.gather import batches_of
from zae.data.loaders import Proxy, copy_with, is_stateful
from zae.data.workers import is_seeded, iterate
from zae.errors import CheckpointMismatch

__all__ = ["LastBatch", "is_read_again", "iterate_on", "skip_batches", "warn_of_workers"]

_log = logging.getLogger("zae")
_FORM = "2:"
"""What a digest begins with; those of older versions looked at the beginning of a batch, and are not compared."""


class LastBatch:
    """The batch that was used last, of a loader whose first batches a resumed run reads again and drops.

    Its digest is in the state, and the batch at its place is compared with it: a stream that draws from an unseeded
    generator, or that counts how often it was read, yields others.
    """

    def __init__(self, batch: Any) -> None:
        # Its leaves: a step may change a dict, an object, or a tensor in place, which is then not compared.
        self._leaves = [(each, _versions_in(each)) for _, each in leaves_of(batch)]

    def digest(self) -> str | None:
        """Return a digest of all that it holds; None where a step has changed it."""
        if any(_versions_in(each) != versions for each, versions in self._leaves):
            return None
        values = [content_digest(each) if isinstance(each, Tensor) else plain_value(each) for each, _ in self._leaves]
        return _FORM + content_digest(values)


def _versions_in(leaf: Any) -> Any:
    """Return what changes where a step changes a tensor, or an attribute of an object."""
    if isinstance(leaf, Tensor):
        return version_of(leaf)
    attributes = getattr(leaf, "__dict__", {})
    return [(name, id(each), version_of(each) if isinstance(each, Tensor) else 0) for name, each in attributes.items()]


def is_read_again(loader: Any) -> bool:
    """Return whether a resume in the middle of an epoch loads the first batches of a loader, and drops them."""
    if isinstance(loader, Sequence) or is_stateful(loader):
        return False
    takes_samples = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return not (takes_samples and type(loader).__iter__ is DataLoader.__iter__)


def skip_batches(loader: Any, count: int, fast: bool, last: str | None = None) -> tuple[Iterator[Any], bool]:
    """Return an iterator over a loader without its first batches, and whether it iterates over a copy of the loader.

    The entries of a sampler are skipped before anything is loaded. Batches of any other loader are loaded and dropped;
    ``last`` is the digest of the last of them, where it is known.
    """
    if not count:
        return batches_of(loader, fast), False
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    rest = _skip_entries(loader, count, fast) if is_map else None
    if rest is not None:
        return rest, True
    if isinstance(loader, DataLoader):
        what = f"a {type(loader).__name__}, which overrides __iter__" if is_map else "an IterableDataset"
        _log.warning(
            "resuming in the middle of an epoch of %s: the first %d batches are loaded and dropped", what, count
        )
    elif not isinstance(loader, Sequence):
        _log.info("the first %d batches of %s are loaded and dropped", count, type(loader).__name__)
    iterator = iterate(loader)
    source = "dataset" if isinstance(loader, DataLoader) else "loader"
    name = f"{source} {type(getattr(loader, 'dataset', loader)).__name__}"
    remedy = (
        "Where it draws random numbers, seed them in each __iter__, or draw from a generator of its own. Where its "
        "batches depend on the model, as those that a policy collects, make it a class with state_dict and "
        "load_state_dict, which says where it stands"
    )
    if is_map:  # The loader reads on from where it is, whatever its dataset does.
        name = f"loader {type(loader).__name__}"
        remedy = "Let each call of its __iter__ begin a new epoch, or give it state_dict and load_state_dict"
    found, has_drawn = _drop(iterator, count)
    if last is None or not last.startswith(_FORM) or found is None:
        if has_drawn:
            _warn_of_draws(name)
    elif (digest := LastBatch(found).digest()) != last and digest is not None:
        raise CheckpointMismatch(
            f"the {name} yields other batches when it is read again: the last one that was used, batch {count}, is "
            f"another one now, so that to continue would use some samples twice and others never. {remedy}. With "
            "mid_epoch='restart' (an option of StateManagerAddon) nothing is read again, and the epoch begins anew"
        )
    return iterator, False


def iterate_on(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the rest of an iterator, without calling ``iter()``, which restarts some iterators."""
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


class _SkipFirst(Proxy):
    """A batch sampler (or sampler) without its first entries."""

    def __init__(self, sampler: Any, skip: int) -> None:
        super().__init__(sampler)
        self._skip = skip
        self.rest: Iterator[Any] | None = None  # Once the loader iterates over it.
        self._turn = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        # Nothing is skipped here: a DataLoader draws its base seed after this call and before the first entry.
        self.rest = iter(self.passed)
        return self._entries()

    def _entries(self) -> Iterator[Any]:
        self.skip()
        assert self.rest is not None
        yield from self.rest

    def skip(self) -> None:
        """Drop the first entries now, while the random state is that of the beginning of the epoch."""
        assert self.rest is not None
        with self._turn:  # A loader may fetch its batches in a thread.
            count = self._skip
            self._skip = 0
            sampler = getattr(self.passed, "sampler", self.passed)
            _, has_drawn = _drop(self.rest, count)
            if has_drawn:
                _warn_of_draws(f"sampler {type(sampler).__name__}")

    def __len__(self) -> int:
        return super().__len__() - self._skip


def _global_streams() -> tuple[Any, ...]:
    """Return the present state of the global random streams, in a form that can be compared."""
    twister = np.random.get_state(legacy=False)["state"]
    key = twister["key"].tobytes() if "key" in twister else repr(twister)
    return random.getstate(), key, twister.get("pos"), torch.get_rng_state().numpy().tobytes()


def _drop(iterator: Iterator[Any], count: int) -> tuple[Any, bool]:
    """Drop the first entries; return the last one, and whether global random streams were drawn from between them.

    Training uses these streams too, so that the entries may be others than those that were used.
    """
    before = None
    last = None
    for _ in range(count):
        entry = next(iterator, None)
        if entry is not None:
            last = entry
        if before is None:  # After the first entry, which may draw all numbers of the epoch at once.
            before = _global_streams()
    return last, count > 0 and before != _global_streams()


def _warn_of_draws(what: str) -> None:
    _log.warning(
        "the %s draws from the global random streams while it is iterated: the order of the samples may differ from "
        "that of an uninterrupted run; give it its own generator",
        what,
    )


def warn_of_workers(loader: Any) -> None:
    """Warn that what a dataset draws in new workers is not what it would have drawn in the middle of an epoch."""
    _log.warning(
        "resuming in the middle of an epoch with num_workers=%d: the samples are the same, but random numbers that the "
        "dataset draws in its workers are not exact; write SeededDataset(dataset) of zae.data for the dataset of the "
        "loader",
        loader.num_workers,
    )


def _skip_entries(loader: DataLoader[Any], count: int, fast: bool) -> Iterator[Any] | None:
    """Iterate over a copy of a loader whose sampler skips its first entries; None if the loader does not use it."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = _SkipFirst(getattr(loader, name), count)
    iterator = batches_of(copy_with(loader, **{name: sampler}), fast)
    if sampler.rest is None:  # The __iter__ of a subclass is a generator, for example.
        return None
    if loader.num_workers and not is_seeded(loader.dataset):
        warn_of_workers(loader)
    sampler.skip()
    return iterator
