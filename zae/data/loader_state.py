"""Capture and restore the states of a loader's parts, and the random streams in them."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from zae import random_state
from zae.data.loader_parts import LoaderParts
from zae.data.loaders import is_stateful
from zae.errors import CheckpointMismatch
from zae.random_state import STREAMS
from zae.values.walk import has_same_bits, names_read_by, search

__all__ = [
    "as_begun",
    "capture_parts",
    "is_exhausted",
    "preserve_streams",
    "restore_parts",
    "streams_of",
]

_log = logging.getLogger("zae")
_DEPTH = 3  # Datasets in datasets: Subset(Subset(...)).
_FUNCTIONS = (FunctionType, MethodType)
_READS = ("__getitem__", "__getitems__", "__iter__", "__call__")  # How samples are read, and a function object is used.
_LIBRARIES = ("builtins", "torch", "torchdata", "datasets", "zae")  # Their classes read no random stream of a script.
# Not searched; iterators are temporary.
_CLOSED = (torch.Tensor, np.ndarray, type, ModuleType, Iterator)


def capture_parts(parts: LoaderParts) -> dict[str, Any]:
    """Return the states of the parts of a loader, by their places: their ``state_dict``, or their random streams.

    The state of a sampler, a dataset or a ``collate_fn`` is that of its ``state_dict``, if it has ``load_state_dict``
    too. Else its attributes, their attributes (of transforms, for example), short lists and dicts, and the closures and
    globals that its functions read, are searched for ``numpy.random.Generator``, ``numpy.random.RandomState``,
    ``random.Random`` and ``torch.Generator``. The generators that `zae.random_state` saves are left out. The
    copies of a dataset in workers cannot be read.
    """
    return {place: _read(owner) for place, owner in _owners(parts)}


def restore_parts(parts: LoaderParts, states: Mapping[str, Any], only_streams: bool = False) -> bool:
    """Restore the parts of a loader, and return whether one has loaded a state of its own.

    A part that already has this state does not load it: some samplers begin their next epoch at a state that they load.
    """
    owners = dict(_owners(parts))
    has_loaded = False
    for place, state in states.items():
        if place not in owners:
            place = place.replace("collate_fn.collate.", "collate_fn.", 1)  # Of several ranks, in older versions.
        if place not in owners:
            if _is_part(place):
                raise CheckpointMismatch(
                    f"the checkpoint contains a state of the loader's {place}, but this one cannot load a state; build "
                    "the loader and its dataset as they were"
                )
            _warn_of_absent(place)
            continue
        owner = owners[place]
        try:
            if isinstance(owner, STREAMS):
                _write(owner, state)
            elif not (only_streams or has_same_bits(_read(owner), state)):
                _write(owner, state)
                has_loaded = True
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CheckpointMismatch(
                f"the state of the loader's {place} does not fit ({error}); build it as it was"
            ) from error
    return has_loaded


def as_begun(present: Mapping[str, Any], begin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states to repeat an epoch: the parts at its beginning, with the present random streams."""
    entries = {}
    for place, state in present.items():
        entries[place] = begin.get(place, state) if _is_part(place) else state
    return entries


def is_exhausted(parts: LoaderParts) -> bool | None:
    """Return whether a sampler, or a stream, with a state is at its end; None if no part has a state."""
    loader = parts.loader
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        iterable: Any = dataset
        owners = [] if getattr(loader, "num_workers", 0) else [dataset]  # Workers have copies, which cannot be read.
    else:
        batch_sampler = getattr(loader, "batch_sampler", None)
        iterable = getattr(loader, "sampler", None) if batch_sampler is None else batch_sampler
        owners = [*parts.samplers.values()]
    if not any(map(is_stateful, owners)):
        return None
    end = object()
    return next(iter(iterable), end) is end


@contextlib.contextmanager
def preserve_streams(loader: Any) -> Iterator[None]:
    """Restore the random streams in the parts of a loader when the block ends, as training may share them."""
    states = [(owner, _read(owner)) for owner in streams_of(loader)]
    try:
        yield
    finally:
        for owner, state in states:
            _write(owner, state)
        ids_before = {id(owner) for owner, _ in states}
        for owner in streams_of(loader):
            if id(owner) not in ids_before:
                _seed_again(owner)


