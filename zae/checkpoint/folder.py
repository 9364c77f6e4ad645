"""Write, read and list checkpoints, which are directories that are whole or absent.

A checkpoint has four files::

    step-00000012/
        model.safetensors     the state of the model (or model.ckpt, the zip file of torch.save)
        state.safetensors     every other tensor
        state.json            everything else, and where the tensors belong (see zae.checkpoint.encoding)
        manifest.json         step, run, add-ons; size and SHA-256 of the files above; a hash of itself

Where tensors lie in parts on several ranks, it has more files::

        shard-00000.safetensors   the parts that rank 0 has written, and so on for each rank
        shards.json               for each divided tensor its shape, dtype and parts: rank and offsets

All are listed in the manifest with their SHA-256, and renamed together (see zae.checkpoint.shards). Where a run has
recorded many rows, most of these are in files of their own, which checkpoints share (see zae.checkpoint.rows).

A save goes down this file: `plan_share` makes JSON and tensors of a state and decides which rank writes what,
`write_share` writes the files under a hidden name, lists their hashes in the manifest, and renames the directory.
`load_checkpoint` reads each byte once and hashes what it has read, and returns nothing before every hash has been
compared with the manifest.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from zae import errors
from zae.checkpoint import filesystem
from zae.checkpoint.directories import holds_checkpoint, install, locate, refuse_foreign
from zae.checkpoint.encoding import decode, encode, strict_json
from zae.checkpoint.filesystem import (
    clear,
    entries_of,
    make_directory,
    not_saved,
    share_file,
    stage,
    staging_now,
    write_file,
)
from zae.checkpoint.hashed_files import REMEDY, Output, open_input, read_whole
from zae.checkpoint.manifest import FileEntry, Manifest, draft, is_whole, json_text, read_manifest, seal, verify
from zae.checkpoint.names import (
    KNOWN,
    MANIFEST,
    MODEL_FILES,
    PIECE,
    SHARDS,
    STATE,
    STATE_TENSORS,
    is_abandoned,
    original_name,
    set_aside,
    shard_name,
    step_of,
)
from zae.checkpoint.rows import Piece, add_rows
from zae.checkpoint.shards import OF_MODEL, OF_STATE, divide, read_parts
from zae.checkpoint.tensor_bytes import byte_count, separate
from zae.checkpoint.tensor_files import (
    load_safetensors,
    read_model,
    write_ckpt,
    write_safetensors,
)
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError, ZaeError
from zae.values.walk import is_sharded

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
    """Return the error of another rank; `zae.distributed.rank_process` reports the original in its place."""
    error: ZaeError = getattr(errors, name or "CheckpointError")(f"rank {rank}: {text}")
    if isinstance(error, CheckpointError):
        error.errno = errno
    error.from_rank = rank
    return error


# -------------------------------------------------------------------------------------------------------- planning


Files: TypeAlias = "dict[str, dict[str, Tensor] | bytes | Piece]"
"""What goes into each file, by its name: tensors, text, or rows that an earlier checkpoint may have as well."""


class Share(NamedTuple):
    """What one rank writes of a checkpoint; rank 0 has the manifest too."""

    files: Files
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
    pieces: Mapping[str, Piece] = MappingProxyType({}),
) -> Share:
    """Return what this rank writes of a checkpoint, without writing it.

    Tensors stay where they are until they are copied or written. With "sharded" all ranks of the group call it.
    """
    if model_format == "sharded":
        return _plan_shards(directory, model_state, state, manifest_info, group, pieces)
    structure, tensors = encode(dict(state), in_place=True)
    return _whole_share(directory, model_format, model_state, tensors, structure, manifest_info, pieces)


def _whole_share(
    directory: Path,
    model_format: str,
    model_state: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    structure: Any,
    manifest_info: Mapping[str, Any],
    pieces: Mapping[str, Piece],
) -> Share:
    """Return the share of one rank that writes everything."""
    untied, tied = separate(model_state)
    files: Files = {
        MODEL_FILES[model_format]: dict(model_state) if model_format == "ckpt" else untied,
        STATE_TENSORS: tensors,
        STATE: json_text(directory, structure),
        **pieces,
    }
    return Share(files, draft(model_format, tied, manifest_info, has_rows=bool(pieces)))


def _plan_shards(
    directory: Path,
    model_state: Mapping[str, Tensor],
    state: Mapping[Any, Any],
    manifest_info: Mapping[str, Any],
    group: Group,
    pieces: Mapping[str, Piece],
) -> Share:
    """Return the parts that this rank writes of tensors that lie in parts; of rank 0 also what is not divided."""
    share = Share({}, None)
    named: dict[str, Tensor] = {}  # All tensors of this rank, by their names in shards.json.

    def prepare() -> list[str]:
        nonlocal share
        structure, tensors = encode(dict(state), with_parts=True, in_place=True)
        for name, tensor in model_state.items():
            named[OF_MODEL + name] = tensor
        for name, tensor in tensors.items():
            named[OF_STATE + name] = tensor
        if group.rank == 0:
            share = _whole_share(directory, "sharded", model_state, tensors, structure, manifest_info, pieces)
        return [name for name, tensor in named.items() if is_sharded(tensor) or tensor.is_meta]

    # What some rank has a part of, or nothing at all: the others must not write it as a whole tensor.
    in_parts = set(itertools.chain(*group.together(prepare, directory)))
    parts = {name: tensor for name, tensor in named.items() if name in in_parts and not tensor.is_meta}
    chunks, described = divide(parts, group, directory)
    files: Files = {shard_name(group.rank): chunks}
    for file, content in share.files.items():
        if isinstance(content, dict):
            kind = OF_STATE if file == STATE_TENSORS else OF_MODEL
            content = {name: tensor for name, tensor in content.items() if kind + name not in in_parts}
        files[file] = content
    if group.rank == 0:
        files[SHARDS] = json_text(directory, described)
    return Share(files, share.manifest)


# --------------------------------------------------------------------------------------------------------- writing


def write_share(
    directory: str | os.PathLike[str],
    share: Share,
    group: Group = Group(),  # noqa: B008  (it is a tuple)
    check: Callable[[], object] = lambda: None,
    reads_back: bool = False,
) -> Path:
    """Write a checkpoint of which each rank has its share; all ranks of the group call it.

    When this returns, the disk has all of it. If it fails on one rank, ``check`` included, it fails on all, and nothing
    is left. An existing checkpoint with this name stays complete until the new one is, which then replaces it. The
    directory must be on a disk that all ranks share. With ``reads_back`` each rank then reads what it has written, and
    compares the hashes: before others are removed.
    """
    directory = Path(os.path.abspath(directory))
    manifest = share.manifest
    needed = 0  # Bytes, for the message of a full disk.
    for content in share.files.values():
        if isinstance(content, Piece):
            needed += content.entry["size"]
        else:
            needed += len(content) if isinstance(content, bytes) else byte_count(*content.values())

    def prepare() -> str | None:
        if manifest is None:
            return None
        refuse_foreign(directory)
        make_directory(directory.parent)
        filesystem.disk.mkdir(staging)
        return str(staging)

    def finish() -> dict[str, FileEntry]:
        if manifest is None:
            return {}
        for files in written:
            manifest["files"] |= files
        return {MANIFEST: _install(staging, directory, manifest)}

    with stage(directory, needed) if manifest is not None else contextlib.nullcontext(Path()) as staging:
        # Each step ends on all ranks before the next begins: rank 0 renames nothing that another has not brought to
        # the disk, and where one rank fails, no rank goes on.
        staging = Path(group.together(prepare, directory, needed)[0] or "")
        written = group.together(
            partial(_write_files, staging, share.files, manifest["tied"] if manifest else {}, check), directory, needed
        )
        installed = group.together(finish, directory, needed)
    if reads_back:
        own = written[group.rank] | installed[group.rank]
        group.together(partial(_read_back, directory, own), directory)
    return directory


def _write_files(
    staging: Path, files: Files, tied: Mapping[str, str], check: Callable[[], object]
) -> dict[str, FileEntry]:
    """Write the files of this rank, and return the size and hash of each."""
    if not staging.is_dir():
        raise CheckpointError(f"{staging.parent} is not on a disk that all ranks share; give such a save_path")
    entries = {}
    outputs = {}
    with contextlib.ExitStack() as hashing:  # Each file is hashed while the next is written, and during the check.
        for name, content in files.items():
            path = staging / name
            if isinstance(content, Piece):
                entries[name] = content.entry
                if content.source is not None and share_file(content.source / name, path, content.entry["size"]):
                    continue
                content = content.text
            outputs[name] = write_file(path, _writer(name, content, tied), hashing)
        check()
    return {**{name: _entry_of(each) for name, each in outputs.items()}, **entries}


def _entry_of(output: Output) -> FileEntry:
    return FileEntry(size=output.size, sha256=output.hexdigest())


def _writer(
    name: str, content: dict[str, Tensor] | bytes, tied: Mapping[str, str]
) -> Callable[[Callable[[Any], object]], object]:
    if isinstance(content, bytes):
        return lambda write: write(content)
    if name == MODEL_FILES["ckpt"]:
        return partial(write_ckpt, tensors=content)
    return partial(write_safetensors, tensors=content, tied=tied if name in MODEL_FILES.values() else {})


def _install(staging: Path, directory: Path, manifest: Manifest) -> FileEntry:
    """Write the manifest and rename the directory to its place."""
    text = seal(manifest)
    output = write_file(staging / MANIFEST, lambda write: write(text))
    filesystem.disk.fsync_directory(staging)  # The names of the files, before the directory gets its own.
    install(staging, directory)
    return _entry_of(output)


def _read_back(directory: Path, written: Mapping[str, FileEntry]) -> None:
    """Read files again that were just written, and raise CheckpointDamaged unless they have their hashes."""
    for name, entry in written.items():
        if PIECE.fullmatch(name) and (directory / name).stat().st_nlink > 1:  # An earlier save has read it.
            continue
        with open_input(directory / name, size=entry["size"]) as source:
            source.finish(entry["sha256"])


def sweep(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed processes have left in a directory, and return it; every save ends with it."""
    removed: list[Path] = []
    with contextlib.suppress(OSError, ConfigError):
        for entry in entries_of(Path(parent)):
            path = Path(entry.path)
            if not entry.name.startswith("."):  # What has its name is in its place.
                continue
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


