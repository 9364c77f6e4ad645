"""Encode a nested state as JSON and a dict of tensors, and decode it exactly.

What JSON can express is written as such. Any other value is an object with one key: its tag in the table `_KINDS`, one
line for each type, with what stands for the value. A tensor is its name in state.safetensors, and if that is not all,
the dtype that its bytes there have, the order of its dimensions in the file, and its strides::

    {"$tensor": "optimizer.0.exp_avg"}
    {"$tensor": ["optimizer.0.exp_avg", null, [1, 0], [1, 2]]}

A member of an Enum is written as its value: `zae.optim.optimizer_state` makes it again where the present optimizer or
scheduler has one. Nothing names a class or a function, so decoding runs no code.
"""

from __future__ import annotations

import base64
import enum
import gc
import io
import json
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zae.checkpoint.tensor_bytes import AXES_LIMIT, DTYPE_NAMES, dense
from zae.errors import CheckpointDamaged, CheckpointError
from zae.values.strides import axes_in_memory, is_laid_out, strides_to_save, view_key, with_strides
from zae.values.walk import is_sharded

__all__ = ["DEPTH_LIMIT", "PLAIN", "decode", "encode", "name_of_key", "strict_json"]

PLAIN = frozenset({type(None), bool, int, float, str})
"""The types of plain values: they are immutable, and JSON has them."""

_ALWAYS = frozenset({type(None), bool, str})  # Of these, JSON has every value.
_LEAST = -(2**63)  # Beyond 64 bits, integers are not read the same by all readers of JSON.
_MOST = 2**63 - 1

DEPTH_LIMIT = 200
"""The deepest nesting of brackets in a text that is written or read."""

_ROOM = 4  # Brackets that a leaf may add: {"$tensor": ["name", null, [1, 0], [1, 2]]} below a tag.
_COLLISIONS = 64  # Keys of one hash in a dict: 34 powers of two have the same, as floats.
_NUMPY_TEXT = re.compile(r"[<>|=](?:[biufcSU]\d{1,9}|[mM]8(?:\[\d*[A-Za-z]{1,2}\])?)")
_NUMPY_KINDS = "biufcSUmM"
_OUTSIDE_NAMES = re.compile(r"[^A-Za-z0-9_-]")  # What names of tensors do not contain.
_FIRST = itemgetter(slice(1))  # The first letter of a key: "$" if it looks like a tag.

# The keys from a value back to the root, linked: one tuple for each level, turned into text only for a message.
_Path: TypeAlias = "tuple[_Path, object] | None"


class _Malformed(Exception):
    """A structure that `encode` does not return; the text says how it differs."""


