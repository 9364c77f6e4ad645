"""Mix streams by weights: each sample is drawn from one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from zae.common.argument_checks import check_count, check_flags
from zae.common.torch_private import outside_worker
from zae.data.loaders import is_stateful, length_of
from zae.data.mixture.sources import FIRST, ONCE, check_sources, check_strategy
from zae.errors import ConfigError, LoaderError

__all__ = ["MixtureStream"]

_BLOCK = 1024  # Draws of a stream that are made at once.


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
        stopping_strategy: str = FIRST,
        seed: int = 0,
        with_names: bool = False,
    ) -> None:
        self.sources, self.weights = check_sources(sources, weights)
        for name, source in self.sources.items():
            if isinstance(source, Iterator) or not hasattr(source, "__iter__"):
                cure = "; for datasets that are read by index write Mixture" * (length_of(source) is not None)
                raise ConfigError(
                    f"source {name!r} of the mixture, a {type(source).__name__}, cannot be iterated from its beginning "
                    f"in each epoch; give an IterableDataset, a list or a class with __iter__{cure}"
                )
        own = {name for name, source in self.sources.items() if getattr(source, "is_sharded", False)}
        if own and own != {*self.sources}:
            raise ConfigError(
                f"the sources {', '.join(sorted(own))} of the mixture have is_sharded = True and the others do not; "
                "either all of them divide themselves by rank and worker, or none"
            )
        self._divides = not own
        self.stopping_strategy = check_strategy(stopping_strategy)
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
            if sample is _END and self._readers[source].is_empty and self._stream._divides:
                raise LoaderError(f"source {self._names[source]!r} of the mixture yields no samples")
            if sample is _END and not self._may_continue(source):
                self._is_over = True
                return
            if sample is _END and self._stream.stopping_strategy == ONCE:
                continue
            if sample is _END and (sample := self._readers[source].next(self.epoch)) is _END:
                raise LoaderError(f"source {self._names[source]!r} of the mixture yields no samples")
            self.position += 1
            yield (self._names[source], sample) if self._stream.with_names else sample

    def _may_continue(self, source: int) -> bool:
        """Note that a source has ended, and return whether the epoch continues."""
        self._ended[source] = True
        self._sums = None
        return self._stream.stopping_strategy != FIRST and not all(self._ended)

    def _drawn(self) -> int:
        """Return the source of the sample at this position."""
        block, index = divmod(self.position, _BLOCK)
        if self._draws[0] != block:
            draws = np.random.default_rng([self._stream.seed, self.epoch, block]).random(_BLOCK)
            self._draws = (block, draws.tolist())
        if self._sums is None:
            left = self._stream.stopping_strategy == ONCE
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
        self._source, self._turn, self._count, self.is_empty = source, 0, 0, False
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
            self.is_empty = not self._count  # Where it divides itself, it may be so in one worker.
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
