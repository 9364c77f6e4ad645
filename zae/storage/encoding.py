"""Encode a nested state as strict JSON and a dict of tensors, and decode it exactly.

What JSON can express is written as such; everything else is an object with one key that begins with ``$``::

    {"$tensor": "optimizer.0.exp_avg"}      a tensor, by its name in state.safetensors
    {"$raw": ["name", "complex128", [2]]}   a tensor whose dtype safetensors lacks, as its bytes
    {"$strided": [..., [1, 0], [1, 2]]}     one of these two, the order of its dimensions in the file, and its strides
    {"$array": ["name", "<f8", [2, 3]]}     a numpy array, as its bytes
    {"$scalar": ["<f8", "0000..."]}         a numpy scalar, its bytes as hexadecimal text
    {"$bytes": "name"}                      bytes
    {"$tuple": [...]}  {"$size": [2, 3]}    a tuple; a torch.Size
    {"$deque": [[...], 3]}                  a deque, and its maxlen
    {"$set": [...]}  {"$frozenset": [...]}  sets of plain values
    {"$dict": [[key, value], ...]}          a dict with keys that are not text, or begin with $
    {"$ordered": ...}  {"$counter": ...}    an OrderedDict; a Counter (MultiStepLR keeps one)
    {"$float": "nan"}  {"$int": "-0x1f"}    a float that JSON lacks; an integer beyond 64 bits
    {"$complex": [re, im]}                  a Python complex number
    {"$dtype": "float32"}  {"$device": ..}  a torch.dtype; a torch.device
    {"$rows": [order, kinds]}               a long list of records, as columns; a column is the name of a tensor, or a
                                            list

A member of an Enum is written as its value: `zae.common.optimizer_state` makes it again where the present optimizer or
scheduler has one. Nothing names a class or a function, so decoding runs no code.
"""

from __future__ import annotations

import enum
import io
import json
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zae.common.strides import axes_in_memory, is_laid_out, strides_to_save, with_strides
from zae.common.walk import is_sharded
from zae.errors import CheckpointDamaged, CheckpointError
from zae.storage.strict_json import DEPTH_LIMIT, without_collector
from zae.storage.tensor_bytes import AXES_LIMIT, DTYPE_NAMES, byte_view, dense, from_bytes, view_key

__all__ = ["PLAIN", "decode", "encode", "name_of_key"]

PLAIN = frozenset({type(None), bool, int, float, str})
"""The types of plain values: they are immutable, and JSON has them."""

_COLLISIONS = 64  # keys of one hash in a dict: 34 powers of two have the same, as floats
_ROOM = 5  # levels that the tag of a leaf may add below it
_ROWS_ROOM = 9  # those of a list of records, down to a value in it
_LEAST_ROWS = 256  # a shorter list of records stays as it is, which is easier to read
_MOST_KINDS = 64  # of records; with more of them nothing is gained
_NUMPY_TEXT = re.compile(r"[<>|=](?:[biufcSU]\d{1,9}|[mM]8(?:\[\d*[A-Za-z]{1,2}\])?)")
_NUMPY_KINDS = "biufcSUmM"

# The keys from a value back to the root, linked: one tuple for each level, turned into text only for a message.
_Path: TypeAlias = "tuple[_Path, object] | None"


