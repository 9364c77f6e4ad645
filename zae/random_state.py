"""Seed, capture and restore the random streams of the process, or isolate code that draws from them.

A process has a stream in ``random``, one in ``numpy.random``, one in torch for the CPU and one for each accelerator.
A loader may have its own generators.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zae.arguments import Seed, checked
from zae.errors import CheckpointMismatch, ConfigError
from zae.torch_private import accelerator, count_devices

__all__ = [
    "HOST",
    "SPREAD",
    "STREAMS",
    "capture",
    "capture_generators",
    "comparable",
    "draw_as_rank",
    "generators_of",
    "isolated",
    "of_devices",
    "of_rank",
    "read_stream",
    "restore",
    "restore_generators",
    "rewind",
    "seed_everything",
    "seeded",
    "write_stream",
]

_log = logging.getLogger("zae")

HOST = ("torch", "numpy", "python")
"""The parts of a state that every process has; the others are accelerators, by kind."""

SPREAD = 0x9E3779B97F4A7C15
"""What lies between the seeds of two ranks: 2**64 by the golden ratio (Steele et al. 2014, SplitMix)."""

STREAMS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""The kinds of random stream that are objects."""

_WORDS = 624  # Of the Mersenne Twister, which random, numpy.random and torch on the CPU use.


class _Streams(NamedTuple):
    """States in the formats of the libraries."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor
    devices: dict[str, list[torch.Tensor]]  # One for each device of each kind that is in use.


@checked
def seed_everything(seed: Seed) -> None:
    """Seed ``random``, ``numpy.random`` and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """Return the state of every random stream of the process, as tensors and JSON values only.

    The states of the devices of a kind begin with that of the current one, which may have another index where they are
    restored.
    """
    streams = _read()
    twister = streams.numpy["state"]
    version, words, gauss_next = streams.python
    state: dict[str, Any] = {
        "torch": streams.torch,
        "numpy": {
            "key": torch.from_numpy(twister["key"].astype(np.int64)),
            "pos": int(twister["pos"]),
            "has_gauss": int(streams.numpy["has_gauss"]),
            "cached_gaussian": float(streams.numpy["gauss"]),
        },
        "python": [version, list(words), gauss_next],
    }
    for kind, states in streams.devices.items():
        state[kind] = states[0] if kind == "mps" else [states[index] for index in _current_first(kind, len(states))]
    return state


def comparable() -> tuple[bytes, bytes, str]:
    """Return the states of the random streams of the host in a form that can be compared."""
    state = capture()
    return (
        state["torch"].numpy().tobytes(),
        state["numpy"]["key"].numpy().tobytes(),
        str((state["python"], state["numpy"]["pos"], state["numpy"]["has_gauss"])),
    )


def restore(state: Mapping[str, Any]) -> None:
    """Restore every random stream or, on an error, none.

    The first state of a kind is given to its current device. States without a device here are skipped; where there is
    none at all, with a warning.
    """
    before = _read()
    try:
        if not isinstance(state, Mapping):
            raise _unfit("as a whole", f"is a {type(state).__name__}, not a dict")
        for part in dict.fromkeys([*HOST, *state]):
            with _refusing(repr(part)):
                _restore_part(part, state[part])
    except CheckpointMismatch:
        _write(before)
        raise


def rewind() -> Callable[[], None]:
    """Return a function that puts every random stream back to where it is now."""
    return functools.partial(_write, _read())


def of_rank(rank: int, state: dict[str, Any]) -> dict[str, Any]:
    """Return the random streams of a rank: rank 0 has the given ones, other ranks derive their own."""
    if rank == 0:
        return state
    with isolated():
        restore(state)
        draw_as_rank(rank)
        return capture()


