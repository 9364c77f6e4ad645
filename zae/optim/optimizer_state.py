"""Load the states of optimizers, with the types and bits that they were saved with, and compare what came back.

``Optimizer.load_state_dict`` of torch casts every floating tensor of a state to the type of its weight, and rebuilds
all that can be iterated over, str included. Here torch loads the groups and calls the hooks; the values are set
unchanged.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zae.errors import CheckpointMismatch
from zae.torch_private import has_loading_hooks
from zae.values.strides import is_laid_out
from zae.values.walk import has_same_bits, is_sharded, leaves_of, map_tensors, redistribute_like

__all__ = [
    "are_small_and_whole",
    "check_loaded",
    "device_of",
    "difference",
    "has_hooks",
    "like_parameter_layout",
    "load_optimizer_state",
    "match_layout",
    "move_to_device",
    "places_on_device",
    "with_enums",
    "with_inner",
    "wraps_others",
]

_LOAD = Optimizer.load_state_dict
_HOOKS = "_optimizer_load_state_dict_pre_hooks"  # What the constructor of torch.optim.Optimizer makes.
_MAX_COMPARED_BYTES = 64 << 20  # Bytes up to which tensors are compared bit by bit.


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state through the ``load_state_dict`` of an optimizer, with every value as it was saved.

    Tensors are moved to the device of their parameter, as torch does it: ``step`` stays on the host unless the kernel
    reads it on the device. Tensors that are there already are not copied, so the state must not be used elsewhere. Of
    whole values, a rank keeps its shard of those of a parameter in parts (DTensor).
    """
    state = _in_layout_of_parameters(optimizer, state)
    handles = []
    has_own_hooks = False  # Hooks of the script may load another state than was saved.
    for part in with_inner(optimizer):
        if not has_hooks(part):
            continue
        has_own_hooks = has_own_hooks or has_loading_hooks(part)
        exact = _Exact()
        handles.append(part.register_load_state_dict_pre_hook(exact.take))
        handles.append(part.register_load_state_dict_post_hook(exact.put, prepend=True))
    # Code of its own class may change in place what it gets.
    own_values = copy.deepcopy(dict(state)) if _has_own_loading(optimizer) else dict(state)
    try:
        optimizer.load_state_dict(own_values)
    finally:
        for handle in handles:
            handle.remove()
    if not has_own_hooks:
        check_loaded("optimizer", optimizer, state)