def encode(state: object, *, with_parts: bool = False, in_place: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state into a structure that JSON can hold and the tensors it refers to.

    Those that lie in parts on several ranks are refused, or with ``with_parts`` returned as they are. With ``in_place``
    tensors stay on their device, for a trial.
    """
    encoder = _Encoder(with_parts, in_place)
    return encoder.value(state, None, 1), encoder.tensors


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


def _are_small(values: Sequence[int]) -> bool:
    """Return whether integers fit into 64 bits: larger ones are not read back the same everywhere."""
    return min(values) >= -(2**63) and max(values) < 2**63


class _Encoder:
    """Walks a state once and collects its tensors under readable, unique names."""

    def __init__(self, with_parts: bool = False, in_place: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._in_place = in_place
        self._with_parts = with_parts
        self._uses: Counter[str] = Counter()
        self._seen: dict[tuple[object, ...], str] = {}
        self._makers: dict[type, Callable[[Any, Any, int], Any]] = {
            type(None): _itself,
            bool: _itself,
            str: _itself,
            int: lambda value, path, depth: value if _are_small([value]) else {"$int": hex(value)},
            float: lambda value, path, depth: value if math.isfinite(value) else {"$float": str(value)},
            complex: lambda value, path, depth: {"$complex": [self.value(value.real, path, depth + 2),
                                                              self.value(value.imag, path, depth + 2)]},
            list: self._list,
            tuple: lambda value, path, depth: {"$tuple": self._items(value, path, depth + 2)},
            deque: lambda value, path, depth: {"$deque": [self._items(value, path, depth + 3), value.maxlen]},
            set: lambda value, path, depth: {"$set": self._set(value, path, depth + 2)},
            frozenset: lambda value, path, depth: {"$frozenset": self._set(value, path, depth + 2)},
            dict: self._dict,
            OrderedDict: lambda value, path, depth: {"$ordered": self._pairs(value, path, depth + 3)},
            Counter: lambda value, path, depth: {"$counter": self._pairs(value, path, depth + 3)},
            bytes: lambda value, path, depth: {"$bytes": self._keep(_byte_tensor(value), path)},
            torch.dtype: lambda value, path, depth: {"$dtype": str(value).removeprefix("torch.")},
            torch.device: lambda value, path, depth: {"$device": str(value)},
            torch.Size: lambda value, path, depth: {"$size": list(value)},
            np.ndarray: self._array,
        }  # fmt: skip

    def value(self, value: Any, path: _Path, depth: int) -> Any:
        """Return the JSON form of `value`, which stands at `path` and `depth` brackets deep."""
        if depth + _ROOM > DEPTH_LIMIT:
            raise CheckpointError(
                f"the state is nested deeper than {DEPTH_LIMIT} levels, or contains itself, at {_show(path)[:80]}...; "
                "keep it flatter"
            )
        maker = self._makers.get(type(value))
        if maker is not None:
            return maker(value, path, depth)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        if isinstance(value, enum.Enum) and type(value.value) in PLAIN:
            return self.value(value.value, path, depth)
        raise _refusal(value, path)

    def _list(self, values: list[Any], path: _Path, depth: int) -> Any:
        """Return the JSON form of a list: for a long one of records, their columns."""
        table = _split_rows(values) if depth + _ROWS_ROOM + _ROOM <= DEPTH_LIMIT else None
        if table is None:
            return self._items(values, path, depth + 1)

        def store(name: str, column: Any) -> Any:
            if isinstance(column, list):
                return self._items(column, (path, name), depth + _ROWS_ROOM)
            return self._keep(torch.from_numpy(column), (path, name))

        order = None if table.order is None else store("order", np.array(table.order, np.int64))
        kinds = [[[name, store(name, column)] for name, column in kind.items()] for kind in table.kinds]
        return {"$rows": [order, kinds]}

    def _items(self, values: Any, path: _Path, depth: int) -> list[Any]:
        """Return the JSON form of each item of a list or a tuple."""
        # The states of Python's and NumPy's random streams, in every checkpoint, are lists of 600 integers.
        if set(map(type, values)) == {int} and depth + _ROOM <= DEPTH_LIMIT and _are_small(values):
            return list(values)
        return [self.value(item, (path, index), depth) for index, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: _Path, depth: int) -> Any:
        """Return an object if JSON can hold the keys and none looks like a tag, else pairs."""
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.value(item, (path, key), depth + 1) for key, item in value.items()}
        return {"$dict": self._pairs(value, path, depth + 3)}

    def _pairs(self, value: dict[Any, Any], path: _Path, depth: int) -> list[Any]:
        """Return a dict as a list of [key, value]."""
        return [[self._key(key, path, depth), self.value(item, (path, key), depth)] for key, item in value.items()]

    def _set(self, value: Any, path: _Path, depth: int) -> list[Any]:
        """Return the members in an order that does not depend on the hash seed."""
        return sorted((self._key(item, path, depth) for item in value), key=json.dumps)

    def _key(self, key: Any, path: _Path, depth: int) -> Any:
        """Return the JSON form of a key or a member, which must be plain: other types compare by identity."""
        if type(key) is tuple:
            for part in key:
                self._key(part, path, depth)
        elif type(key) not in PLAIN:
            raise CheckpointError(
                f"{_show(path)} has the key {key!r:.80}, a {_type_name(key)}; "
                "keys in a checkpoint are text, numbers, None or tuples of these"
            )
        return self.value(key, path, depth)

    def _tensor(self, value: Tensor, path: _Path) -> Any:
        """Return a reference to a tensor; the same view of the same memory is kept once."""
        if self._with_parts and (is_sharded(value) or value.is_meta) and value.dtype in DTYPE_NAMES:
            return {"$tensor": self._keep(value, path)}
        # Of tensors that are one on this rank, another rank may have none: all ranks give them the same names.
        key = None if self._with_parts else view_key(value)
        strides, axes = strides_to_save(value), list[int]()
        if strides is not None:
            axes = axes_in_memory(value) or [*range(value.dim())]
            value = value.permute(axes)
        name = self._seen.get(key) if key is not None else None
        if name is not None:
            host = self.tensors[name]
        elif self._in_place and value.dtype in DTYPE_NAMES and not value.is_cpu and is_laid_out(value):
            host = value.detach().contiguous()
        else:
            host = dense(value, _show(path))
        if name is None:
            name = self._keep(host if host.dtype in DTYPE_NAMES else _byte_tensor(byte_view(host)), path)
            if key is not None:
                self._seen[key] = name
        made: dict[str, Any] = {"$tensor": name}
        if value.dtype not in DTYPE_NAMES:
            made = {"$raw": [name, str(value.dtype).removeprefix("torch."), list(value.shape)]}
        return made if strides is None else {"$strided": [made, axes, list(strides)]}

    def _array(self, value: np.ndarray[Any, Any], path: _Path, depth: int) -> Any:
        """Keep the bytes of a numpy array of numbers, text or dates."""
        if value.dtype.kind not in _NUMPY_KINDS:
            raise CheckpointError(
                f"{_show(path)} is a numpy array of dtype {value.dtype}; "
                "a checkpoint holds arrays of numbers, text and dates only"
            )
        return {"$array": [self._keep(_byte_tensor(value.tobytes()), path), value.dtype.str, list(value.shape)]}

    def _keep(self, tensor: Tensor, path: _Path) -> str:
        """Store a tensor under a unique ASCII name made of its path."""
        base = ".".join(map(name_of_key, _keys(path))) or "value"
        name = base
        while name in self.tensors or name == "__metadata__":  # the one name that safetensors reserves
            self._uses[base] += 1
            name = f"{base}.{self._uses[base] + 1}"
        self.tensors[name] = tensor
        return name


def name_of_key(key: Any) -> str:
    """Return what stands for a key in the name of a tensor."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", str(key))