def draw_as_rank(rank: int) -> None:
    """Let a process that has the random streams of rank 0 draw as another rank, on every device."""
    if rank:
        # Far from the number that is drawn: the loader of rank 0 may draw it too, and seeds its workers with the next.
        seed_everything(int(torch.randint(2**62, ())) + SPREAD * rank & (1 << 63) - 1)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed the random streams for the block, and restore them when it ends; None leaves them as they are."""
    if seed is None:
        yield
        return
    with isolated():
        seed_everything(seed)
        yield


@contextlib.contextmanager
def isolated(*generators: torch.Generator) -> Iterator[None]:
    """Restore the random streams of the process when the block ends, by an exception too.

    Parameters
    ----------
    *generators : torch.Generator
        Further generators to restore, such as those of :func:`generators_of`.

    Raises
    ------
    ConfigError
        If one of ``generators`` is something else.

    Examples
    --------
    >>> import torch
    >>> seed_everything(0)
    >>> expected = torch.rand(1)
    >>> seed_everything(0)
    >>> with isolated():
    ...     noise = torch.rand(100)
    >>> torch.equal(torch.rand(1), expected)
    True
    """
    for generator in generators:
        if not isinstance(generator, torch.Generator):
            raise ConfigError(
                f"isolated(...) takes torch.Generator objects, found {type(generator).__name__}; "
                f"write isolated(*generators_of(loader))"
            )
    streams = _read()
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        _write(streams)
        for kind in _kinds_in_use():
            if kind not in streams.devices:
                _rewind(kind)
        for generator, saved in zip(generators, states, strict=True):
            generator.set_state(saved)


def read_stream(stream: Any) -> Any:
    """Return the state of a random stream that is an object."""
    if isinstance(stream, np.random.Generator):
        return stream.bit_generator.state
    if isinstance(stream, np.random.RandomState):
        return stream.get_state(legacy=False)
    return stream.getstate() if isinstance(stream, random.Random) else stream.get_state()


def write_stream(stream: Any, state: Any) -> None:
    """Set a random stream to a state that `read_stream` returned."""
    if isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    else:
        stream.set_state(state)


def generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators of a loader, its sampler, its batch sampler and the samplers in them, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None)
    # With batch_size=None the sampler may be a BatchSampler around another one.
    inner = getattr(sampler, "sampler", None)
    owners = (loader, sampler, getattr(batch_sampler, "sampler", None), batch_sampler, inner)
    generators: dict[int, torch.Generator] = {}
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generators.setdefault(id(generator), generator)
    return list(generators.values())


def capture_generators(loader: object) -> list[torch.Tensor]:
    """Return the states of the generators of a loader, in the order of :func:`generators_of`."""
    return [generator.get_state() for generator in generators_of(loader)]


def restore_generators(loader: object, states: Sequence[torch.Tensor]) -> None:
    """Restore the generators of a loader to what :func:`capture_generators` returned."""
    generators = generators_of(loader)
    if len(states) != len(generators):
        raise CheckpointMismatch(
            f"the checkpoint holds the states of {len(states)} loader generator{'' if len(states) == 1 else 's'}, "
            f"this loader has {len(generators)}; build the loader as it was, "
            f"for example DataLoader(..., generator=torch.Generator().manual_seed(0))"
        )
    before = capture_generators(loader)
    try:
        for index, (saved, generator) in enumerate(zip(states, generators, strict=True)):
            with _refusing(f"loader generator {index}"):
                generator.set_state(saved.cpu())
    except CheckpointMismatch:
        for generator, present in zip(generators, before, strict=True):
            generator.set_state(present)
        raise


def of_devices() -> dict[str, list[torch.Tensor]]:
    """Return the states of the accelerators that this process uses, by kind, one uint8 tensor for each device."""
    return {kind: [_read_device(kind, index) for index in range(_devices(kind))] for kind in _kinds_in_use()}


def _kinds_in_use() -> list[str]:
    """List the kinds of accelerator that this process uses, without initializing one."""
    device = accelerator()
    kinds: dict[str, None] = dict.fromkeys(["cuda", "mps", *([] if device is None else [device.type])])
    return [kind for kind in kinds if _devices(kind, begun=True)]


def _devices(kind: str, begun: bool = False) -> int:
    """Count the devices of a kind that have a stream; with ``begun``, only if the kind is in use."""
    return count_devices(kind, "get_rng_state", "set_rng_state", begun=begun)


def _current_first(kind: str, count: int) -> list[int]:
    """Return the indices of devices, that of the current one first."""
    current = 0 if kind == "mps" else int(getattr(torch, kind).current_device())
    return [current, *(index for index in range(count) if index != current)]


def _read_device(kind: str, index: int) -> torch.Tensor:
    module: Any = getattr(torch, kind)
    state: torch.Tensor = module.get_rng_state() if kind == "mps" else module.get_rng_state(index)
    return state


def _write_device(kind: str, index: int, state: torch.Tensor) -> None:
    module: Any = getattr(torch, kind)
    module.set_rng_state(state, *(() if kind == "mps" else (index,)))


def _read() -> _Streams:
    """Return the present state of every stream."""
    return _Streams(
        python=random.getstate(),
        numpy=_numpy_now(),
        torch=torch.get_rng_state(),
        devices=of_devices(),
    )


def _numpy_now() -> dict[str, Any]:
    """Return the present state of ``numpy.random``, with its arrays."""
    state = dict(np.random.get_state(legacy=False))
    kind = state["bit_generator"]
    if kind != "MT19937":
        raise ConfigError(
            f"numpy.random draws from {kind}, and only its own MT19937 can be captured and restored; "
            f"leave out numpy.random.set_bit_generator, or draw from a numpy.random.Generator({kind}()) beside it"
        )
    return state


def _write(streams: _Streams) -> None:
    """Set every stream to a state that was checked."""
    random.setstate(streams.python)
    np.random.set_state(streams.numpy)
    torch.set_rng_state(streams.torch)
    for kind, states in streams.devices.items():
        for index, state in enumerate(states):
            _write_device(kind, index, state)


def _rewind(kind: str) -> None:
    """Set streams that did not exist on entry to their seed."""
    for generator in getattr(getattr(torch, kind), "default_generators", ()):
        generator.manual_seed(generator.initial_seed())


def _unfit(part: str, problem: str) -> CheckpointMismatch:
    """Return the error for a part of a state that cannot be restored."""
    return CheckpointMismatch(
        f"the saved random state {part} {problem}; restore a state that zae.random_state.capture() "
        "returned on a machine like this one"
    )


@contextlib.contextmanager
def _refusing(part: str) -> Iterator[None]:
    """Raise CheckpointMismatch where a part of a state is not one."""
    try:
        yield
    except KeyError as error:
        raise _unfit(part, f"is absent, or has no {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise _unfit(part, f"is not a random state: {error}") from error


def _restore_part(part: str, value: Any) -> None:
    """Set one of the streams, or raise any error; it may then have been changed."""
    if part == "python":
        version, words, gauss_next = value  # Lists after JSON, tuples from random.getstate() itself.
        random.setstate((version, tuple(words), None if gauss_next is None else float(gauss_next)))
    elif part == "numpy":
        np.random.set_state(_numpy_state(**value))
    elif part == "torch":
        torch.set_rng_state(value.cpu())
    else:
        _restore_devices(part, [value] if isinstance(value, torch.Tensor) else list(value))


def _numpy_state(key: torch.Tensor, pos: int, has_gauss: int, cached_gaussian: float) -> dict[str, Any]:
    """Return the state of ``numpy.random``, which accepts a position outside of its key, and reads beyond it later."""
    words = key.cpu().numpy()
    is_key = words.shape == (_WORDS,) and words.min() >= 0 and words.max() < 2**32
    if not (
        is_key and type(pos) is int and 0 <= pos <= _WORDS and has_gauss in (0, 1) and math.isfinite(cached_gaussian)
    ):
        raise ValueError(f"a number is outside of its range (pos={pos!r}, has_gauss={has_gauss!r})")
    twister = {"key": words.astype(np.uint32), "pos": pos}
    return {"bit_generator": "MT19937", "state": twister, "has_gauss": has_gauss, "gauss": cached_gaussian}


def _restore_devices(kind: str, states: list[torch.Tensor]) -> None:
    """Set the streams of the devices of a kind that this machine has, the current one first."""
    present = _devices(kind)
    if not present:
        _warn_of_lost(kind)
        return
    for index, state in zip(_current_first(kind, present), states):
        _write_device(kind, index, state.cpu())


@functools.cache
def _warn_of_lost(kind: str) -> None:
    """Warn, once in a process, that the streams of a state have no device here."""
    _log.warning(
        "the saved random state is of a device of kind %s, and none is visible here: random numbers that the model "
        "draws on a device, for dropout for instance, differ from those of an uninterrupted run",
        kind,
    )