# ------------------------------------------------------------------------------------------------------------ reading

_log = logging.getLogger("zae")
_Content = TypeVar("_Content")


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    allow_partial: Collection[str] = (),
    held: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Manifest, dict[str, Tensor], dict[Any, Any]]:
    """Read each byte of a checkpoint once, and return its content if every file has the hash in the manifest.

    Of one in shards, ``held`` names tensors of which this rank keeps its part (`read_parts`).
    """
    unknown = [name for name in allow_partial if name not in KNOWN - {MANIFEST} and not PIECE.fullmatch(name)]
    if unknown:
        raise ConfigError(f"allow_partial names {sorted(unknown)}; write names of {sorted(KNOWN - {MANIFEST})}")
    directory = locate(Path(directory))
    manifest = read_manifest(directory)
    model_state: dict[str, Tensor] = {}
    model_parts, state_parts = read_parts(directory, manifest, held)
    try:
        model_state = {**read_model(directory, manifest), **model_parts}
    except CheckpointDamaged:
        if MODEL_FILES[manifest["model_format"]] not in allow_partial:
            raise
    state = load_state(directory, manifest, allow_partial, state_parts)
    return manifest, model_state, state


def load_state(
    directory: Path,
    manifest: Manifest | None = None,
    allow_partial: Collection[str] = (),
    parts: Mapping[str, Tensor] | None = None,
) -> dict[Any, Any]:
    """Read and verify what a checkpoint holds beside the model; arguments and errors as for `load_checkpoint`.

    ``parts`` is what `read_parts` returned, where it has been called.
    """
    manifest = manifest or read_manifest(directory)
    parts = read_parts(directory, manifest)[1] if parts is None else parts
    reading = STATE_TENSORS
    try:
        tensors = load_safetensors(directory / STATE_TENSORS, manifest["files"][STATE_TENSORS])
        reading = STATE
        entry = manifest["files"][STATE]
        where = str(directory / STATE)
        text = read_whole(directory / STATE, size=entry["size"], sha256=entry["sha256"])
        state = decode(strict_json(text, where), {**tensors, **parts}, where=where)
    except CheckpointDamaged:
        if reading not in allow_partial:
            raise
        return {}
    if not isinstance(state, dict):
        raise CheckpointDamaged(f"{directory / STATE}: contains a {type(state).__name__}, not a dict. {REMEDY}")
    add_rows(state, directory, manifest, allow_partial)
    return state


