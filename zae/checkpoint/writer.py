"""Write one checkpoint, a directory that is whole or absent.

It has four files::

    step-00000012/
        model.safetensors     the state of the model (or model.ckpt, the zip file of torch.save)
        state.safetensors     every other tensor
        state.json            everything else, and where the tensors belong (see zae.checkpoint.encoding)
        manifest.json         step, run, add-ons; size and SHA-256 of the files above; a hash of itself

Where tensors lie in parts on several ranks, it has more::

        shard-00000.safetensors   the parts that rank 0 has written, and so on for each rank
        shards.json               for each divided tensor its shape, dtype and parts: rank and offsets

Where a run has recorded many rows, most of these are in files of their own, which checkpoints share
(see zae.checkpoint.rows).

A save goes down this file. `plan` stages the files in memory: bytes, and tensors by name; of a tensor in parts, those
of this rank by their offsets. `write` brings them to the disk under a hidden name, each hashed while it is written,
lists the hashes of all ranks in the manifest, and renames the directory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from zae.checkpoint import filesystem
from zae.checkpoint.ckpt_files import write_ckpt
from zae.checkpoint.encoding import encode
from zae.checkpoint.filesystem import clear, make_directory, share_file, stage, write_file
from zae.checkpoint.folder import install, refuse_foreign, sweep
from zae.checkpoint.group import Group
from zae.checkpoint.hashed_files import open_input
from zae.checkpoint.json_text import json_text
from zae.checkpoint.manifest import FileEntry, Manifest, draft, seal
from zae.checkpoint.names import MANIFEST, MODEL_FILES, PIECE, SHARDS, STATE, STATE_TENSORS, shard_name
from zae.checkpoint.rows import Piece
from zae.checkpoint.shards import OF_MODEL, OF_STATE, divide, weight_of_chunk
from zae.checkpoint.tensor_bytes import byte_count, separate
from zae.checkpoint.tensor_files import write_safetensors
from zae.errors import CheckpointError, NonFiniteError
from zae.values.walk import is_sharded, nonfinite_in

__all__ = ["Files", "SavePlan", "plan", "write"]

Files: TypeAlias = "dict[str, dict[str, Tensor] | bytes | Piece]"
"""What goes into each file, by its name: tensors, text, or rows that an earlier checkpoint may have as well."""


class SavePlan(NamedTuple):
    """What one rank writes of a checkpoint; rank 0 has the manifest too."""

    target: Path
    files: Files
    manifest: Manifest | None = None
    group: Group = Group()  # The ranks that write it.
    trained: Collection[str] = ()  # The weights that must be finite.

    @property
    def byte_count(self) -> int:
        """How many bytes the files have."""
        count = 0
        for content in self.files.values():
            if isinstance(content, Piece):
                count += content.entry["size"]
            else:
                count += len(content) if isinstance(content, bytes) else byte_count(*content.values())
        return count


def plan(
    target: Path,
    weights: Mapping[str, Tensor],
    state: Mapping[Any, Any],
    about: Mapping[str, Any],
    *,
    model_format: str,
    group: Group = Group(),  # noqa: B008  (it is a tuple)
    pieces: Mapping[str, Piece] = MappingProxyType({}),
    trained: Collection[str] = (),
) -> SavePlan:
    """Return what this rank writes of a checkpoint, without writing it; with "sharded" all ranks of the group call it.

    Tensors stay where they are until they are copied or written.
    """
    is_sharded_format = model_format == "sharded"
    files: Files = {}
    manifest: Manifest | None = None
    named: dict[str, Tensor] = {}  # All tensors of this rank, by their names in shards.json.

    def stage() -> list[str]:
        """Stage whole tensors, and return the names of those that this rank has a part of, or nothing at all."""
        nonlocal files, manifest
        structure, tensors = encode(dict(state), with_parts=is_sharded_format)
        if group.rank == 0:
            untied, tied = separate(weights)
            files = {
                MODEL_FILES[model_format]: dict(weights) if model_format == "ckpt" else untied,
                STATE_TENSORS: tensors,
                STATE: json_text(target, structure),
                **pieces,
            }
            run = structure.get("records", {}).get("run")
            manifest = draft(model_format, tied, about, has_rows=bool(pieces), run=run)
        if not is_sharded_format:
            return []
        named.update({OF_MODEL + name: tensor for name, tensor in weights.items()})
        named.update({OF_STATE + name: tensor for name, tensor in tensors.items()})
        return [name for name, tensor in named.items() if is_sharded(tensor) or tensor.is_meta]

    divided = {*itertools.chain(*group.together(stage, target))}
    if is_sharded_format:  # What some rank has a part of is in the shards alone: no other one writes it whole.
        parts = {name: tensor for name, tensor in named.items() if name in divided and not tensor.is_meta}
        chunks, described = divide(parts, group, target)
        for file, content in files.items():
            if isinstance(content, dict):
                kind = OF_STATE if file == STATE_TENSORS else OF_MODEL
                files[file] = {name: tensor for name, tensor in content.items() if kind + name not in divided}
        files = {shard_name(group.rank): chunks, **files}
        if group.rank == 0:
            files[SHARDS] = json_text(target, described)
    return SavePlan(target, files, manifest, group, trained)


def write(save: SavePlan, reads_back: bool = False, place: Path | None = None) -> None:
    """Write a checkpoint to its target, or to another place; all ranks of its group call it.

    When this returns, the disk has all of it. If it fails on one rank, by weights that are not finite too, it fails on
    all, and nothing is left. An existing checkpoint with this name stays complete until the new one is, which then
    replaces it. The directory must be on a disk that all ranks share. With ``reads_back``, and where it replaces one,
    each rank then reads what it has written, and compares the hashes: before others are removed.
    """
    directory = Path(os.path.abspath(place or save.target))
    manifest = save.manifest
    needed = save.byte_count
    together = partial(save.group.together, where=directory, needed=needed)

    def prepare() -> str | None:
        if manifest is None:
            return None
        refuse_foreign(directory)
        make_directory(directory.parent)
        filesystem.disk.mkdir(staging)
        return str(staging)

    def finish() -> tuple[dict[str, FileEntry], Path | None]:
        if manifest is None:
            return {}, None
        for entries in written:
            manifest["files"] |= entries
        output = write_file(staging / MANIFEST, partial(_write_content, MANIFEST, seal(manifest), {}))
        filesystem.disk.fsync_directory(staging)  # The names of the files, before the directory gets its own.
        entry = FileEntry(size=output.size, sha256=output.hexdigest())
        return {MANIFEST: entry}, install(staging, directory)

    with stage(directory, needed) if manifest is not None else contextlib.nullcontext(Path()) as staging:
        # Each step ends on all ranks before the next begins: rank 0 renames nothing that another has not brought to
        # the disk, and where one rank fails, no rank goes on.
        staging = Path(together(prepare)[0] or "")
        written = together(partial(_write_files, staging, save))
        installed = together(finish)
    replaced = installed[0][1]
    if reads_back or replaced is not None:
        rank = save.group.rank
        together(partial(_read_back, directory, written[rank] | installed[rank][0]))
    if manifest is not None:
        if replaced is not None:
            with contextlib.suppress(OSError):  # The next save tries again.
                clear(replaced)
        sweep(directory.parent)


def _write_files(staging: Path, save: SavePlan) -> dict[str, FileEntry]:
    """Write the files of this rank, check its weights, and return the size and hash of each file."""
    if not staging.is_dir():
        raise CheckpointError(f"{staging.parent} is not on a disk that all ranks share; give such a save_path")
    tied = save.manifest["tied"] if save.manifest else {}
    entries = {}
    outputs = {}
    for name, content in save.files.items():
        path = staging / name
        if isinstance(content, Piece):
            entries[name] = content.entry
            if content.source is not None and share_file(content.source / name, path, content.entry["size"]):
                continue
            content = content.text
        outputs[name] = write_file(path, partial(_write_content, name, content, tied))
    _refuse_nonfinite(save)  # Each file is hashed while the next is written, and during the check.
    for name, output in outputs.items():
        entries[name] = FileEntry(size=output.size, sha256=output.hexdigest())
    return entries


def _write_content(
    name: str, content: dict[str, Tensor] | bytes, tied: Mapping[str, str], write: Callable[[Any], object]
) -> None:
    """Write the content of a file with a function for buffers."""
    if isinstance(content, bytes):
        write(content)
    elif name == MODEL_FILES["ckpt"]:
        write_ckpt(write, content)
    else:
        write_safetensors(write, content, tied=tied if name in MODEL_FILES.values() else {})


def _refuse_nonfinite(save: SavePlan) -> None:
    """Refuse to save trained parameters that are not finite, as far as this rank writes them."""
    names: dict[str, str] = {}  # Of the weights, by what they or their parts are called in a file.
    parameters: dict[str, Tensor] = {}
    for file, content in save.files.items():
        for key, tensor in content.items() if isinstance(content, dict) and file != STATE_TENSORS else ():
            name = key if file in MODEL_FILES.values() else weight_of_chunk(key)
            if name in save.trained:
                names[key] = name
                parameters[key] = tensor
    bad = sorted({names[key] for key in nonfinite_in(parameters)})
    if bad:
        others_text = f", and {len(bad) - 1} others do" if len(bad) > 1 else ""
        raise NonFiniteError(
            f"{save.target} was not saved: the parameter {bad[0]} contains NaN or infinite values{others_text}; "
            "resume from an older checkpoint with a lower learning rate or gradient_clip=1.0"
        )


def _read_back(directory: Path, written: Mapping[str, FileEntry]) -> None:
    """Read files again that were just written, and raise CheckpointDamaged unless they have their hashes."""
    for name, entry in written.items():
        if PIECE.fullmatch(name) and (directory / name).stat().st_nlink > 1:  # An earlier save has read it.
            continue
        with open_input(directory / name, size=entry["size"]) as source:
            source.finish(entry["sha256"])
