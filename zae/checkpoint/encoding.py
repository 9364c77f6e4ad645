"""Encode a nested state as JSON and a dict of tensors, and decode it exactly.

What JSON can express is written as such. Any other value is an object with one key: its tag in `KINDS`, with what
stands for the value. A tensor is its name in state.safetensors, and if that is not all, the dtype that its bytes there
have, the order of its dimensions in the file, and its strides::

    {"$tensor": "optimizer.0.exp_avg"}
    {"$tensor": ["optimizer.0.exp_avg", null, [1, 0], [1, 2]]}

A member of an Enum is written as its value: `zae.optim.optimizer_state` makes it again where the present optimizer or
scheduler has one. Nothing names a class or a function, so decoding runs no code.
"""

from __future__ import annotations

import base64
import enum
import io
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zae.checkpoint.json_text import DEPTH_LIMIT, without_collector
from zae.checkpoint.tensor_bytes import AXES_LIMIT, DTYPE_NAMES, dense
from zae.errors import CheckpointDamaged, CheckpointError
from zae.values.strides import axes_in_memory, strides_to_save, view_key, with_strides
from zae.values.walk import is_sharded

__all__ = ["decode", "encode", "name_of_place"]

PLAIN = frozenset({type(None), bool, int, float, str})
"""The types of plain values: they are immutable, and JSON has them."""

NUMPY_KINDS = "biufcSUmM"
"""The kinds of numpy dtypes that are written: numbers, text and dates."""

_NUMPY_TEXT = re.compile(r"[<>|=](?:[biufcSU]\d{1,9}|[mM]8(?:\[\d*[A-Za-z]{1,2}\])?)")
_MAX_COLLISIONS = 64  # Keys of one hash in a dict: 34 powers of two have the same, as floats.
_ALWAYS = frozenset({type(None), bool, str})  # Of these, JSON has every value.
_NUMBERS = frozenset({int, float})
_MIN_INT = -(2**63)  # Beyond 64 bits, integers are not read the same by all readers of JSON.
_MAX_INT = 2**63 - 1
_LEAF_BRACKETS = 4  # Brackets that a leaf may add: {"$tensor": ["name", null, [1, 0], [1, 2]]} below a tag.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")  # What names of tensors do not contain.
_initial = itemgetter(slice(1))  # The first letter of a key: "$" if it looks like a tag.

_Path: TypeAlias = "tuple[object, ...]"  # The keys from the root to a value.


