"""Write a checkpoint, of which each rank writes its share and a process alone all of it; and weights as one file.

Where tensors lie in parts on several ranks, there are beside the files of every checkpoint (see
zae.storage.checkpoint), which rank 0 writes::

    shard-00000.safetensors   the parts that rank 0 has written, and so on for each rank
    shards.json               for each divided tensor its shape, dtype and parts: rank and offsets

All are listed in the manifest with their SHA-256, and renamed together. torch.distributed.checkpoint plans which rank
writes which part: a part that several ranks hold is written once. Its own files are not used, because their index is a
pickle, and because they would have to be read again to be hashed. zae.storage.parts reads the shards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from torch import Tensor

from zae import errors
from zae.common.walk import is_sharded
from zae.errors import CheckpointError, ConfigError, ZaeError
from zae.storage import filesystem
from zae.storage.encoding import encode
from zae.storage.filesystem import (
    clear,
    install,
    make_directory,
    not_saved,
    replace_file,
    stage,
    staging_now,
    write_file,
)
from zae.storage.manifest import FileEntry, Manifest, draft, is_whole, seal, state_text, verify
from zae.storage.names import (
    MANIFEST,
    MODEL_FILES,
    SHARDS,
    STATE,
    STATE_TENSORS,
    entries_of,
    is_abandoned,
    refuse_foreign,
    set_aside,
    shard_name,
)
from zae.storage.parts import OF_MODEL, OF_STATE, chunk_name
from zae.storage.tensor_bytes import DTYPE_NAMES, byte_count, separate
from zae.storage.weights_file import format_of, parse_format, write_ckpt, write_safetensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import TensorWriteData

__all__ = [
    "Group",
    "Share",
    "plan_share",
    "save_checkpoint",
    "save_weights",
    "sweep",
    "verify_share",
    "write_share",
]

_Result = TypeVar("_Result")


class Group(NamedTuple):
    """The ranks that do something together, for instance save; by default this process alone."""

    rank: int = 0
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def together(self, function: Callable[[], _Result], where: Path, needed: int = 0) -> list[_Result]:
        """Call a function on every rank, and return what each returned; if one fails, all of them raise its error.

        An error of the disk names ``where``, and how many bytes were ``needed`` there. Where rank 0 writes alone,
        the others learn from it that this failed.
        """
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
            if isinstance(raised, OSError) and not isinstance(raised, CheckpointError):
                error = not_saved(where, raised, needed)
        outcomes = self.gather((result, None if error is None else _describe(error)))
        if error is not None:
            raise error
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                raise _rebuild(rank, *failed)
        return [each for each, _ in outcomes]


def _describe(error: BaseException) -> tuple[str, str, int | None]:
    """Return the name of an error of zae, else "", its text, and the number of the system."""
    name = type(error).__name__
    is_ours = isinstance(error, ZaeError) and getattr(errors, name, None) is type(error)
    return name if is_ours else "", str(error) if is_ours else f"{name}: {error}", getattr(error, "errno", None)


def _rebuild(rank: int, name: str, text: str, errno: int | None) -> Exception:
    """Return the error of another rank; `zae.launch.rank_process` reports the original in its place."""
    error: ZaeError = getattr(errors, name or "CheckpointError")(f"rank {rank}: {text}")
    if isinstance(error, CheckpointError):
        error.errno = errno
    error.from_rank = rank
    return error


# -------------------------------------------------------------------------------------------------------- planning


class Share(NamedTuple):
    """What one rank writes of a checkpoint: tensors or text by the name of the file; rank 0 has the manifest too."""

    files: dict[str, dict[str, Tensor] | bytes]
    manifest: Manifest | None

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in it, by their names and the offsets of each part: ``name@0,8``, ``name@`` if whole."""
        found: dict[str, Tensor] = {}
        for file, held in self.files.items():
            for name, each in held.items() if isinstance(held, dict) else ():
                if file in MODEL_FILES.values():
                    found[f"{name}@"] = each
                elif file != STATE_TENSORS and name.startswith(OF_MODEL):
                    found[name.removeprefix(OF_MODEL)] = each
        return found


