"""Devices: parse their names, and move batches to them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zae.errors import ConfigError
from zae.torch_private import accelerator, count_devices, has_bf16_of_x86
from zae.values.walk import children_of, fields_of, is_dataclass, with_items

__all__ = [
    "as_current",
    "can_copy_async",
    "cpu_computes_in_bf16",
    "exchange_current",
    "is_out_of_memory",
    "name_of_device",
    "parse_device",
    "plain_tensors",
    "release_memory",
    "to_device",
]

DeviceSpec: TypeAlias = "str | int | torch.device | Sequence[str | int | torch.device] | None"

HOST = torch.device("cpu")
"""The CPU, as `parse_device` returns it: comparing identities is faster than comparing devices."""

_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def parse_device(spec: DeviceSpec = "auto") -> list[torch.device]:
    """Return the devices of the argument ``device``, one for each rank."""
    if spec is None or (isinstance(spec, str) and spec == "auto"):
        return [_best_device()]
    if isinstance(spec, (list, tuple)):
        return _parse_list(spec)
    device = _parse_entry(spec, "device")
    _require(device, spec, "device")
    return [device]


def to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return the batch with every tensor in it on the device, without changing the batch.

    Tensors are found in tuples, lists, mappings, named tuples and dataclasses, at any depth, whose types are kept. Of
    any other object with a method ``to``, a shallow copy is moved by this method, as many change their object. Other
    values (str, numbers, arrays, ...) are returned unchanged, and so are containers in which all is on the device.
    """
    # A fast path for a few tensors that are on the device already: every batch comes here.
    kind = type(batch)
    items: Iterable[Any]
    if kind is Tensor:
        items = (batch,)
    elif kind is tuple or kind is list:
        items = batch
    elif kind is dict:
        items = batch.values()
    else:
        return _move(batch, device, non_blocking)
    on_host = device is HOST or device == HOST
    for item in items:
        if type(item) is not Tensor or not (item.is_cpu if on_host else item.device == device):
            return _move(batch, device, non_blocking)
    return batch


def can_copy_async(device: torch.device) -> bool:
    """Return whether a copy between pinned memory and a device can run beside the host and the computation.

    It can on an accelerator with streams: the CPU has no streams, and torch does not expose those of MPS.
    """
    present = accelerator()
    return present is not None and present.type == device.type != "mps"


def exchange_current(device: torch.device | None) -> torch.device | None:
    """Make a device the current one of this process, and return the one that was; None where nothing is to be done.

    What a step makes with ``device="cuda"`` then lies where the model is.
    """
    module = _module_with_current(device)
    if device is None or module is None:
        return None
    before = torch.device(device.type, module.current_device())
    module.set_device(device)
    return before


@contextmanager
def as_current(device: torch.device) -> Iterator[None]:
    """Make a device the current one of this process for the block; an accelerator that is not in use stays so."""
    if _module_with_current(device) is None or not count_devices(device.type, begun=True):
        yield
        return
    before = exchange_current(device)
    try:
        yield
    finally:
        exchange_current(before)


def _module_with_current(device: torch.device | None) -> Any:
    """Return torch's module of an accelerator that has a current device, or None: the CPU and MPS have none."""
    if device is None or device.type in ("cpu", "meta"):
        return None
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "set_device") and hasattr(module, "current_device") else None


