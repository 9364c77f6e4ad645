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

from zae.errors import CheckpointError, NonFiniteError
from zae.storage import filesystem
from zae.storage.encoding import encode
from zae.storage.filesystem import install, make_directory, not_saved, staged, write_file
from zae.storage.manifest import FileEntry, Manifest, draft, seal, state_text, verify
from zae.storage.names import MANIFEST, MODEL_FILES, SHARDS, STATE, STATE_TENSORS, refuse_foreign, shard_name
from zae.storage.parts import OF_MODEL, OF_STATE, chunk_name
from zae.storage.tensor_bytes import DTYPE_NAMES, byte_count, is_part, separate
from zae.storage.weights_file import write_safetensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import TensorWriteData

__all__ = ["Group", "save_shards", "verify_shards"]

_Result = TypeVar("_Result")
_Writers = dict[str, Callable[[Callable[[Any], object]], object]]


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
        outcomes = self.gather((result, None if error is None else _described(error)))
        if error is not None:
            raise error from None
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                raise _rebuilt(rank, *failed)
        return [each for each, _ in outcomes]


def _described(error: BaseException) -> tuple[bool, str, int | None]:
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return isinstance(error, NonFiniteError), text, getattr(error, "errno", None)


def _rebuilt(rank: int, is_nonfinite: bool, text: str, errno: int | None) -> Exception:
    if is_nonfinite:
        return NonFiniteError(text.partition(": ")[2])
    error = CheckpointError(f"rank {rank}: {text}")
    error.errno = errno
    return error


# ---------------------------------------------------------------------------------------------------------- saving


def save_shards(
    directory: str | os.PathLike[str],
    model_state: Mapping[str, Tensor],
    state: Mapping[Any, Any],
    group: Group,
    *,
    manifest_info: Mapping[str, Any],
    check: Callable[[], object] = lambda: None,
) -> Path:
    """Write a checkpoint whose DTensors each rank writes its parts of; all ranks call it.

    When this returns, the disk has all of it. If it fails on one rank, it fails on all, and nothing is left. The
    directory must be on a disk that all ranks share.
    """
    directory, is_main = Path(os.path.abspath(directory)), group.rank == 0
    split, about = partial(_split, directory, model_state, state), dict[str, Any]()

    def prepare() -> str | None:
        check()
        about["writers"], about["parts"], about["bytes"] = split()
        if not is_main:
            return None
        about["manifest"] = draft("sharded", separate(_plain(model_state))[1], manifest_info)
        refuse_foreign(directory)
        make_directory(directory.parent)
        filesystem.disk.mkdir(staging)
        return str(staging)

    with staged(directory, byte_count(*_plain(model_state).values())) if is_main else _elsewhere() as staging:
        staging = Path(group.together(prepare, directory)[0] or "")
        chunks, plan = _plan(about["parts"], group, directory)
        writers: _Writers = {shard_name(group.rank): partial(write_safetensors, tensors=chunks)}
        if is_main:
            writers |= {**about["writers"], SHARDS: lambda write: write(plan)}
        written = group.together(partial(_write, staging, writers), directory)
        finish = partial(_finish, staging, directory, about["manifest"], written) if is_main else _nothing
        group.together(finish, directory)
    return directory


def _split(
    directory: Path, model_state: Mapping[str, Tensor], state: Mapping[Any, Any]
) -> tuple[_Writers, dict[str, Tensor], int]:
    """Return the writers of what rank 0 writes, the tensors that lie in parts, by name, and the bytes of the rest."""
    structure, tensors = encode(dict(state), with_parts=True)
    text = state_text(directory, structure)
    named = {OF_MODEL: model_state, OF_STATE: tensors}
    parts = {f"{kind}{name}": each for kind, held in named.items() for name, each in held.items() if is_part(each)}
    plain = {kind: _plain(held) for kind, held in named.items()}
    writers: _Writers = {
        MODEL_FILES["sharded"]: partial(write_safetensors, tensors=plain[OF_MODEL]),
        STATE_TENSORS: partial(write_safetensors, tensors=plain[OF_STATE]),
        STATE: lambda write: write(text),
    }
    return writers, parts, len(text) + byte_count(*plain[OF_MODEL].values(), *plain[OF_STATE].values())


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in tensors.items() if not is_part(each)}


def _nothing() -> None: ...


@contextlib.contextmanager
def _elsewhere() -> Iterator[Path]:
    """Stand for the folder that another rank makes, and removes if the save fails."""
    yield Path()


def _plan(parts: Mapping[str, Tensor], group: Group, where: Path) -> tuple[dict[str, Tensor], bytes]:
    """Return the parts that this rank writes, and the text of shards.json; all ranks call it."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(parts), None, group.rank == 0)
    plans = group.together(planner.create_local_plan, where)
    merged, _ = planner.create_global_plan(plans)  # Each rank makes the same one of all plans.
    own, described = dict[str, Tensor](), dict[str, Any]()
    for rank, plan in enumerate(merged):
        for item in plan.items:
            name, written = item.index.fqn, cast("TensorWriteData", item.tensor_data)
            kind = {"shape": list(written.size), "dtype": DTYPE_NAMES[written.properties.dtype], "parts": []}
            described.setdefault(name, kind)["parts"].append([rank, list(written.chunk.offsets)])
            if rank == group.rank:
                own[chunk_name(name, written.chunk.offsets)] = cast("Tensor", planner.resolve_data(item))
    return own, json.dumps(described, separators=(",", ":")).encode()


def _write(staging: Path, writers: _Writers) -> dict[str, tuple[int, str]]:
    """Write the files of this rank, and return the size and hash of each."""
    if not staging.is_dir():
        raise CheckpointError(f"{staging.parent} is not on a disk that all ranks share; give such a save_path")
    with contextlib.ExitStack() as hashing:  # Each file is hashed while the next is written.
        outputs = {name: write_file(staging / name, writer, hashing) for name, writer in writers.items()}
    return {name: (output.size, output.hexdigest()) for name, output in outputs.items()}


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
