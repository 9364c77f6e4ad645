"""The files of a run: checkpoints that are whole or absent, whatever happens while they are written.

A checkpoint is a directory::

    step-00000012/
        model.safetensors     the model's state (or model.ckpt, the zip file of torch.save)
        state.safetensors     every other tensor
        state.json            everything else, and where the tensors belong (see zae.storage.encoding)
        manifest.json         what this is, and size and SHA-256 of the files above and of itself

It is written under another name beside its place, brought to the disk, and renamed, so no reader ever sees a part::

    .staging-<name>-<host>-<pid>-<token>     being written; left behind only by a process that was killed
    .replaced-<name>-<token>                 what stood at <name> before; it stands in while <name> is absent
    .deleting-<name>-<token>                 being removed

This is the one module that touches checkpoint files, and it changes the disk only through `filesystem`, one
operation at a time: a test that replaces it sees, and can break, each of them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError
from zae.storage.encoding import decode, encode
from zae.storage.folders import KNOWN, MANIFEST, entries_of, holds_checkpoint, refuse_foreign
from zae.storage.hashed_io import CURE, Output, free_bytes, not_saved, opened, read_whole, reason
from zae.storage.manifest import (
    FORMAT,
    MANIFEST_LIMIT,
    MODEL_FILES,
    STATE,
    STATE_LIMIT,
    STATE_TENSORS,
    FileEntry,
    Manifest,
    draft,
    parse,
    seal,
)
from zae.storage.names import (
    aside_name,
    checkpoint_name,
    is_abandoned,
    original_name,
    parse_format,
    set_aside,
    staging_name,
    step_of,
    weights_format,
)
from zae.storage.strict_json import strict_json
from zae.storage.tensor_files import (
    byte_count,
    moved,
    read_ckpt,
    read_safetensors,
    read_trusted,
    separate,
    write_ckpt,
    write_safetensors,
)

__all__ = [
    "FORMAT",
    "FileSystem",
    "Manifest",
    "checkpoint_name",
    "filesystem",
    "list_checkpoints",
    "load_checkpoint",
    "load_state",
    "load_weights",
    "make_directory",
    "newest_valid",
    "parse_format",
    "put_back",
    "read_manifest",
    "remove_checkpoint",
    "save_checkpoint",
    "save_weights",
    "sweep",
    "verify",
]

_log = logging.getLogger("zae")

_Read = TypeVar("_Read")
_LARGE = 1 << 20  # bytes: the disk is told of no smaller piece

_active: set[str] = set()  # names staged by this process at this moment, in any thread


class FileSystem:
    """The operations that change the disk, one call each; nothing else in zae changes a checkpoint.

    Replace ``zae.storage.files.filesystem`` by an object with these methods to see, delay or break each operation.

    Raises
    ------
    OSError
        From every method, as the operating system reports it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     handle = filesystem.create(Path(folder, "note"))
    ...     filesystem.write(handle, memoryview(b"whole"))
    ...     filesystem.close(handle)
    ...     Path(folder, "note").read_bytes()
    b'whole'
    """

    def mkdir(self, path: Path) -> None:
        """Make one directory, which must be new; never writable for others than its owner."""
        os.mkdir(path, 0o755)

    def create(self, path: Path) -> int:
        """Create one file, which must be new, and return its handle; never writable for others than its owner."""
        # The last two flags are absent on some platforms: O_NOFOLLOW on Windows, O_BINARY elsewhere.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        return os.open(path, flags, 0o644)

    def write(self, handle: int, data: memoryview) -> None:
        """Write all of these bytes; the disk begins with a large piece while the next one is prepared."""
        size = len(data)
        while data:
            data = data[os.write(handle, data) :]
        if size >= _LARGE and hasattr(os, "posix_fadvise"):
            # Linux begins to bring such a range to the disk, and waits for nothing; what is not there yet stays in
            # memory. Then the wait of fsync, which is what counts, is a short one. Elsewhere it is no more than a hint.
            with contextlib.suppress(OSError):
                start = os.lseek(handle, 0, os.SEEK_CUR) - size
                os.posix_fadvise(handle, start, size, os.POSIX_FADV_DONTNEED)

    def fsync(self, handle: int) -> None:
        """Wait until the disk has the file."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close the file."""
        os.close(handle)

    def fsync_directory(self, path: Path) -> None:
        """Wait until the disk has the names in a directory."""
        if os.name == "nt":  # Windows opens no directories; its renames are journaled
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks have no such wait
                raise
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or a directory another name at once; a file of that name is replaced."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        """Remove one file, or one link."""
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Remove one empty directory."""
        os.rmdir(path)