class _Malformed(Exception):
    """A structure that `encode` does not return; the text says how it differs."""


class _Decoder:
    """Walks a structure once; it may be hostile."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()
        self._strided_ones: dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]] = {}
        self._makers: dict[str, Callable[[Any, int], Any]] = {
            "$tensor": lambda given, depth: self._tensor_named(given),
            "$raw": self._raw,
            "$strided": self._strided,
            "$array": self._array,
            "$scalar": self._scalar,
            "$bytes": lambda given, depth: bytes(byte_view(self._alone(given))),
            "$tuple": lambda given, depth: tuple(self._items(given, depth)),
            "$deque": self._deque,
            "$set": lambda given, depth: set(_plain_keys(self._items(given, depth))),
            "$frozenset": lambda given, depth: frozenset(_plain_keys(self._items(given, depth))),
            "$size": lambda given, depth: torch.Size(_shape(given)),
            "$dict": self._pairs,
            "$ordered": lambda given, depth: OrderedDict(self._pairs(given, depth)),
            "$counter": lambda given, depth: Counter(self._pairs(given, depth)),
            "$float": lambda given, depth: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[given],
            "$int": lambda given, depth: int(given, 16),
            "$complex": lambda given, depth: complex(*self._items(given, depth)),
            "$rows": self._rows,
            "$dtype": lambda given, depth: _dtype(given),
            "$device": lambda given, depth: torch.device(_check_type(given, str)),
        }

    def value(self, node: Any, depth: int) -> Any:
        """Return what one node of the structure stands for."""
        if depth > DEPTH_LIMIT:
            raise _Malformed(f"is nested deeper than {DEPTH_LIMIT} levels")
        if isinstance(node, list):
            if PLAIN.issuperset(map(type, node)):  # Most lists are of numbers, and long.
                return list(node)
            return [self.value(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            if node is None or isinstance(node, (bool, int, float, str)):
                return node
            raise _Malformed(f"contains a {_type_name(node)}")
        tags = [key for key in node if not isinstance(key, str) or key.startswith("$")]
        if not tags:
            return {key: self.value(item, depth + 1) for key, item in node.items()}
        if len(node) > 1 or tags[0] not in self._makers:
            raise _Malformed(f"contains the unknown tag {tags[0]!r:.80}; a newer zae may have written it")
        return self._makers[tags[0]](node[tags[0]], depth + 1)

    def _items(self, nodes: Any, depth: int) -> list[Any]:
        """Return what each node of a list stands for."""
        return [self.value(node, depth + 1) for node in _check_type(nodes, list)]

    def _pairs(self, nodes: Any, depth: int) -> dict[Any, Any]:
        """Return a dict made of [key, value] pairs with keys that differ."""
        pairs = [self._items(pair, depth + 1) for pair in _check_type(nodes, list)]
        _plain_keys([key for key, _ in pairs])
        made = dict(pairs)
        if len(made) != len(pairs):
            raise _Malformed("contains a dict with one key twice")
        return made

    def _rows(self, given: Any, depth: int) -> list[Any]:
        """Return the records that columns hold."""
        order, kinds = _check_type(given, list)
        kinds = [_check_type(kind, list) for kind in _check_type(kinds, list)]
        tables = [{_check_type(name, str): self._column(column, depth) for name, column in kind} for kind in kinds]
        if [len(table) for table in tables] != [len(kind) or -1 for kind in kinds]:
            raise _Malformed("contains records without a name, or with one twice")
        numbers = None if order is None else self._column(order, depth)
        if numbers is not None and not all(type(number) is int and 0 <= number < len(kinds) for number in numbers):
            raise _Malformed("contains records of an unknown kind")
        return _join_rows(_Table(tables, numbers))

    def _column(self, given: Any, depth: int) -> list[Any]:
        """Return the values of a column."""
        if type(given) is not str:
            return self._items(given, depth + _ROWS_ROOM)
        tensor = self._alone(given)
        if tensor.dtype not in (torch.float64, torch.int64) or tensor.dim() != 1:
            raise _Malformed(f"names {given!r:.80} as a column, but it is not one")
        return list(tensor.tolist())

    def _alone(self, name: Any) -> Tensor:
        """Return a tensor that is going to be copied: each only once, or a small file could fill the memory."""
        tensor = self._tensor_named(name)
        if name in self._taken:
            raise _Malformed(f"takes the bytes of the tensor {name!r:.80} twice")
        self._taken.add(name)
        return tensor

    def _tensor_named(self, name: Any) -> Tensor:
        """Return the tensor of this name."""
        if _check_type(name, str) not in self._tensors:
            raise _Malformed(f"names the tensor {name!r:.80}, which is missing")
        return self._tensors[name]

    def _raw(self, given: Any, depth: int) -> Tensor:
        """Return a tensor of a dtype that safetensors lacks, from its bytes."""
        name, dtype, shape = _check_type(given, list)
        return from_bytes(self._tensor_named(name), _dtype(dtype), _shape(shape))

    def _strided(self, given: Any, depth: int) -> Tensor:
        """Return a tensor in the order of memory that it had."""
        node, axes, strides = _check_type(given, list)
        tag, inner = next(iter(_check_type(node, dict).items()), ("", ""))
        if tag not in ("$tensor", "$raw"):
            raise _Malformed("contains the strides of what is not a tensor")
        name = inner if tag == "$tensor" else _check_type(inner, list)[0]
        order, places = _shape(axes), _shape(strides)
        # Two references to one tensor have the same strides, and are one tensor again. More of them than that could
        # fill the memory from a small file.
        if _check_type(name, str) not in self._strided_ones:
            tensor = self.value(node, depth + 1)
            if sorted(order) != [*range(tensor.dim())]:
                raise _Malformed(f"contains the axes {axes!s:.80} of a tensor of shape {tuple(tensor.shape)!s:.80}")
            back = sorted(range(tensor.dim()), key=order.__getitem__)
            self._strided_ones[name] = (order, places, with_strides(tensor.permute(back), places))
        known_order, known_places, found = self._strided_ones[name]
        if (known_order, known_places) != (order, places):
            raise _Malformed(f"contains the tensor {name!r:.80} with two kinds of strides")
        return found

    def _deque(self, given: Any, depth: int) -> deque[Any]:
        """Return a deque with its limit."""
        items, maxlen = _check_type(given, list)
        if maxlen is not None and (type(maxlen) is not int or not 0 <= maxlen < 2**62):
            raise _Malformed(f"contains the maxlen {maxlen!r:.80}")
        return deque(self._items(items, depth + 1), maxlen)

    def _array(self, given: Any, depth: int) -> np.ndarray[Any, Any]:
        """Return a numpy array from its bytes."""
        name, dtype, shape = _check_type(given, list)
        return _numpy(byte_view(self._alone(name)), dtype, _shape(shape))

    def _scalar(self, given: Any, depth: int) -> Any:
        """Return a numpy scalar from its bytes."""
        dtype, text = _check_type(given, list)
        return _numpy(memoryview(bytes.fromhex(text)), dtype, ())[()]


def _itself(value: Any, path: _Path, depth: int) -> Any:
    """Return what JSON can express."""
    return value


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
    cure = "leave it out of state_dict() and create it again on load"
    if callable(getattr(value, "state_dict", None)):
        cure = "return its state_dict() instead, and load that with its load_state_dict()"
    if isinstance(value, io.BytesIO):
        cure = "store its getvalue(), and create it again on load"
    if isinstance(value, enum.Enum):
        cure = "store its name, and create it again on load"
    for kind in (dict, list, tuple, set, int, float, str):
        if isinstance(value, kind):
            cure = f"store {kind.__name__}(...) of it, and create it again on load"
    return CheckpointError(
        f"{_show(path)} is a {_type_name(value)}; a checkpoint holds only numbers, text and tensors "
        f"in dicts, lists, tuples and sets: {cure}"
    )


def _byte_tensor(data: bytes | memoryview) -> Tensor:
    """Copy bytes into a tensor."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # frombuffer refuses an empty buffer
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _check_type(value: Any, kind: type) -> Any:
    """Return the value, checked to have exactly this type."""
    if type(value) is not kind:
        raise _Malformed(f"contains a {_type_name(value)}; expected a {kind.__name__}")
    return value


