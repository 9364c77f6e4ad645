"""Find and compare what a value contains: batches, states, the objects of a user, and tensors in parts (DTensor)."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = [
    "children_of",
    "copy_of",
    "dense_part",
    "fields_of",
    "flatten",
    "has_same_bits",
    "is_dataclass",
    "is_of_library",
    "is_of_zae",
    "is_sharded",
    "json_safe",
    "leading_dimension",
    "leaves_of",
    "local_part",
    "map_tensors",
    "names_read_by",
    "nonfinite_in",
    "owners_of_user",
    "redistribute_like",
    "sample",
    "search",
    "tensors_in",
    "with_items",
]

_MISSING = object()
MAX_OBJECTS = 1000  # Objects that `search` examines in all.
MAX_ENTRIES = 64  # Entries of a container that it examines; a larger one is left out.


def is_dataclass(value: object) -> bool:
    """Return whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance that have a value, in order."""
    fields = {field.name: getattr(value, field.name, _MISSING) for field in dataclasses.fields(value)}
    return {name: item for name, item in fields.items() if item is not _MISSING}


def children_of(value: Any) -> Iterable[Any]:
    """Return what a tuple, a list, a mapping or a dataclass contains, in order; nothing for any other object."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    return fields_of(value).values() if is_dataclass(value) else ()


def leading_dimension(batch: Any) -> int | None:
    """Return the number of samples in a batch: dimension 0 of the first tensor or array in it.

    The containers of :func:`children_of` are searched in order, depth first; tensors without dimensions are skipped. A
    ``PackedSequence`` has as many samples as sequences.
    """
    kind = type(batch)
    if (kind is tuple or kind is list) and batch:  # A fast path for (inputs, targets), in every step.
        first = batch[0]
        if type(first) is Tensor:
            try:
                shape: Sequence[int] = first.shape
            except RuntimeError:  # A nested tensor has none.
                shape = ()
            if shape:
                return shape[0]  # size(0) is twice as slow.
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else None  # A nested tensor has no shape.
    if isinstance(batch, np.ndarray):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # Its first field has the steps of all sequences.
    for child in children_of(batch):
        size = leading_dimension(child)
        if size is not None:
            return size
    return None


def leaves_of(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a value contains at any depth, without the containers, with places if the value itself has one."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, (tuple, list, deque)):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    elif is_dataclass(value):
        items = fields_of(value).items()
    else:
        yield place, value
        return
    for key, item in items:
        location = f"{place}[{key!r}]" if place else ""
        if type(item) is Tensor:  # In every step: it needs no generator of its own.
            yield location, item
        else:
            yield from leaves_of(item, location)


def flatten(values: Mapping[Any, Any], separator: str, prefix: str = "", depth: int = 8) -> dict[str, Any]:
    """Return the entries of nested mappings by joined names; a mapping that lies deeper stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        is_open = isinstance(value, Mapping) and depth > 0
        flat |= flatten(value, separator, f"{name}{separator}", depth - 1) if is_open else {name: value}
    return flat


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, at any depth; one that is contained twice is yielded twice."""
    return (leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor))


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor lies in parts on several ranks (DTensor)."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; any other tensor itself."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def redistribute_like(value: Any, reference: Any) -> Any:
    """Return a whole tensor in the layout of another one; each rank keeps its part, and none communicates."""
    if not is_sharded(reference) or is_sharded(value) or not isinstance(value, Tensor):
        return value
    if value.shape != reference.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        value.detach().to(reference.device), reference.device_mesh, reference.placements, src_data_rank=None
    )


def dense_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a dense one."""
    part = local_part(tensor)
    return part if part.layout is torch.strided else part.to_dense()


def has_same_bits(a: Any, b: Any) -> bool:
    """Return whether two values have the same types and the same bits, in all that they contain."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout) and _are_equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(has_same_bits(a[key], b[key]) for key in a)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(has_same_bits, a, b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return bool(a == b) or bool(a != a and b != b)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one type and shape have the same bits."""
    if a.layout is not torch.strided or a.is_quantized:
        return torch.equal(a, b)
    a, b = (tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous() for tensor in (a, b))
    return torch.equal(*(tensor.unsqueeze(-1).view(torch.uint8) for tensor in (a, b)))


def nonfinite_in(named: Mapping[str, Tensor]) -> list[str]:
    """Name the tensors that hold NaN or an infinity; a device is waited for once."""
    floats = {key: value.detach() for key, value in named.items() if value.is_floating_point() and value.numel()}
    if not floats:
        return []
    # A sum is one fast pass; that it is finite proves that all are. Only else each number is looked at.
    device = next(iter(floats.values())).device
    totals = torch.stack([value.sum().float().to(device) for value in floats.values()]).tolist()
    suspects = [key for key, total in zip(floats, totals, strict=True) if not math.isfinite(total)]
    return [key for key in suspects if not bool(floats[key].isfinite().all())]


def search(
    value: Any,
    place: str,
    kinds: tuple[type, ...],
    *,
    closed: tuple[type, ...] = (),
    visited: set[int] | None = None,
    apart: Collection[int] = (),
) -> Iterator[tuple[str, Any]]:
    """Yield the objects of some kinds in the attributes and containers of an object, breadth first."""
    visited = set() if visited is None else visited
    queue = deque([(place, value)])
    for _ in range(MAX_OBJECTS):
        if not queue:
            return
        path, candidate = queue.popleft()
        if id(candidate) in visited:
            continue
        visited.add(id(candidate))
        if isinstance(candidate, kinds):
            yield path, candidate
            continue
        inner: Any = candidate if isinstance(candidate, (list, tuple, dict)) else getattr(candidate, "__dict__", {})
        if len(inner) > MAX_ENTRIES:
            continue
        inner = inner if isinstance(inner, dict) else dict(enumerate(inner))
        for key, part in sorted(inner.items(), key=lambda item: str(item[0])):
            is_open = isinstance(part, (*kinds, list, tuple, dict)) or hasattr(part, "__dict__")
            if is_open and not isinstance(part, closed) and id(part) not in visited and id(part) not in apart:
                queue.append((f"{path}.{key}", part))


