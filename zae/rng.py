"""The random streams of the process: seed them, capture and restore them, and keep others from drawing from them.

A process has a stream in ``random``, one in ``numpy.random``, one in torch for the CPU and one for each accelerator.
A loader may draw from generators of its own beside them.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zae.errors import CheckpointMismatch, ConfigError

__all__ = [
    "capture",
    "capture_generators",
    "generators_of",
    "isolated",
    "restore",
    "restore_generators",
    "seed_everything",
]

_WORDS = 624  # of the Mersenne Twister, which is behind random, numpy.random and torch's CPU stream alike
_NUMPY_KEYS = ("key", "pos", "has_gauss", "cached_gaussian")


class _Streams(NamedTuple):
    """The states as the libraries themselves give and take them."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor
    cuda: list[torch.Tensor] | None  # None: CUDA was not in use
    mps: torch.Tensor | None


def seed_everything(seed: int) -> None:
    """Seed ``random``, ``numpy.random`` and torch on every device.

    Parameters
    ----------
    seed : int
        From 0 to ``2**64 - 1``. numpy takes 32 bits: it gets ``seed % 2**32``.

    Raises
    ------
    ConfigError
        If the seed is not such an int.

    Examples
    --------
    >>> import torch
    >>> seed_everything(7)
    >>> first = torch.rand(3)
    >>> seed_everything(7)
    >>> torch.equal(torch.rand(3), first)
    True
    """
    if not _is_whole(seed) or not 0 <= seed < 2**64:
        raise ConfigError(
            f"seed_everything(seed=...) must be an int from 0 to 2**64 - 1, found {seed!r}; write seed_everything(0)"
        )
    number = int(seed)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def capture() -> dict[str, Any]:
    """Return the state of every random stream of the process, as tensors and JSON values only.

    Returns
    -------
    dict[str, Any]
        ``"torch"``: uint8 tensor, the CPU's. ``"numpy"``: dict of ``key`` (int64 tensor of shape (624,)), ``pos``,
        ``has_gauss`` and ``cached_gaussian``. ``"python"``: what ``random.getstate()`` gives, in lists.
        ``"cuda"``: list of uint8 tensors, one for each visible device, only if CUDA is in use.
        ``"mps"``: uint8 tensor, only where there is MPS.

    Raises
    ------
    ConfigError
        If ``numpy.random`` was given another generator than its own MT19937.

    Examples
    --------
    >>> import random
    >>> state = capture()
    >>> first = random.random()
    >>> restore(state)
    >>> random.random() == first
    True
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
    if streams.cuda is not None:
        state["cuda"] = streams.cuda
    if streams.mps is not None:
        state["mps"] = streams.mps
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put every random stream where it was when ``state`` was captured, whatever was drawn or seeded since.

    Parameters
    ----------
    state : Mapping[str, Any]
        What :func:`capture` returned, also after a round trip through tensors and JSON on disk.

    Raises
    ------
    CheckpointMismatch
        If a part is absent, unknown, damaged or of another machine. No stream has changed then.
    ConfigError
        If ``numpy.random`` was given another generator than its own MT19937.

    Examples
    --------
    >>> import torch
    >>> state = capture()
    >>> first = torch.rand(2)
    >>> torch.manual_seed(123456) is torch.default_generator
    True
    >>> restore(state)
    >>> torch.equal(torch.rand(2), first)
    True
    """
    streams = _checked(state)
    _numpy_now()  # refuses a generator that the state would not fit
    _write(streams)


