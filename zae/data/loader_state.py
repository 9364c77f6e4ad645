"""What a checkpoint has to know of a loader: what it is, and the random streams that its parts hold themselves."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from zae.common import random_state
from zae.common.walk import search
from zae.errors import CheckpointMismatch
from zae.storage.encoding import encode

__all__ = [
    "STREAMS",
    "Padded",
    "Passing",
    "as_begun",
    "bare",
    "begins_again",
    "capture_parts",
    "changes_of",
    "facts_of",
    "global_streams",
    "read_stream",
    "restore_parts",
    "undrawn",
]

STREAMS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""The kinds of random stream that an object may hold."""

_log = logging.getLogger("zae")
_DEPTH = 3  # Datasets in datasets: Subset(Subset(...)).
# Iterators come and go.
_CLOSED = (torch.Tensor, np.ndarray, type, ModuleType, Iterator)


def facts_of(loader: Any) -> dict[str, Any]:
    """Return what must be the same for a resumed epoch to have the same batches.

    Parameters
    ----------
    loader : iterable
        Any loader.

    Returns
    -------
    dict
        Names, with text or numbers; only what the loader tells.

    Examples
    --------
    >>> facts_of([1, 2, 3])
    {'loader': 'list', 'number of batches': 3}
    """
    facts: dict[str, Any] = {"loader": type(loader).__name__, "number of batches": _length(loader)}
    facts["dataset length"] = _length(getattr(loader, "dataset", None))
    batch_sampler = getattr(loader, "batch_sampler", None)
    for name in ("batch_size", "drop_last"):
        value = getattr(loader, name, None)
        facts[name] = getattr(batch_sampler, name, None) if value is None or batch_sampler is not None else value
    facts["sampler"] = _kind(_sampler_of(loader))
    facts["batch sampler"] = _kind(bare(batch_sampler))
    return {key: value for key, value in facts.items() if isinstance(value, (str, int))}


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say in words in what two loaders differ.

    Parameters
    ----------
    before, now : mapping
        What `facts_of` returned.

    Returns
    -------
    list of str
        Empty when nothing differs.

    Examples
    --------
    >>> changes_of({"loader": "DataLoader", "batch_size": 4}, {"loader": "DataLoader", "batch_size": 8})
    ['batch_size was 4 and is 8']
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name, 'unknown')} and is {now.get(name, 'unknown')}" for name in names]


def capture_parts(loader: Any) -> dict[str, Any]:
    """Return the states of what a loader's parts hold themselves: their own random streams, or their own state.

    A sampler or dataset with ``state_dict`` and ``load_state_dict`` is asked for it. Any other, and a ``collate_fn``,
    is looked through for ``numpy.random.Generator``, ``numpy.random.RandomState``, ``random.Random`` and
    ``torch.Generator``: in its attributes, in what these hold (transforms, say), and in short lists and dicts there.
    What `zae.common.random_state` saves of a loader is left out. Copies of a dataset in a loader's workers are out of
    reach.

    Parameters
    ----------
    loader : iterable
        Any loader.

    Returns
    -------
    dict
        States by the place of their owner, plain values and tensors only.

    Examples
    --------
    >>> class Noisy:
    ...     def __init__(self):
    ...         self.rng = random.Random(1)
    >>> sampler = Noisy()
    >>> loader = type("Loader", (), {"sampler": sampler})()
    >>> state, drawn = capture_parts(loader), sampler.rng.random()
    >>> restore_parts(loader, state)
    >>> sampler.rng.random() == drawn
    True
    """
    return {place: read_stream(owner) for place, owner in _owners(loader)}