def _in_layout_of_parameters(optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a whole state as this rank holds it: in the layouts of its parameters, without those of other ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if "param_groups" not in state or not any(is_sharded(parameter) or parameter.is_meta for parameter in parameters):
        return state
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameter_at = dict(zip(indices, parameters))
    # Parameters of other ranks are on the meta device; where all are there, they are of a model without memory.
    on_meta = {id(parameter) for parameter in parameters if parameter.is_meta}
    ids_of_others = on_meta if len(on_meta) < len({*map(id, parameters)}) else set()
    states = {}
    for index, values in state["state"].items():
        parameter = parameter_at.get(index)
        if id(parameter) not in ids_of_others:
            states[index] = map_tensors(partial(redistribute_like, reference=parameter), values)
    return {**state, "state": states}


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether the constructor of torch was called; a wrapper without it saves and loads with the one inside."""
    return hasattr(optimizer, _HOOKS)


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and the optimizers that it wraps, at any depth: any of these may load the state."""
    optimizers = [optimizer]
    for outer in optimizers:
        for value in vars(outer).values():
            candidates = [value]
            if isinstance(value, dict):
                candidates += value.values()
            elif isinstance(value, (list, tuple)):
                candidates += value
            for inner in candidates:
                if isinstance(inner, Optimizer) and not any(inner is optimizer for optimizer in optimizers):
                    optimizers.append(inner)
    return optimizers


def wraps_others(optimizer: Optimizer) -> bool:
    """Return whether an optimizer contains others."""
    return len(with_inner(optimizer)) > 1


class _Exact:
    """Take the values out of a state before torch loads it, and set them afterwards.

    Torch would give them the type of their weight: on weights in bfloat16 the float32 values in the state of NAdam,
    QHAdam and Kron lose digits, and NAdam and ASGD of torch itself get others with float64 too. Integers, text and
    deques that an optimizer of the user keeps would become tensors of the weight's type, or fail.
    """

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] = {}
        self._devices: list[dict[str, torch.device]] = []

    def take(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state without values: the last of the hooks before torch loads."""
        self._saved = state
        self._devices = []
        for group in optimizer.param_groups:
            self._devices.append({key: value.device for key, value in group.items() if isinstance(value, Tensor)})
        groups = [with_enums(saved, present) for saved, present in zip(state["param_groups"], optimizer.param_groups)]
        return {**state, "state": {}, "param_groups": groups}

    def put(self, optimizer: Optimizer) -> None:
        """Set the values: the first of the hooks after torch has loaded."""
        for group, devices in zip(optimizer.param_groups, self._devices, strict=True):
            for key, device in devices.items():  # Rates that are tensors stay where the kernel reads them.
                if isinstance(group.get(key), Tensor):
                    group[key] = group[key].to(device)
        places = {}
        for group, saved in zip(optimizer.param_groups, self._saved["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                places[index] = (parameter, group)
        moved: dict[Any, Tensor] = {}
        exact = {}
        for key, values in self._saved["state"].items():
            parameter, group = places.get(key, (key, {}))
            if key in places:
                values = _on_device(values, parameter.device, group, moved)
            exact[parameter] = copy.copy(values)
        copies = defaultdict(dict, {key: copy.copy(values) for key, values in exact.items()})
        # A class looks at the state here, and fails on one that it cannot use. What it converts, since it takes it for
        # one of an older format, is set as it was saved.
        optimizer.__setstate__({"state": copies, "param_groups": optimizer.param_groups})
        vars(optimizer)["state"] = defaultdict(dict, exact)


def _on_device(
    value: Any, device: torch.device, group: Mapping[str, Any], moved: dict[Any, Tensor], key: Any = None
) -> Any:
    """Move the tensors in a value to a device; a tensor that is contained twice is moved once."""
    if isinstance(value, Tensor):
        by_kernel = bool(group.get("fused") or group.get("capturable"))
        if key == "step" and not by_kernel:
            return value
        dtype = torch.float32 if key == "step" and group.get("fused") else value.dtype  # All that its kernel reads.
        memo_key = (id(value), dtype)
        if memo_key not in moved:
            moved[memo_key] = value.to(device=device, dtype=dtype)
        return moved[memo_key]
    if isinstance(value, dict):
        copied = value.copy()
        for name, entry in value.items():
            copied[name] = _on_device(entry, device, group, moved, name)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_on_device(entry, device, group, moved) for entry in value)
    if type(value) is deque:
        return deque((_on_device(entry, device, group, moved) for entry in value), value.maxlen)
    return value


# ------------------------------------------------------------------------------------- what has come back by a load


def check_loaded(kind_of_part: str, part: Any, state: Any) -> None:
    """Refuse an optimizer or a schedule that says, right after a load, that its state is another one.

    It may have more than was saved: a newer version of torch adds settings.
    """
    kind = type(part).__name__
    if problem := difference(state, part.state_dict(), kind_of_part, may_have_more=True):
        raise CheckpointMismatch(
            f"{kind_of_part} {kind} does not load its own state: {problem}. A run cannot be resumed from it; let "
            f"{kind}.load_state_dict restore what its state_dict returns"
        )


def difference(saved: Any, loaded: Any, path: str, *, may_have_more: bool = False) -> str:
    """Return where a loaded state differs from the saved one; else an empty string.

    The bits of tensors are read where `are_small_and_whole`. With ``may_have_more`` a dict may have got more entries.
    """
    pairs = _pairs(saved, loaded, path, may_have_more)
    reads_bits = are_small_and_whole(value for _, *pair in pairs for value in pair if isinstance(value, Tensor))
    for place, before, after in pairs:
        if _are_alike(before, after):
            if before.stride() != after.stride():
                return f"{place} had the strides {before.stride()} and has {after.stride()}"
            if not reads_bits:
                continue
        if not has_same_bits(before, after):
            return f"{place} was {_describe(before)} and is {_describe(after)}"
    return ""


def _pairs(saved: Any, loaded: Any, path: str, may_have_more: bool) -> list[tuple[str, Any, Any]]:
    """Return the values at the same places of two states, and containers that do not have the same places."""
    items: Iterable[tuple[Any, Any, Any]]
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping) and _has_keys_of(loaded, saved, may_have_more):
        items = [(key, value, loaded[key]) for key, value in saved.items()]
    elif isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        items = zip(itertools.count(), saved, loaded)
    else:
        is_member = isinstance(loaded, enum.Enum) and not isinstance(saved, enum.Enum)
        return [(path, saved, loaded.value if is_member else loaded)]  # A checkpoint has the value of a member.
    pairs = []
    for key, before, after in items:
        pairs += _pairs(before, after, f"{path}[{key!r}]", may_have_more)
    return pairs


def _has_keys_of(loaded: Mapping[Any, Any], saved: Mapping[Any, Any], may_have_more: bool) -> bool:
    return saved.keys() == loaded.keys() or (may_have_more and saved.keys() < loaded.keys())


def are_small_and_whole(tensors: Iterable[Tensor]) -> bool:
    """Return whether the bits of some tensors may be read: they are whole on this rank, and few bytes in all."""
    size = 0
    for tensor in tensors:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta or is_sharded(tensor):
            return False
        size += tensor.numel() * tensor.element_size()
    return size <= _MAX_COMPARED_BYTES


def _are_alike(a: Any, b: Any) -> bool:
    """Return whether two values are tensors of one shape and type."""
    are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor) and is_laid_out(a) and is_laid_out(b)
    return are_tensors and (a.shape, a.dtype) == (b.shape, b.dtype)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, {value.detach().flatten()[:3].tolist()}"
    return " ".join(repr(value).split())[:80]


def with_enums(saved: Any, present: Any) -> Any:
    """Return a saved state with the members of an Enum where the present one has some: a checkpoint has their values.

    SCION of pytorch_optimizer has some among the settings of its groups.

    Raise ValueError for a value that none of its members has.
    """
    if isinstance(present, enum.Enum):
        return type(present)(saved)
    if type(saved) is dict and isinstance(present, Mapping):
        return {key: with_enums(value, present.get(key)) for key, value in saved.items()}
    if type(saved) in (list, tuple) and isinstance(present, (list, tuple)) and len(saved) == len(present):
        return type(saved)(with_enums(value, model) for value, model in zip(saved, present))
    return saved


# --------------------------------------------------------------------------------------------- devices and copies


def places_on_device(state: Mapping[str, Any]) -> list[str]:
    """Name the tensors on an accelerator that belong to no parameter: a checkpoint has them on the host."""
    return [path for path, value in _apart_from_parameters(state) if isinstance(value, Tensor) and not value.is_cpu]


def device_of(optimizer: Optimizer) -> torch.device:
    """Return the device of the first parameter of an optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device
    return torch.device("cpu")


def move_to_device(state: Mapping[str, Any], places: Collection[str], device: torch.device) -> Any:
    """Return a state with the tensors of these names, as `places_on_device` returned them, on a device."""
    tensors = {path: value for path, value in _apart_from_parameters(state) if path in places}
    moved = {id(value): value.to(device) for value in tensors.values() if isinstance(value, Tensor)}
    return map_tensors(lambda tensor: moved.get(id(tensor), tensor), state) if moved else state


def _apart_from_parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a state that belong to no parameter; a parameter's go to the device of the parameter."""
    entries = state.get("state")
    named: Any = entries
    if isinstance(entries, dict):
        named = {key: entry for key, entry in entries.items() if type(key) is not int}
    other_entries = {key: entry for key, entry in state.items() if key not in ("state", "param_groups")}
    yield from leaves_of({**other_entries, "state": named}, "optimizer")


def _has_own_loading(optimizer: Optimizer) -> bool:
    """Return whether code of a class other than torch's loads the state of an optimizer, or of one that it wraps."""
    return any(type(part).load_state_dict is not _LOAD for part in with_inner(optimizer))


def match_layout(optimizer: Optimizer) -> None:
    """Give an optimizer's state the strides of the parameters: what was saved in parts has none of them.

    A fused kernel reads a weight and its state in the order of memory: with ``AdamW(fused=True)`` and weights in
    channels_last, a state that FSDPAddon has saved would be added to other weights, without an error.
    """
    for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
        state: Any = optimizer.state.get(parameter)  # Indexing the defaultdict would add an entry.
        if not isinstance(state, dict):
            continue
        for name, value in list(state.items()):
            if _has_same_shape(value, parameter) and value.stride() != parameter.stride():
                state[name] = like_parameter_layout(value, parameter)


def _has_same_shape(value: Any, parameter: Tensor) -> bool:
    """Return whether an entry of a state is a plain tensor with the shape and device of its parameter."""
    return (
        type(value) is Tensor
        and not nn.parameter.is_lazy(parameter)
        and value.layout is parameter.layout is torch.strided
        and (value.shape, value.device) == (parameter.shape, parameter.device)
    )


def like_parameter_layout(value: Tensor, parameter: Tensor) -> Tensor:
    """Copy a tensor of the parameter's shape into the parameter's order in memory."""
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