@contextlib.contextmanager
def isolated(*generators: torch.Generator) -> Iterator[None]:
    """Let what runs inside draw random numbers without moving a stream of the process.

    Inside, the streams go on from where they are; on exit, by an exception too, they are back where they were.

    Parameters
    ----------
    *generators : torch.Generator
        Further generators to protect, such as those of :func:`generators_of`.

    Yields
    ------
    None

    Raises
    ------
    ConfigError
        On entry, if one of ``generators`` is something else.

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
        if streams.cuda is None and _cuda_in_use():
            _rewind_cuda()
        for generator, saved in zip(generators, states, strict=True):
            generator.set_state(saved)


def generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators of its own that a loader draws from, each once.

    Parameters
    ----------
    loader : object
        A ``DataLoader``, or any other object: one without generators has an empty list.

    Returns
    -------
    list[torch.Generator]
        Those of the loader, its sampler, its batch sampler's sampler and its batch sampler, in this order, and of a
        sampler within its sampler.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader
    >>> generator = torch.Generator()
    >>> generators_of(DataLoader([1, 2, 3], shuffle=True, generator=generator)) == [generator]
    True
    >>> generators_of([1, 2, 3])
    []
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None)
    # With batch_size=None the sampler may itself be a BatchSampler around another one.
    inner = getattr(sampler, "sampler", None)
    owners = (loader, sampler, getattr(batch_sampler, "sampler", None), batch_sampler, inner)
    found: dict[int, torch.Generator] = {}
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
    return list(found.values())


def capture_generators(loader: object) -> list[torch.Tensor]:
    """Return the states of a loader's own generators.

    Parameters
    ----------
    loader : object
        See :func:`generators_of`.

    Returns
    -------
    list[torch.Tensor]
        One uint8 tensor for each generator, in the order of :func:`generators_of`.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(8), shuffle=True, generator=torch.Generator().manual_seed(1))
    >>> states = capture_generators(loader)
    >>> first = [int(x) for x in loader]
    >>> restore_generators(loader, states)
    >>> [int(x) for x in loader] == first
    True
    """
    return [generator.get_state() for generator in generators_of(loader)]


def restore_generators(loader: object, states: Sequence[torch.Tensor]) -> None:
    """Put a loader's own generators where they were.

    Parameters
    ----------
    loader : object
        A loader built like the one whose states were captured.
    states : Sequence[torch.Tensor]
        What :func:`capture_generators` returned.

    Raises
    ------
    CheckpointMismatch
        If the loader has another number of generators, or a state is not one. No generator has changed then.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(range(8), shuffle=True, generator=torch.Generator().manual_seed(1))
    >>> resumed = DataLoader(range(8), shuffle=True, generator=torch.Generator())
    >>> restore_generators(resumed, capture_generators(loader))
    >>> [int(x) for x in resumed] == [int(x) for x in loader]
    True
    """
    generators = generators_of(loader)
    if len(states) != len(generators):
        raise CheckpointMismatch(
            f"the checkpoint holds the states of {len(states)} loader generator{'' if len(states) == 1 else 's'}, "
            f"this loader has {len(generators)}; build the loader as it was, "
            f"for example DataLoader(..., generator=torch.Generator().manual_seed(0))"
        )
    checked = [
        _generator_state(saved, generator.device, f"loader generator {index}")
        for index, (saved, generator) in enumerate(zip(states, generators, strict=True))
    ]
    for generator, saved in zip(generators, checked, strict=True):
        generator.set_state(saved)


def _is_whole(value: object) -> bool:
    """Tell whether a value is a whole number, numpy's included; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _cuda_in_use() -> bool:
    """Tell whether this process has begun to use CUDA, without beginning it."""
    initialized: Callable[[], bool] = torch.cuda.is_initialized  # torch leaves it unannotated
    return initialized()


def _read() -> _Streams:
    """Return the present state of every stream."""
    return _Streams(
        python=random.getstate(),
        numpy=_numpy_now(),
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state_all() if _cuda_in_use() else None,
        mps=torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    )


def _numpy_now() -> dict[str, Any]:
    """Return the present state of ``numpy.random``, as a dict with the arrays in it."""
    state = dict(np.random.get_state(legacy=False))
    kind = state["bit_generator"]
    if kind != "MT19937":
        raise ConfigError(
            f"numpy.random draws from {kind}, and only its own MT19937 can be captured and restored; "
            f"leave out numpy.random.set_bit_generator, or draw from a numpy.random.Generator({kind}()) beside it"
        )
    return state


def _write(streams: _Streams) -> None:
    """Set every stream to a state that is known to be good."""
    random.setstate(streams.python)
    np.random.set_state(streams.numpy)
    torch.set_rng_state(streams.torch)
    if streams.cuda is not None:
        torch.cuda.set_rng_state_all(streams.cuda)
    if streams.mps is not None:
        torch.mps.set_rng_state(streams.mps)


def _rewind_cuda() -> None:
    """Put streams that did not exist on entry to where they begin: at their seed, with nothing drawn."""
    for generator in torch.cuda.default_generators:
        generator.manual_seed(generator.initial_seed())