def plan_share(
    directory: Path,
    model_state: Mapping[str, Tensor],
    state: Mapping[Any, Any],
    manifest_info: Mapping[str, Any],
    *,
    model_format: str,
    group: Group = Group(),  # noqa: B008  (it is a tuple)
) -> Share:
    """Return what this rank writes of a checkpoint, without writing it; all ranks of the group call it."""
    files: dict[str, dict[str, Tensor] | bytes] = {}
    named: dict[str, Tensor] = {}

    def prepare() -> tuple[Manifest | None, list[str]]:
        structure, tensors = encode(dict(state), with_parts=model_format == "sharded")
        for kind, held in ((OF_MODEL, model_state), (OF_STATE, tensors)):
            named.update({f"{kind}{name}": each for name, each in held.items()})
        away = [name for name, each in named.items() if is_sharded(each) or each.is_meta]
        if group.rank > 0:
            return None, away
        files[MODEL_FILES[model_format]], files[STATE_TENSORS] = dict(model_state), tensors
        files[STATE] = state_text(directory, structure)
        return draft(model_format, separate(model_state)[1], manifest_info), away

    prepared = group.together(prepare, directory)
    manifest = prepared[group.rank][0]
    if model_format == "sharded":
        away = set(itertools.chain(*(names for _, names in prepared)))  # What some rank has a part of, or nothing.
        for file, kind in ((MODEL_FILES[model_format], OF_MODEL), (STATE_TENSORS, OF_STATE)) if files else ():
            held = cast("dict[str, Tensor]", files[file])
            files[file] = {name: each for name, each in held.items() if kind + name not in away}
        parts = {name: each for name, each in named.items() if name in away and not each.is_meta}
        chunks, described = _divide(parts, group, directory)
        files = {shard_name(group.rank): chunks, **files}
        if group.rank == 0:
            files[SHARDS] = json.dumps(described, separators=(",", ":")).encode()
    return Share(files, manifest)