def encode(state: object, *, with_parts: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state into a structure that JSON can hold and the tensors it refers to.

    These stay on their device. Those that lie in parts on several ranks are refused, or with ``with_parts`` returned as
    they are.
    """
    encoder = _Encoder(with_parts)
    return encoder.value(state, (), 1), encoder.tensors


def decode(structure: object, tensors: Mapping[str, Tensor], *, where: str = "state.json") -> Any:
    """Return the state that `encode` has split."""
    try:
        with without_collector():
            return _Decoder(tensors).value(structure, 1)
    except _Malformed as error:
        raise CheckpointDamaged(f"{where}: {error}. Load another checkpoint.") from None
    # A hostile structure may have any type anywhere: what the conversions raise for it is damage, too.
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]!r}"
        raise CheckpointDamaged(
            f"{where}: contains what zae does not write ({reason}). Load another checkpoint."
        ) from error


# ------------------------------------------------------------------------------------------ types beside those of JSON


class _Malformed(Exception):
    """A structure that `encode` does not return; the text says how it differs."""


def _type_name(value: object) -> str:
    """Return the name of a type, with its module unless it is built in."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _check_type(value: Any, kind: type) -> Any:
    """Return the value, checked to have exactly this type."""
    if type(value) is not kind:
        raise _Malformed(f"contains a {_type_name(value)}; expected a {kind.__name__}")
    return value


def _shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape, checked to be a list of whole numbers from 0."""
    if len(_list(value)) > AXES_LIMIT or any(_check_type(size, int) < 0 for size in value):
        raise _Malformed(f"contains a shape with a negative size, or of more than {AXES_LIMIT} axes")
    return tuple(value)


def _dtype_named(name: Any) -> torch.dtype:
    """Return the torch dtype of this name."""
    dtype = vars(torch).get(_check_type(name, str))  # getattr could import a module
    if not isinstance(dtype, torch.dtype):
        raise _Malformed(f"names the dtype {name!r:.80}, which torch {torch.__version__} lacks")
    return dtype


class _Kind(NamedTuple):
    """A type beside those of JSON: what stands for a value, and the value made of that again."""

    type: type
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _list(parts: Any) -> list[Any]:
    """Return a list; anything else is refused, as an array that would become one of a hundred times its size."""
    return _check_type(parts, list)


def _members(values: Any) -> list[Any]:
    """Return the members of a set in an order that does not depend on the hash seed."""
    return sorted(values, key=lambda member: (type(member).__name__, repr(member)))


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
    if len(keys) > _MAX_COLLISIONS and max(Counter(map(hash, keys)).values()) > _MAX_COLLISIONS:
        raise _Malformed(f"contains a dict or set in which more than {_MAX_COLLISIONS} keys have one hash")
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
    sizes = _shape_of(shape)
    if _check_type(data, Tensor).dtype is not torch.uint8 or dtype.itemsize * math.prod(sizes) != data.numel():
        raise _Malformed(f"contains {data.numel()} values for a numpy array of shape {sizes!s:.80} and dtype {text}")
    return np.ndarray(sizes, dtype, data.numpy() if data.numel() else b"")


def _scalar(parts: Any) -> Any:
    """Return a numpy scalar from its dtype, and its bytes as hexadecimal text."""
    text, data = _list(parts)
    return _array(torch.tensor([*bytes.fromhex(data)], dtype=torch.uint8), text, [])[()]


KINDS = {
    "$tuple": _Kind(tuple, list, lambda parts: tuple(_list(parts))),
    "$deque": _Kind(deque, lambda value: {"items": list(value), "maxlen": value.maxlen}, lambda parts: _deque(**parts)),
    "$set": _Kind(set, _members, lambda parts: set(_check_keys(parts))),
    "$frozenset": _Kind(frozenset, _members, lambda parts: frozenset(_check_keys(parts))),
    # The pairs of dicts are written by the encoder, which knows the path of each.
    "$dict": _Kind(dict, dict, _dict),
    "$ordered": _Kind(OrderedDict, dict, lambda parts: OrderedDict(_dict(parts))),
    "$counter": _Kind(Counter, dict, lambda parts: Counter(_dict(parts))),  # MultiStepLR keeps one.
    "$float": _Kind(float, str, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__),
    "$int": _Kind(int, hex, lambda parts: int(parts, 16)),  # Beyond 64 bits: random streams have them.
    "$complex": _Kind(complex, lambda value: [value.real, value.imag], lambda parts: complex(*_list(parts))),
    "$bytes": _Kind(bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$array": _Kind(np.ndarray, _array_parts, lambda parts: _array(*_list(parts))),
    "$scalar": _Kind(np.generic, lambda value: [value.dtype.str, value.tobytes().hex()], _scalar),
    "$dtype": _Kind(torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype_named),
    "$device": _Kind(torch.device, str, lambda parts: torch.device(_check_type(parts, str))),
    "$size": _Kind(torch.Size, list, lambda parts: torch.Size(_shape_of(parts))),
}
"""The types, by the tags that stand for them in a structure."""

TAGS = {kind.type: tag for tag, kind in KINDS.items()}
"""The tag of each type."""


# ------------------------------------------------------------------------------------------------------- encoding


class _Encoder:
    """Walks a state once and collects its tensors under readable, unique names."""

    def __init__(self, with_parts: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._with_parts = with_parts
        self._uses: Counter[str] = Counter()
        self._names: dict[tuple[object, ...], str] = {}  # Of the tensors, by their views.

    def value(self, value: Any, path: _Path, depth: int) -> Any:
        """Return the JSON form of `value`, which stands at `path` and `depth` brackets deep."""
        kind = type(value)
        if (
            kind in _ALWAYS
            or (kind is int and _MIN_INT <= value <= _MAX_INT)
            or (kind is float and math.isfinite(value))
        ):
            return value
        if depth + _LEAF_BRACKETS > DEPTH_LIMIT:
            raise CheckpointError(
                f"the state is nested deeper than {DEPTH_LIMIT} levels, or contains itself, at {_show(path)[:80]}...; "
                "keep it flatter"
            )
        if kind is list and set(map(type, value)) == {int} and min(value) >= _MIN_INT and max(value) <= _MAX_INT:
            return list(value)  # The states of random streams, in every checkpoint, are 600 integers.
        if kind is list or (kind is dict and {str}.issuperset(map(type, value)) and "$" not in map(_initial, value)):
            forms: Any = [None] * len(value) if kind is list else {}
            for key, item in enumerate(value) if kind is list else value.items():
                kind = type(item)  # Most of them are plain: these take no call.
                is_plain = kind in _ALWAYS or (kind in _NUMBERS and _MIN_INT <= item <= _MAX_INT)
                forms[key] = item if is_plain else self.value(item, (*path, key), depth + 1)
            return forms
        if kind in (dict, OrderedDict, Counter):
            return {TAGS[kind]: self._pairs(value, path, depth + 3)}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, path)}
        if isinstance(value, enum.Enum) and type(value.value) in PLAIN:
            return self.value(value.value, path, depth)
        tag = TAGS.get(np.generic if isinstance(value, np.generic) else kind)
        if tag is None or (isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in NUMPY_KINDS):
            raise _refusal(value, path)
        if kind in (set, frozenset):
            for member in value:
                _check_key(member, path)
        return {tag: self.value(KINDS[tag].parts(value), path, depth + 1)}

    def _pairs(self, value: dict[Any, Any], path: _Path, depth: int) -> list[Any]:
        """Return the pairs of a dict that is no object in JSON: by its keys, one that looks like a tag, or its type."""
        pairs = []
        for key, item in value.items():
            _check_key(key, path)
            pairs.append([self.value(key, path, depth), self.value(item, (*path, key), depth)])
        return pairs

    def _tensor(self, value: Tensor, path: _Path) -> str | list[Any]:
        """Return the reference to a tensor; the same view of the same memory is kept once."""
        if self._with_parts and (is_sharded(value) or value.is_meta) and value.dtype in DTYPE_NAMES:
            return self._keep(value, path)
        view = view_key(value)
        # Of tensors that are one on this rank, another rank may have none: all ranks give them the same names.
        key = None if self._with_parts else view
        if key in self._names:
            return self._names[key]
        dtype: str | None = None
        axes: list[int] | None = None
        strides = strides_to_save(value)
        if strides is not None:
            axes = axes_in_memory(value) or [*range(value.dim())]
            value = value.permute(axes)
        if view is not None and value.dtype in DTYPE_NAMES:  # It has bytes; the file brings them to the host.
            stored = value.detach().resolve_conj().resolve_neg().contiguous()
        else:
            stored = dense(value, lambda: _show(path))
        if stored.dtype not in DTYPE_NAMES:  # safetensors lacks it: the bytes of an element are one more dimension.
            dtype = str(stored.dtype).removeprefix("torch.")
            stored = stored.unsqueeze(-1).view(torch.uint8)
        name = self._keep(stored, path)
        if key is not None:
            self._names[key] = name
        if dtype is None and strides is None:
            return name
        return [name, dtype, axes, None if strides is None else [*strides]]

    def _keep(self, tensor: Tensor, path: _Path) -> str:
        """Store a tensor under a unique ASCII name made of its path."""
        base = name_of_place(path) or "value"
        name = base
        while name in self.tensors or name == "__metadata__":  # the one name that safetensors reserves
            self._uses[base] += 1
            name = f"{base}.{self._uses[base] + 1}"
        self.tensors[name] = tensor
        return name


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


def name_of_place(keys: Iterable[object]) -> str:
    """Return the name of a tensor that stands at these keys of a state; ASCII, and for most keys unique."""
    return ".".join([_NOT_IN_NAMES.sub("_", str(key)) for key in keys])


def _show(path: _Path) -> str:
    """Write a path as one would in Python: ``optimizer['state'][0]``."""
    has_root = path and isinstance(path[0], str) and path[0].isidentifier()
    root, keys = (str(path[0]), path[1:]) if has_root else ("state", path)
    return root + "".join(f"[{key!r}]" for key in keys)


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
        if type(node) is not dict:
            raise _Malformed(f"contains a {_type_name(node)}; expected a dict")
        if "$" not in map(_initial, node):
            values = {}
            for key, item in node.items():
                values[key] = item if type(item) in PLAIN else self.value(item, depth + 1)
            return values
        (tag, content), *others = node.items()
        if tag == "$tensor" and not others:
            return self._tensor(content)
        if tag not in KINDS or others:
            raise _Malformed(f"contains the unknown tag {tag!r:.80}; a newer zae may have written it")
        return KINDS[tag].make(self.value(content, depth + 1))

    def _tensor(self, reference: Any) -> Tensor:
        """Return a tensor by its name, in the form that the first reference to it describes."""
        if type(reference) is str:
            return self._named(reference)
        name, dtype, axes, strides = _check_type(reference, list)
        tensor = self._named(name)
        if name in self._formed:  # A small file could fill the memory with its copies.
            raise _Malformed(f"describes the tensor {name!r:.80} twice")
        self._formed.add(name)
        if dtype is not None:
            if tensor.dtype is not torch.uint8:
                raise _Malformed(f"takes a tensor of {tensor.dtype} for bytes")
            tensor = tensor.view(_dtype_named(dtype)).squeeze(-1)
        if strides is not None:
            order = _shape_of(axes)
            if sorted(order) != [*range(tensor.dim())]:
                raise _Malformed(f"contains the axes {axes!s:.80} of a tensor of shape {tuple(tensor.shape)!s:.80}")
            back = sorted(range(tensor.dim()), key=order.__getitem__)
            tensor = with_strides(tensor.permute(back), _shape_of(strides))
        self._tensors[name] = tensor
        return tensor

    def _named(self, name: Any) -> Tensor:
        """Return the tensor of a name."""
        if _check_type(name, str) not in self._tensors:
            raise _Malformed(f"names the tensor {name!r:.80}, which is missing")
        return self._tensors[name]