filesystem = FileSystem()
"""What every function here uses, looked up at each call."""


def make_directory(path: str | os.PathLike[str]) -> Path:
    """Make a directory and those above it that are missing.

    Parameters
    ----------
    path : path-like
        It may exist.

    Returns
    -------
    Path
        The directory.

    Raises
    ------
    CheckpointError
        A file stands in the way, or the directory cannot be made there.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     make_directory(Path(folder, "runs", "first")).is_dir()
    True
    """
    path = Path(path)
    try:
        missing = [place for place in (path, *path.parents) if not place.exists()]
        for place in reversed(missing):
            # Another process may be quicker; then the directory is there, which is what was asked for.
            with contextlib.suppress(FileExistsError):
                filesystem.mkdir(place)
            filesystem.fsync_directory(place.parent)
    except OSError as error:
        raise not_saved(path, error, 0) from error
    if not path.is_dir():
        refused = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        raise CheckpointError(f"{path} is a file, not a directory; choose another place for checkpoints") from refused
    return path


def save_checkpoint(
    directory: str | os.PathLike[str],
    model_state: Mapping[str, Tensor],
    state: Mapping[Any, Any],
    *,
    model_format: str = "safetensors",
    manifest_info: Mapping[str, Any],
    check: Callable[[], object] = lambda: None,
) -> Path:
    """Write a checkpoint; when this returns, the disk has all of it.

    A checkpoint of that name is replaced, and stays complete until the new one is. What killed processes left beside
    it is removed.

    Parameters
    ----------
    directory : path-like
        Where it is to stand; what is above it is made when missing.
    model_state : mapping of str to Tensor
        The model's state.
    state : mapping
        Everything else, as `zae.storage.encoding.encode` takes it.
    model_format : str
        "safetensors" or "ckpt".
    manifest_info : mapping
        ``run_id`` (text), ``step``, ``epoch``, ``composition`` (list of names), ``world_size``, and at will ``info``,
        a dict of plain values.
    check : callable
        Called once the files are written, beside their hashing; if it raises, there is no checkpoint.

    Returns
    -------
    Path
        The directory.

    Raises
    ------
    CheckpointError
        The state holds what no checkpoint can hold, or the disk refuses; older checkpoints are untouched.
    ConfigError
        The format is unknown, or `manifest_info` is not what is asked for.

    Examples
    --------
    >>> import tempfile
    >>> about = {"run_id": "demo", "step": 12, "epoch": 1, "composition": [], "world_size": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, checkpoint_name(12))
    ...     path = save_checkpoint(path, {"w": torch.ones(2)}, {"lr": 0.1}, manifest_info=about)
    ...     manifest, model_state, state = load_checkpoint(path)
    >>> manifest["step"], model_state, state
    (12, {'w': tensor([1., 1.])}, {'lr': 0.1})
    """
    directory = Path(os.path.abspath(directory))
    manifest = draft(parse_format(model_format), separate(model_state)[1], manifest_info)
    structure, tensors = encode(dict(state))
    text = json.dumps(structure, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > STATE_LIMIT:
        raise CheckpointError(
            f"{directory}: the state takes {len(text)} bytes as JSON, the limit is {STATE_LIMIT}; "
            "keep long lists of numbers as tensors or numpy arrays"
        )
    write_model = write_ckpt if manifest["model_format"] == "ckpt" else write_safetensors
    writers: dict[str, Callable[[Callable[[Any], object]], object]] = {
        MODEL_FILES[manifest["model_format"]]: partial(write_model, tensors=model_state),
        STATE_TENSORS: partial(write_safetensors, tensors=tensors),
        STATE: lambda write: write(text),
    }
    needed = byte_count(*model_state.values(), *tensors.values()) + len(text)
    refuse_foreign(directory)
    make_directory(directory.parent)
    with _staged(directory, needed) as staging:
        filesystem.mkdir(staging)
        with contextlib.ExitStack() as hashing:  # Of each file beside the writing of the next, and the check.
            outputs = {name: _write_file(staging / name, writer, hashing) for name, writer in writers.items()}
            check()
        step, run_id = manifest["step"], manifest["run_id"]
        for name, output in outputs.items():
            manifest["files"][name] = FileEntry(size=output.size, sha256=output.hexdigest(), step=step, run_id=run_id)
        _write_file(staging / MANIFEST, lambda write: write(seal(manifest)))
        filesystem.fsync_directory(staging)
        _install(staging, directory)
    sweep(directory.parent)
    return directory


def read_manifest(directory: Path) -> Manifest:
    """Read what a checkpoint says of itself, and look at none of its other files.

    Parameters
    ----------
    directory : Path
        The checkpoint.

    Returns
    -------
    Manifest
        Compared with its own hash.

    Raises
    ------
    CheckpointDamaged
        The manifest is absent, no plain file, or changed.
    CheckpointMismatch
        A newer zae wrote it.

    Examples
    --------
    >>> read_manifest(Path("runs/no-such-run"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointDamaged: runs/no-such-run/manifest.json: is missing. Restore the file...
    """
    return parse(bytes(read_whole(directory / MANIFEST, limit=MANIFEST_LIMIT)), str(directory / MANIFEST))


def verify(directory: str | os.PathLike[str], *, skip: Collection[str] = ()) -> Manifest:
    """Read every byte of a checkpoint and compare its hashes with the manifest.

    Parameters
    ----------
    directory : path-like
        The checkpoint.
    skip : collection of str
        Names of files that are not read, because the caller is going to.

    Returns
    -------
    Manifest
        What the checkpoint says of itself.

    Raises
    ------
    CheckpointNotFound
        There is no such directory.
    CheckpointDamaged
        A file is absent, no plain file, of another size, or changed.
    CheckpointMismatch
        A newer zae wrote it.

    Examples
    --------
    >>> verify("runs/no-such-run")
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointNotFound: there is no checkpoint at runs/no-such-run; \
give the directory that holds manifest.json
    """
    directory = _standing(Path(directory))
    manifest = read_manifest(directory)
    for name, entry in manifest["files"].items():
        if name not in skip:
            with opened(directory / name, size=entry["size"]) as source:
                source.finish(entry["sha256"])
    return manifest


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    allow_partial: Collection[str] = (),
) -> tuple[Manifest, dict[str, Tensor], dict[Any, Any]]:
    """Read a checkpoint, and return it only once every byte has been compared with the manifest.

    Parameters
    ----------
    directory : path-like
        The checkpoint.
    map_location : str or torch.device
        Where the model's tensors go. The others stay on the CPU: random states must, and an optimizer moves its own.
    allow_partial : collection of str
        Names of files that may be absent or damaged. Without its file the model's state is empty; without one of its
        two files the other state is.

    Returns
    -------
    manifest : Manifest
        What the checkpoint says of itself.
    model_state : dict of str to Tensor
        The model's state; tied names give the same tensor.
    state : dict
        Everything else.

    Raises
    ------
    CheckpointNotFound
        There is no such directory.
    CheckpointDamaged
        A file is absent, no plain file, of another size, changed, or holds what zae does not write.
    CheckpointMismatch
        A newer zae wrote it.
    ConfigError
        `allow_partial` names a file that no checkpoint has.

    Examples
    --------
    >>> import tempfile
    >>> about = {"run_id": "demo", "step": 12, "epoch": 1, "composition": [], "world_size": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_checkpoint(Path(folder, "last"), {"w": torch.ones(2)}, {"lr": 0.1}, manifest_info=about)
    ...     Path(path, "state.json").unlink()
    ...     load_checkpoint(path, allow_partial=["state.json"])[1:]
    ({'w': tensor([1., 1.])}, {})
    """
    if unknown := sorted(set(allow_partial) - (KNOWN - {MANIFEST})):
        raise ConfigError(f"allow_partial names {unknown}; write names of {sorted(KNOWN - {MANIFEST})}")
    directory = _standing(Path(directory))
    manifest = read_manifest(directory)
    model_state: dict[str, Tensor] = {}
    try:
        model_state = _load_model(directory, manifest)
    except CheckpointDamaged:
        if MODEL_FILES[manifest["model_format"]] not in allow_partial:
            raise
    state = load_state(directory, manifest, allow_partial)
    return manifest, moved(model_state, map_location), state