def restore_parts(loader: Any, states: Mapping[str, Any], only_streams: bool = False) -> None:
    """Put the parts of a loader back to where they were.

    A part that keeps a state, and is in that state already, is left alone: many a sampler takes what it is given for
    the place at which its next epoch begins.

    Parameters
    ----------
    loader : iterable
        Built as it was.
    states : mapping
        What `capture_parts` returned.
    only_streams : bool
        Whether to leave the parts with a ``state_dict`` as they are.

    Raises
    ------
    CheckpointMismatch
        A part with a state is not there any more, or one is of another kind.
    """
    found = dict(_owners(loader))
    for place, state in states.items():
        if place not in found:
            if _is_part(place):
                raise CheckpointMismatch(
                    f"the checkpoint holds the state of the loader's {place}, which has none now; build the loader and "
                    "its dataset as they were"
                )
            _warn_of_absent(place)
            continue
        owner = found[place]
        try:
            if isinstance(owner, STREAMS) or not (only_streams or _is_same(read_stream(owner), state)):
                _write(owner, state)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CheckpointMismatch(
                f"the state of the loader's {place} does not fit ({error}); build it as it was"
            ) from error


def as_begun(present: Mapping[str, Any], begin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of parts for an epoch that begins again: where they stood at its beginning, with the streams
    as they are.

    Parameters
    ----------
    present, begin : mapping
        What `capture_parts` returned now, and at the epoch's beginning.

    Returns
    -------
    dict
        For `restore_parts`.

    Examples
    --------
    >>> as_begun({"sampler": {"at": 12}, "dataset.rng": 7}, {"sampler": {"at": 0}, "dataset.rng": 3})
    {'sampler': {'at': 0}, 'dataset.rng': 7}
    """
    return {place: begin.get(place, state) if _is_part(place) else state for place, state in present.items()}


def begins_again(loader: Any) -> bool | None:
    """Ask a sampler, or a stream of this process, that keeps a place of its own for its first entry.

    Parameters
    ----------
    loader : iterable
        Any loader, whose parts are to be restored again afterwards.

    Returns
    -------
    bool or None
        True for one that stood at its end, and will begin again when it is asked once more; None for a loader that has
        no such part.
    """
    dataset, batch_sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    walked: Any = getattr(loader, "sampler", None) if batch_sampler is None else batch_sampler
    parts = [_sampler_of(loader), bare(batch_sampler)]
    if isinstance(dataset, IterableDataset):
        parts, walked = [None if getattr(loader, "num_workers", 0) else dataset], dataset
    if not any(_keeps_state(part) for part in parts):
        return None
    end = object()
    return next(iter(walked), end) is end


@contextlib.contextmanager
def undrawn(loader: Any) -> Iterator[None]:
    """Let a loader be walked without moving the random streams that its parts hold, which training may share.

    Parameters
    ----------
    loader : iterable
        Any loader.
    """
    kept = [(owner, read_stream(owner)) for owner in _streams_in(loader)]
    try:
        yield
    finally:
        for owner, state in kept:
            _write(owner, state)
        known = {id(owner) for owner, _ in kept}
        for made in [owner for owner in _streams_in(loader) if id(owner) not in known]:
            _seed_again(made)


class Passing:
    """A sampler that passes the entries of another on; what it is, that one is asked."""

    def __init__(self, entries: Any) -> None:
        self.passed = entries

    def __len__(self) -> int:
        return len(self.passed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "passed":
            raise AttributeError(name)
        return getattr(self.passed, name)


class Padded(Passing):
    """One with entries before those, which stand for what was used: they are passed over, never loaded."""

    def __init__(self, entries: Any, count: int) -> None:
        super().__init__(entries)
        self._count = count

    def __len__(self) -> int:
        return self._count + super().__len__()

    def __iter__(self) -> Iterator[Any]:
        entries = iter(self.passed)
        first = next(entries)
        for _ in range(self._count + 1):
            yield first
        yield from entries


def bare(sampler: Any) -> Any:
    """A sampler itself, without those that pass its entries on."""
    while isinstance(sampler, Passing):
        sampler = sampler.passed
    return sampler


def global_streams() -> tuple[Any, ...]:
    """Return the present state of the global random streams, to be compared with a later one.

    Examples
    --------
    >>> before = global_streams()
    >>> _ = torch.rand(1)
    >>> global_streams() == before
    False
    """
    twister = np.random.get_state(legacy=False)["state"]
    key = twister["key"].tobytes() if "key" in twister else repr(twister)
    return random.getstate(), key, twister.get("pos"), torch.get_rng_state().numpy().tobytes()


def _owners(loader: Any) -> Iterator[tuple[str, Any]]:
    """Every part that has a state of its own, and every random stream in the others, with its place."""
    batch_sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    parts = {"sampler": _sampler_of(loader), "batch_sampler": bare(batch_sampler)}
    for depth in range(_DEPTH):
        if dataset is None:
            break
        parts["dataset" + ".dataset" * depth] = dataset
        dataset = getattr(dataset, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    seen = {id(generator) for generator in random_state.generators_of(loader)}
    ours = {id(part) for part in (*parts.values(), getattr(loader, "_iterator", None))}
    parts["collate_fn"] = getattr(collate, "__self__", collate)
    if hasattr(loader, "__dict__") and type(loader) is not DataLoader and not _keeps_state(loader):
        parts["loader"] = loader  # One of the user's own.
    for name, part in parts.items():
        if part is None or id(part) in seen:
            continue
        if _is_part(name) and _keeps_state(part):
            seen.add(id(part))
            yield name, part
        else:
            yield from search(part, name, STREAMS, closed=_CLOSED, seen=seen, apart=ours - {id(part)})


def _streams_in(loader: Any) -> list[Any]:
    return [owner for _, owner in _owners(loader) if isinstance(owner, STREAMS)]


def _seed_again(stream: Any) -> None:
    """Put a stream that was made just now, at the first use of a `collate_fn` say, back to its seed, if it tells it."""
    if isinstance(stream, torch.Generator):
        stream.manual_seed(stream.initial_seed())
    elif isinstance(stream, np.random.Generator):
        bits: Any = stream.bit_generator
        with contextlib.suppress(AttributeError, TypeError):  # One that was given no seed, but its whole state.
            _write(stream, type(bits)(bits.seed_seq).state)


def _keeps_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _is_part(place: str) -> bool:
    """Whether a place is that of a part itself, not of a stream within."""
    return place in ("sampler", "batch_sampler") or set(place.split(".")) == {"dataset"}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bitwise."""
    (structure, tensors), (again, others) = encode(one), encode(other)
    return bool(structure == again) and all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


@functools.cache
def _warn_of_absent(place: str) -> None:
    """Say, once in a process, that nobody has a random stream that was saved: it may be made when it is needed."""
    _log.warning(
        "the checkpoint holds the random stream %s of the loader, which is not there now: what it draws is not exact; "
        "make it when the object is made", place,
    )  # fmt: skip


def _sampler_of(loader: Any) -> Any:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return bare(getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None))


def read_stream(stream: Any) -> Any:
    """Return the state of a random stream, or of a part that has a ``state_dict``.

    Parameters
    ----------
    stream : object
        One of the kinds in `STREAMS`, or the part.

    Returns
    -------
    object
        A tensor of bytes for a generator of torch; else as NumPy, `random` or the part gives it.

    Examples
    --------
    >>> stream = random.Random(1)
    >>> read_stream(stream) == random.Random(1).getstate()
    True
    """
    if isinstance(stream, np.random.Generator):
        return stream.bit_generator.state
    if isinstance(stream, np.random.RandomState):
        return stream.get_state(legacy=False)
    if isinstance(stream, random.Random):
        return stream.getstate()
    return stream.get_state() if isinstance(stream, torch.Generator) else stream.state_dict()


def _write(stream: Any, state: Any) -> None:
    if isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    elif isinstance(stream, (np.random.RandomState, torch.Generator)):
        stream.set_state(state)
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    else:
        stream.load_state_dict(state)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _kind(value: Any) -> str | None:
    return None if value is None else type(value).__name__