def names_read_by(function: Any, depth: int = 2) -> dict[str, Any]:
    """Return what a function reads from its closure and from the globals of its module, by name.

    What it reads of the user's modules and classes among them, ``config.level`` for instance, and what its helpers in
    the same module read, is there too.
    """
    if isinstance(function, partial):
        return names_read_by(function.func, depth)
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):  # It is not written in Python.
        return {}
    known = function.__globals__
    values = {name: known[name] for name in _names_in(function.__code__) if name in known}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # The cell is still empty.
            values[name] = cell.cell_contents
    names = _names_in(function.__code__)
    for place, holder in list(values.items()):
        is_open = isinstance(holder, (ModuleType, type)) and not is_of_library(holder)
        if is_open and place != "__class__":  # That is the class that super() needs.
            values |= {f"{place}.{name}": vars(holder)[name] for name in names if name in vars(holder)}
    for value in list(values.values()) if depth else ():
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            values = {**names_read_by(value, depth - 1), **values}
    return values


def is_of_library(holder: ModuleType | type) -> bool:
    """Return whether a module or a class is of Python, of zae, or of an installed package, and not of the user."""
    name = holder.__name__ if isinstance(holder, ModuleType) else holder.__module__
    root = name.partition(".")[0]
    if root == "zae" or root in sys.stdlib_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def is_of_zae(cls: type) -> bool:
    """Return whether a class is of zae, and not of the user or of another package."""
    return cls.__module__.partition(".")[0] == "zae"


def owners_of_user(cls: type, *names: str) -> list[type]:
    """Return the classes of the user, or of another package, that define one of these names, outermost first."""
    return [base for base in cls.__mro__ if not is_of_zae(base) and any(name in vars(base) for name in names)]


@lru_cache(maxsize=1000)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and globals in a function, and in those within it, comprehensions for instance."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


def sample(values: Any, limit: int) -> Any:
    """Return about so many elements of a tensor or an array, evenly spaced, in one dimension and without a copy."""
    is_tensor = isinstance(values, Tensor)
    if not (values.is_contiguous() if is_tensor else values.flags.forc):
        # Each dimension by itself first: to reshape what was expanded would make all of it.
        values = values[tuple(slice(None, None, max(1, size // limit)) for size in values.shape)]
    flat = values.reshape(-1) if is_tensor else values.reshape(-1, order="A")
    return flat[:: max(1, len(flat) // limit)]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to each tensor in containers, whose types are kept; they stay the same where nothing differs."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return with_items(value, [map_tensors(function, item) for item in value])
    if isinstance(value, deque):
        return deque((map_tensors(function, item) for item in value), value.maxlen)
    if isinstance(value, Mapping):
        return with_items(value, {key: map_tensors(function, entry) for key, entry in value.items()})
    if is_dataclass(value):
        return with_items(value, {name: map_tensors(function, item) for name, item in fields_of(value).items()})
    return value


def with_items(old: Any, items: Any) -> Any:
    """Return a container like another one with other items; the same object where none differs.

    Parameters
    ----------
    old : tuple, list, mapping or dataclass instance
        It is not changed. Its class and further attributes are kept.
    items : list or dict
        An item for each of its own, by the same key: a list for a tuple or a list.
    """
    if isinstance(old, (tuple, list)):
        return _with_sequence(old, items)
    if isinstance(old, Mapping):
        return _with_mapping(old, items)
    changed = {name: item for name, item in items.items() if item is not getattr(old, name)}
    if not changed:
        return old
    # Not dataclasses.replace: it calls __post_init__ again, and refuses fields with init=False.
    new = copy.copy(old)
    for name, item in changed.items():
        object.__setattr__(new, name, item)
    return new


def _with_sequence(old: Any, items: list[Any]) -> Any:
    """Return a tuple or list of the same type with other items."""
    if all(new is item for new, item in zip(items, old, strict=True)):
        return old
    kind = type(old)
    if kind is list:
        return items
    if isinstance(old, list):
        new = copy.copy(old)
        new[:] = items
        return new
    try:
        # A named tuple, or a subclass with its own __new__, takes other arguments.
        copied = tuple.__new__(kind, items)
    except TypeError:  # Such as torch.return_types.max.
        return kind(items)
    if hasattr(old, "__dict__"):
        copied.__dict__.update(old.__dict__)
    return copied


def _with_mapping(old: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other values."""
    if all(new is item for new, item in zip(items.values(), old.values(), strict=True)):
        return old
    if type(old) is dict:
        return items
    if isinstance(old, MutableMapping):  # A copy keeps default_factory and attributes.
        new = copy.copy(old)
        for key, item in items.items():
            new[key] = item
        return new
    try:
        return type(old)(items)  # type: ignore[call-arg]
    except TypeError:  # The constructor takes something else.
        return items


def json_safe(value: Any) -> Any:
    """Return a value for JSON: NaN and the infinities, which it has no numbers for, as "nan", "inf" and "-inf"."""
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    # float(): a float64 of NumPy has another repr.
    return repr(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def copy_of(value: Any, device: torch.device | None = None) -> Any:
    """Copy a value deeply, with its tensors detached, and on the device if one is given."""
    if isinstance(value, Tensor):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    if type(value) is dict:
        return {key: copy_of(entry, device) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_of(item, device) for item in value)
    return copy.deepcopy(value)
