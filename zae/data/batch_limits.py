"""The first batches of a loader: what ``limit_batches`` and ``overfit_batches`` take of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, SequentialSampler

from zae.data.loaders import Proxy, describe, iterates_as_torch, with_entries
from zae.data.workers import iterate
from zae.errors import ConfigError

__all__ = ["BatchLimits"]


class BatchLimits(NamedTuple):
    """How many batches of the loaders a call of ``run`` takes in an epoch; None is all.

    Attributes
    ----------
    train, valid : int or None
        Batches of the ``loader``, and of each ``valid_loader``.
    repeats : bool
        Whether each epoch has the same training batches.
    """

    train: int | None = None
    valid: int | None = None
    repeats: bool = False

    def check(self, loader: Any, valid_loader: Any) -> None:
        """Refuse loaders that cannot be limited."""
        limited = []
        if self.train is not None:
            limited.append(loader)
        if self.valid is not None:
            limited += valid_loader.values() if isinstance(valid_loader, Mapping) else [valid_loader]
        for part in limited:
            if isinstance(part, Iterator):
                raise ConfigError(
                    f"the first batches of a {type(part).__name__} come once, so that limit_batches and "
                    "overfit_batches cannot take them in each epoch; give a list, a DataLoader or a class with "
                    "__iter__, or write steps_per_epoch=..., which ends the epochs of a stream"
                )
        if self.repeats and iterates_as_torch(loader) and type(loader.batch_sampler) not in (BatchSampler, type(None)):
            raise ConfigError(
                "overfit_batches takes the first samples of the dataset in each epoch, and the batches of this loader "
                f"are those of its {type(loader.batch_sampler).__name__} ({describe(loader)}); give a DataLoader with "
                "batch_size=..., or a list of batches"
            )

    def of_training(self, loader: Any) -> Any:
        """Return the view of a training loader."""
        return loader if self.train is None else _first_of(loader, self.train, self.repeats)

    def of_validation(self, loader: Any) -> Any:
        """Return the view of a validation loader, or of each of several."""
        if self.valid is None or loader is None:
            return loader
        if isinstance(loader, Mapping):
            return {name: _first_of(part, self.valid) for name, part in loader.items()}
        return _first_of(loader, self.valid)


def _first_of(loader: Any, count: int, repeats: bool = False) -> Any:
    """Return a loader of the first batches of a loader; with ``repeats``, in the order of the dataset."""
    if isinstance(loader, (list, tuple)):
        return loader[:count]
    if iterates_as_torch(loader):
        if repeats:
            loader = with_entries(loader, lambda entries, size: SequentialSampler(loader.dataset))
        return with_entries(loader, partial(_FirstEntries, count))
    return _FirstOfStream(loader, count)


class _FirstEntries(Proxy):
    """A sampler, or a batch sampler, without the entries after the first batches."""

    def __init__(self, batches: int, entries: Any, batch_size: int) -> None:
        super().__init__(entries)
        self._count = batches * batch_size

    def __len__(self) -> int:
        return min(self._count, super().__len__())

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.passed), self._count)


class _FirstOfStream(Proxy):
    """The first batches of an iterable; where each rank reads a stream by itself, the first batches of each rank."""

    def __init__(self, loader: Any, count: int) -> None:
        super().__init__(loader)
        self._count = count

    def __len__(self) -> int:
        return min(self._count, super().__len__())

    def __iter__(self) -> Iterator[Any]:
        return islice(iterate(self.passed), self._count)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # That of the loader knows no end of an epoch at these batches.
            raise AttributeError(name)
        return super().__getattr__(name)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank gets other batches without help."""
        dataset = getattr(self.passed, "dataset", None)
        return any(getattr(part, "is_sharded", False) for part in (self.passed, dataset))
