"""Tensors of a checkpoint that lie in parts on several ranks: each writes its own, and any number of ranks reads them.

shards.json says for each of them its shape, its dtype and its parts, by rank and offsets; the parts of a rank are in
one safetensors file. torch.distributed.checkpoint plans which rank writes which part: a part that several ranks hold is
written once. Its own files are not used, because their index is a pickle, and because they would have to be read again
to be hashed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from zae.checkpoint.group import Group
from zae.checkpoint.hashed_files import REMEDY
from zae.checkpoint.json_text import read_json
from zae.checkpoint.manifest import FileEntry, Manifest
from zae.checkpoint.names import SHARDS, shard_name
from zae.checkpoint.tensor_bytes import DTYPE_NAMES, DTYPES
from zae.checkpoint.tensor_files import iterate_safetensors
from zae.errors import CheckpointDamaged, CheckpointError
from zae.values.walk import is_sharded

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import TensorWriteData

__all__ = ["OF_MODEL", "OF_STATE", "chunk_name", "divide", "read_parts", "weight_of_chunk"]

OF_MODEL, OF_STATE = "model/", "state/"
"""What the names of divided tensors begin with in shards.json."""


def chunk_name(name: str, offsets: Sequence[int]) -> str:
    """Return the name of one part of a tensor in a shard."""
    return f"{name}@{','.join(map(str, offsets))}"


def weight_of_chunk(chunk: str) -> str:
    """Return the name of the weight that a part in a shard is of; empty for a part of another tensor."""
    return chunk.removeprefix(OF_MODEL).rpartition("@")[0] if chunk.startswith(OF_MODEL) else ""


def divide(parts: dict[str, Tensor], group: Group, directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the parts of tensors that this rank writes, by name and offsets, and a description of all of them."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(cast("dict[str, Any]", parts), None, group.rank == 0)
    # Each rank gets the plans of all, and makes the same global plan of them.
    plans, _ = planner.create_global_plan(group.together(planner.create_local_plan, directory))
    chunks: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name = item.index.fqn
            written = cast("TensorWriteData", item.tensor_data)
            offsets = list(written.chunk.offsets)
            if name not in described:
                dtype = DTYPE_NAMES[written.properties.dtype]
                described[name] = {"shape": list(written.size), "dtype": dtype, "parts": []}
            described[name]["parts"].append([rank, offsets])
            if rank == group.rank:
                chunks[chunk_name(name, offsets)] = cast("Tensor", planner.resolve_data(item))
    _untie(chunks)
    return chunks, described


def _untie(chunks: dict[str, Tensor]) -> None:
    """Give each tensor memory of its own: a file has one entry for tied tensors, and the plan has both."""
    names: dict[int, str] = {}
    for name, chunk in chunks.items():
        if chunk.numel() and names.setdefault(chunk.data_ptr(), name) != name:
            chunks[name] = chunk.clone()


def read_parts(
    directory: Path, manifest: Manifest, local_shards: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read and verify the shards of a checkpoint, and return the tensors of the model, and the others.

    They are whole, or laid out as the DTensor that ``local_shards`` has for the beginning of their name:
    "model/head.weight", "state/optimizer.0.state.3.". Of these, this rank keeps its part alone, and one tensor of a
    file at a time.
    """
    if manifest["model_format"] != "sharded":
        return {}, {}
    where = str(directory / SHARDS)
    plan = read_json(directory / SHARDS, manifest["files"][SHARDS])
    files = {name: manifest["files"][name] for name in map(shard_name, range(manifest["world_size"]))}
    try:
        targets = _allocate(plan, sum(file["size"] for file in files.values()), local_shards)
        _fill(targets, plan, directory, files)
    # Hostile text may have any type anywhere.
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointDamaged(f"{where}: does not describe the shards ({str(error)[:160]!r}). {REMEDY}") from error
    model = {}
    state = {}
    for name, target in targets.items():
        if name.startswith(OF_MODEL):
            model[name.removeprefix(OF_MODEL)] = target.tensor()
        elif name.startswith(OF_STATE):
            state[name.removeprefix(OF_STATE)] = target.tensor()
    return model, state