def load_state(path: Path, manifest: Manifest | None = None, allow_partial: Collection[str] = ()) -> dict[Any, Any]:
    """Read what a checkpoint holds beside the model, and compare it with the manifest.

    Parameters
    ----------
    path : Path
        The checkpoint.
    manifest : Manifest, optional
        What `read_manifest` returned.
    allow_partial : collection of str
        As for `load_checkpoint`.

    Returns
    -------
    dict
        The state; the model's file is not read.

    Raises
    ------
    CheckpointNotFound, CheckpointDamaged, CheckpointMismatch
        As from `load_checkpoint`.
    """
    manifest, state = manifest or read_manifest(path), dict[Any, Any]()
    blamed = STATE_TENSORS
    try:
        tensors = _load_safetensors(path / STATE_TENSORS, manifest["files"][STATE_TENSORS])
        blamed = STATE
        entry = manifest["files"][STATE]
        text, where = read_whole(path / STATE, size=entry["size"], sha256=entry["sha256"]), str(path / STATE)
        state = decode(strict_json(bytes(text), where), tensors, where=where)
    except CheckpointDamaged:
        if blamed not in allow_partial:
            raise
    if not isinstance(state, dict):
        raise CheckpointDamaged(f"{path / STATE}: holds a {type(state).__name__}, not a dict. {CURE}")
    return state


