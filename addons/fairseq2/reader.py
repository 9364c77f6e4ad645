"""Data readers of fairseq2, or those that are written like them, as loaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zae.arguments import Count, check_argument
from zae.errors import ConfigError, LoaderError, kind_of

__all__ = ["ReaderLoader", "check_reader", "num_accumulate_of"]

_METHODS = ("__next__", "reset", "state_dict", "load_state_dict")


class ReaderLoader:
    """The batches of a data reader of fairseq2, one at a time, as a loader.

    ``next(reader)`` returns the list of the batches of a step. Give ``GradientAccumulationAddon`` their number as
    ``gradient_accumulation_steps``, so that a step of zae has the same batches. At the end of an epoch the reader is
    reset. A resume restores the reader's state, and passes over the batches of its list that were used.

    Parameters
    ----------
    reader : object
        An iterator of lists of batches with ``reset()``, ``state_dict()`` and ``load_state_dict(state)``.
    is_sharded : bool
        Whether the reader yields the batches of its rank only, as those of fairseq2 do.
    num_accumulate : int, optional
        How many batches each list has, but for the last of an epoch; by default that of the reader, as those of
        fairseq2 have one. None is not checked.

    Raises
    ------
    ConfigError
        The reader has no such methods.
    LoaderError
        A list is empty, or one in the middle of an epoch has not ``num_accumulate`` batches.

    Examples
    --------
    >>> from zae.addons.fairseq2 import ReaderLoader
    >>> class Reader:
    ...     place = 0
    ...     def __next__(self):
    ...         if self.place == 2:
    ...             raise StopIteration
    ...         self.place += 1
    ...         return [10 * self.place, 10 * self.place + 1]
    ...     def reset(self):
    ...         self.place = 0
    ...     def state_dict(self):
    ...         return {"place": self.place}
    ...     def load_state_dict(self, state):
    ...         self.place = state["place"]
    >>> list(ReaderLoader(Reader()))
    [10, 11, 20, 21]
    """

    def __init__(self, reader: Any, is_sharded: bool = True, num_accumulate: int | None = None) -> None:
        check_reader("the reader", reader)
        self.reader = reader
        self.is_sharded = is_sharded
        self.num_accumulate = getattr(reader, "num_accumulate", None) if num_accumulate is None else num_accumulate
        self._begin = reader.state_dict()
        self._used = 0
        self._is_loaded = False

    def __iter__(self) -> Iterator[Any]:
        if not self._is_loaded and self._used:  # The last epoch was left before its end.
            self.reader.reset()
            self._used = 0
        skipped = self._used
        self._is_loaded = False
        is_short = False
        while True:
            self._begin = self.reader.state_dict()
            try:
                batches = next(self.reader)
            except StopIteration:
                break
            is_short = self._check(batches, is_short)
            for self._used, batch in enumerate(batches, start=1):
                if self._used > skipped:
                    yield batch
            skipped = 0
            self._used = skipped
        self.reader.reset()
        self._begin = self.reader.state_dict()
        self._used = 0

    def _check(self, batches: Any, follows_short: bool) -> bool:
        """Refuse what is not the list of a step; return whether it is shorter than that of a whole step."""
        name = type(self.reader).__name__
        count = self.num_accumulate
        if not isinstance(batches, (list, tuple)):
            raise LoaderError(f"next() of the {name} returned {kind_of(batches)}; return the list of a step's batches")
        if count is not None and (follows_short or not 0 < len(batches) <= count):
            raise LoaderError(
                f"next() of the {name} returned {len(batches)} batches, and its steps have {count}; only the last list "
                "of an epoch may be shorter: set num_accumulate on the reader, and raise StopIteration at the end"
            )
        return count is not None and len(batches) < count

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the present list of batches, and how many of them were used."""
        return {"reader": self._begin, "used": self._used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; the next iteration continues there."""
        self.reader.load_state_dict(state["reader"])
        begin = state["reader"]
        self._used = int(state["used"])
        self._begin = begin
        self._is_loaded = True


def check_reader(name: str, reader: Any) -> None:
    """Refuse what is not a data reader."""
    absent = [method for method in _METHODS if not hasattr(reader, method)]
    if absent:
        raise ConfigError(f"{name} is {kind_of(reader)} and has no {', '.join(absent)}; give a DataReader")


def num_accumulate_of(reader: Any) -> int:
    """Return how many batches a reader gives to each step; 1 where it does not say."""
    return int(check_argument("data_reader.num_accumulate", getattr(reader, "num_accumulate", 1), Count))