def _fill(targets: Mapping[str, _Target], plan: Any, directory: Path, files: Mapping[str, FileEntry]) -> None:
    """Read the shards, and refuse parts that are not those of the plan, or that leave a tensor incomplete."""
    missing = {name: target.whole.numel() for name, target in targets.items()}
    for rank, (file, entry) in enumerate(files.items()):
        expected: dict[str, tuple[str, list[int]]] = {}
        for name, about in plan.items():
            for holder, offsets in about["parts"]:
                if holder != rank:
                    continue
                chunk = chunk_name(name, offsets)
                if chunk in expected:
                    raise ValueError(f"{chunk!r:.80} is described twice")
                expected[chunk] = (name, offsets)
        for chunk, part in iterate_safetensors(directory / file, entry):
            if chunk in expected:
                name, offsets = expected.pop(chunk)
                targets[name].fill(part, offsets)
                missing[name] -= part.numel()
        if expected:
            raise ValueError(f"the parts in {file} are others")
    lacking = [name for name, count in missing.items() if count]
    if lacking:
        raise ValueError(f"the parts of {lacking[0]!r:.80} are not all of it")


def _allocate(plan: Any, limit: int, local_shards: Mapping[str, Tensor]) -> dict[str, _Target]:
    """Return what is to be filled with what the shards hold, which cannot be more bytes than their files have."""
    kinds = {name: (tuple(about["shape"]), DTYPES[about["dtype"]]) for name, about in plan.items()}
    if any(type(size) is not int or size < 0 for shape, _ in kinds.values() for size in shape):
        raise ValueError("a shape is not a list of sizes")
    if sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds.values()) > limit:
        raise ValueError("it claims more than the files hold")
    tensors = {}
    for name, (shape, dtype) in kinds.items():
        reference = local_shards.get(name, local_shards.get(name.rpartition(".")[0] + "."))
        fits = reference is not None and is_sharded(reference) and reference.shape == shape
        tensors[name] = _Target(torch.empty(shape, dtype=dtype, device="meta"), reference if fits else None)
    return tensors


class _Target:
    """A tensor that is read: whole, or the part of it that this rank has of a tensor in the same layout."""

    def __init__(self, whole: Tensor, reference: Any) -> None:
        self.whole = whole  # Its shape and type, on the meta device.
        self._reference: Any = None
        first: Sequence[int] = (0,) * whole.dim()
        shape: Sequence[int] = whole.shape
        chunks = [] if reference is None else reference.__create_chunk_list__()
        if len(chunks) == 1:  # Else this rank has several parts, or none: it is read whole.
            self._reference = reference
            first = chunks[0].offsets
            shape = chunks[0].sizes
        self._first = tuple(first)  # Where in the whole tensor its own part begins.
        self._part = torch.zeros(shape, dtype=whole.dtype, device="cpu")

    def fill(self, part: Tensor, offsets: Sequence[int]) -> None:
        """Copy what overlaps with a part that was read."""
        whole = self.whole
        ends = [first + size for first, size in zip(offsets, part.shape, strict=True)]
        if part.dtype != whole.dtype or len(ends) != whole.dim() or any(first < 0 for first in offsets):
            raise ValueError(f"a part of {part.dtype} at {list(offsets)} does not fit {whole.dtype}")
        if any(end > size for end, size in zip(ends, whole.shape)):
            raise ValueError(f"a part ends at {ends}, in a tensor of {list(whole.shape)}")
        target, source = [], []
        for own_first, size, first, end in zip(self._first, self._part.shape, offsets, ends):
            begin = max(own_first, first)
            stop = min(own_first + size, end)
            if begin >= stop:  # They do not overlap.
                return
            target.append(slice(begin - own_first, stop - own_first))
            source.append(slice(begin - first, stop - first))
        self._part[tuple(target)] = part[tuple(source)]

    def tensor(self) -> Tensor:
        """Return it, in the layout of the reference if there is one."""
        like = self._reference
        if like is None:
            return self._part
        from torch.distributed.tensor import DTensor

        local = self._part.to(like.device)
        layout = {"shape": like.shape, "stride": self.whole.stride(), "run_check": False}
        return DTensor.from_local(local, like.device_mesh, like.placements, **layout)
