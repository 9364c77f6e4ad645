"""Read the shards of a checkpoint as whole tensors; zae.storage.sharded writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zae.errors import CheckpointDamaged, CheckpointError
from zae.storage.hashed_io import CURE, read_whole
from zae.storage.names import SHARDS, shard_name
from zae.storage.strict_json import strict_json
from zae.storage.tensor_bytes import DTYPES
from zae.storage.weights_file import load_safetensors

if TYPE_CHECKING:
    from zae.storage.manifest import Manifest

__all__ = ["OF_MODEL", "OF_STATE", "chunk_name", "read_parts"]

OF_MODEL, OF_STATE = "model/", "state/"
"""What the names of divided tensors begin with in shards.json."""


def chunk_name(name: str, offsets: Sequence[int]) -> str:
    """Return the name of one part of a tensor in a shard."""
    return f"{name}@{','.join(map(str, offsets))}"


def read_parts(directory: Path, manifest: Manifest) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read and verify the shards of a checkpoint, and return whole tensors: those of the model, and the others."""
    if manifest["model_format"] != "sharded":
        return {}, {}
    entry, where = manifest["files"][SHARDS], str(directory / SHARDS)
    text = read_whole(directory / SHARDS, size=entry["size"], sha256=entry["sha256"])
    files = {name: manifest["files"][name] for name in map(shard_name, range(manifest["world_size"]))}
    try:
        plan = strict_json(text, where)
        made = _allocated(plan, sum(each["size"] for each in files.values()))
        missing = {name: each.numel() for name, each in made.items()}
        for rank, (file, each) in enumerate(files.items()):
            held = load_safetensors(directory / file, each)
            for name, described in plan.items():
                for offsets in [offsets for holder, offsets in described["parts"] if holder == rank]:
                    part = held.pop(chunk_name(name, offsets))
                    _place(made[name], part, offsets).copy_(part)
                    missing[name] -= part.numel()
        if lacking := [name for name, count in missing.items() if count]:
            raise ValueError(f"the parts of {lacking[0]!r:.80} are not all of it")
    # Hostile text may have any type anywhere.
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointDamaged(f"{where}: does not describe the shards ({str(error)[:160]!r}). {CURE}") from error
    model = {name.removeprefix(OF_MODEL): each for name, each in made.items() if name.startswith(OF_MODEL)}
    return model, {name.removeprefix(OF_STATE): each for name, each in made.items() if name.startswith(OF_STATE)}


def _allocated(plan: Any, limit: int) -> dict[str, Tensor]:
    """Return tensors for what the shards hold, which cannot be more bytes than their files have."""
    kinds = {name: (tuple(each["shape"]), DTYPES[each["dtype"]]) for name, each in plan.items()}
    if any(type(size) is not int or size < 0 for shape, _ in kinds.values() for size in shape):
        raise ValueError("a shape is not a list of sizes")
    if sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds.values()) > limit:
        raise ValueError("it claims more than the files hold")
    return {name: torch.zeros(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in kinds.items()}


def _place(whole: Tensor, part: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return the view of a tensor where a part of it belongs."""
    ends = [first + size for first, size in zip(offsets, part.shape, strict=True)]
    if part.dtype != whole.dtype or len(ends) != whole.dim() or any(first < 0 for first in offsets):
        raise ValueError(f"a part of {part.dtype} at {list(offsets)} does not fit {whole.dtype}")
    if any(end > size for end, size in zip(ends, whole.shape)):
        raise ValueError(f"a part ends at {ends}, in a tensor of {list(whole.shape)}")
    return whole[tuple(slice(first, end) for first, end in zip(offsets, ends))]