def _divide(parts: dict[str, Tensor], group: Group, directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the parts of tensors that this rank writes, by name and offsets, and a description of all of them."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(cast("dict[str, Any]", parts), None, group.rank == 0)
    # Every rank makes the same global plan.
    plans, _ = planner.create_global_plan(group.together(planner.create_local_plan, directory))
    chunks, described = dict[str, Tensor](), dict[str, Any]()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, written = item.index.fqn, cast("TensorWriteData", item.tensor_data)
            kind = {"shape": list(written.size), "dtype": DTYPE_NAMES[written.properties.dtype], "parts": []}
            described.setdefault(name, kind)["parts"].append([rank, list(written.chunk.offsets)])
            if rank == group.rank:
                chunks[chunk_name(name, written.chunk.offsets)] = cast("Tensor", planner.resolve_data(item))
    places = dict[int, str]()
    for name, each in chunks.items():  # A file has one entry for tied tensors, and the plan has both.
        if each.numel() and places.setdefault(each.data_ptr(), name) != name:
            chunks[name] = each.clone()
    return chunks, described


# --------------------------------------------------------------------------------------------------------- writing


def write_share(
    directory: str | os.PathLike[str],
    share: Share,
    group: Group = Group(),  # noqa: B008  (it is a tuple)
    check: Callable[[], object] = lambda: None,
) -> Path:
    """Write a checkpoint of which each rank has its share; all ranks of the group call it.

    When this returns, the disk has all of it. If it fails on one rank, ``check`` included, it fails on all, and nothing
    is left. An existing checkpoint with this name stays complete until the new one is, which then replaces it. The
    directory must be on a disk that all ranks share.
    """
    directory, manifest = Path(os.path.abspath(directory)), share.manifest
    sizes = (len(each) if isinstance(each, bytes) else byte_count(*each.values()) for each in share.files.values())
    needed = sum(sizes)

    def prepare() -> str | None:
        if manifest is None:
            return None
        refuse_foreign(directory)
        make_directory(directory.parent)
        filesystem.disk.mkdir(staging)
        return str(staging)

    def finish() -> None:
        if manifest is not None:
            _install(staging, directory, manifest, {name: each for files in written for name, each in files.items()})

    with stage(directory, needed) if manifest is not None else contextlib.nullcontext(Path()) as staging:
        staging = Path(group.together(prepare, directory, needed)[0] or "")
        written = group.together(partial(_write_files, staging, share.files, check), directory, needed)
        group.together(finish, directory, needed)
    return directory


def _write_files(
    staging: Path, files: Mapping[str, dict[str, Tensor] | bytes], check: Callable[[], object]
) -> dict[str, tuple[int, str]]:
    """Write the files of this rank, and return the size and hash of each."""
    if not staging.is_dir():
        raise CheckpointError(f"{staging.parent} is not on a disk that all ranks share; give such a save_path")
    with contextlib.ExitStack() as hashing:  # Each file is hashed while the next is written, and during the check.
        outputs = {name: write_file(staging / name, _writer(name, held), hashing) for name, held in files.items()}
        check()
    return {name: (output.size, output.hexdigest()) for name, output in outputs.items()}


def _writer(name: str, content: dict[str, Tensor] | bytes) -> Callable[[Callable[[Any], object]], object]:
    if isinstance(content, bytes):
        return lambda write: write(content)
    return partial(write_ckpt if name == MODEL_FILES["ckpt"] else write_safetensors, tensors=content)


def _install(staging: Path, directory: Path, manifest: Manifest, written: Mapping[str, tuple[int, str]]) -> None:
    """List the files of all ranks in the manifest, and rename the directory."""
    step, run_id = manifest["step"], manifest["run_id"]
    for name, (size, sha256) in written.items():
        manifest["files"][name] = FileEntry(size=size, sha256=sha256, step=step, run_id=run_id)
    text = seal(manifest)
    write_file(staging / MANIFEST, lambda write: write(text))
    filesystem.disk.fsync_directory(staging)
    install(staging, directory)


def verify_share(directory: Path, group: Group) -> None:
    """Read what was written, each rank its own files, and compare the hashes; all ranks call it."""

    def check() -> None:
        others = {shard_name(rank) for rank in range(ranks) if rank != group.rank}
        rest = {MODEL_FILES["sharded"], STATE_TENSORS, STATE, SHARDS} if group.rank else set()
        verify(directory, skip=others | rest)

    ranks = len(group.gather(None))
    group.together(check, directory)


def save_checkpoint(
    directory: str | os.PathLike[str],
    model_state: Mapping[str, Tensor],
    state: Mapping[Any, Any],
    *,
    model_format: str = "safetensors",
    manifest_info: Mapping[str, Any],
) -> Path:
    """Write a checkpoint from one process; when this returns, the disk has all of it.

    An existing checkpoint with this name stays complete until the new one is, which then replaces it. What killed
    processes have left beside it is removed.
    """
    directory, kind = Path(os.path.abspath(directory)), parse_format(model_format)
    write_share(directory, plan_share(directory, model_state, state, manifest_info, model_format=kind))
    sweep(directory.parent)
    return directory


def sweep(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed processes have left in a directory, and return it; every save ends with it."""
    removed: list[Path] = []
    with contextlib.suppress(OSError, ConfigError):
        for entry in entries_of(Path(parent)):
            path = Path(entry.path)
            with contextlib.suppress(OSError):  # What cannot be removed stays until the next time.
                if _is_stray(path) and clear(path):
                    removed.append(path)
    return removed


def _is_stray(path: Path) -> bool:
    """Return whether a directory entry is a left-over that nobody needs."""
    if set_aside(path.name, "deleting") is not None:
        return True
    if (replaced := set_aside(path.name, "replaced")) is not None:
        return is_whole(path.with_name(replaced))
    return path.name not in staging_now and is_abandoned(path.name, time.time() - path.lstat().st_mtime)


# ------------------------------------------------------------------------------------------------ weights in one file


def save_weights(
    path: str | os.PathLike[str],
    model_state: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    writes: bool = True,
) -> Path:
    """Write the state of a model as one file; an existing file is replaced atomically.

    With ``writes=False`` everything is checked and nothing written: another process writes the file.
    """
    path = Path(os.path.abspath(os.path.expanduser(path)))
    writer = partial(write_ckpt, tensors=model_state)
    if format_of(path) == "safetensors":
        writer = partial(write_safetensors, tensors=model_state, metadata=metadata)
    separate(model_state)  # What cannot be written is refused before the disk is touched.
    if not writes:
        return path
    replace_file(path, writer, byte_count(*model_state.values()))
    sweep(path.parent)
    return path
