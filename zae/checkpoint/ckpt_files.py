"""Files of ``torch.save``: written as torch writes them, and read without running any code in them."""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from zae.checkpoint.tensor_bytes import byte_view, dense, separate
from zae.errors import CheckpointDamaged

__all__ = ["read_ckpt", "read_trusted", "write_ckpt"]

_KEYS = frozenset({"str", "int", "bool", "float", "None", "bytes_or_str"})  # What a dict in a pickle may have as keys.
_ORDERED = "collections OrderedDict"


def write_ckpt(write: Callable[[Any], object], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as ``torch.save`` does, as a dict on the CPU that ``weights_only=True`` loads; tied ones once."""
    untied, tied = separate(tensors)
    content: dict[str, Tensor] = {}
    for name, tensor in untied.items():
        host = dense(tensor, name)
        # torch.save writes the whole memory behind a view: a view that is less than that is copied.
        has_all_of_storage = host.untyped_storage().nbytes() == host.numel() * host.element_size()
        content[name] = host if has_all_of_storage else host.clone()
    sink = _Sink(write, {host.data_ptr(): byte_view(host) for host in content.values()})
    torch.save({name: content[tied.get(name, name)] for name in tensors}, cast("IO[bytes]", sink))


def read_ckpt(data: bytes, where: str) -> dict[str, Tensor]:
    """Read what ``torch.save`` wrote to the file `where`, without running any code in it.

    Raise CheckpointDamaged unless it is torch's zip file with a dict of tensors.
    """
    try:
        _refuse_odd_pickle(_refuse_odd_zip(data))
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # torch raises nearly any exception for a hostile file; the caller gets ours.
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:160]
        raise CheckpointDamaged(
            f"{where}: not loaded: contains code, or is cut short ({reason}). "
            "Get the weights as .safetensors, or as .ckpt with a dict of tensors. If you trust the file, write "
            "saved = torch.load(path, weights_only=False), and apply_weights(saved['state_dict']) for a checkpoint of "
            "Lightning, or apply_weights(saved.state_dict()) for a whole module."
        ) from error
    if isinstance(content, dict) and _is_state(content.get("state_dict")):  # A checkpoint of Lightning.
        content = content["state_dict"]
    if _is_state(content):
        return dict(content)
    description = (
        f"a dict with the keys {list(content)[:5]!r:.120}"
        if isinstance(content, dict)
        else f"a {type(content).__name__}"
    )
    keys = [key for key, part in content.items() if _is_state(part)] if isinstance(content, dict) else []
    hint = f", or give that part: apply_weights(torch.load(path)[{keys[0]!r:.80}])" if keys else ""
    raise CheckpointDamaged(
        f"{where}: contains {description}; expected a dict of tensors. Store only the model's state{hint}."
    )


def read_trusted(path: Path) -> dict[str, Tensor]:
    """Read what ``torch.save`` wrote, and run whatever code it contains."""
    content = torch.load(path, map_location="cpu", weights_only=False)
    content = content.state_dict() if isinstance(content, nn.Module) else content
    content = content["state_dict"] if isinstance(content, dict) and _is_state(content.get("state_dict")) else content
    if _is_state(content):
        return dict(content)
    raise CheckpointDamaged(f"{path}: contains a {type(content).__name__}; expected a state_dict or a torch.nn.Module")


def _is_state(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


class _Sink(io.RawIOBase):
    """The file that torch.save writes to."""

    def __init__(self, write: Callable[[Any], object], owned: Mapping[int, memoryview]) -> None:
        self._write = write
        self._owned = owned

    def writable(self) -> bool:
        """Return True, for torch asks."""
        return True

    def write(self, data: Any) -> int:
        """Pass a buffer on: the tensor that it shows, else a copy, because torch may reuse its memory."""
        view = memoryview(data).cast("B")
        tensor = self._owned.get(np.frombuffer(view, np.uint8).ctypes.data) if view else None
        self._write(tensor if tensor is not None and len(tensor) == len(view) else bytes(view))
        return len(view)


def _refuse_odd_zip(data: bytes) -> bytes:
    """Return the pickle in a zip file, and refuse what torch.save does not write: other formats, TorchScript, bombs."""
    if data[:4] != b"PK\x03\x04":
        raise ValueError("a bare pickle, or not a zip file of torch.save")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("a compressed zip file, which torch.save does not write")
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("a zip file that claims more than it holds")
        if any("/code/" in entry.filename or entry.filename.endswith("constants.pkl") for entry in entries):
            raise ValueError("a TorchScript archive, which is a program")
        pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{len(pickles)} pickles of tensors, where there must be one")
        return archive.read(pickles[0])


def _refuse_odd_pickle(data: bytes) -> None:
    """Refuse a pickle that would take long for its size: torch's interpreter is slow, and keys may collide.

    The stack is simulated as pickletools describes each operation, with kinds of values instead of values.
    """
    stack: list[str] = []
    marks: list[int] = []
    memo: dict[Any, str] = {}
    calls = 0
    for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
        name, before = operation.name, operation.stack_before
        if count > 2000 + 0.4 * len(data) or calls > 1000 + len(data) / 40:
            raise ValueError("more operations than a dict of tensors takes")
        if name == "MARK":
            marks.append(len(stack))
            continue
        has_mark = pickletools.markobject in before
        start = marks.pop() if has_mark else len(stack) - len(before)
        taken = stack[start:]
        del stack[start - (before.index(pickletools.markobject) if has_mark else 0) :]
        if name in ("SETITEM", "SETITEMS") and not _KEYS.issuperset(taken[1::2] if name == "SETITEM" else taken[::2]):
            raise ValueError("a dict with keys that are neither text nor small numbers")
        if name in ("REDUCE", "NEWOBJ"):
            calls += 1
            if taken[0] == _ORDERED and taken[1] != "EMPTY_TUPLE":
                raise ValueError("a dict that is filled in another way than by torch.save")
        if name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif operation.stack_after:
            stack.append(_kind_of(name, operation.stack_after[0].name, argument))


def _kind_of(operation: str, kind: str, argument: Any) -> str:
    """Return what an operation of a pickle puts on the stack: the kind of a value, or the name of a function."""
    if operation in ("GLOBAL", "STACK_GLOBAL", "INST"):
        if argument != _ORDERED and not str(argument).startswith(("torch ", "torch.")):
            raise ValueError(f"it names {str(argument)[:80]!r}, which weights do not need")
        return str(argument)
    if kind == "int" and not -(2**63) <= argument < 2**63:
        return "a large number"
    return operation if operation == "EMPTY_TUPLE" else kind
