"""The kinds of values that a checkpoint can hold: one table, with a line for each.

A kind has a name, which stands in a state; a function that writes a value into a state; one that makes the value again;
and, where the object can be changed in place, one that fills it. In a state a value is a plain one (None, a number,
text), or a list of the name of its kind and what this kind needs. Nothing there names a function or a class to call: a
named tuple and the member of an enumeration are looked up in modules that are loaded, and no code of theirs is run.
"""

from __future__ import annotations

import builtins
import enum
import functools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from zae.errors import CheckpointMismatch
from zae.random_state import STREAMS, read_stream, write_stream
from zae.values.redact import redact
from zae.values.strides import is_laid_out, span, without_repeats
from zae.values.walk import is_sharded

__all__ = ["PLAIN", "Absent", "Maker", "Name", "NotSaved", "Packer", "fill", "has_state", "kind_of", "same_kind"]

Name: TypeAlias = "tuple[str, str]"
"""The path of an owner, and the attribute or key in it."""

PLAIN = frozenset({type(None), bool, int, float, str})
"""The types of values that are in a state as they are."""

MAX_DEPTH = 25  # A state is nested twice as deep as the value, and may be nested 200 deep.
_SCALARS = (complex, bytes, torch.dtype, torch.device, torch.Size)
_ARRAYS = "biufcSUmM"  # The kinds of NumPy's types that a checkpoint has.
_FACTORIES = {factory.__name__: factory for factory in (int, float, bool, str, list, dict, set, tuple)}


class NotSaved(Exception):
    """A value that no checkpoint can hold; the text says what it is."""


class Absent(Exception):
    """A state refers to an object that does not exist here."""


class Kind(NamedTuple):
    """A kind of values."""

    name: str
    pack: Callable[[Any, Packer], list[Any]]
    make: Callable[..., Any]  # Of a Maker and of what `pack` has returned.
    fill: Callable[[Any, Any], bool] | None = None


