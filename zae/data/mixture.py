"""Mixtures of datasets and of streams by weights; their order is a function of seed, epoch and position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from zae.common.argument_checks import check_count, check_flags, check_number
from zae.common.torch_private import outside_worker
from zae.data.loaders import is_stateful, length_of
from zae.errors import ConfigError, LoaderError

__all__ = ["Mixture", "MixtureBatchSampler", "MixtureSampler", "MixtureStream"]

_Entry = TypeVar("_Entry")
_FIRST, _ALL, _ONCE = _STRATEGIES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
_BLOCK = 1024  # Draws of a stream that are made at once.
_ORDER, _ROWS, _BATCHES = range(3)  # What the generators of a mixture are for.


class Mixture(Dataset[Any]):
    """Several datasets as one, in which each has a share by its weight; its samplers decide the order.

    An epoch contains a fixed number of samples of each dataset, in an order that is a function of ``seed``, epoch and
    position. It needs no state: a run that is resumed, with any number of workers, continues with the next sample, and
    several ranks share the samples of each step, each sample once. A dataset is shuffled anew in each pass over it, and
    an epoch begins in each dataset where the last one ended.

    Parameters
    ----------
    datasets : mapping of str to Dataset, or sequence of Dataset
        Datasets with ``__len__`` and ``__getitem__``. Those of a sequence are named "0", "1", ...
    weights : mapping of str to float, or sequence of float
        The share of each dataset in the samples, in any unit.
    stopping_strategy : {"first_exhausted", "all_exhausted", "all_exhausted_without_replacement"}, optional
        What an epoch is. "first_exhausted", the default, ends it with the dataset that is used up first, so that no
        sample comes twice. "all_exhausted" ends it when each sample was used at least once; smaller datasets are
        repeated. "all_exhausted_without_replacement" uses each sample once: a dataset that is used up is left out, and
        the others keep their weights.
    samples_per_epoch : int, optional
        Samples in an epoch, in place of a ``stopping_strategy``.
    seed : int
        Seeds the order.
    with_names : bool
        Whether a sample is the pair ``(name of its dataset, sample)``; the default collate function makes
        ``[names, batch]`` of them.

    Raises
    ------
    ConfigError
        If weights and datasets do not fit, or a dataset would have no sample in an epoch.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from zae.data import Mixture
    >>> datasets = {"text": TensorDataset(torch.arange(6)), "code": TensorDataset(torch.arange(100, 200))}
    >>> mixture = Mixture(datasets, weights={"text": 3, "code": 1}, with_names=True)
    >>> mixture.counts
    {'text': 6, 'code': 2}
    >>> loader = DataLoader(mixture, batch_size=4, sampler=mixture.sampler())  # Samples mixed in each batch.
    >>> sorted(name for names, _ in loader for name in names)
    ['code', 'code', 'text', 'text', 'text', 'text', 'text', 'text']
    >>> loader = DataLoader(mixture, batch_sampler=mixture.batch_sampler(batch_size=2))  # Batches of one dataset each.
    >>> sorted(names for names, _ in loader)
    [('code', 'code'), ('text', 'text'), ('text', 'text'), ('text', 'text')]
    """

    def __init__(
        self,
        datasets: Mapping[str, Any] | Sequence[Any],
        weights: Mapping[str, float] | Sequence[float],
        *,
        stopping_strategy: str | None = None,
        samples_per_epoch: int | None = None,
        seed: int = 0,
        with_names: bool = False,
    ) -> None:
        self.datasets, self.weights = _check_sources(datasets, weights)
        for name, dataset in self.datasets.items():
            if not length_of(dataset) or not hasattr(dataset, "__getitem__"):
                raise ConfigError(
                    f"dataset {name!r} of the mixture, a {type(dataset).__name__}, has no samples to index: it needs "
                    "__getitem__, and a length of at least 1; for streams write MixtureStream"
                )
        if stopping_strategy is not None and samples_per_epoch is not None:
            raise ConfigError("stopping_strategy and samples_per_epoch both say what an epoch is; give one of them")
        self.stopping_strategy = _check_strategy(stopping_strategy or _FIRST)
        self.samples_per_epoch = check_count("samples_per_epoch", samples_per_epoch, optional=True)
        self.seed = check_count("seed", seed, least=0)
        (self.with_names,) = check_flags(with_names=with_names)
        self._names = list(self.datasets)
        sizes = [len(dataset) for dataset in self.datasets.values()]
        self.counts = dict(zip(self._names, self._counts_of(sizes), strict=True))
        for name, count in self.counts.items():
            if not count:
                raise ConfigError(
                    f"an epoch of the mixture, {sum(self.counts.values())} samples, has none of dataset {name!r} with "
                    f"weight {self.weights[name]:g}; give it a larger weight, leave it out, or write "
                    "stopping_strategy='all_exhausted'"
                )

    def _counts_of(self, sizes: list[int]) -> list[int]:
        """Return the samples of each dataset in an epoch."""
        shares = np.array(list(self.weights.values())) / sum(self.weights.values())
        if self.samples_per_epoch is not None:
            exact = shares * self.samples_per_epoch
            counts = np.floor(exact).astype(int)
            rest = np.argsort(counts - exact, kind="stable")[: self.samples_per_epoch - counts.sum()]
            counts[rest] += 1
            return [int(count) for count in counts]
        if self.stopping_strategy == _ONCE:
            return sizes
        lengths = np.array(sizes) / shares
        if self.stopping_strategy == _FIRST:
            return [min(size, math.floor(x * lengths.min() + 1e-6)) for size, x in zip(sizes, shares, strict=True)]
        return [max(size, math.ceil(x * lengths.max() - 1e-6)) for size, x in zip(sizes, shares, strict=True)]

    def __len__(self) -> int:
        raise TypeError(
            "a Mixture is indexed by its samplers, which know the weights; write "
            "DataLoader(mixture, batch_size=..., sampler=mixture.sampler()) or "
            "DataLoader(mixture, batch_sampler=mixture.batch_sampler(batch_size=...)), and no shuffle"
        )

    def __getitem__(self, entry: tuple[int, int]) -> Any:
        return self.__getitems__([entry])[0]

    def __getitems__(self, entries: Sequence[tuple[int, int]]) -> list[Any]:
        if not all(isinstance(entry, tuple) for entry in entries):
            len(self)  # Raises the error.
        samples: list[Any] = []
        for source, run in groupby(entries, key=lambda entry: entry[0]):
            name, rows = self._names[source], [row for _, row in run]
            dataset = self.datasets[name]
            fetch = getattr(dataset, "__getitems__", None)
            found = [dataset[row] for row in rows] if fetch is None else fetch(rows)
            samples += [(name, sample) for sample in found] if self.with_names else found
        return samples

    def sampler(self) -> MixtureSampler:
        """Return a sampler that mixes the samples of all datasets: ``DataLoader(mixture, 32, sampler=...)``."""
        return MixtureSampler(self)

    def batch_sampler(self, batch_size: int, drop_last: bool = False) -> MixtureBatchSampler:
        """Return a sampler of batches of one dataset each: ``DataLoader(mixture, batch_sampler=...)``.

        Parameters
        ----------
        batch_size : int
            Samples of a batch.
        drop_last : bool
            Whether the last batch of each dataset in an epoch is left out where it is smaller.
        """
        return MixtureBatchSampler(self, batch_size, drop_last)

    def _generator(self, use: int, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, use, *numbers])

    def order(self, epoch: int) -> Any:
        """Return the dataset of each position of an epoch, as an array of their numbers."""
        return self._arranged(list(self.counts.values()), self._generator(_ORDER, epoch))

    def _arranged(self, counts: list[int], draw: np.random.Generator) -> Any:
        """Return the numbers 0, 1, ... as often as the counts say, in a random order."""
        numbers = np.repeat(np.arange(len(counts)), counts)
        if self.stopping_strategy != _ONCE or self.samples_per_epoch is not None:
            return draw.permutation(numbers)
        # Each dataset's samples arrive with a rate of its weight: the next one is by weight, of those that are left.
        rates = zip(counts, self.weights.values(), strict=True)
        return numbers[np.argsort(np.concatenate([np.cumsum(draw.exponential(1 / w, n)) for n, w in rates]))]

    def rows(self, source: int, epoch: int) -> Iterator[int]:
        """Yield the rows of one dataset in an epoch, which continue those of the epoch before."""
        name = self._names[source]
        size, count = len(self.datasets[name]), self.counts[name]
        first, end = epoch * count, (epoch + 1) * count
        while first < end:
            turn, at = divmod(first, size)
            rows = self._generator(_ROWS, source, turn).permutation(size)[at : at + end - first]
            yield from rows.tolist()
            first += len(rows)

    @property
    def signature(self) -> str:
        """What decides the order, which a resumed run must have as well."""
        weights = ", ".join(f"{name}: {self.counts[name]} of weight {w:g}" for name, w in self.weights.items())
        return f"seed {self.seed}, {weights}"


class _MixtureOrder(Sampler[_Entry]):
    """What the samplers of a mixture have in common: their epoch."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture, self.epoch = mixture, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration yields; a trainer calls it, a loop of your own has to."""
        self.epoch = epoch

    @property
    def signature(self) -> str:
        """What decides the order; a checkpoint contains it."""
        return self.mixture.signature

    def _rows(self) -> list[Iterator[int]]:
        return [self.mixture.rows(source, self.epoch) for source in range(len(self.mixture.counts))]


