"""Hash tensors on their device."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zae.common import random_state as rng
from zae.common.torch_private import sparse_parts
from zae.common.walk import local_part

__all__ = ["fingerprint", "fingerprints", "random_state"]

_WORDS = 1 << 16  # 64-bit words that are hashed at once: half a megabyte, which stays in the cache.
_keys: dict[torch.device, Tensor] = {}


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Hash tensors on their device: a sum of their 64-bit words, each multiplied by another odd random number.

    A change of one word always changes the sum, any other change with a probability of about 1 - 2**-63 (multiply-shift
    hashing: Dietzfelbinger et al. 1997, "A reliable randomized algorithm for the closest-pair problem"). Only the sums
    are copied to the host, at once.
    """
    shapes: list[Any] = []
    small: dict[torch.device, list[Tensor]] = {}  # Bytes that are hashed together.
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        for part in _parts(local_part(tensor).detach()):
            shapes.append((str(part.dtype), tuple(part.shape)))
            data = _bytes(part) if part.numel() else None
            if data is not None and data.numel() < _WORDS:
                small.setdefault(data.device, []).append(data)
            elif data is not None:
                sums.setdefault(data.device, []).extend(_sums(data))
    for device, each in small.items():
        sums.setdefault(device, []).extend(_sums(torch.cat(each)))
    found = [torch.stack(each).cpu().numpy().tobytes() for each in sums.values()]
    return hashlib.sha256(b"".join([repr(shapes).encode(), *found])).hexdigest()[:16]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Hash each tensor on its device in 64 bits, as `fingerprint` does, and copy all hashes to the host at once."""
    totals: list[Tensor] = []
    for tensor in tensors:
        parts: list[Tensor] = []
        for part in _parts(local_part(tensor).detach()):
            if part.numel():
                parts += _sums(_bytes(part))
        if not parts:
            totals.append(torch.zeros((), dtype=torch.int64))
            continue
        sums = torch.stack(parts)
        totals.append((sums * _key(sums.device)[: len(sums)]).sum() if len(sums) > 1 else sums[0])
    devices: dict[torch.device, list[int]] = {}
    for index, total in enumerate(totals):
        devices.setdefault(total.device, []).append(index)
    found = [0] * len(totals)
    for indices in devices.values():
        for index, value in zip(indices, torch.stack([totals[index] for index in indices]).tolist()):
            found[index] = value
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the dense tensors of a tensor that may be nested or sparse."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    return (tensor if tensor.layout is torch.strided else tensor.to_dense(),)


def _sums(data: Tensor) -> Iterator[Tensor]:
    """Yield the keyed sums of a tensor of bytes, one for each half megabyte."""
    left = data.numel() % 8
    if left or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(8 - left if left else 0)])
    words = data.view(torch.int64)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        key = _key(part.device)[: part.numel()]
        # Outside of the CPU, dot does not support integers.
        yield torch.dot(part, key) if part.is_cpu else (part * key).sum()


def _key(device: torch.device) -> Tensor:
    """Return odd random numbers, the same in all processes, drawn from a separate generator."""
    if device not in _keys:
        drawn = np.random.Generator(np.random.PCG64(2718)).integers(-(2**63), 2**63 - 1, _WORDS, dtype=np.int64)
        _keys[device] = torch.from_numpy(drawn | 1).to(device)
    return _keys[device]


def random_state() -> str:
    """Hash the random streams of the process, without drawing from them."""
    state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    numbers: Any = np.random.get_state()
    state.update(numbers[1].tobytes())
    _, words, gauss = random.getstate()
    # The hash of integers does not depend on the process.
    state.update(repr((numbers[2:], hash(words), gauss)).encode())
    for states in rng.of_devices().values():
        for each in states:
            state.update(each.numpy().tobytes())
    return state.hexdigest()
