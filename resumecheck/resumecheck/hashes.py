"""Hash tensors on their device, and random streams without a draw.

Two distributions have this file, ``resumecheck/hashes.py`` and ``zae/values/hashes.py``, so that neither needs the
other; a test compares them. It runs in processes that train, and takes the torch that is imported there.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["digest", "fingerprint", "fingerprints", "ordered_sum", "random_streams", "read"]

_WORDS = 1 << 16  # 64-bit words that are hashed at once: half a megabyte, which stays in the cache.
_keys: dict[Any, Any] = {}


def digest(value: Any) -> str:
    """Return sixteen digits for a value, by its text."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def fingerprint(tensors: Iterable[Any]) -> str:
    """Return sixteen digits for some tensors: their types, their shapes, and each word in its place."""
    parts = [part for tensor in tensors for part in _dense_parts(tensor)]
    small: dict[Any, list[Any]] = {}  # Hashed with one call for each device.
    sums = []
    for part in parts:
        if part.numel() * part.element_size() < _WORDS:
            small.setdefault(part.device, []).append(_bytes(part))
        else:
            sums.append(_sum_of_part(part))
    sums += [_sum_of_part(sys.modules["torch"].cat(chunks)) for chunks in small.values()]
    return digest(([(str(part.dtype), tuple(part.shape)) for part in parts], read(sums)))


def fingerprints(tensors: Iterable[Any]) -> list[int]:
    """Return a number for each tensor: the sum of its words, each by its place."""
    return [int(number) for number in read([ordered_sum(tensor) for tensor in tensors])]


def ordered_sum(tensor: Any) -> Any:
    """Sum the 64-bit words of a tensor on its device, each times an odd random number of its place; 0 if it is empty.

    A change of one word always changes the sum, any other change with a probability of about 1 - 2**-63 (multiply-shift
    hashing: Dietzfelbinger et al. 1997, "A reliable randomized algorithm for the closest-pair problem").
    """
    total: Any = 0
    for part in _dense_parts(tensor):
        total = total * 1000003 + _sum_of_part(part)
    return total


def _dense_parts(tensor: Any) -> Sequence[Any]:
    """Return the dense tensors of one: the parts of a nested one, places and values of a sparse one, or itself."""
    torch, data = sys.modules["torch"], tensor.detach().resolve_conj().resolve_neg()
    if hasattr(data, "to_local"):
        data = data.to_local()
    if data.is_nested:
        return list(data.unbind())
    if data.layout is torch.sparse_coo:
        data = data.coalesce()
        return [data.indices(), *_dense_parts(data.values())]
    if data.layout is not torch.strided:
        data = data.to_dense()
    return [torch.view_as_real(data) if data.is_complex() else data]


def _sum_of_part(part: Any) -> Any:
    torch, data = sys.modules["torch"], _bytes(part)
    if not data.numel():
        return 0
    rest = data.numel() % 8
    if rest or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(8 - rest if rest else 0)])
    words, key, total = data.view(torch.int64), _key(data.device), 0
    for start in range(0, words.numel(), _WORDS):
        block = words[start : start + _WORDS]
        here = key[: block.numel()]
        # Outside of the CPU, dot does not support integers.
        total = total * 1000003 + (torch.dot(block, here) if block.is_cpu else (block * here).sum())
    return total


def _bytes(part: Any) -> Any:
    # With a new last dimension, since one element may have any stride.
    return part.contiguous().unsqueeze(-1).view(sys.modules["torch"].uint8).reshape(-1)


def _key(device: Any) -> Any:
    """Return odd random numbers, the same in all processes, from a generator of their own."""
    if device not in _keys:
        torch = sys.modules["torch"]
        drawn = torch.empty(_WORDS, dtype=torch.int64, device="cpu")
        drawn.random_(generator=torch.Generator().manual_seed(2718))
        _keys[device] = (drawn * 2 + 1).to(device)
    return _keys[device]


def read(values: Sequence[Any]) -> list[Any]:
    """Return numbers in place of tensors of one element, read with one wait for each device."""
    torch, numbers = sys.modules["torch"], list(values)
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            groups.setdefault((value.device, value.dtype), []).append(index)
    for places in groups.values():
        for index, number in zip(places, torch.stack([values[index] for index in places]).tolist()):
            numbers[index] = number
    return numbers


def random_streams() -> dict[str, str]:
    """Hash each random stream of this process, without a draw."""
    torch = sys.modules["torch"]
    _, words, gauss = random.getstate()  # The hash of integers does not depend on the process.
    states = {"torch": torch.get_rng_state().numpy().tobytes(), "python": repr((hash(words), gauss)).encode()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        _, words, *rest = numpy.random.get_state()
        states["numpy"] = words.tobytes() + repr(rest).encode()
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        states["cuda"] = b"".join(torch.cuda.get_rng_state(index).numpy().tobytes() for index in devices)
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}
