"""The shards of a loader: which of its entries, samples or whole batches, each rank gets in each step, or none."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler

from zae import random_state
from zae.data.loaders import length_of
from zae.errors import LoaderError
from zae.values.walk import leading_dimension

__all__ = [
    "EMPTY",
    "BatchShards",
    "ListShards",
    "Ranks",
    "SampleShards",
    "Shards",
    "UnlessEmpty",
    "check_present",
    "collate_of",
    "is_of_torch",
]


class _Empty(enum.Enum):
    EMPTY = "no samples"


EMPTY = _Empty.EMPTY
"""The batch of a rank without samples in a step in which other ranks have some; pickle keeps it one object."""


class Ranks(NamedTuple):
    """This rank, and how it communicates with the other ranks."""

    rank: int
    size: int
    from_main: Callable[[Any], Any]
    all_agree: Callable[[bool], bool]
    gather: Callable[[Any], list[Any]] = lambda value: [value]


class Shards:
    """How the ranks share the entries of a loader: in each step, every rank takes the same number of the next ones.

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
        self.ranks = ranks
        self._entries = entries
        self._step_size = per_step * ranks.size  # In entries of all ranks.
        self._is_even = is_even
        self._drops_last = drop_last

    def __len__(self) -> int:
        count = len(self._entries)
        if self._drops_last:
            return count // self._step_size
        if self._is_even:
            return -(-count // self._step_size)  # Rounded up.
        return len(self._of_rank(range(count)))

    @property
    def leaves_out(self) -> bool:
        """Whether the last step has too few entries for every rank."""
        return self._is_even and len(self) > 0 and len(self._places(len(self) - 1)) < self.ranks.size

    def samples_in(self, step: int) -> tuple[int, int]:
        """Return the number of samples of this rank, and of all ranks, in a step."""
        sizes = [self._samples_at(place) for place in self._places(step)]
        return sum(self._of_rank(sizes)), sum(sizes)

    def _samples_at(self, place: int) -> int:
        """Return how many samples an entry has."""
        raise NotImplementedError

    def _places(self, step: int) -> range:
        """Return the places of the entries of all ranks in a step."""
        return range(len(self._entries))[step * self._step_size : (step + 1) * self._step_size]

    def _of_rank(self, entries: Any) -> Any:
        """Return this rank's entries: one of every ``size`` consecutive ones."""
        return entries[self.ranks.rank :: self.ranks.size]


class SampleShards(Shards):
    """A batch sampler over this rank's samples: all ranks together take the next ``size`` batches in a step."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, ranks: Ranks) -> None:
        super().__init__(sampler, ranks, per_step=batch_size, drop_last=drop_last)
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        samples = self._of_rank(_draw(self.sampler, self.ranks))
        for step in range(len(self)):
            yield samples[step * self.batch_size : (step + 1) * self.batch_size]

    def samples_in(self, step: int) -> tuple[int, int]:
        places = self._places(step)
        return len(self._of_rank(places)), len(places)


class BatchShards(Shards):
    """A batch sampler over this rank's whole batches, those of a batch sampler of the user's own or of an evaluation.

    Parameters
    ----------
    sampler : sampler
        Its entries are lists of indices, or with ``is_unbatched`` indices of batches that the dataset returns.
    """

    def __init__(self, sampler: Any, is_unbatched: bool, is_even: bool, ranks: Ranks) -> None:
        super().__init__(sampler, ranks, is_even=is_even)
        self.sampler = sampler
        self._is_unbatched = is_unbatched
        self._sizes: list[int] = []

    def __iter__(self) -> Iterator[list[Any]]:
        entries = _draw(self.sampler, self.ranks)
        if self._is_unbatched:
            entries = [[entry] for entry in entries]
        self._sizes = [len(entry) for entry in entries]
        batches = self._of_rank(entries)
        for step in range(len(self)):
            yield batches[step] if step < len(batches) else []

    def _samples_at(self, place: int) -> int:
        return self._sizes[place]


class ListShards(Shards, Sequence[Any]):
    """This rank's batches of a sequence."""

    def __getitem__(self, step: Any) -> Any:
        place = range(len(self))[step] * self.ranks.size + self.ranks.rank
        if place >= len(self._entries):
            return EMPTY
        batch = self._entries[place]
        return check_present(batch) if self._is_even else batch

    def _samples_at(self, place: int) -> int:
        return leading_dimension(self._entries[place]) or 1


def check_present(batch: Any) -> Any:
    """Return a batch, and refuse None: this rank would have fewer steps than the others, which would wait."""
    if batch is None:
        raise LoaderError(
            "a training batch is None (the return value of the collate_fn), and with several ranks batches cannot be "
            "skipped; return the valid samples, or remove the others from the dataset"
        )
    return batch


class UnlessEmpty:
    """Call the collate function of the user, but not for empty batches."""

    def __init__(self, collate: Callable[[Any], Any], is_unbatched: bool, training: bool) -> None:
        self.collate = collate
        self._is_unbatched = is_unbatched
        self._training = training

    def __call__(self, samples: Any) -> Any:
        if not len(samples):
            return EMPTY
        batch = self.collate(samples[0] if self._is_unbatched else samples)
        return check_present(batch) if self._training else batch


def collate_of(loader: Any) -> Any:
    """Return the collate function of the user, also of a loader that is divided among ranks."""
    collate = getattr(loader, "collate_fn", None)
    return collate.collate if isinstance(collate, UnlessEmpty) else collate


# --------------------------------------------------------------------------------------- one order on all ranks


def _draw(sampler: Any, ranks: Ranks) -> list[Any]:
    """Return all entries of a sampler in this epoch, drawn on every rank from the random streams of rank 0."""
    streams = {key: value for key, value in random_state.capture().items() if key in random_state.HOST}
    main_streams, main_states = ranks.from_main((streams, random_state.capture_generators(sampler)))
    if ranks.rank == 0:
        entries = list(sampler)
    else:
        with random_state.isolated():
            random_state.restore(main_streams)
            random_state.restore_generators(sampler, main_states)
            entries = list(sampler)
    if not is_of_torch(sampler):
        _check_entries(sampler, entries, ranks)
    return entries


def is_of_torch(sampler: Any) -> bool:
    """Return whether a sampler, and the one in it, are classes of torch: they yield as many entries as they say."""
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
    main_entries = ranks.from_main(entries)
    try:
        is_same = bool(main_entries == entries)
    except (RuntimeError, ValueError):  # Tensors and arrays compare by element.
        is_same = True
    if not ranks.all_agree(is_same):
        raise LoaderError(
            f"{owner} yields different entries on the {ranks.size} ranks. If it shards them itself, set "
            "loader.is_sharded = True. If it draws at random, let it draw from torch, numpy.random or random directly, "
            "or from a generator with the same seed on all ranks"
        )
