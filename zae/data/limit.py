"""Limit a loader to its first batches: a view of it, which is sharded, resumed and planned like any other loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from zae.common.argument_checks import check_count
from zae.data.loaders import SamplerProxy, describe, is_stateful, length_of, with_entries
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

    @classmethod
    def parse(cls, limit: Any, overfit: Any, loader: Any, valid_loader: Any) -> BatchLimits:
        """Return the limits that the arguments of ``run`` set; refuse loaders that cannot be limited."""
        pair = limit if isinstance(limit, (tuple, list)) else (limit, limit)
        if len(pair) != 2:
            raise ConfigError(f"limit_batches={limit!r}; write one number of batches, or (training, validation)")
        train, valid = (check_count("limit_batches", each, optional=True) for each in pair)
        check_count("overfit_batches", overfit, optional=True)
        if overfit is not None and train is not None:
            raise ConfigError(
                f"limit_batches={limit!r} and overfit_batches={overfit} both limit the training batches; write "
                f"limit_batches=(None, {valid}) to limit those of the validation alone"
            )
        found = cls(overfit if train is None else train, valid, overfit is not None)
        several = valid_loader.values() if isinstance(valid_loader, Mapping) else [valid_loader]
        for each in [loader] * (found.train is not None) + [*several] * (valid is not None):
            if isinstance(each, Iterator):
                raise ConfigError(
                    f"the first batches of a {type(each).__name__} come once, so that limit_batches and "
                    "overfit_batches cannot take them in each epoch; give a list, a DataLoader or a class with "
                    "__iter__, or write steps_per_epoch=..., which ends the epochs of a stream"
                )
        if found.repeats:
            _check_repeatable(loader)
        return found

    def of_training(self, loader: Any) -> Any:
        """Return the view of a training loader."""
        return loader if self.train is None else _first_of(loader, self.train, self.repeats)

    def of_validation(self, loader: Any) -> Any:
        """Return the view of a validation loader, or of each of several."""
        if self.valid is None or loader is None:
            return loader
        if isinstance(loader, Mapping):
            return {name: _first_of(each, self.valid) for name, each in loader.items()}
        return _first_of(loader, self.valid)


def _check_repeatable(loader: Any) -> None:
    """Refuse a loader whose batch sampler decides which samples come first."""
    if _is_map(loader) and type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ConfigError(
            f"overfit_batches takes the first samples of the dataset in each epoch, and the batches of this loader are "
            f"those of its {type(loader.batch_sampler).__name__} ({describe(loader)}); give a DataLoader with "
            "batch_size=..., or a list of batches"
        )


def _is_map(loader: Any) -> bool:
    """Return whether a DataLoader takes its batches from a sampler."""
    is_own = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return is_own and not isinstance(loader.dataset, IterableDataset)


def _first_of(loader: Any, count: int, repeats: bool = False) -> Any:
    """Return a loader of the first batches of another one; with ``repeats``, those of the dataset in its order."""
    if isinstance(loader, (list, tuple)):
        return loader[:count]
    if _is_map(loader):
        if repeats:
            loader = with_entries(loader, lambda entries, size: SequentialSampler(loader.dataset))
        return with_entries(loader, partial(_FirstEntries, count))
    kind = _FirstOfStateful if is_stateful(loader) else _FirstOfStream
    return kind(loader, count) if length_of(loader) is None else _with_length(kind)(loader, count)


class _FirstEntries(SamplerProxy):
    """A sampler, or a batch sampler, without the entries after the first batches."""

    def __init__(self, batches: int, entries: Any, batch_size: int) -> None:
        super().__init__(entries)
        self._count = batches * batch_size

    def __len__(self) -> int:
        return min(self._count, super().__len__())

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.passed), self._count)


class _FirstOfStream:
    """The first batches of an iterable; of a stream that each rank reads by itself, those of each rank."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.count)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank gets other batches without help."""
        return any(getattr(each, "is_sharded", False) for each in (self.loader, getattr(self.loader, "dataset", None)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class _FirstOfStateful(_FirstOfStream):
    """The same of a loader that has its position in its state."""

    _used, _begin, _has_ended = 0, 0, False

    def __iter__(self) -> Iterator[Any]:
        if self._begin == self.count:  # The loaded state is at the end of our epoch, and within one of the loader.
            next(iter(self.loader), None)  # Its next iteration begins at its first batch.
            self._begin = 0 if self._has_ended else self._begin
        self._used, self._begin, self._has_ended = self._begin, 0, False
        for batch in islice(iter(self.loader), self.count - self._used):
            self._used += 1
            yield batch
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, how many batches of the epoch were used, and whether that was its end."""
        return {"loader": self.loader.state_dict(), "used": self._used, "has_ended": self._has_ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; the next iteration yields what is left of the epoch, or the next one."""
        self.loader.load_state_dict(state["loader"])
        self._has_ended = state["has_ended"]
        self._begin = state["used"] if not self._has_ended or state["used"] == self.count else 0


def _with_length(kind: type[_FirstOfStream]) -> type[_FirstOfStream]:
    """Return the class of a view whose loader has a length."""
    return type(kind.__name__, (kind,), {"__len__": lambda self: min(self.count, len(self.loader))})
