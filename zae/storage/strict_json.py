"""Parse JSON from an untrusted author: RFC 8259 and nothing else."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zae.errors import CheckpointDamaged

__all__ = ["DEPTH_LIMIT", "strict_json", "without_collector"]

DEPTH_LIMIT = 200
"""The deepest nesting of brackets in a text that is read."""

_STEP = np.zeros(256, np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1


def strict_json(data: bytes, where: str, *, spaces: int | None = None) -> Any:
    """Parse JSON from the file `where`, in time and depth that its author cannot raise.

    Raise CheckpointDamaged if it is not JSON, nested deeper than `DEPTH_LIMIT`, has one key twice in an object, a NaN,
    an infinity or an integer beyond 64 bits, or more white space than `spaces` bytes beside one for each other byte.
    """
    try:
        if spaces is not None:
            _refuse_spaces(data, spaces)
        _refuse_depth(data)
        with without_collector():
            return json.loads(
                data.decode("utf-8"),
                object_pairs_hook=_unique,
                parse_constant=_refuse_constant,
                parse_int=_small_int,
                parse_float=_finite,
            )
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: not JSON as zae writes it ({str(error)[:200]}).") from None


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the garbage collector, which would search half a million new lists again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refuse_spaces(data: bytes, limit: int) -> None:
    """Refuse a text that is mostly white space, whose size is not a measure of its content."""
    count = sum(data.count(space) for space in (b" ", b"\n", b"\t", b"\r"))
    if count > limit + len(data) // 2:
        raise ValueError(f"{count} of its {len(data)} bytes are white space")


def _refuse_depth(data: bytes) -> None:
    """Refuse deep nesting before the parser recurses into it, in one pass over the bytes."""
    # Without escapes every quotation mark opens or closes a text. A backslash outside of a text is not JSON, and the
    # parser stops there: what this pass takes for brackets after it is never reached.
    marks = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    inside, depth = 0, 0
    for start in range(0, len(marks), 1 << 20):
        part = marks[start : start + (1 << 20)]
        quotes = np.cumsum(part == ord('"'), dtype=np.int32) + inside
        depths = np.cumsum(np.where(quotes & 1, 0, _STEP[part]), dtype=np.int32) + depth
        if depths.max() > DEPTH_LIMIT:
            raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")
        inside, depth = int(quotes[-1]) & 1, int(depths[-1])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that occurs twice: two readers could choose differently."""
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return made


def _refuse_constant(text: str) -> Any:
    """Refuse NaN and Infinity, which Python reads and JSON lacks."""
    raise ValueError(f"{text} is not a number in JSON")


def _small_int(text: str) -> int:
    """Return an integer of at most 64 bits; Python takes time with the square of the digits."""
    number = int(text) if len(text) <= 20 else 2**63
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"the integer {text[:20]}... is beyond 64 bits")
    return number


def _finite(text: str) -> float:
    """Return a float, checked not to be too large for one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is beyond a float")
    return number