def list_checkpoints(save_path: str | os.PathLike[str]) -> list[Path]:
    """List the checkpoints of a run by name, the highest step first, without a look into them.

    Parameters
    ----------
    save_path : path-like
        Where the run saves.

    Returns
    -------
    list of Path
        Directories named as `checkpoint_name` does. One that a killed save was about to replace comes right behind the
        one that took its place.

    Raises
    ------
    ConfigError
        `save_path` is a file.

    Examples
    --------
    >>> list_checkpoints("runs/no-such-run")
    []
    """
    found: list[tuple[int, bool, float, Path]] = []
    for entry in entries_of(Path(save_path)):
        own = original_name(entry.name)
        if (step := step_of(own)) is None or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            age = entry.stat(follow_symlinks=False).st_mtime
            if not holds_checkpoint(Path(entry.path)):
                continue
            found.append((step, own == entry.name, age, Path(entry.path)))
    return [path for *_, path in sorted(found, reverse=True)]


def newest_valid(
    save_path: str | os.PathLike[str],
    read: Callable[[Path], _Read] = verify,  # type: ignore[assignment]
) -> tuple[Path, _Read, list[tuple[Path, str]]] | None:
    """Find the newest checkpoint that can be read.

    Parameters
    ----------
    save_path : path-like
        Where the run saves.
    read : callable
        What is done with a checkpoint to find out: `verify`, or `load_checkpoint` to read it once and have it.

    Returns
    -------
    path, content, passed_over : tuple, or None
        The checkpoint, what `read` returned for it, and the newer ones that are damaged, each with the reason. None
        if there is no checkpoint at all: then, and only then, a run may start from scratch.

    Raises
    ------
    CheckpointDamaged
        There are checkpoints, and none of them is whole.
    CheckpointMismatch
        A newer zae wrote the newest; to take an older one would throw away what it holds.

    Examples
    --------
    >>> import tempfile
    >>> about = {"run_id": "demo", "step": 3, "epoch": 1, "composition": [], "world_size": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in 3, 6:
    ...         path = Path(folder, checkpoint_name(step))
    ...         path = save_checkpoint(path, {}, {}, manifest_info=about | {"step": step})
    ...     Path(path, "state.json").unlink()
    ...     best, manifest, passed_over = newest_valid(folder)
    >>> best.name, [path.name for path, reason in passed_over]
    ('step-00000003', ['step-00000006'])
    """
    passed_over: list[tuple[Path, str]] = []
    for path in list_checkpoints(save_path):
        try:
            return path, read(path), passed_over
        except (CheckpointDamaged, CheckpointNotFound) as error:
            passed_over.append((path, str(error)))
    if not passed_over:
        return None
    reasons = "\n".join(f"  {path.name}: {reason}" for path, reason in passed_over)
    raise CheckpointDamaged(
        f"{save_path}: none of {len(passed_over)} checkpoints is whole; restore one from a copy, or move them away to "
        f"start afresh:\n{reasons}"
    )


