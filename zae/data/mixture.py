"""Mix datasets by weights; their order is a function of seed, epoch and position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Dataset, Sampler

from zae.common.argument_checks import check_count, check_flags, check_number
from zae.data.loaders import length_of
from zae.errors import ConfigError

__all__ = ["Mixture", "MixtureBatchSampler", "MixtureSampler"]

_Entry = TypeVar("_Entry")
_ORDER, _ROWS, _BATCHES = range(3)  # What the generators of a mixture are for.
_STRATEGIES = FIRST, _ALL, ONCE = "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"


class Mixture(Dataset[Any]):
    """Several datasets as one, in which each has a share by its weight; its samplers decide the order.

    An epoch contains a fixed number of samples of each dataset, in an order that is a function of ``seed``, epoch and
    position. It needs no state: a run that is resumed, with any number of workers, continues with the next sample, and
    several ranks share the samples of each step, each sample once. A dataset is shuffled anew in each pass over it.
    Where an epoch has a part of its samples, the next epochs have the others, until each was used.

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
        self.datasets, self.weights = _check_datasets(datasets, weights)
        for name, dataset in self.datasets.items():
            if not length_of(dataset) or not hasattr(dataset, "__getitem__"):
                raise ConfigError(
                    f"dataset {name!r} of the mixture, a {type(dataset).__name__}, has no samples to index: it needs "
                    "__getitem__, and a length of at least 1"
                )
        if stopping_strategy is not None and samples_per_epoch is not None:
            raise ConfigError("stopping_strategy and samples_per_epoch both say what an epoch is; give one of them")
        self.stopping_strategy = stopping_strategy or FIRST
        if self.stopping_strategy not in _STRATEGIES:
            raise ConfigError(
                f"stopping_strategy={stopping_strategy!r}; it must be one of {', '.join(map(repr, _STRATEGIES))}"
            )
        self.samples_per_epoch = check_count("samples_per_epoch", samples_per_epoch, optional=True)
        self.seed = check_count("seed", seed, least=0)
        (self.with_names,) = check_flags(with_names=with_names)
        self._names = list(self.datasets)
        sizes = [len(dataset) for dataset in self.datasets.values()]
        self.counts = dict(zip(self._names, self._counts_of(sizes), strict=True))
        for name, count in self.counts.items():
            if not count:
                ends = "stopping_strategy='all_exhausted'"
                remedy = ends if samples_per_epoch is None else "a larger samples_per_epoch"
                raise ConfigError(
                    f"an epoch of the mixture, {sum(self.counts.values())} samples, has none of dataset {name!r} with "
                    f"weight {self.weights[name]:g}; give it a larger weight, leave it out, or write {remedy}"
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
        if self.stopping_strategy == ONCE:
            return sizes
        lengths = np.array(sizes) / shares
        if self.stopping_strategy == FIRST:
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
            name = self._names[source]
            rows = [row for _, row in run]
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
        if self.stopping_strategy != ONCE or self.samples_per_epoch is not None:
            return draw.permutation(numbers)
        # Each dataset's samples arrive with a rate of its weight: the next one is by weight, of those that are left.
        rates = zip(counts, self.weights.values(), strict=True)
        return numbers[np.argsort(np.concatenate([np.cumsum(draw.exponential(1 / w, n)) for n, w in rates]))]

    def rows(self, source: int, epoch: int) -> Iterator[int]:
        """Yield the rows of one dataset in an epoch: whole passes over it, and a part of one that epochs share."""
        name = self._names[source]
        size = len(self.datasets[name])
        whole, rest = divmod(self.counts[name], size)
        for turn in range(epoch * whole, (epoch + 1) * whole):
            yield from self._generator(_ROWS, source, turn).permutation(size).tolist()
        if rest:
            turn, part = divmod(epoch, -(-size // rest))
            order = self._generator(_ROWS, source, turn, *[1] * (whole > 0)).permutation(size)
            # The last epoch of a pass is filled up with samples of the first one, so that none comes twice in it.
            yield from np.roll(order, -part * rest)[:rest].tolist()

    @property
    def signature(self) -> str:
        """What decides the order, which a resumed run must have as well."""
        shares = ", ".join(
            f"{name}: {self.counts[name]} of {len(self.datasets[name])} samples, weight {weight!r}"
            for name, weight in self.weights.items()
        )
        ends = self.stopping_strategy if self.samples_per_epoch is None else f"{self.samples_per_epoch} in an epoch"
        return f"seed {self.seed}, {shares}, {ends}"


class _MixtureOrder(Sampler[_Entry]):
    """What the samplers of a mixture have in common: their epoch."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.epoch = 0

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
        rows = self._rows()
        draw = self.mixture._generator(_BATCHES, self.epoch)
        for source in self.mixture._arranged(self._counts, draw).tolist():
            yield [(source, row) for row in islice(rows[source], self.batch_size)]


def _check_datasets(datasets: Any, weights: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Return datasets and weights by name, or refuse what does not fit."""
    if isinstance(datasets, (list, tuple)):
        datasets = {str(index): each for index, each in enumerate(datasets)}
    if not isinstance(datasets, Mapping) or not datasets:
        raise ConfigError(
            f"a mixture takes a dict of datasets by name, or a list of them, not {type(datasets).__name__}"
            + (" without entries" if isinstance(datasets, Mapping) else "")
        )
    if hasattr(weights, "tolist"):  # An array or a tensor.
        weights = weights.tolist()
    if isinstance(weights, (list, tuple)) and len(weights) == len(datasets):
        weights = dict(zip(datasets, weights, strict=True))
    if not isinstance(weights, Mapping) or {*weights} != {*datasets}:
        found = list(weights) if isinstance(weights, (Mapping, list, tuple)) else weights
        raise ConfigError(f"weights must have one number for each of {', '.join(map(str, datasets))}; it has {found}")
    for name, weight in weights.items():
        if not check_number(f"weights[{name!r}]", weight):
            raise ConfigError(f"weights[{name!r}]={weight!r}; leave a dataset of weight 0 out")
    by_name = {str(name): each for name, each in datasets.items()}
    weight_by_name = {str(name): float(weights[name]) for name in datasets}
    return by_name, weight_by_name