def encode(state: object, *, with_parts: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state into a structure that JSON can hold and the tensors it refers to.

    These stay on their device. Those that lie in parts on several ranks are refused, or with ``with_parts`` returned as
    they are.
    """
    encoder = _Encoder(with_parts)
    return encoder.value(state, None, 1), encoder.tensors


def decode(structure: object, tensors: Mapping[str, Tensor], *, where: str = "state.json") -> Any:
    """Return the state that `encode` has split."""
    try:
        with _without_collector():
            return _Decoder(tensors).value(structure, 1)
    except _Malformed as error:
        raise CheckpointDamaged(f"{where}: {error}. Load another checkpoint.") from None
    # A hostile structure may have any type anywhere: what the conversions raise for it is damage, too.
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]!r}"
        raise CheckpointDamaged(
            f"{where}: contains what zae does not write ({reason}). Load another checkpoint."
        ) from error


# ------------------------------------------------------------------------------------------------------ the table


class _Kind(NamedTuple):
    """A type beside those of JSON: what stands for a value, and the value made of that again."""

    type: type
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _list(given: Any) -> list[Any]:
    """Return a list; anything else is refused, as an array that would become one of a hundred times its size."""
    return _check_type(given, list)


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
        raise _Malformed("contains a dict with one key twice")
    return entries


def _check_keys(keys: list[Any]) -> list[Any]:
    """Return keys, checked to be plain and not to collide: a dict of those would take quadratic time."""
    waiting = [*_list(keys)]
    while waiting:
        key = waiting.pop()
        if type(key) is tuple:
            waiting += key
        elif type(key) not in PLAIN:
            raise _Malformed(f"contains a key that is a {_type_name(key)}")
    if len(keys) > _COLLISIONS and max(Counter(map(hash, keys)).values()) > _COLLISIONS:
        raise _Malformed(f"contains a dict or set in which more than {_COLLISIONS} keys have one hash")
    return keys


def _array_parts(value: np.ndarray[Any, Any]) -> list[Any]:
    data = value.tobytes()
    copied = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return [copied, value.dtype.str, list(value.shape)]


def _array(data: Any, text: Any, shape: Any) -> np.ndarray[Any, Any]:
    """Return an array in the memory of a tensor of bytes; the dtype is checked as text before numpy sees it."""
    if not _NUMPY_TEXT.fullmatch(_check_type(text, str)):
        raise _Malformed(f"names the numpy dtype {text!r:.80}")
    dtype = np.dtype(text)
    sizes = _shape(shape)
    if _check_type(data, Tensor).dtype is not torch.uint8 or dtype.itemsize * math.prod(sizes) != data.numel():
        raise _Malformed(f"contains {data.numel()} values for a numpy array of shape {sizes!s:.80} and dtype {text}")
    return np.ndarray(sizes, dtype, data.numpy() if data.numel() else b"")


def _scalar(given: Any) -> Any:
    """Return a numpy scalar from its dtype, and its bytes as hexadecimal text."""
    text, data = _list(given)
    return _array(torch.tensor([*bytes.fromhex(data)], dtype=torch.uint8), text, [])[()]


def _shape(value: Any) -> tuple[int, ...]:
    """Return a shape, checked to be a list of whole numbers from 0."""
    if len(_list(value)) > AXES_LIMIT or any(_check_type(size, int) < 0 for size in value):
        raise _Malformed(f"contains a shape with a negative size, or of more than {AXES_LIMIT} axes")
    return tuple(value)


def _dtype(name: Any) -> torch.dtype:
    """Return the torch dtype of this name."""
    dtype = vars(torch).get(_check_type(name, str))  # getattr could import a module
    if not isinstance(dtype, torch.dtype):
        raise _Malformed(f"names the dtype {name!r:.80}, which torch {torch.__version__} lacks")
    return dtype


def _check_type(value: Any, kind: type) -> Any:
    """Return the value, checked to have exactly this type."""
    if type(value) is not kind:
        raise _Malformed(f"contains a {_type_name(value)}; expected a {kind.__name__}")
    return value


_KINDS = {
    "$tuple": _Kind(tuple, list, lambda given: tuple(_list(given))),
    "$deque": _Kind(deque, lambda value: {"items": list(value), "maxlen": value.maxlen}, lambda given: _deque(**given)),
    "$set": _Kind(set, _members, lambda given: set(_check_keys(given))),
    "$frozenset": _Kind(frozenset, _members, lambda given: frozenset(_check_keys(given))),
    # The pairs of dicts are written by the encoder, which knows the path of each.
    "$dict": _Kind(dict, dict, _dict),
    "$ordered": _Kind(OrderedDict, dict, lambda given: OrderedDict(_dict(given))),
    "$counter": _Kind(Counter, dict, lambda given: Counter(_dict(given))),  # MultiStepLR keeps one.
    "$float": _Kind(float, str, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__),
    "$int": _Kind(int, hex, lambda given: int(given, 16)),  # Beyond 64 bits: random streams have them.
    "$complex": _Kind(complex, lambda value: [value.real, value.imag], lambda given: complex(*_list(given))),
    "$bytes": _Kind(bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$array": _Kind(np.ndarray, _array_parts, lambda given: _array(*_list(given))),
    "$scalar": _Kind(np.generic, lambda value: [value.dtype.str, value.tobytes().hex()], _scalar),
    "$dtype": _Kind(torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype),
    "$device": _Kind(torch.device, str, lambda given: torch.device(_check_type(given, str))),
    "$size": _Kind(torch.Size, list, lambda given: torch.Size(_shape(given))),
}
_TAGS = {kind.type: tag for tag, kind in _KINDS.items()}


# ------------------------------------------------------------------------------------------------------- encoding


class _Encoder:
    """Walks a state once and collects its tensors under readable, unique names."""

    def __init__(self, with_parts: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._with_parts = with_parts
        self._uses: Counter[str] = Counter()
        self._seen: dict[tuple[object, ...], str] = {}

    def value(self, value: Any, path: _Path, depth: int) -> Any:
        """Return the JSON form of `value`, which stands at `path` and `depth` brackets deep."""
        kind = type(value)
        if kind in _ALWAYS:
            return value
        if kind is int and _LEAST <= value <= _MOST:
            return value
        if kind is float and math.isfinite(value):
            return value
        if depth + _ROOM > DEPTH_LIMIT:
            raise CheckpointError(
                f"the state is nested deeper than {DEPTH_LIMIT} levels, or contains itself, at {_show(path)[:80]}...; "
                "keep it flatter"
            )
        if kind is list:
            if not value or _are_in_json(value):
                return list(value)
            return [self.value(item, (path, index), depth + 1) for index, item in enumerate(value)]
        if kind in (dict, OrderedDict, Counter):
            if kind is not dict or not {str}.issuperset(map(type, value)) or "$" in map(_FIRST, value):
                return self._pairs(value, path, depth)
            made = {}
            for key, item in value.items():
                kind = type(item)
                is_plain = (
                    kind in _ALWAYS
                    or (kind is float and -math.inf < item < math.inf)
                    or (kind is int and _LEAST <= item <= _MOST)
                )
                made[key] = item if is_plain else self.value(item, (path, key), depth + 1)
            return made
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, enum.Enum) and type(value.value) in PLAIN:
            return self.value(value.value, path, depth)
        tag = _TAGS.get(np.generic if isinstance(value, np.generic) else kind)
        if tag is None or (isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in _NUMPY_KINDS):
            raise _refusal(value, path)
        if kind in (set, frozenset):
            for member in value:
                _check_key(member, path)
        return {tag: self.value(_KINDS[tag].parts(value), path, depth + 1)}

    def _pairs(self, value: dict[Any, Any], path: _Path, depth: int) -> Any:
        """Return the pairs of a dict that is no object in JSON: by its keys, one that looks like a tag, or its type."""
        pairs = []
        for key, item in value.items():
            _check_key(key, path)
            pairs.append([self.value(key, path, depth + 3), self.value(item, (path, key), depth + 3)])
        return {_TAGS[type(value)]: pairs}

    def _tensor(self, value: Tensor, path: _Path) -> Any:
        """Return a reference to a tensor; the same view of the same memory is kept once."""
        if self._with_parts and (is_sharded(value) or value.is_meta) and value.dtype in DTYPE_NAMES:
            return {"$tensor": self._keep(value, path)}
        # Of tensors that are one on this rank, another rank may have none: all ranks give them the same names.
        key = None if self._with_parts else view_key(value)
        if key in self._seen:
            return {"$tensor": self._seen[key]}
        dtype: str | None = None
        axes: list[int] | None = None
        strides = strides_to_save(value)
        if strides is not None:
            axes = axes_in_memory(value) or [*range(value.dim())]
            value = value.permute(axes)
        if value.dtype in DTYPE_NAMES and not (value.is_cpu or value.is_meta) and is_laid_out(value):
            host = value.detach().contiguous()
        else:
            host = dense(value, lambda: _show(path))
        if host.dtype not in DTYPE_NAMES:  # safetensors lacks it: the bytes of an element are one more dimension.
            dtype = str(host.dtype).removeprefix("torch.")
            host = host.unsqueeze(-1).view(torch.uint8)
        name = self._keep(host, path)
        if key is not None:
            self._seen[key] = name
        if dtype is None and strides is None:
            return {"$tensor": name}
        return {"$tensor": [name, dtype, axes, None if strides is None else [*strides]]}

    def _keep(self, tensor: Tensor, path: _Path) -> str:
        """Store a tensor under a unique ASCII name made of its path."""
        base = ".".join(_OUTSIDE_NAMES.sub("_", str(key)) for key in _keys(path)) or "value"
        name = base
        while name in self.tensors or name == "__metadata__":  # the one name that safetensors reserves
            self._uses[base] += 1
            name = f"{base}.{self._uses[base] + 1}"
        self.tensors[name] = tensor
        return name


def _are_in_json(values: Collection[Any]) -> bool:
    """Return whether JSON has all of these values as they are: plain, without NaN and integers beyond 64 bits."""
    kinds = set(map(type, values))
    if not kinds <= PLAIN:
        return False
    if kinds == {int}:  # The states of random streams, in every checkpoint, are lists of 600 integers.
        return bool(min(values) >= _LEAST and max(values) <= _MOST)
    if kinds <= _ALWAYS:
        return True
    for value in values:
        kind = type(value)
        if kind is int and not _LEAST <= value <= _MOST:
            return False
        if kind is float and not math.isfinite(value):
            return False
    return True


def _check_key(key: Any, path: _Path) -> None:
    """Refuse a key or a member that is not plain: other types compare by identity."""
    if type(key) is tuple:
        for part in key:
            _check_key(part, path)
    elif type(key) not in PLAIN:
        raise CheckpointError(
            f"{_show(path)} has the key {key!r:.80}, a {_type_name(key)}; "
            "keys in a checkpoint are text, numbers, None or tuples of these"
        )


def name_of_key(key: Any) -> str:
    """Return what stands for a key in the name of a tensor."""
    return _OUTSIDE_NAMES.sub("_", str(key))


def _keys(path: _Path) -> list[Any]:
    """Return the keys of a path from the root on; it is linked from its end."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(key)
    return keys[::-1]


def _show(path: _Path) -> str:
    """Write a path as one would in Python: ``optimizer['state'][0]``."""
    keys = _keys(path)
    root = keys.pop(0) if keys and isinstance(keys[0], str) and keys[0].isidentifier() else "state"
    return root + "".join(f"[{key!r}]" for key in keys)


def _type_name(value: object) -> str:
    """Return the name of a type, with its module unless it is built in."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refusal(value: object, path: _Path) -> CheckpointError:
    """Return the error for a value that checkpoints cannot hold, with the remedy for its type."""
    if isinstance(value, np.ndarray) and type(value) is np.ndarray:
        return CheckpointError(
            f"{_show(path)} is a numpy array of dtype {value.dtype}; "
            "a checkpoint holds arrays of numbers, text and dates only"
        )
    remedy = "leave it out of state_dict() and create it again on load"
    if callable(getattr(value, "state_dict", None)):
        remedy = "return its state_dict() instead, and load that with its load_state_dict()"
    if isinstance(value, io.BytesIO):
        remedy = "store its getvalue(), and create it again on load"
    if isinstance(value, enum.Enum):
        remedy = "store its name, and create it again on load"
    for kind in (dict, list, tuple, set, int, float, str):
        if isinstance(value, kind):
            remedy = f"store {kind.__name__}(...) of it, and create it again on load"
    return CheckpointError(
        f"{_show(path)} is a {_type_name(value)}; a checkpoint holds only numbers, text and tensors "
        f"in dicts, lists, tuples and sets: {remedy}"
    )


# ------------------------------------------------------------------------------------------------------- decoding


class _Decoder:
    """Walks a structure once; it may be hostile."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._formed: set[str] = set()

    def value(self, node: Any, depth: int) -> Any:
        """Return what one node of the structure stands for."""
        if type(node) in PLAIN:
            return node
        if depth > DEPTH_LIMIT:
            raise _Malformed(f"is nested deeper than {DEPTH_LIMIT} levels")
        if type(node) is list:
            if PLAIN.issuperset(map(type, node)):  # Most lists are of numbers, and long.
                return list(node)
            return [self.value(item, depth + 1) for item in node]
        _check_type(node, dict)
        if "$" not in map(_FIRST, node):
            made = {}
            for key, item in node.items():
                made[key] = item if type(item) in PLAIN else self.value(item, depth + 1)
            return made
        tag = next(key for key in node if key[:1] == "$")
        if len(node) > 1 or tag not in _KINDS.keys() | {"$tensor"}:
            raise _Malformed(f"contains the unknown tag {tag!r:.80}; a newer zae may have written it")
        if tag == "$tensor":
            return self._tensor(node[tag])
        return _KINDS[tag].make(self.value(node[tag], depth + 1))

    def _tensor(self, given: Any) -> Tensor:
        """Return a tensor by its name, in the form that the first reference to it describes."""
        if type(given) is str:
            return self._named(given)
        name, dtype, axes, strides = _list(given)
        tensor = self._named(name)
        if name in self._formed:  # A small file could fill the memory with its copies.
            raise _Malformed(f"describes the tensor {name!r:.80} twice")
        self._formed.add(name)
        if dtype is not None:
            if tensor.dtype is not torch.uint8:
                raise _Malformed(f"takes a tensor of {tensor.dtype} for bytes")
            tensor = tensor.view(_dtype(dtype)).squeeze(-1)
        if strides is not None:
            order = _shape(axes)
            if sorted(order) != [*range(tensor.dim())]:
                raise _Malformed(f"contains the axes {axes!s:.80} of a tensor of shape {tuple(tensor.shape)!s:.80}")
            back = sorted(range(tensor.dim()), key=order.__getitem__)
            tensor = with_strides(tensor.permute(back), _shape(strides))
        self._tensors[name] = tensor
        return tensor

    def _named(self, name: Any) -> Tensor:
        """Return the tensor of a name."""
        if _check_type(name, str) not in self._tensors:
            raise _Malformed(f"names the tensor {name!r:.80}, which is missing")
        return self._tensors[name]


# ------------------------------------------------------------------------------------------------------------ JSON


def strict_json(data: bytes, where: str) -> Any:
    """Parse JSON from the file `where`, in time and depth that its author cannot raise.

    Raise CheckpointDamaged if it is not JSON, nested deeper than `DEPTH_LIMIT`, has one key twice in an object, a NaN,
    an infinity, or an integer with more digits than Python reads. Whoever reads the file limits its size.
    """
    try:
        with _without_collector():
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


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the garbage collector, which would search half a million new lists again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refuse_depth(found: Any) -> None:
    """Refuse a value that is nested too deep; the parser itself stops at Python's limit for recursion."""
    level = [found]
    for _ in range(DEPTH_LIMIT):
        inside = [each.values() if type(each) is dict else each for each in level if type(each) in (dict, list)]
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