def remove_checkpoint(directory: str | os.PathLike[str]) -> None:
    """Remove a checkpoint; killed at any instant, it leaves it whole or gone.

    What a user has put into its folder stays there, and the folder with it.

    Parameters
    ----------
    directory : path-like
        A checkpoint, whole or damaged.

    Raises
    ------
    CheckpointNotFound
        There is no such directory.
    CheckpointError
        It holds files that belong to no checkpoint, or cannot be removed.

    Examples
    --------
    >>> remove_checkpoint("runs/no-such-run/step-00000012")
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointNotFound: there is no checkpoint at runs/no-such-run/step-00000012; \
give the directory that holds manifest.json
    """
    directory = _standing(Path(directory))
    refuse_foreign(directory)
    gone = directory.with_name(aside_name(directory.name, "deleting"))
    try:
        filesystem.rename(directory, gone)
        filesystem.fsync_directory(directory.parent)
        _clear(gone)
    except OSError as error:
        raise CheckpointError(f"{directory} was not removed: {reason(error)}; remove it by hand") from error


def put_back(parent: str | os.PathLike[str]) -> None:
    """Give what a killed save had moved aside its name again, where nothing that is whole stands there.

    Parameters
    ----------
    parent : path-like
        Where checkpoints stand; nobody else saves there.

    Examples
    --------
    >>> put_back("runs/no-such-run")
    """
    for path in list_checkpoints(parent):
        place = path.with_name(original_name(path.name))
        if place != path and not _stands(place) and _stands(path):
            with contextlib.suppress(OSError):  # it stands in until it can be renamed
                _install(path, place)