class Packer:
    """Writes values as a state holds them; an object that is met twice is written once.

    Parameters
    ----------
    weights : mapping
        The model's tensors by their names: what shows one of them is written as its name.
    objects : mapping
        The paths of the user's objects by id: their values are written one by one, and they themselves as their path.
    device : torch.device
        Of the trainer: what is on the host of a run that trains elsewhere stays there.
    copies : bool
        Whether tensors are copied, since training may go on before they are read.
    max_bytes : int, optional
        The largest size of a value in bytes; a larger one is refused.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        objects: Mapping[int, str],
        device: torch.device,
        copies: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        self.weights = weights
        self.objects = objects
        self.device = device
        self.copies = copies
        self.max_bytes = max_bytes
        self.size = 0  # Bytes of the value that was written last.
        self.names: dict[int, Name] = {}  # Of objects that have a name, by id: elsewhere they are written as it.
        self._texts: list[dict[str, str]] = []
        self._depth = 0
        self._present: Name | None = None  # Of the value that is written.

    @functools.cached_property
    def weights_in_memory(self) -> dict[tuple[str, int], list[tuple[str, Tensor]]]:
        """The model's tensors with their names, by where they lie."""
        weights: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
        for name, weight in self.weights.items():
            weights.setdefault(_memory_of(weight), []).append((name, weight))
        return weights

    def count(self, size: int) -> None:
        """Add to the bytes of the value that is written."""
        self.size += size
        if self.max_bytes is not None and self.size > self.max_bytes:
            raise NotSaved("a value that is too large")

    def write(self, name: Name, value: Any) -> Any:
        """Return the form of a value that has a name."""
        self.size = 0
        self._texts = []
        self._present = name
        is_first = type(value) not in PLAIN and self.names.setdefault(id(value), name) == name
        written = self._pack_new(value) if is_first else self.pack(value, name[1])
        if self._texts and redact(self._texts) != self._texts:
            raise NotSaved("what looks like a secret")
        return written

    def pack(self, value: Any, key: str = "") -> Any:
        """Return the form of a value, which may be within another one."""
        if type(value) in PLAIN:
            if type(value) is str:
                self.count(len(value))
                self._texts.append({key: value})
            return value
        if id(value) in self.names:
            if self.names[id(value)] == self._present:
                raise NotSaved("what contains itself")
            return ["same", *self.names[id(value)]]
        return self._pack_new(value)

    def _pack_new(self, value: Any) -> Any:
        """Return the form of a value that no other name stands for."""
        if id(value) in self.objects:
            return ["object", self.objects[id(value)]]
        kind = kind_of(value)
        if kind is None:
            raise NotSaved(f"a {type(value).__module__}.{type(value).__qualname__}")
        if self._depth == MAX_DEPTH:
            raise NotSaved(f"what is nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        try:
            return [kind.name, *kind.pack(value, self)]
        finally:
            self._depth -= 1


class Maker:
    """Makes values of what a `Packer` has written.

    Parameters
    ----------
    weights : mapping
        The model's tensors by their names.
    objects : mapping
        The user's objects by their paths.
    device : torch.device
        Of the trainer.
    """

    def __init__(self, weights: Mapping[str, Tensor], objects: Mapping[str, Any], device: torch.device) -> None:
        self.weights = weights
        self.objects = objects
        self.device = device
        self.values: dict[Name, Any] = {}  # What was made, by name.
        self.present: Any = None  # The object at the place of the value that is made.

    def read(self, written: Any, present: Any) -> Any:
        """Make a value for a place."""
        self.present = present
        return self.make(written)

    def make(self, written: Any) -> Any:
        """Make a value."""
        if type(written) in PLAIN:
            return written
        if type(written) is not list or not written or written[0] not in KINDS:
            raise CheckpointMismatch(f"the state contains {written!r:.80} where a value of the task should be")
        return KINDS[written[0]].make(self, *written[1:])


def kind_of(value: Any) -> Kind | None:
    """Return the kind of a value that is not plain; None if no checkpoint can hold it."""
    name = _NAMES.get(type(value))
    if name is None:
        name = next((name for name, test in _TESTS.items() if test(value)), None)
    return None if name is None else KINDS[name]


def same_kind(value: Any) -> str:
    """Return a word that is the same for values which may take each other's place."""
    if value is None:
        return ""
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return "number"
    if isinstance(value, str):
        return "text"
    kind = kind_of(value)
    return "another" if kind is None else kind.name


def fill(present: Any, value: Any) -> bool:
    """Write a value into the object that is there; return whether that can be done."""
    if type(present) is not type(value) or type(present) in PLAIN:
        return present is value
    kind = kind_of(present)
    return kind is not None and kind.fill is not None and kind.fill(present, value)


def has_state(value: Any) -> bool:
    """Return whether an object saves and loads its own state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


# ------------------------------------------------------------------------------------------------- tensors and arrays


def _pack_tensor(value: Tensor, packer: Packer) -> list[Any]:
    for name, weight in packer.weights_in_memory.get(_memory_of(value), ()):
        if value is weight or (place := _place_within(value, weight)) is not None:
            return [name, True if value is weight else place]
    is_plain = type(value) in (Tensor, nn.Parameter, nn.Buffer) or is_sharded(value)
    if not is_plain or value.layout is not torch.strided or value.is_meta or value.is_nested or value.is_quantized:
        raise NotSaved(f"a {type(value).__name__} with the layout {value.layout} on {value.device}")
    form = ""
    if value.is_leaf and value.requires_grad:
        form = "parameter" if isinstance(value, nn.Parameter) else "leaf"
    is_on_host = value.is_cpu and packer.device.type != "cpu"
    tensor = without_repeats(value.detach())  # The graph is of a step that has ended.
    packer.count(tensor.numel() * tensor.element_size())
    return [tensor.clone() if packer.copies else tensor, list(value.shape), is_on_host, form]


def _memory_of(tensor: Tensor) -> tuple[str, int]:
    """Return a key that is equal for two tensors in the same memory."""
    try:
        pointer = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # ValueError: a lazy parameter has no memory yet.
        pointer = 0
    return ("memory", pointer) if pointer else ("object", id(tensor))


def _place_within(value: Tensor, weight: Tensor) -> list[Any] | None:
    """Return where a tensor lies within one of the model that shares its memory: itself, transposed, or sliced."""
    is_apart = not (is_laid_out(value) and is_laid_out(weight)) or weight.dtype is not value.dtype
    if is_apart or not value.numel() or value.is_conj() or value.is_neg():
        return None
    offset = value.storage_offset() - weight.storage_offset()
    is_within = offset >= 0 and offset + span(value.shape, value.stride()) <= span(weight.shape, weight.stride())
    return [list(value.shape), list(value.stride()), offset] if is_within else None


def _make_tensor(maker: Maker, tensor: Any, shape: Any, is_on_host: bool = False, form: str = "") -> Any:
    if isinstance(tensor, str):  # The name of one of the model's, and whether it is that one itself, or where in it.
        if tensor not in maker.weights:
            raise Absent(f"the tensor {tensor!r} of the model")
        return maker.weights[tensor] if shape is True else _make_view(maker.weights[tensor], *shape)
    copied = tensor.to("cpu" if is_on_host else maker.device, copy=True)
    if list(copied.shape) != shape:
        copied = copied.expand(shape)
    if form == "parameter":
        return nn.Parameter(copied)
    return copied.requires_grad_() if form == "leaf" else copied


def _make_view(weight: Tensor, shape: Any, strides: Any, offset: Any) -> Tensor:
    """Return a view of a tensor of the model, which must lie within it."""
    numbers = [*shape, *strides, offset]
    is_within = all(type(number) is int and number >= 0 for number in numbers) and len(shape) == len(strides)
    if not is_within or offset + span(shape, strides) > span(weight.shape, weight.stride()):
        raise CheckpointMismatch("the state has a view of a tensor of the model that does not lie within it")
    return weight.detach().as_strided(shape, strides, weight.storage_offset() + offset)


def _fill_tensor(present: Tensor, value: Tensor) -> bool:
    is_fit = (present.shape, present.dtype, present.device) == (value.shape, value.dtype, value.device)
    if not is_fit or 0 in present.stride():
        return False
    with torch.no_grad():
        present.copy_(value)
    return True


def _pack_array(value: np.ndarray[Any, Any], packer: Packer) -> list[Any]:
    if type(value) is not np.ndarray or value.dtype.kind not in _ARRAYS:
        raise NotSaved(f"a {type(value).__name__} of {value.dtype}")
    packer.count(value.nbytes)
    return [value.copy()]


def _fill_array(present: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    if (present.shape, present.dtype) != (value.shape, value.dtype) or not present.flags.writeable:
        return False
    present[...] = value
    return True


# ------------------------------------------------------------------------------------------------------ random streams


def _pack_stream(value: Any, packer: Packer) -> list[Any]:
    return [_name_of_stream(value), packer.pack(read_stream(value))]


def _make_stream(maker: Maker, name: str, state: Any) -> Any:
    stream = maker.present
    if not isinstance(stream, STREAMS) or _name_of_stream(stream) != name:
        if name not in _NEW_STREAMS:
            raise CheckpointMismatch(f"the state has a random stream of {name!r:.40}, which zae does not make")
        stream = _NEW_STREAMS[name](maker)
    write_stream(stream, maker.make(state))
    return stream


def _name_of_stream(value: Any) -> str:
    if isinstance(value, np.random.Generator):
        return type(value.bit_generator).__name__
    return f"torch.{type(value).__name__}" if isinstance(value, torch.Generator) else type(value).__name__


_NEW_STREAMS: dict[str, Callable[[Maker], Any]] = {
    "PCG64": lambda maker: np.random.Generator(np.random.PCG64()),
    "PCG64DXSM": lambda maker: np.random.Generator(np.random.PCG64DXSM()),
    "MT19937": lambda maker: np.random.Generator(np.random.MT19937()),
    "Philox": lambda maker: np.random.Generator(np.random.Philox()),
    "SFC64": lambda maker: np.random.Generator(np.random.SFC64()),
    "RandomState": lambda maker: np.random.RandomState(),
    "Random": lambda maker: random.Random(),
    "torch.Generator": lambda maker: torch.Generator(maker.device),
}


# ---------------------------------------------------------------------------------------------------------- containers


def _pack_items(value: Any, packer: Packer) -> list[Any]:
    packer.count(8 * len(value))
    return [[packer.pack(item) for item in value]]


def _pack_pairs(value: Any, packer: Packer) -> list[Any]:
    packer.count(16 * len(value))
    pairs = []
    for key, entry in value.items():
        text = key if isinstance(key, str) else ""
        pairs.append([packer.pack(key), packer.pack(entry, text)])
    return [pairs]


def _items_kind(cls: Any, fill: Callable[[Any, Any], bool] | None) -> Kind:
    return Kind(cls.__name__, _pack_items, lambda maker, items: cls(map(maker.make, items)), fill)


def _pairs(maker: Maker, pairs: Any) -> dict[Any, Any]:
    return {maker.make(key): maker.make(entry) for key, entry in pairs}


def _make_default(maker: Maker, factory: Any, pairs: Any) -> Any:
    function = _FACTORIES.get(factory) or getattr(maker.present, "default_factory", None)
    return defaultdict(function, _pairs(maker, pairs))


def _pack_default(value: Any, packer: Packer) -> list[Any]:
    name = getattr(value.default_factory, "__name__", "")
    is_known = getattr(builtins, name, None) is value.default_factory
    return [name if is_known else "", *_pack_pairs(value, packer)]


def _fill_list(present: Any, value: Any) -> bool:
    present[:] = value
    return True


def _fill_members(present: Any, value: Any) -> bool:
    present.clear()
    present.update(value)
    return True


def _fill_deque(present: Any, value: Any) -> bool:
    if present.maxlen != value.maxlen:
        return False
    present.clear()
    present.extend(value)
    return True


# --------------------------------------------------------------------------------------------------- classes by name


def _name_of(value: Any) -> str:
    cls = type(value)
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _class_named(name) is not cls:
        raise NotSaved(f"a {cls.__qualname__}, whose class is not at the top of its module")
    return name


def _class_named(name: str) -> Any:
    """Return a class of a module that is loaded; nothing is imported, and no attribute is computed."""
    module, _, path = name.partition(":")
    place: Any = sys.modules.get(module)
    for part in path.split("."):
        place = vars(place).get(part) if hasattr(place, "__dict__") else None
    return place if isinstance(place, type) else None


def _make_named_tuple(maker: Maker, name: str, items: Any) -> Any:
    cls = _class_named(name)
    if cls is None or not issubclass(cls, tuple) or len(getattr(cls, "_fields", ())) != len(items):
        raise Absent(f"the class {name!r}")
    return tuple.__new__(cls, map(maker.make, items))


def _make_member(maker: Maker, name: str, member: str) -> Any:
    cls = _class_named(name)
    member_found = getattr(cls, "__members__", {}).get(member) if isinstance(cls, enum.EnumMeta) else None
    if member_found is None:
        raise Absent(f"{member!r} of the class {name!r}")
    return member_found


# -------------------------------------------------------------------------------------- objects, and what is met again


def _make_same(maker: Maker, owner: str, key: str) -> Any:
    if (owner, key) not in maker.values:
        raise Absent(f"{owner}.{key}")
    return maker.values[owner, key]


def _make_object(maker: Maker, path: str) -> Any:
    if path not in maker.objects:
        raise Absent(f"{path}, which training has made")
    return maker.objects[path]


def _never(value: Any, packer: Packer) -> list[Any]:
    raise AssertionError("written by Packer.pack itself")


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("scalar", lambda value, packer: [value], lambda maker, value: value),
        Kind("tensor", _pack_tensor, _make_tensor, _fill_tensor),
        Kind("array", _pack_array, lambda maker, value: value.copy(), _fill_array),
        Kind("stream", _pack_stream, _make_stream, lambda present, value: present is value),
        Kind("path", lambda value, packer: [str(value)], lambda maker, text: Path(text)),
        _items_kind(list, _fill_list),
        _items_kind(tuple, None),
        _items_kind(set, _fill_members),
        _items_kind(frozenset, None),
        Kind(
            "deque",
            lambda value, packer: [*_pack_items(value, packer), value.maxlen],
            lambda maker, items, most: deque(map(maker.make, items), most),
            _fill_deque,
        ),
        Kind("dict", _pack_pairs, _pairs, _fill_members),
        Kind("ordered", _pack_pairs, lambda maker, pairs: OrderedDict(_pairs(maker, pairs)), _fill_members),
        Kind("counter", _pack_pairs, lambda maker, pairs: Counter(_pairs(maker, pairs)), _fill_members),
        Kind("default", _pack_default, _make_default, _fill_members),
        Kind("named", lambda value, packer: [_name_of(value), *_pack_items(value, packer)], _make_named_tuple),
        Kind("member", lambda value, packer: [_name_of(value), value.name], _make_member),
        Kind("same", _never, _make_same),
        Kind("object", _never, _make_object),
    )
}
"""The kinds, by their names in a state."""

_NAMES: dict[type, str] = {
    **dict.fromkeys(_SCALARS, "scalar"),
    **{cls: cls.__name__ for cls in (list, tuple, set, frozenset, deque, dict)},
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "default",
}
_TESTS: dict[str, Callable[[Any], bool]] = {
    "scalar": lambda value: isinstance(value, np.generic),
    "tensor": lambda value: isinstance(value, Tensor),
    "array": lambda value: isinstance(value, np.ndarray),
    "stream": lambda value: isinstance(value, STREAMS),
    "path": lambda value: isinstance(value, PurePath),
    "member": lambda value: isinstance(value, enum.Enum),
    "named": lambda value: isinstance(value, tuple) and hasattr(value, "_fields"),
}