class MixtureSampler(_MixtureOrder[tuple[int, int]]):
    """The samples of an epoch of a `Mixture`, in random order: (number of the dataset, row)."""

    def __len__(self) -> int:
        return sum(self.mixture.counts.values())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        rows = self._rows()
        for source in self.mixture.order(self.epoch).tolist():
            yield source, next(rows[source])


class MixtureBatchSampler(_MixtureOrder[list[tuple[int, int]]]):
    """The batches of an epoch of a `Mixture`, each of one dataset, in random order."""

    def __init__(self, mixture: Mixture, batch_size: int, drop_last: bool = False) -> None:
        super().__init__(mixture)
        self.batch_size = check_count("batch_size", batch_size)
        (self.drop_last,) = check_flags(drop_last=drop_last)
        self._counts = [n // batch_size if drop_last else -(-n // batch_size) for n in mixture.counts.values()]
        for name, count in zip(mixture.counts, self._counts, strict=True):
            if not count:
                raise ConfigError(
                    f"an epoch has {mixture.counts[name]} samples of dataset {name!r}, which make no batch of "
                    f"{batch_size}; write drop_last=False, or a smaller batch_size"
                )

    def __len__(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        rows, draw = self._rows(), self.mixture._generator(_BATCHES, self.epoch)
        for source in self.mixture._arranged(self._counts, draw).tolist():
            yield [(source, row) for row in islice(rows[source], self.batch_size)]


# -------------------------------------------------------------------------------------------------------- streams


class MixtureStream(IterableDataset[Any]):
    """Several iterable datasets as one stream, in which each sample is drawn from one of them by weight.

    The source of each sample is a function of ``seed``, epoch and position. Its state says how far each source was
    read, so that torchdata's ``StatefulDataLoader`` continues it without reading again, with workers too; a source
    that has ``state_dict`` and ``load_state_dict`` is asked for its own. A plain DataLoader reads again what was used.

    Ranks and workers share the stream: each of them reads all of it, and yields every n-th sample. So a source must
    yield the same samples in every process, in the same order; it does not see that it is in a worker. Where reading is
    expensive, give sources that divide themselves by rank and worker, and have ``is_sharded = True``.

    Parameters
    ----------
    sources : mapping of str to iterable, or sequence of them
        Datasets that begin again with each ``iter()``. Where they have ``set_epoch``, it is called.
    weights : mapping of str to float, or sequence of float
        The probability of each source, in any unit.
    stopping_strategy : {"first_exhausted", "all_exhausted", "all_exhausted_without_replacement"}
        "first_exhausted" ends an epoch when a source is drawn that has ended. "all_exhausted" begins such a source
        again, until each has ended once. "all_exhausted_without_replacement" leaves it out, until all have ended.
    seed : int
        Seeds the draws.
    with_names : bool
        Whether a sample is the pair ``(name of its source, sample)``.

    Raises
    ------
    ConfigError
        If weights and sources do not fit, or a source is an iterator, which does not begin again.

    Examples
    --------
    >>> from zae.data import MixtureStream
    >>> stream = MixtureStream({"a": range(4), "b": range(10, 14)}, {"a": 1, "b": 3}, with_names=True)
    >>> [sample for name, sample in stream if name == "b"]
    [10, 11, 12, 13]
    """

    def __init__(
        self,
        sources: Mapping[str, Any] | Sequence[Any],
        weights: Mapping[str, float] | Sequence[float],
        *,
        stopping_strategy: str = _FIRST,
        seed: int = 0,
        with_names: bool = False,
    ) -> None:
        self.sources, self.weights = _check_sources(sources, weights)
        for name, source in self.sources.items():
            if isinstance(source, Iterator) or not hasattr(source, "__iter__"):
                raise ConfigError(
                    f"source {name!r} of the mixture, a {type(source).__name__}, cannot be iterated from its beginning "
                    "in each epoch; give an IterableDataset, a list or a class with __iter__"
                )
        own = {name for name, source in self.sources.items() if getattr(source, "is_sharded", False)}
        if own and own != {*self.sources}:
            raise ConfigError(
                f"the sources {', '.join(sorted(own))} of the mixture have is_sharded = True and the others do not; "
                "either all of them divide themselves by rank and worker, or none"
            )
        self._divides = not own
        self.stopping_strategy = _check_strategy(stopping_strategy)
        self.seed = check_count("seed", seed, least=0)
        (self.with_names,) = check_flags(with_names=with_names)
        self._ranks = (0, 1)
        self._epoch = torch.tensor(0).share_memory_()  # Workers that persist see the next epoch.
        self._place: _Place | None = None
        self._loaded: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a trainer calls it, a loop of your own has to."""
        self._epoch.fill_(epoch)

    def set_ranks(self, rank: int, size: int) -> None:
        """Set the share of this process: every ``size``-th sample from ``rank`` on; a trainer calls it.

        Parameters
        ----------
        rank, size : int
            This rank, and the number of ranks that share the stream.
        """
        self._ranks = (rank, size)

    def _share(self) -> tuple[int, int]:
        """Return which samples of the stream this process yields: the first one, and of how many."""
        worker, (rank, size) = get_worker_info(), self._ranks
        if not self._divides:
            return 0, 1
        return (rank, size) if worker is None else (rank * worker.num_workers + worker.id, size * worker.num_workers)

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        self._place = place = _Place(self, int(self._epoch))
        first, step = self._share()
        if loaded is not None:
            place.load(loaded)
            if loaded["share"] != [first, step]:
                raise LoaderError(
                    f"the state of the stream is that of process {loaded['share'][0]} of {loaded['share'][1]}, and "
                    f"this is {first} of {step}; use as many ranks and workers as before"
                )
        place.share = [first, step]
        for sample in place:
            if (place.position - 1) % step == first:
                yield sample

    def state_dict(self) -> dict[str, Any]:
        """Return how far the stream was read by the last iteration in this process."""
        if self._loaded is not None:
            return {"place": self._loaded}
        return {"place": None if self._place is None else self._place.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue there; after a state of the end of an epoch it yields nothing."""
        place = state["place"]
        if place is not None and [name for name, _ in place["sources"]] != list(self.sources):
            raise ValueError(f"it is of the sources {', '.join(name for name, _ in place['sources'])}")
        if place is not None and place["signature"] != self.signature:
            raise ValueError(f"it is that of a mixture with {place['signature']}, and this one has {self.signature}")
        self._loaded, self._place = place, None

    @property
    def signature(self) -> str:
        """What decides the order, which a resumed run must have as well."""
        weights = ", ".join(f"{name} of weight {weight:g}" for name, weight in self.weights.items())
        return f"seed {self.seed}, {weights}, {self.stopping_strategy}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open iterators out: a copy continues where this one is."""
        return {**vars(self), "_place": None, "_loaded": self.state_dict()["place"]}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._epoch = self._epoch.share_memory_()


class _Place:
    """An iteration over a `MixtureStream`: how far each source was read."""

    def __init__(self, stream: MixtureStream, epoch: int) -> None:
        self._stream, self.epoch, self.position = stream, epoch, 0
        self.share, self._is_over = [0, 1], False
        self._names, self._weights = list(stream.sources), np.array(list(stream.weights.values()))
        self._ended = [False] * len(self._names)
        self._readers = [_Reader(source) for source in stream.sources.values()]
        self._draws: tuple[int, list[float]] = (-1, [])
        self._sums: Any = None  # Of the weights; computed anew where a source has ended.

    def __iter__(self) -> Iterator[Any]:
        while not self._is_over:
            source = self._drawn()
            sample = self._readers[source].next(self.epoch)
            if sample is _END and not self._may_continue(source):
                self._is_over = True
                return
            if sample is _END and self._stream.stopping_strategy == _ONCE:
                continue
            if sample is _END and (sample := self._readers[source].next(self.epoch)) is _END:
                raise LoaderError(f"source {self._names[source]!r} of the mixture yields no samples")
            self.position += 1
            yield (self._names[source], sample) if self._stream.with_names else sample

    def _may_continue(self, source: int) -> bool:
        """Note that a source has ended, and return whether the epoch continues."""
        self._ended[source] = True
        self._sums = None
        return self._stream.stopping_strategy != _FIRST and not all(self._ended)

    def _drawn(self) -> int:
        """Return the source of the sample at this position."""
        block, index = divmod(self.position, _BLOCK)
        if self._draws[0] != block:
            draws = np.random.default_rng([self._stream.seed, self.epoch, block]).random(_BLOCK)
            self._draws = (block, draws.tolist())
        if self._sums is None:
            left = self._stream.stopping_strategy == _ONCE
            weights = np.where(self._ended, 0.0, self._weights) if left else self._weights
            self._sums = np.cumsum(weights) / weights.sum()
        return int(np.searchsorted(self._sums, self._draws[1][index], side="right"))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and that of each source."""
        readers = [[name, reader.state_dict()] for name, reader in zip(self._names, self._readers, strict=True)]
        names = ("epoch", "position", "share")
        rest = {"ended": list(self._ended), "is_over": self._is_over, "signature": self._stream.signature}
        return {**{name: getattr(self, name) for name in names}, **rest, "sources": readers}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._ended, self._is_over = list(state["ended"]), state["is_over"]
        for reader, (_, each) in zip(self._readers, state["sources"], strict=True):
            reader.load_state_dict(each)


_END: Any = object()


def apply(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function."""
    return function(*args)


class _Reader:
    """One source of a stream: how often it was begun again, and how many of its samples were read since."""

    def __init__(self, source: Any) -> None:
        self._source, self._turn, self._count = source, 0, 0
        self._iterator: Iterator[Any] | None = None
        self._own: Any = None  # The state of the source, until it is opened.
        # A source that does not divide itself yields all its samples in each worker.
        self._call = apply if getattr(source, "is_sharded", False) else outside_worker

    def next(self, epoch: int) -> Any:
        """Return the next sample; `_END` once where the source has ended, and then its first one again."""
        if self._iterator is None:
            self._open(epoch)
        assert self._iterator is not None
        sample = self._call(next, self._iterator, _END)
        if sample is _END:
            self._turn, self._count, self._iterator, self._own = self._turn + 1, 0, None, None
        else:
            self._count += 1
        return sample

    def _open(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch + self._turn)
        if self._own is not None:
            self._source.load_state_dict(self._own)
        self._iterator = self._call(iter, self._source)
        if self._own is None:
            for _ in range(self._count):
                self._call(next, self._iterator, _END)
        self._own = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the source."""
        own = self._own
        if self._iterator is not None and is_stateful(self._source):
            own = self._source.state_dict()
        return {"turn": self._turn, "count": self._count, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there when the next sample is read."""
        self._turn, self._count, self._own, self._iterator = state["turn"], state["count"], state["own"], None


# --------------------------------------------------------------------------------------------------------- checks


def _check_strategy(strategy: Any) -> str:
    if strategy not in _STRATEGIES:
        raise ConfigError(f"stopping_strategy={strategy!r}; it must be one of {', '.join(map(repr, _STRATEGIES))}")
    return str(strategy)


def _check_sources(sources: Any, weights: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Return sources and weights by name, or refuse what does not fit."""
    if isinstance(sources, (list, tuple)):
        sources = {str(index): source for index, source in enumerate(sources)}
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError(
            f"a mixture takes a dict of datasets by name, or a list of them, not {type(sources).__name__}"
            + (" without entries" if isinstance(sources, Mapping) else "")
        )
    if isinstance(weights, (list, tuple)) and len(weights) == len(sources):
        weights = dict(zip(sources, weights, strict=True))
    if not isinstance(weights, Mapping) or {*weights} != {*sources}:
        found = list(weights) if isinstance(weights, (Mapping, list, tuple)) else weights
        raise ConfigError(f"weights must have one number for each of {', '.join(map(str, sources))}; it has {found}")
    for name, weight in weights.items():
        if not check_number(f"weights[{name!r}]", weight):
            raise ConfigError(f"weights[{name!r}]={weight!r}; leave a dataset of weight 0 out")
    return {str(name): each for name, each in sources.items()}, {str(name): float(weights[name]) for name in sources}