def sweep(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove what saves and removals left behind when their process was killed.

    Every save ends with it. What cannot be removed stays until the next time.

    Parameters
    ----------
    parent : path-like
        Where checkpoints stand.

    Returns
    -------
    list of Path
        What was removed.

    Examples
    --------
    >>> sweep("runs/no-such-run")
    []
    """
    removed: list[Path] = []
    with contextlib.suppress(OSError, ConfigError):
        for entry in entries_of(Path(parent)):
            path = Path(entry.path)
            with contextlib.suppress(OSError):
                if _is_stray(path) and _clear(path):
                    removed.append(path)
    return removed


def save_weights(
    path: str | os.PathLike[str], model_state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a model's state as one file; a file of that name is replaced at once.

    Parameters
    ----------
    path : path-like
        The suffix says the format: .safetensors (or .safetensor), or .ckpt, .pt or .pth for that of ``torch.save``.
    model_state : mapping of str to Tensor
        The model's state.
    metadata : mapping of str to str, optional
        Notes for the header of a safetensors file; the other format has no place for them.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ConfigError
        The suffix is none of these.
    CheckpointError
        The state holds what the format cannot hold, or the disk refuses.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load_weights(save_weights(Path(folder, "model.ckpt"), {"w": torch.ones(2)}))
    {'w': tensor([1., 1.])}
    """
    path = Path(os.path.abspath(os.path.expanduser(path)))
    writer = partial(write_ckpt, tensors=model_state)
    if weights_format(path) == "safetensors":
        writer = partial(write_safetensors, tensors=model_state, metadata=metadata)
    separate(model_state)  # what cannot be written is refused before the disk is touched
    make_directory(path.parent)
    with _staged(path, byte_count(*model_state.values())) as staging:
        _write_file(staging, writer)
        filesystem.rename(staging, path)
        filesystem.fsync_directory(path.parent)
    sweep(path.parent)
    return path


def load_weights(path: str | os.PathLike[str], *, trust_pickle: bool = False) -> dict[str, Tensor]:
    """Read a model's state from one file, or from a checkpoint.

    Parameters
    ----------
    path : path-like
        A file as `save_weights` writes it, also one by safetensors or ``torch.save``; or a checkpoint's directory, of
        which only the model's file is read and compared.
    trust_pickle : bool
        Whether a file of ``torch.save`` may run the code that it holds, with a warning. Only for a file of your own
        that an older program has written; no resume ever does so.

    Returns
    -------
    dict of str to Tensor
        On the CPU; tied names give the same tensor.

    Raises
    ------
    CheckpointNotFound
        There is no such file.
    ConfigError
        The suffix is not one that `save_weights` writes.
    CheckpointDamaged
        The file is not whole, needs code to be read, or holds something else.

    Examples
    --------
    >>> load_weights("runs/model.h5")
    Traceback (most recent call last):
    ...
    zae.errors.ConfigError: runs/model.h5: the suffix '.h5' is no format of weights; write .safetensors, .safetensor, \
.ckpt, .pt or .pth
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _load_model(path, read_manifest(path))
    kind = weights_format(path)
    if not path.exists():
        raise CheckpointNotFound(f"there is no file {path}; give one that save_model wrote, or a checkpoint")
    path = path.resolve()  # the user's own link, as caches of downloads have them, is followed
    if trust_pickle and kind == "ckpt":
        _log.warning("%s is read with trust_pickle=True: whatever code it holds is run", path)
        return read_trusted(path)
    return _load_safetensors(path, None) if kind == "safetensors" else read_ckpt(read_whole(path), str(path))


def _load_safetensors(path: Path, entry: FileEntry | None) -> dict[str, Tensor]:
    """Read a safetensors file in one pass, and compare it with its entry."""
    with opened(path, size=entry and entry["size"]) as source:
        try:
            tensors, _ = read_safetensors(source)
        except CheckpointDamaged:
            # Of a changed file say that it was changed, not what the change broke.
            if entry is not None:
                source.finish(entry["sha256"])
            raise
        if entry is not None:
            source.finish(entry["sha256"])
    return tensors


def _load_model(directory: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read the model's file of a checkpoint."""
    name = MODEL_FILES[manifest["model_format"]]
    path, entry = directory / name, manifest["files"][name]
    return (
        read_ckpt(read_whole(path, size=entry["size"], sha256=entry["sha256"]), str(path))
        if name == MODEL_FILES["ckpt"]
        else _load_safetensors(path, entry)
    )


def _write_file(
    path: Path, writer: Callable[[Callable[[Any], object]], object], hashing: contextlib.ExitStack | None = None
) -> Output:
    """Write one new file and wait until the disk has it; its hash is complete once ``hashing`` is left."""
    handle = filesystem.create(path)
    output = Output(lambda data: filesystem.write(handle, data))
    with contextlib.ExitStack() as here:
        (hashing or here).enter_context(output)
        try:
            writer(output.write)
            output.flush()
            filesystem.fsync(handle)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                filesystem.close(handle)
            if output.error is not None:
                raise output.error from None
            raise
        filesystem.close(handle)
    return output


@contextlib.contextmanager
def _staged(target: Path, needed: int) -> Iterator[Path]:
    """Yield an unpredictable name beside the target; on failure, remove what was written there."""
    staging = target.with_name(staging_name(target.name))
    _active.add(staging.name)
    try:
        yield staging
    except BaseException as error:
        free = free_bytes(target.parent)  # before the removal changes it
        with contextlib.suppress(OSError):
            _clear(staging)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise not_saved(target, error, needed, free) from error
        raise
    finally:
        _active.discard(staging.name)


def _install(staging: Path, directory: Path) -> None:
    """Rename a staged checkpoint to its place; one that stands there steps aside and is swept afterwards."""
    aside = directory.with_name(aside_name(directory.name, "replaced")) if os.path.lexists(directory) else None
    if aside is not None:
        # Killed between the two renames, the old one is found under its new name: see _standing.
        filesystem.rename(directory, aside)
        filesystem.fsync_directory(directory.parent)
    try:
        filesystem.rename(staging, directory)
    except OSError:
        if aside is not None:
            with contextlib.suppress(OSError):
                filesystem.rename(aside, directory)
        raise
    filesystem.fsync_directory(directory.parent)


def _standing(directory: Path) -> Path:
    """Return the directory, or the one that a killed save had moved aside to replace it."""
    if directory.is_dir():
        return directory
    with contextlib.suppress(ConfigError):
        twins = [entry for entry in entries_of(directory.parent) if set_aside(entry.name, "replaced") == directory.name]
        twins = [entry for entry in twins if holds_checkpoint(Path(entry.path))]
        if twins and not os.path.lexists(directory):
            return Path(max(twins, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime).path)
    raise CheckpointNotFound(f"there is no checkpoint at {directory}; give the directory that holds {MANIFEST}")


def _is_stray(path: Path) -> bool:
    """Say whether a directory entry is a left-over that nobody needs."""
    if set_aside(path.name, "deleting") is not None:
        return True
    if (replaced := set_aside(path.name, "replaced")) is not None:
        return _stands(path.with_name(replaced))
    return path.name not in _active and is_abandoned(path.name, time.time() - path.lstat().st_mtime)


def _stands(directory: Path) -> bool:
    """Say whether a checkpoint is at its place, and whole."""
    try:
        return directory.is_dir() and bool(verify(directory))
    except CheckpointError:
        return False


def _clear(path: Path) -> bool:
    """Remove a file, a link, or a checkpoint that was moved aside; say whether it is gone.

    Of a folder only the files of a checkpoint are removed: what is left is a user's, and goes back to where it was.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            filesystem.remove_file(path)
            return True
        entries = entries_of(path)
        ours = [entry for entry in entries if entry.name in KNOWN and not entry.is_dir(follow_symlinks=False)]
        for entry in ours:
            filesystem.remove_file(Path(entry.path))
        foreign = [Path(entry.path) for entry in entries if entry not in ours]
        if not foreign or not _give_back(path, foreign):
            filesystem.remove_directory(path)
    except FileNotFoundError:  # Somebody else was quicker.
        return True
    return not foreign


def _give_back(path: Path, foreign: list[Path]) -> bool:
    """Return a user's files to the folder that was moved aside with them; say whether there is still one aside."""
    home = path.with_name(set_aside(path.name, "deleting") or original_name(path.name))
    if home == path:
        return True
    if not os.path.lexists(home):
        filesystem.rename(path, home)
        return True
    taken = [each for each in foreign if os.path.lexists(home / each.name)]
    for each in foreign:
        if each not in taken:
            filesystem.rename(each, home / each.name)
    return bool(taken)
