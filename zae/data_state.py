"""What a checkpoint has to know of a loader: what it is, and the random streams that its parts hold themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from zae.errors import CheckpointMismatch

__all__ = ["Padded", "capture_parts", "changes_of", "facts_of", "global_streams", "restore_parts"]

_DEPTH = 3  # Datasets in datasets: Subset(Subset(...)).


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
    facts["batch sampler"] = _kind(_bare(batch_sampler))
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

    A sampler or dataset with ``state_dict`` and ``load_state_dict`` is asked for it. Of any other the attributes are
    looked through for ``numpy.random.Generator``, ``numpy.random.RandomState`` and ``random.Random``; generators of
    torch are `zae.rng`'s. Copies of a dataset in a loader's workers are out of reach.

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
    return {place: _read(stream) for place, stream in _streams(loader)}


def restore_parts(loader: Any, states: Mapping[str, Any]) -> None:
    """Put the parts of a loader back to where they were.

    Parameters
    ----------
    loader : iterable
        Built as it was.
    states : mapping
        What `capture_parts` returned.

    Raises
    ------
    CheckpointMismatch
        A part is not there any more, or is of another kind.
    """
    found = dict(_streams(loader))
    for place, state in states.items():
        if place not in found:
            raise CheckpointMismatch(
                f"the checkpoint holds the state of the loader's {place}, which is not there now; build the loader and "
                "its dataset as they were"
            )
        try:
            _write(found[place], state)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointMismatch(
                f"the state of the loader's {place} does not fit ({error}); build it as it was"
            ) from error


class Padded:
    """A sampler with entries before its own, which stand for what was used: they are passed over, never loaded."""

    def __init__(self, entries: Any, count: int) -> None:
        self.padded, self._count = entries, count

    def __len__(self) -> int:
        return self._count + len(self.padded)

    def __iter__(self) -> Iterator[Any]:
        entries = iter(self.padded)
        first = next(entries)
        for _ in range(self._count + 1):
            yield first
        yield from entries

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "padded":
            raise AttributeError(name)
        return getattr(self.padded, name)


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


def _streams(loader: Any) -> Iterator[tuple[str, Any]]:
    """Every part that has a state of its own, with its place."""
    batch_sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    parts = {"sampler": _sampler_of(loader), "batch_sampler": _bare(batch_sampler)}
    for depth in range(_DEPTH):
        if dataset is None:
            break
        parts["dataset" + ".dataset" * depth] = dataset
        dataset = getattr(dataset, "dataset", None)
    seen: set[int] = set()
    for name, part in parts.items():
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            yield name, part
            continue
        for attribute, value in sorted(getattr(part, "__dict__", {}).items()):
            if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{name}.{attribute}", value


def _bare(sampler: Any) -> Any:
    """A sampler without the entries that were put before its own."""
    return sampler.padded if isinstance(sampler, Padded) else sampler


def _sampler_of(loader: Any) -> Any:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return _bare(getattr(batch_sampler, "sampler", None) or getattr(loader, "sampler", None))


def _read(stream: Any) -> Any:
    if isinstance(stream, np.random.Generator):
        return stream.bit_generator.state
    if isinstance(stream, np.random.RandomState):
        return stream.get_state(legacy=False)
    if isinstance(stream, random.Random):
        return stream.getstate()
    return stream.state_dict()


def _write(stream: Any, state: Any) -> None:
    if isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    elif isinstance(stream, np.random.RandomState):
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