def _owners(parts: LoaderParts) -> Iterator[tuple[str, Any]]:
    """Yield every part with a ``state_dict``, and every random stream in other parts, with its place."""
    loader = parts.loader
    collate = parts.collate
    objects = {**parts.samplers, **_chain_of(getattr(loader, "dataset", None))}
    part_ids = {id(part) for part in (*objects.values(), getattr(loader, "_iterator", None))}
    objects["collate_fn"] = getattr(collate, "__self__", collate)
    if hasattr(loader, "__dict__") and type(loader) is not DataLoader and not is_stateful(loader):
        objects["loader"] = loader  # A class of the user.
    visited = {id(generator) for generator in parts.generators}
    for place, function in _functions_of(parts):
        for variable, value in names_read_by(function).items():
            if isinstance(value, STREAMS) and id(value) not in visited:
                visited.add(id(value))
                yield f"{place}.{variable}", value
    for place, owner in objects.items():
        if id(owner) in visited:
            continue
        # The object of a bound method as collate_fn may be the trainer, and is only searched.
        if _is_part(place) and is_stateful(owner) and (place != "collate_fn" or owner is collate):
            visited.add(id(owner))
            yield place, owner
        else:
            yield from search(owner, place, STREAMS, closed=_CLOSED, visited=visited, apart=part_ids - {id(owner)})


def _chain_of(dataset: Any) -> dict[str, Any]:
    """Return a dataset and those in one another, by their places, also where they are of no class of torch."""
    chain: dict[str, Any] = {}
    while dataset is not None and len(chain) < _DEPTH:
        chain["dataset" + ".dataset" * len(chain)] = dataset
        dataset = getattr(dataset, "dataset", None)
    return chain


def _functions_of(parts: LoaderParts) -> list[tuple[str, Any]]:
    """List the functions of the user that a loader calls for its samples, by their places."""
    is_function = isinstance(parts.collate, (*_FUNCTIONS, functools.partial))
    functions = [("collate_fn", parts.collate)] if is_function else []
    for place, part in parts.by_place.items():
        if is_stateful(part):  # Its state is what it says.
            continue
        for klass in type(part).__mro__:
            if klass.__module__.partition(".")[0] not in _LIBRARIES:
                functions += [(place, vars(klass)[method]) for method in _READS if method in vars(klass)]
        functions += [(place, item) for item in getattr(part, "__dict__", {}).values() if isinstance(item, _FUNCTIONS)]
    return functions


def streams_of(loader: Any) -> list[Any]:
    """List the random streams in the parts of a loader, and the streams that its functions read."""
    return [owner for _, owner in _owners(LoaderParts(loader)) if isinstance(owner, STREAMS)]


def _seed_again(stream: Any) -> None:
    """Reset a stream that was created in the block, for example at the first use of a `collate_fn`, to its seed."""
    if isinstance(stream, torch.Generator):
        stream.manual_seed(stream.initial_seed())
    elif isinstance(stream, np.random.Generator):
        bits: Any = stream.bit_generator
        with contextlib.suppress(AttributeError, TypeError):  # It was created from a state, without a seed.
            _write(stream, type(bits)(bits.seed_seq).state)


def _is_part(place: str) -> bool:
    """Return whether a place is a part itself, not a stream in it."""
    return place in ("sampler", "batch_sampler", "collate_fn") or set(place.split(".")) == {"dataset"}


@functools.cache
def _warn_of_absent(place: str) -> None:
    """Warn, once in a process, that a saved random stream does not exist; it may be created when it is used."""
    _log.warning(
        "the checkpoint contains the random stream %s of the loader, which does not exist now: what it draws is not "
        "exact; create it in __init__ of its object",
        place,
    )


def _read(owner: Any) -> Any:
    """Return the state of a random stream, or of a part with a ``state_dict``."""
    return random_state.read_stream(owner) if isinstance(owner, STREAMS) else owner.state_dict()


def _write(owner: Any, state: Any) -> None:
    """Set a random stream, or a part with a ``state_dict``, to a state that `_read` returned."""
    if isinstance(owner, STREAMS):
        random_state.write_stream(owner, state)
    else:
        owner.load_state_dict(state)