def _checked(state: object) -> _Streams:
    """Return the streams of a captured state; every part is tried on a stream that nobody uses."""
    if not isinstance(state, Mapping):
        raise _unfit("as a whole", f"is a {type(state).__name__}, not a dict")
    for part in ("torch", "numpy", "python"):
        if part not in state:
            raise _unfit(repr(part), f"is absent, found {sorted(map(str, state))}")
    unknown = sorted(str(part) for part in state if part not in ("torch", "numpy", "python", "cuda", "mps"))
    if unknown:
        raise _unfit(repr(unknown[0]), "is none that zae knows")
    return _Streams(
        python=_python_state(state["python"]),
        numpy=_numpy_state(state["numpy"]),
        torch=_generator_state(state["torch"], torch.device("cpu"), "'torch'"),
        cuda=_cuda_states(state["cuda"]) if "cuda" in state else None,
        mps=_mps_state(state["mps"]) if "mps" in state else None,
    )


def _unfit(part: str, found: str) -> CheckpointMismatch:
    """Return the error for a part of a state that cannot be restored."""
    return CheckpointMismatch(
        f"the saved random state {part} {found}; restore a state that zae.rng.capture() gave on a machine like this one"
    )


def _try(part: str, setter: Callable[..., object], *args: object) -> None:
    """Call a spare stream's setter, and name the part where it refuses."""
    try:
        setter(*args)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise _unfit(part, f"is not one: {error}") from error


def _python_state(value: object) -> tuple[Any, ...]:
    """Return the state of ``random``."""
    # Lists after JSON, tuples from random.getstate() itself.
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not isinstance(value[1], (list, tuple)):
        raise _unfit("'python'", "is not a list of version, words and the next normal number")
    version, words, gauss_next = value
    if not all(type(word) is int for word in words) or not (gauss_next is None or isinstance(gauss_next, float)):
        raise _unfit("'python'", "has words that are not ints, or a next normal number that is not a float")
    state = (version, tuple(words), gauss_next)
    _try("'python'", random.Random(0).setstate, state)
    return state


def _numpy_state(value: object) -> dict[str, Any]:
    """Return the state of ``numpy.random``."""
    if not isinstance(value, Mapping) or set(value) != set(_NUMPY_KEYS):
        raise _unfit("'numpy'", f"is not a dict of {', '.join(_NUMPY_KEYS)}")
    key, pos, has_gauss, cached = (value[name] for name in _NUMPY_KEYS)
    if not isinstance(key, torch.Tensor) or key.shape != (_WORDS,) or key.dtype != torch.int64:
        shape = f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else type(key).__name__
        raise _unfit("'numpy'", f"has for its key {shape}, expected torch.int64 of shape ({_WORDS},)")
    words = key.cpu().numpy()
    if words.min() < 0 or words.max() >= 2**32:
        raise _unfit("'numpy'", "has in its key a number that does not fit 32 bits")
    # numpy takes a position outside of the key without a word, and reads beyond it later.
    if type(pos) is not int or not 0 <= pos <= _WORDS:
        raise _unfit("'numpy'", f"has pos={pos!r}, expected an int from 0 to {_WORDS}")
    if has_gauss not in (0, 1) or not isinstance(cached, float) or not math.isfinite(cached):
        raise _unfit(
            "'numpy'", f"has has_gauss={has_gauss!r} and cached_gaussian={cached!r}, expected 0 or 1 and a float"
        )
    twister = {"key": words.astype(np.uint32), "pos": pos}
    state = {"bit_generator": "MT19937", "state": twister, "has_gauss": int(has_gauss), "gauss": cached}
    _try("'numpy'", np.random.RandomState(0).set_state, state)
    return state


def _generator_state(value: object, device: torch.device, part: str) -> torch.Tensor:
    """Return the state of a torch generator on a device."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        found = (
            f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        )
        raise _unfit(part, f"is {found}, expected a torch.uint8 tensor of one dimension")
    saved = value.cpu().contiguous()
    _try(part, torch.Generator(device=device).set_state, saved)
    return saved


def _cuda_states(value: object) -> list[torch.Tensor]:
    """Return the states of all CUDA devices."""
    if not isinstance(value, (list, tuple)):
        raise _unfit("'cuda'", f"is a {type(value).__name__}, not a list of tensors")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(value) != count:
        raise _unfit("'cuda'", f"is of {len(value)} CUDA devices, and {count} are visible here")
    return [
        _generator_state(saved, torch.device("cuda", index), f"'cuda' (device {index})")
        for index, saved in enumerate(value)
    ]


def _mps_state(value: object) -> torch.Tensor:
    """Return the state of the MPS device."""
    if not torch.backends.mps.is_available():
        raise _unfit("'mps'", "is of an Apple GPU, and there is none here")
    return _generator_state(value, torch.device("mps"), "'mps'")
