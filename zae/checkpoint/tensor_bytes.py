"""Tensors and their bytes: which tensors are the same, what can be stored, and views without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zae.errors import CheckpointError
from zae.values.strides import is_laid_out, view_key

__all__ = [
    "AXES_LIMIT",
    "DTYPES",
    "DTYPE_NAMES",
    "byte_count",
    "byte_view",
    "dense",
    "separate",
    "shared_memory",
]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, torch_name in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
    }.items()
    if hasattr(torch, torch_name)  # An older torch lacks some.
}
"""The dtypes that safetensors can hold, by their names in its header."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_VIEWS = 255  # Of one memory, that are examined.
AXES_LIMIT = 1024
"""The most axes of a tensor that is read: torch takes time with the square of their number."""


def dense(tensor: Tensor, name: str | Callable[[], str]) -> Tensor:
    """Return a contiguous tensor on the CPU with the same values, sharing memory where possible.

    Raise CheckpointError for one without its own bytes: sparse, quantized, on the meta device, or distributed. The
    message begins with the name, or with what a function returns for it.
    """
    try:
        host = tensor.detach()
        if host.layout is torch.strided and not host.is_quantized and not host.is_meta:
            host = host.to("cpu").resolve_conj().resolve_neg().contiguous()
            # A tensor that wraps others (DTensor) fails only when its memory is read.
            if host.untyped_storage().data_ptr() or not host.numel():
                return host
    except (RuntimeError, NotImplementedError, ValueError):
        pass
    layout = f"on {tensor.device} ({tensor.layout})"
    place = name if isinstance(name, str) else name()
    raise CheckpointError(
        f"{place} is a {type(tensor).__name__} {layout}, which has no bytes to store; "
        "store the dense tensor that it stands for"
    )


def byte_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as `dense` returns it, without a copy; writing to the view writes to the tensor."""
    size = tensor.element_size()
    count = tensor.numel() * size
    if not count:
        return memoryview(bytearray())
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (count,), (1,))
    return flat.numpy().data


def separate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split the state of a model into the tensors to write, and the names that are tied to one of them.

    Only identical views are tied; views that overlap are each written by themselves.
    """
    separate_tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    name_at: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__" or not name.isprintable():
            raise CheckpointError(f"the model's state has the key {name!r:.80}, which files cannot hold; rename it")
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"the model's state contains a {type(tensor).__name__} at {name!r}; expected a tensor: "
                "return a tensor from get_extra_state(), or leave it out of the model's state"
            )
        key = view_key(tensor)
        first = name if key is None else name_at.setdefault(key, name)
        if first == name:
            separate_tensors[name] = tensor
        else:
            tied[name] = first
    return separate_tensors, tied


def shared_memory(tensors: Sequence[tuple[str, object]]) -> tuple[str, str] | None:
    """Return the names of two tensors that are different views of the same elements, if there are any."""
    by_storage: dict[object, dict[tuple[object, ...], tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        if isinstance(tensor, Tensor) and is_laid_out(tensor) and (key := view_key(tensor)) is not None:
            by_storage.setdefault(key[:2], {}).setdefault(key, (name, tensor))
    for views in by_storage.values():
        if len(views) < 2:
            continue
        (_, first), *_ = views.values()
        taken = torch.zeros(first.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")
        for number, (name, tensor) in enumerate(views.values(), start=1):
            if number > _MAX_VIEWS:
                break
            size = tensor.element_size()
            strides = [stride * size for stride in tensor.stride()]
            marks = taken.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size)
            if (before := int(marks.max())) > 0:
                return [*views.values()][before - 1][0], name
            marks.fill_(number)
    return None


def byte_count(*tensors: Tensor) -> int:
    """Return how many bytes tensors take, each counted separately."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
