"""The types of a state beside those of JSON: what stands for a value, and the value made of that again.

A structure may be hostile: whatever a function here gets to make a value of is checked.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zae.checkpoint.tensor_bytes import AXES_LIMIT

__all__ = ["KINDS", "NUMPY_KINDS", "PLAIN", "TAGS", "Malformed", "check_type", "dtype_named", "shape_of", "type_name"]

PLAIN = frozenset({type(None), bool, int, float, str})
"""The types of plain values: they are immutable, and JSON has them."""

NUMPY_KINDS = "biufcSUmM"
"""The kinds of numpy dtypes that are written: numbers, text and dates."""

_NUMPY_TEXT = re.compile(r"[<>|=](?:[biufcSU]\d{1,9}|[mM]8(?:\[\d*[A-Za-z]{1,2}\])?)")
_COLLISIONS = 64  # Keys of one hash in a dict: 34 powers of two have the same, as floats.


class Malformed(Exception):
    """A structure that `zae.checkpoint.encoding.encode` does not return; the text says how it differs."""


def type_name(value: object) -> str:
    """Return the name of a type, with its module unless it is built in."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_type(value: Any, kind: type) -> Any:
    """Return the value, checked to have exactly this type."""
    if type(value) is not kind:
        raise Malformed(f"contains a {type_name(value)}; expected a {kind.__name__}")
    return value


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape, checked to be a list of whole numbers from 0."""
    if len(_list(value)) > AXES_LIMIT or any(check_type(size, int) < 0 for size in value):
        raise Malformed(f"contains a shape with a negative size, or of more than {AXES_LIMIT} axes")
    return tuple(value)


def dtype_named(name: Any) -> torch.dtype:
    """Return the torch dtype of this name."""
    dtype = vars(torch).get(check_type(name, str))  # getattr could import a module
    if not isinstance(dtype, torch.dtype):
        raise Malformed(f"names the dtype {name!r:.80}, which torch {torch.__version__} lacks")
    return dtype


class Kind(NamedTuple):
    """A type beside those of JSON: what stands for a value, and the value made of that again."""

    type: type
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _list(parts: Any) -> list[Any]:
    """Return a list; anything else is refused, as an array that would become one of a hundred times its size."""
    return check_type(parts, list)


def _members(values: Any) -> list[Any]:
    """Return the members of a set in an order that does not depend on the hash seed."""
    return sorted(values, key=lambda each: (type(each).__name__, repr(each)))


def _deque(items: Any, maxlen: Any) -> deque[Any]:
    return deque(_list(items), maxlen)


def _dict(pairs: Any) -> dict[Any, Any]:
    """Return a dict made of [key, value] pairs with keys that differ."""
    _check_keys([key for key, _ in _list(pairs)])
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise Malformed("contains a dict with one key twice")
    return entries


def _check_keys(keys: list[Any]) -> list[Any]:
    """Return keys, checked to be plain and not to collide: a dict of those would take quadratic time."""
    waiting = [*_list(keys)]
    while waiting:
        key = waiting.pop()
        if type(key) is tuple:
            waiting += key
        elif type(key) not in PLAIN:
            raise Malformed(f"contains a key that is a {type_name(key)}")
    if len(keys) > _COLLISIONS and max(Counter(map(hash, keys)).values()) > _COLLISIONS:
        raise Malformed(f"contains a dict or set in which more than {_COLLISIONS} keys have one hash")
    return keys


def _array_parts(value: np.ndarray[Any, Any]) -> list[Any]:
    data = value.tobytes()
    copied = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return [copied, value.dtype.str, list(value.shape)]


def _array(data: Any, text: Any, shape: Any) -> np.ndarray[Any, Any]:
    """Return an array in the memory of a tensor of bytes; the dtype is checked as text before numpy sees it."""
    if not _NUMPY_TEXT.fullmatch(check_type(text, str)):
        raise Malformed(f"names the numpy dtype {text!r:.80}")
    dtype = np.dtype(text)
    sizes = shape_of(shape)
    if check_type(data, Tensor).dtype is not torch.uint8 or dtype.itemsize * math.prod(sizes) != data.numel():
        raise Malformed(f"contains {data.numel()} values for a numpy array of shape {sizes!s:.80} and dtype {text}")
    return np.ndarray(sizes, dtype, data.numpy() if data.numel() else b"")


def _scalar(parts: Any) -> Any:
    """Return a numpy scalar from its dtype, and its bytes as hexadecimal text."""
    text, data = _list(parts)
    return _array(torch.tensor([*bytes.fromhex(data)], dtype=torch.uint8), text, [])[()]


KINDS = {
    "$tuple": Kind(tuple, list, lambda parts: tuple(_list(parts))),
    "$deque": Kind(deque, lambda value: {"items": list(value), "maxlen": value.maxlen}, lambda parts: _deque(**parts)),
    "$set": Kind(set, _members, lambda parts: set(_check_keys(parts))),
    "$frozenset": Kind(frozenset, _members, lambda parts: frozenset(_check_keys(parts))),
    # The pairs of dicts are written by the encoder, which knows the path of each.
    "$dict": Kind(dict, dict, _dict),
    "$ordered": Kind(OrderedDict, dict, lambda parts: OrderedDict(_dict(parts))),
    "$counter": Kind(Counter, dict, lambda parts: Counter(_dict(parts))),  # MultiStepLR keeps one.
    "$float": Kind(float, str, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__),
    "$int": Kind(int, hex, lambda parts: int(parts, 16)),  # Beyond 64 bits: random streams have them.
    "$complex": Kind(complex, lambda value: [value.real, value.imag], lambda parts: complex(*_list(parts))),
    "$bytes": Kind(bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$array": Kind(np.ndarray, _array_parts, lambda parts: _array(*_list(parts))),
    "$scalar": Kind(np.generic, lambda value: [value.dtype.str, value.tobytes().hex()], _scalar),
    "$dtype": Kind(torch.dtype, lambda value: str(value).removeprefix("torch."), dtype_named),
    "$device": Kind(torch.device, str, lambda parts: torch.device(check_type(parts, str))),
    "$size": Kind(torch.Size, list, lambda parts: torch.Size(shape_of(parts))),
}
"""The types, by the tags that stand for them in a structure."""

TAGS = {kind.type: tag for tag, kind in KINDS.items()}
"""The tag of each type."""
