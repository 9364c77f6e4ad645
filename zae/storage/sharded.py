"""Save checkpoints of which each rank writes its own parts, and which any number of processes reads.

Beside the files of every checkpoint (see zae.storage.checkpoint), which rank 0 writes, there are::

    shard-00000.safetensors   the parts that rank 0 has written, and so on for each rank
    shards.json               for each divided tensor its shape, dtype and parts: rank and offsets

All are listed in the manifest with their SHA-256, and renamed together. torch.distributed.checkpoint plans which rank
writes which part: a part that several ranks hold is written once. Its own files are not used, because their index is a
pickle, and because they would have to be read again to be hashed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from torch import Tensor

from zae.common.walk import is_sharded
from zae.errors import CheckpointError, NonFiniteError
from zae.storage import filesystem
from zae.storage.encoding import encode
from zae.storage.filesystem import install, make_directory, not_saved, staged, write_file
from zae.storage.manifest import FileEntry, Manifest, draft, seal, state_text, verify
from zae.storage.names import MANIFEST, MODEL_FILES, SHARDS, STATE, STATE_TENSORS, refuse_foreign, shard_name
from zae.storage.parts import OF_MODEL, OF_STATE, chunk_name
from zae.storage.tensor_bytes import DTYPE_NAMES, byte_count, separate
from zae.storage.weights_file import write_safetensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import TensorWriteData

__all__ = ["Group", "Share", "plan_shards", "verify_shards", "write_shards"]

_Result = TypeVar("_Result")


class Group(NamedTuple):
    """The ranks that save together."""

    rank: int
    gather: Callable[[Any], list[Any]]

    def together(self, function: Callable[[], _Result], where: Path) -> list[_Result]:
        """Call a function on every rank, and return what each returned; if one fails, all of them raise its error."""
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
            if isinstance(raised, OSError) and not isinstance(raised, CheckpointError):
                error = not_saved(where, raised, 0)
        outcomes = self.gather((result, None if error is None else _describe(error)))
        if error is not None:
            raise error from None
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                raise _rebuild(rank, *failed)
        return [each for each, _ in outcomes]


def _describe(error: BaseException) -> tuple[bool, str, int | None]:
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return isinstance(error, NonFiniteError), text, getattr(error, "errno", None)


def _rebuild(rank: int, is_nonfinite: bool, text: str, errno: int | None) -> Exception:
    if is_nonfinite:
        return NonFiniteError(text.partition(": ")[2])
    error = CheckpointError(f"rank {rank}: {text}")
    error.errno = errno
    return error


# ---------------------------------------------------------------------------------------------------------- saving


class Share(NamedTuple):
    """What one rank writes of a checkpoint: tensors or text by the name of the file; rank 0 has the manifest too."""

    files: dict[str, dict[str, Tensor] | bytes]
    manifest: Manifest | None

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in it, by their names and the offsets of each part: ``name@0,8``."""
        held = [each for each in self.files.values() if not isinstance(each, bytes)]
        chunks = {name.removeprefix(OF_MODEL): each for name, each in held[0].items() if name.startswith(OF_MODEL)}
        plain: Any = self.files.get(MODEL_FILES["sharded"], {})
        return chunks | {f"{name}@": each for name, each in plain.items()}