def list_checkpoints(save_path: str | os.PathLike[str]) -> list[Path]:
    """List the directories named like checkpoints, the highest step first, without reading them.

    One that a killed save was about to replace comes right after the one that took its place. Raise ConfigError if
    `save_path` is a file.
    """
    found: list[tuple[int, bool, float, Path]] = []
    for entry in entries_of(Path(save_path)):
        own = original_name(entry.name)
        if (step := step_of(own)) is None or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # Removed since it was listed.
            age = entry.stat(follow_symlinks=False).st_mtime
            if not holds_checkpoint(Path(entry.path)):
                continue
            found.append((step, own == entry.name, age, Path(entry.path)))
    return [path for *_, path in sorted(found, reverse=True)]


def newest_valid(
    save_path: str | os.PathLike[str],
    read: Callable[[Path], _Content] = verify,  # type: ignore[assignment]
    list_all: Callable[[Any], list[Path]] = list_checkpoints,
) -> tuple[Path, _Content, list[tuple[Path, str]]] | None:
    """Find the newest checkpoint that can be read, among those that ``list_all`` returns."""
    passed_over: list[tuple[Path, str]] = []
    for path in list_all(save_path):
        try:
            return path, read(path), passed_over
        except (CheckpointDamaged, CheckpointNotFound) as error:
            passed_over.append((path, str(error)))
    if not passed_over:
        return None
    reasons = "\n".join(f"  {path.name}: {reason}" for path, reason in passed_over)
    raise CheckpointDamaged(
        f"{save_path}: all of {len(passed_over)} checkpoints are damaged; restore one from a copy, or move them away "
        f"to start from scratch:\n{reasons}"
    )


def refuse_links(folder: Path, found: Path | None) -> None:
    """Refuse to start from scratch, or from an older checkpoint, if a link stands for a newer one."""
    steps = {path: step_of(path.name) or 0 for path in folder.glob("step-*") if path.is_symlink()}
    newest = max(steps, key=lambda path: steps[path], default=None)
    if newest is not None and steps[newest] > (step_of(found.name) or 0 if found else -1):
        raise CheckpointNotFound(
            f"{newest} is a link, and links are not followed; write resume={os.path.realpath(newest)!r}, give the "
            "folder that it points into as save_path, or remove the link"
        )


def put_back(parent: str | os.PathLike[str]) -> None:
    """Rename what a killed save has moved aside back to its place, unless a whole checkpoint stands there.

    No other process may save into this directory at the same time.
    """
    for path in list_checkpoints(parent):
        place = path.with_name(original_name(path.name))
        if place != path and not is_whole(place) and is_whole(path):
            with contextlib.suppress(OSError):  # It stands in until it can be renamed.
                install(path, place)