def _plain_keys(keys: list[Any]) -> list[Any]:
    """Return keys, checked to be plain and not to collide: a dict of those would take quadratic time."""
    waiting = [*keys]
    while waiting:
        key = waiting.pop()
        if type(key) is tuple:
            waiting += key
        elif type(key) not in PLAIN:
            raise _Malformed(f"contains a key that is a {_type_name(key)}")
    if len(keys) > _COLLISIONS and max(Counter(map(hash, keys)).values()) > _COLLISIONS:
        raise _Malformed(f"contains a dict or set in which more than {_COLLISIONS} keys have one hash")
    return keys


def _shape(value: Any) -> tuple[int, ...]:
    """Return a shape, checked to be a list of whole numbers from 0."""
    if len(_check_type(value, list)) > AXES_LIMIT or any(_check_type(size, int) < 0 for size in value):
        raise _Malformed(f"contains a shape with a negative size, or of more than {AXES_LIMIT} axes")
    return tuple(value)


def _dtype(name: Any) -> torch.dtype:
    """Return the torch dtype of this name."""
    dtype = vars(torch).get(_check_type(name, str))  # getattr could import a module
    if not isinstance(dtype, torch.dtype):
        raise _Malformed(f"names the dtype {name!r:.80}, which torch {torch.__version__} lacks")
    return dtype