def plan_shards(
    directory: Path,
    model_state: Mapping[str, Tensor],
    state: Mapping[Any, Any],
    group: Group,
    manifest_info: Mapping[str, Any],
) -> Share:
    """Return what this rank writes of a checkpoint with DTensors, without writing it; all ranks call it."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    planner, is_main = DefaultSavePlanner(flatten_state_dict=False), group.rank == 0
    files: dict[str, dict[str, Tensor] | bytes] = {}
    manifests: list[Manifest] = []

    def propose() -> Any:
        structure, tensors = encode(dict(state), with_parts=True)
        named = {OF_MODEL: model_state, OF_STATE: tensors}
        parts = {
            f"{kind}{name}": each for kind, held in named.items() for name, each in held.items() if is_sharded(each)
        }
        if is_main:
            model = _plain(model_state)
            files.update({MODEL_FILES["sharded"]: model, STATE_TENSORS: _plain(tensors)})
            files[STATE] = state_text(directory, structure)
            manifests.append(draft("sharded", separate(model)[1], manifest_info))
        planner.set_up_planner(cast("dict[str, Any]", parts), None, is_main)
        return planner.create_local_plan()

    plans, _ = planner.create_global_plan(group.together(propose, directory))  # Every rank makes the same global plan.
    chunks, described = dict[str, Tensor](), dict[str, Any]()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, written = item.index.fqn, cast("TensorWriteData", item.tensor_data)
            kind = {"shape": list(written.size), "dtype": DTYPE_NAMES[written.properties.dtype], "parts": []}
            described.setdefault(name, kind)["parts"].append([rank, list(written.chunk.offsets)])
            if rank == group.rank:
                chunks[chunk_name(name, written.chunk.offsets)] = cast("Tensor", planner.resolve_data(item))
    if is_main:
        files[SHARDS] = json.dumps(described, separators=(",", ":")).encode()
    return Share({shard_name(group.rank): chunks, **files}, manifests[0] if is_main else None)


def write_shards(
    directory: str | os.PathLike[str], share: Share, group: Group, check: Callable[[], object] = lambda: None
) -> Path:
    """Write a checkpoint of which each rank has its share; all ranks call it.

    When this returns, the disk has all of it. If it fails on one rank, it fails on all, and nothing is left. The
    directory must be on a disk that all ranks share.
    """
    directory, manifest = Path(os.path.abspath(directory)), share.manifest

    def prepare() -> str | None:
        check()
        if manifest is None:
            return None
        refuse_foreign(directory)
        make_directory(directory.parent)
        filesystem.disk.mkdir(staging)
        return str(staging)

    held = [[each] if isinstance(each, bytes) else each.values() for each in share.files.values()]
    needed = sum(len(each) if isinstance(each, bytes) else byte_count(each) for file in held for each in file)
    with staged(directory, needed) if manifest is not None else _elsewhere() as staging:
        staging = Path(group.together(prepare, directory)[0] or "")
        written = group.together(partial(_write, staging, share.files), directory)
        finish = _nothing if manifest is None else partial(_finish, staging, directory, manifest, written)
        group.together(finish, directory)
    return directory


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if not is_sharded(each)}


def _nothing() -> None: ...


@contextlib.contextmanager
def _elsewhere() -> Iterator[Path]:
    """Take the place of `staged` on a rank that does not make the folder."""
    yield Path()


def _write(staging: Path, files: Mapping[str, dict[str, Tensor] | bytes]) -> dict[str, tuple[int, str]]:
    """Write the files of this rank, and return the size and hash of each."""
    if not staging.is_dir():
        raise CheckpointError(f"{staging.parent} is not on a disk that all ranks share; give such a save_path")
    with contextlib.ExitStack() as hashing:  # Each file is hashed while the next is written.
        outputs = {name: write_file(staging / name, _writer(content), hashing) for name, content in files.items()}
    return {name: (output.size, output.hexdigest()) for name, output in outputs.items()}


def _writer(content: dict[str, Tensor] | bytes) -> Callable[[Callable[[Any], object]], object]:
    if isinstance(content, bytes):
        return lambda write: write(content)
    return partial(write_safetensors, tensors=content)


def _finish(
    staging: Path, directory: Path, manifest: Manifest, written: Sequence[Mapping[str, tuple[int, str]]]
) -> None:
    """List the files of all ranks, and rename the directory."""
    step, run_id = manifest["step"], manifest["run_id"]
    for name, (size, sha256) in {name: each for files in written for name, each in files.items()}.items():
        manifest["files"][name] = FileEntry(size=size, sha256=sha256, step=step, run_id=run_id)
    write_file(staging / MANIFEST, lambda write: write(seal(manifest)))
    filesystem.disk.fsync_directory(staging)
    install(staging, directory)


def verify_shards(directory: Path, group: Group) -> None:
    """Read what was written, each rank its own files, and compare the hashes; all ranks call it."""

    def check() -> None:
        others = {shard_name(rank) for rank in range(ranks) if rank != group.rank}
        rest = {MODEL_FILES["sharded"], STATE_TENSORS, STATE, SHARDS} if group.rank else set()
        verify(directory, skip=others | rest)

    ranks = len(group.gather(None))
    group.together(check, directory)
