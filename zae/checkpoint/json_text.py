"""The text of JSON in checkpoints: written within limits, and read strictly, as somebody else may have written it."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zae.checkpoint.hashed_files import read_whole
from zae.errors import CheckpointDamaged, CheckpointError

__all__ = ["DEPTH_LIMIT", "STATE_LIMIT", "json_text", "read_json", "strict_json", "without_collector"]

DEPTH_LIMIT = 200
"""The deepest nesting of brackets in a text that is written or read."""

STATE_LIMIT = 256 << 20
"""The largest state.json that is written, and the largest file of JSON beside the manifest that is read, in bytes."""


def json_text(directory: Path, structure: Any) -> bytes:
    """Return the text of state.json for an encoded state, or that of shards.json."""
    text = json.dumps(structure, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > STATE_LIMIT:
        raise CheckpointError(
            f"{directory}: the state takes {len(text)} bytes as JSON, the limit is {STATE_LIMIT}; "
            "keep long lists of numbers as tensors or numpy arrays"
        )
    return text


def strict_json(data: bytes, where: str) -> Any:
    """Parse JSON from the file `where`, in time and depth that its author cannot raise.

    Raise CheckpointDamaged if it is not JSON, nested deeper than `DEPTH_LIMIT`, has one key twice in an object, a NaN,
    an infinity, or an integer with more digits than Python reads. Whoever reads the file limits its size.
    """
    try:
        with without_collector():
            content = json.loads(
                data.decode("utf-8"),
                object_pairs_hook=_unique,
                parse_constant=_refuse_constant,
                parse_float=_finite,
            )
            _refuse_depth(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: not JSON as zae writes it ({str(error)[:200]}).") from None
    return content


def read_json(path: Path, entry: Mapping[str, Any]) -> Any:
    """Read a file of JSON that has an entry in a manifest, and verify it."""
    return strict_json(read_whole(path, size=entry["size"], sha256=entry["sha256"]), str(path))


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


def _refuse_depth(content: Any) -> None:
    """Refuse a value that is nested too deep; the parser itself stops at Python's limit for recursion."""
    level = [content]
    for _ in range(DEPTH_LIMIT):
        inside = [node.values() if type(node) is dict else node for node in level if type(node) in (dict, list)]
        level = [value for values in inside for value in values if type(value) in (dict, list)]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that occurs twice: two readers could choose differently."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return entries


def _refuse_constant(text: str) -> Any:
    """Refuse NaN and Infinity, which Python reads and JSON lacks."""
    raise ValueError(f"{text} is not a number in JSON")


def _finite(text: str) -> float:
    """Return a float, checked not to be too large for one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is beyond a float")
    return number