def _numpy(data: memoryview, text: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return an array with its own memory from bytes; the dtype is checked as text before numpy sees it."""
    if not _NUMPY_TEXT.fullmatch(_check_type(text, str)):
        raise _Malformed(f"names the numpy dtype {text!r:.80}")
    dtype = np.dtype(text)
    if dtype.itemsize * math.prod(shape) != len(data):
        raise _Malformed(f"contains {len(data)} bytes for a numpy array of shape {shape!s:.80} and dtype {text}")
    array = np.empty(shape, dtype)
    if len(data):
        array.reshape(-1).view(np.uint8)[:] = data
    return array


# ------------------------------------------------------------------------------------------------------- records


class _Table(NamedTuple):
    """A list of records as columns, by kind: the names that a record has, in their order."""

    kinds: list[dict[str, Any]]  # For each kind its columns by name: an array, or a list of values of any type.
    order: list[int] | None  # The kind of each record; None if there is only one kind.


def _split_rows(rows: Sequence[Any]) -> _Table | None:
    """Split a list of records into columns; None if they are few, or contain more than numbers, text and None."""
    if len(rows) < _LEAST_ROWS or set(map(type, rows)) != {dict}:
        return None
    numbers: dict[tuple[Any, ...], int] = {}
    order = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
    if len(numbers) > _MOST_KINDS or not all(names and set(map(type, names)) == {str} for names in numbers):
        return None
    kinds = []
    for names, number in numbers.items():
        own = rows if len(numbers) == 1 else [row for row, kind in zip(rows, order, strict=True) if kind == number]
        columns = {name: _pack([row[name] for row in own]) for name in names}
        if any(column is None for column in columns.values()):
            return None
        kinds.append(columns)
    return _Table(kinds, None if len(numbers) == 1 else order)


def _join_rows(table: _Table) -> list[dict[str, Any]]:
    """Return the records of a table that may be hostile; raise ValueError if columns and order do not agree."""
    made = []
    for columns in table.kinds:
        made.append([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    if table.order is None:
        (rows,) = made
        return rows
    if Counter(table.order) != Counter({number: len(rows) for number, rows in enumerate(made)}):
        raise ValueError(f"{len(table.order)} records are not those of {len(made)} kinds")
    following = [iter(rows) for rows in made]
    return [next(following[number]) for number in table.order]


def _pack(values: list[Any]) -> Any:
    """Return the values under one name: as an array if they have one type, None if they are not plain."""
    types = set(map(type, values))
    if types == {float}:
        return np.array(values, np.float64)
    if types == {int} and _are_small(values):
        return np.array(values, np.int64)
    return values if types <= PLAIN else None