def cpu_computes_in_bf16() -> bool:
    """Return whether the processor has instructions for bfloat16: AVX512_BF16 or AMX, or those of Arm.

    Without them torch converts every operand, and a step in bfloat16 is much slower than one in float32. The result is
    False where this build of torch does not know.
    """
    if not torch.backends.mkldnn.is_available():  # The library that uses these instructions.
        return False
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        answer = ask()
        return any(answer.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return has_bf16_of_x86()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be allocated, on an accelerator or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def release_memory() -> None:
    """Free what only reference cycles hold, and what torch keeps of an accelerator's memory."""
    gc.collect()
    device = accelerator()
    if device is not None and count_devices(device.type, "empty_cache", begun=True):
        getattr(torch, device.type).empty_cache()


def name_of_device(device: torch.device) -> str:
    """Return the name that the maker gave to an accelerator; empty where torch does not know it."""
    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return "" if ask is None else str(ask(device))


def plain_tensors(batch: Any) -> list[Tensor] | None:
    """Return the tensors that :func:`to_device` moves; None if the batch contains an object with its own ``to``."""
    if type(batch) is Tensor:
        return [batch] if batch.layout is torch.strided and not batch.is_nested else None
    if callable(getattr(type(batch), "to", None)) and not isinstance(batch, type):
        return None
    plain: list[Tensor] = []
    for child in children_of(batch):
        tensors = plain_tensors(child)
        if tensors is None:
            return None
        plain += tensors
    return plain


def _best_device() -> torch.device:
    """Return the device for "auto"."""
    device = accelerator()
    for kind in ("cuda", "mps", *([] if device is None else [device.type])):
        if count_devices(kind):
            return torch.device(kind, 0)
    return HOST


def _parse_list(spec: Sequence[Any]) -> list[torch.device]:
    """Return the devices of a list, one for each rank."""
    if not spec:
        raise ConfigError("device=[] names no device; write device='auto', or one entry for each rank: ['cpu', 'cpu']")
    places = [f"device[{index}]" for index in range(len(spec))]
    devices = [_parse_entry(entry, place) for entry, place in zip(spec, places, strict=True)]
    # Errors of the list on any machine come before devices that this machine lacks.
    kinds = list(dict.fromkeys(device.type for device in devices))
    if len(kinds) > 1:
        raise ConfigError(
            f"device={_format_list(spec)} mixes {' and '.join(kinds)}, but all ranks need the same kind of device; "
            f"write for example device={[str(device) for device in devices if device.type == kinds[0]]!r}"
        )
    distinct = list(dict.fromkeys(devices))
    if kinds != ["cpu"] and len(distinct) < len(devices):
        twice = next(device for index, device in enumerate(devices) if device in devices[:index])
        raise ConfigError(
            f"device={_format_list(spec)} names {twice} more than once, but each rank needs its own; "
            f"write device={[str(device) for device in distinct]!r}"
        )
    for device, entry, place in zip(devices, spec, places, strict=True):
        _require(device, entry, place)
    return devices


def _parse_entry(entry: object, argument: str) -> torch.device:
    """Return the device of one entry, with its index, even if this machine does not have it."""
    if isinstance(entry, (int, np.integer)) and not isinstance(entry, bool):
        if entry < 0:
            raise ConfigError(f"{argument}={entry} is not the index of a CUDA device; write device='cpu' for the CPU")
        return torch.device("cuda", int(entry))
    if isinstance(entry, str):
        device = _parse_name(entry, argument)
    elif isinstance(entry, torch.device):
        device = entry
    else:
        if isinstance(entry, torch.optim.Optimizer):
            raise ConfigError(
                f"{argument} is an optimizer ({type(entry).__name__}); the second argument is the device, so give it "
                "by its name: optimizer=..."
            )
        if isinstance(entry, torch.nn.Module):
            raise ConfigError(
                f"{argument} is a model ({type(entry).__name__}); the first argument is the model, and the second one "
                "the device"
            )
        raise ConfigError(
            f"{argument}={entry!r} is a {type(entry).__name__}, not a device; "
            f"write a str, an int, a torch.device, or a list of those, for example device='cpu'"
        )
    if device.type == "cpu":
        return HOST  # Without an index: cpu:0 does not equal the device of a tensor.
    return torch.device(device.type, _current_index(device) if device.index is None else device.index)


def _current_index(device: torch.device) -> int:
    """Return the index of the device that torch means by a kind; an accelerator that is not in use stays so."""
    module = _module_with_current(device)
    is_in_use = module is not None and getattr(module, "is_initialized", module.is_available)()
    return module.current_device() if is_in_use else 0


def _parse_name(text: str, argument: str) -> torch.device:
    """Return the torch.device of a name."""
    try:
        return torch.device(text)
    except RuntimeError:
        raise ConfigError(
            f"{argument}={text!r} is not a device; write 'auto', 'cpu', 'cuda:0' or 'mps', and in a list one of the "
            "last three for each rank"
        ) from None


def _require(device: torch.device, entry: object, option: str) -> None:
    """Refuse a device that this machine does not have."""
    if device.type == "cpu":
        return
    argument = f"{option}={_plain_entry(entry)!r}"
    if device.type == "meta":
        raise ConfigError(f"{argument} cannot train, because its tensors have no data; write device='cpu'")
    count = count_devices(device.type)
    if device.index >= count:
        name = f"{device.type.upper()} device{' is' if count == 1 else 's are'}"
        remedy = f"device='{device.type}:{count - 1}' or device='cpu'" if count else "device='cpu'"
        raise ConfigError(f"{argument}, but {count} {name} available; write {remedy}")


def _plain_entry(entry: object) -> object:
    """Return an entry to show: the name of a torch.device, any other as it is."""
    return str(entry) if isinstance(entry, torch.device) else entry


def _format_list(spec: Sequence[Any]) -> str:
    """Return a list as it is written in a script."""
    return repr([_plain_entry(entry) for entry in spec])


def _move(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """Return the value with its tensors on the device; the same object if nothing was moved."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking or _is_staged(value, device))
    if callable(getattr(type(value), "to", None)) and not isinstance(value, type):
        return _move_by_method(value, device, non_blocking)
    if isinstance(value, (tuple, list)):
        return with_items(value, [_move(item, device, non_blocking) for item in value])
    if isinstance(value, Mapping):
        return with_items(value, {key: _move(item, device, non_blocking) for key, item in value.items()})
    if is_dataclass(value):
        return with_items(value, {name: _move(item, device, non_blocking) for name, item in fields_of(value).items()})
    return value


def _is_staged(tensor: Tensor, device: torch.device) -> bool:
    """Return whether the driver has read a tensor of the host when a copy that does not block returns.

    It has read pageable memory, which it puts into pinned memory of its own first. A copy that blocks would wait for
    all that the device has to do.
    """
    if not tensor.is_cpu or not can_copy_async(device):
        return False
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_pinned()


def _move_by_method(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """Return a copy of the value that its own ``to`` has moved."""
    # BatchEncoding.to of Hugging Face, for instance, changes its object.
    copied: Any = value if isinstance(value, tuple) else _shallow_copy(value)
    if non_blocking:
        try:
            moved = copied.to(device, non_blocking=True)
        except TypeError:  # Many take the device only.
            moved = copied.to(device)
    else:
        moved = copied.to(device)
    return copied if moved is None else moved


def _shallow_copy(value: Any) -> Any:
    """Return a shallow copy, or the value itself where it cannot be copied."""
    try:
        return copy.copy(value)
    except Exception:  # Copying may be code of the user.
        return value
