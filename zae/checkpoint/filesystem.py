"""Every change of the disk: files and directories that are whole or absent, whatever happens while they are written.

What is written gets a hidden name beside its place, is brought to the disk, and is renamed, so that no reader ever sees
a part of it::

    .staging-<name>-<host>-<pid>-<token>     being written; left behind only by a process that was killed
    .replaced-<name>-<token>                 what stood at <name> before; it stands in while <name> is missing
    .deleting-<name>-<token>                 being removed

Nothing else in zae changes a checkpoint, and nothing here changes the disk but through `disk`, one operation at a time:
a test that replaces it sees, and can break, each of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import queue
import re
import secrets
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Self

from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError

# -------------------------------------------------------------------------------------------------------------- names

MANIFEST = "manifest.json"
# By format; in the last one the tensors that ranks hold in parts are in further files, see zae.checkpoint.folder.
MODEL_FILES = {"safetensors": "model.safetensors", "ckpt": "model.ckpt", "sharded": "model.safetensors"}
STATE_TENSORS = "state.safetensors"
STATE = "state.json"
SHARDS = "shards.json"
KNOWN = {MANIFEST, STATE_TENSORS, STATE, *MODEL_FILES.values()}
"""All files that a checkpoint may have, without those of shards and of rows."""

_STEP = re.compile(r"step-(\d{8,18})")
_OURS = re.compile(r"(?:step|crash)-\d{8,18}")
_ASIDE = re.compile(r"\.(replaced|deleting)-(.+)-[0-9a-f]{16}")
_STAGED = re.compile(r"\.staging-.+-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}")
_SHARD = re.compile(r"shard-\d{5}\.safetensors")
PIECE = re.compile(r"(train_history|valid_history|log_history)-(\d{1,12})-(\d{1,12})\.json")
"""The files of rows: the list, its first row in the file, and the row after the last, see zae.checkpoint.rows."""
_OLD = 24 * 3600.0


def checkpoint_name(step: int) -> str:
    """Return the directory name for the checkpoint of a step; names sort as their steps do."""
    if step < 0:
        raise ConfigError(f"step is {step}; the step of a checkpoint must be 0 or more")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for; None if `checkpoint_name` does not return such names."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def shard_name(rank: int) -> str:
    """Return the name of the file with the parts that a rank has written."""
    return f"shard-{rank:05d}.safetensors"


def is_known(name: str) -> bool:
    """Return whether a file of this name may be part of a checkpoint."""
    return name in KNOWN or name == SHARDS or any(pattern.fullmatch(name) for pattern in (_SHARD, PIECE))


# -------------------------------------------------------------------------------------------------- hidden names


def staging_name(name: str) -> str:
    """Return an unpredictable hidden name to write under: ``.staging-<name>-<host>-<pid>-<token>``."""
    return f".staging-{name}-{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def is_abandoned(name: str, age: float) -> bool:
    """Return whether this is a staging name of a process that no longer runs, last written `age` seconds ago."""
    match = _STAGED.fullmatch(name)
    if match is None:
        return False
    host, pid = match[1], int(match[2])
    # An earlier process had the number of this one, as in a container that was restarted.
    return age > _OLD or (host == _host() and (pid == os.getpid() or not is_running(pid)))


def aside_name(name: str, kind: str) -> str:
    """Return a new hidden name, of kind "replaced" or "deleting", for a directory that is moved aside."""
    match = _ASIDE.fullmatch(name)
    return f".{kind}-{name if match is None else match[2]}-{secrets.token_hex(8)}"


def set_aside(name: str, kind: str) -> str | None:
    """Return the name that a directory had before it was hidden; None if it is not hidden in this way."""
    match = _ASIDE.fullmatch(name)
    return match[2] if match is not None and match[1] == kind else None


def original_name(name: str) -> str:
    """Return the name of a checkpoint, also of one that a killed save has left moved aside."""
    return set_aside(name, "replaced") or name


# ---------------------------------------------------------------------------------------------------- directories


def entries_of(parent: Path) -> list[os.DirEntry[str]]:
    """List a directory; a missing one is empty."""
    try:
        with os.scandir(parent) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise ConfigError(
            f"{parent} is a file, not a directory; give the directory that holds checkpoints. start_from and "
            "apply_weights take a file of weights"
        ) from error


def holds_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a checkpoint, perhaps a damaged one, and not only a user's own files."""
    try:
        names = {entry.name for entry in entries_of(directory)}
    except OSError:  # Without permission to list it; reading it will say so.
        return True
    return not names or any(map(is_known, names))  # An empty one has lost its files.


def locate(directory: Path) -> Path:
    """Return the directory, or the one that a killed save has moved aside to replace it; raise if there is neither."""
    if directory.is_dir():
        return directory
    with contextlib.suppress(ConfigError):
        twins = [entry for entry in entries_of(directory.parent) if set_aside(entry.name, "replaced") == directory.name]
        twins = [entry for entry in twins if holds_checkpoint(Path(entry.path))]
        if twins and not os.path.lexists(directory):
            return Path(max(twins, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime).path)
    raise CheckpointNotFound(f"there is no checkpoint at {directory}; give the directory that holds {MANIFEST}")


def refuse_foreign(directory: Path) -> None:
    """Raise if a directory to be replaced or removed contains a user's files and is not named like a checkpoint."""
    if not os.path.lexists(directory) or _OURS.fullmatch(original_name(directory.name)):
        return
    foreign = sorted(entry.name for entry in entries_of(directory) if not is_known(entry.name))
    if foreign:
        raise CheckpointError(
            f"{directory} contains {foreign[0]!r}, which is not part of a checkpoint; it is neither replaced nor "
            "removed: choose another directory"
        )


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def is_running(pid: int) -> bool:
    """Return whether a process with this number runs on this host."""
    if os.name == "nt":  # Signal 0 is Ctrl-C there.
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


# ------------------------------------------------------------------------------------------------------------- hashes

REMEDY = "Restore the file from a copy, or delete this checkpoint and resume from an older one."
"""What to do about a damaged file."""

CHUNK = 8 << 20
"""The most bytes in one write or read."""

_AHEAD = 16  # The most pieces that wait for their hash while the next are written: memory must not grow.
_BATCH = 1 << 20  # smaller pieces are collected: one write for a thousand small tensors


class Output:
    """Counts and hashes what is written, and passes it on in large pieces.

    Large pieces are hashed by a thread while they are written; leaving the context ends that thread. After a failed
    write, ``error`` is what it raised, and every later one raises it again.
    """

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self.size = 0
        self.error: BaseException | None = None
        self._write = write
        self._pending = bytearray()
        self._digest = hashlib.sha256()
        self._hasher: threading.Thread | None = None
        self._queue: queue.Queue[memoryview | None] = queue.Queue(_AHEAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._hasher is not None:
            self._queue.put(None)
            self._hasher.join()
            self._hasher = None

    def write(self, data: Any) -> None:
        """Write a buffer, which must not change before the context is left; small ones are collected."""
        if self.error is not None:
            raise self.error
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        if len(view) < _BATCH:
            self._pending += view
            if len(self._pending) >= _BATCH:
                self.flush()
            return
        self.flush()
        for start in range(0, len(view), CHUNK):
            self._emit(view[start : start + CHUNK])

    def flush(self) -> None:
        """Write what was collected."""
        pending = self._pending
        self._pending = bytearray()
        if pending:
            self._emit(memoryview(pending))

    def hexdigest(self) -> str:
        """Return the SHA-256 of everything written; the context must have been left."""
        return self._digest.hexdigest()

    def _emit(self, data: memoryview) -> None:
        """Hash one piece and write it."""
        self._hash(data)
        try:
            self._write(data)
        except BaseException as error:
            self.error = error  # torch.save raises another error instead
            raise
        self.size += len(data)

    def _hash(self, data: memoryview) -> None:
        """Hash a piece directly while the file is small, then in the thread, which costs as much as a megabyte."""
        if self._hasher is None and len(data) >= _BATCH:
            hasher = threading.Thread(target=self._hash_all, name="zae-sha256", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is started while the interpreter shuts down
                hasher.start()
                self._hasher = hasher
        if self._hasher is None:
            self._digest.update(data)
        else:
            self._queue.put(data)

    def _hash_all(self) -> None:
        """Hash pieces until there are no more; hashlib releases the interpreter lock."""
        while (data := self._queue.get()) is not None:
            self._digest.update(data)


class Input:
    """Reads an open file of ``size`` bytes and hashes what it reads."""

    def __init__(self, file: FileIO, path: Path, size: int) -> None:
        self.size = size
        self.path = path
        self._file = file
        self._digest = hashlib.sha256()

    def fill(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes; a file that ends earlier is damaged."""
        while len(buffer):
            count = self._file.readinto(buffer[:CHUNK])
            if not count:
                raise CheckpointDamaged(f"{self.path}: ends before its {self.size} bytes. {REMEDY}")
            self._digest.update(buffer[:count])
            buffer = buffer[count:]

    def skip(self, data: memoryview) -> None:
        """Hash the next bytes of the file, which a library has read already, and move past them."""
        self._digest.update(data)
        self._file.seek(len(data), os.SEEK_CUR)

    def finish(self, expected: str) -> None:
        """Read the rest, and compare the SHA-256 of the whole file with the expected one."""
        while data := self._file.read(_BATCH):
            self._digest.update(data)
        found = self._digest.hexdigest()
        if found != expected:
            raise CheckpointDamaged(
                f"{self.path}: changed since it was written, or of another checkpoint: "
                f"expected sha256 {expected[:12]}, got {found[:12]}. {REMEDY}"
            )


@contextlib.contextmanager
def open_input(path: Path, *, size: int | None = None, limit: int | None = None) -> Iterator[Input]:
    """Open a regular file of this size, or of at most `limit` bytes; raise CheckpointDamaged if that fails.

    A symbolic link is not followed.
    """
    try:
        with FileIO(path, "rb", opener=_open_no_link) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointDamaged(f"{path}: is not a regular file. {REMEDY}")
            if size is not None and status.st_size != size:
                raise CheckpointDamaged(
                    f"{path}: cut short or overwritten: expected {size} bytes, got {status.st_size}. {REMEDY}"
                )
            if limit is not None and status.st_size > limit:
                raise CheckpointDamaged(f"{path}: has {status.st_size} bytes; the limit is {limit}. {REMEDY}")
            yield Input(file, path, status.st_size)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path}: is missing. {REMEDY}") from error
    except OSError as error:
        kind = (
            "is a symbolic link, which checkpoints do not contain"
            if path.is_symlink()
            else f"cannot be read: {reason(error)}"
        )
        raise CheckpointDamaged(f"{path}: {kind}. {REMEDY}") from error


def read_whole(path: Path, *, size: int | None = None, limit: int | None = None, sha256: str | None = None) -> bytes:
    """Read a file as `open_input` does, and compare it with a hash if one is given."""
    with open_input(path, size=size, limit=limit) as source:
        stream = io.BytesIO(bytes(source.size))  # It gives its memory away, so that the file is in memory once.
        with stream.getbuffer() as view:
            source.fill(view)
        if sha256 is not None:
            source.finish(sha256)
    return stream.getvalue()


def reason(error: OSError) -> str:
    """Return what the operating system reported, and for which file, in one line."""
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


# Windows has only the last flag, other systems the first two.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def _open_no_link(path: str, flags: int) -> int:
    """Open without following a link or waiting for the other end of a pipe."""
    return os.open(path, flags | _NO_LINK)


# ------------------------------------------------------------------------------------------------ changes of the disk

_LARGE = 1 << 20  # bytes: smaller pieces are left to the system

staging_now: set[str] = set()  # names that this process is staging at this moment, in any thread


class FileSystem:
    """The operations that change the disk, one method each; every method raises OSError as the system reports it.

    Assign an object with these methods to ``zae.checkpoint.filesystem.disk`` to see, delay or break each operation.
    """

    def mkdir(self, path: Path) -> None:
        """Make one directory, which must be new; only its owner may write to it."""
        os.mkdir(path, 0o755)

    def create(self, path: Path) -> int:
        """Create one file, which must be new, and return its handle; only its owner may write to it."""
        # The last two flags are missing on some platforms: O_NOFOLLOW on Windows, O_BINARY elsewhere.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        return os.open(path, flags, 0o644)

    def write(self, handle: int, data: memoryview) -> None:
        """Write all of these bytes; the disk starts on a large piece while the next one is prepared."""
        size = len(data)
        while data:
            data = data[os.write(handle, data) :]
        if size >= _LARGE and hasattr(os, "posix_fadvise"):
            # Linux starts to bring such a range to the disk without waiting for it, so that the later fsync has less
            # to wait for. Elsewhere it is only a hint.
            with contextlib.suppress(OSError):
                start = os.lseek(handle, 0, os.SEEK_CUR) - size
                os.posix_fadvise(handle, start, size, os.POSIX_FADV_DONTNEED)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, which must be new."""
        os.link(source, target)

    def fsync(self, handle: int) -> None:
        """Wait until the disk has the file."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close the file."""
        os.close(handle)

    def fsync_directory(self, path: Path) -> None:
        """Wait until the disk has the names in a directory."""
        if os.name == "nt":  # Windows cannot open directories; its renames are journaled.
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some network disks do not support it.
                raise
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or a directory atomically; a file with that name is replaced."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        """Remove one file, or one link."""
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Remove one empty directory."""
        os.rmdir(path)


disk = FileSystem()
"""What every function uses; it is looked up at each call."""


# -------------------------------------------------------------------------------------------------------- writing


def make_directory(path: str | os.PathLike[str]) -> Path:
    """Make a directory and the missing ones above it; raise CheckpointError if that fails or a file is in the way."""
    path = Path(path)
    try:
        missing = [place for place in (path, *path.parents) if not place.exists()]
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):  # Another process was quicker.
                disk.mkdir(place)
            disk.fsync_directory(place.parent)
    except OSError as error:
        raise not_saved(path, error, 0) from None
    if not path.is_dir():
        refused = CheckpointError(f"{path} is a file, not a directory; choose another folder")
        refused.errno = errno.ENOTDIR
        raise refused
    return path


@contextlib.contextmanager
def stage(target: Path, needed: int) -> Iterator[Path]:
    """Yield a hidden path beside the target to write to; if the block fails, remove what was written there."""
    staging = target.with_name(staging_name(target.name))
    staging_now.add(staging.name)
    try:
        yield staging
    except BaseException as error:
        free = _free_bytes(target.parent)  # Before the removal changes it.
        with contextlib.suppress(OSError):
            clear(staging)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise not_saved(target, error, needed, free) from None
        raise
    finally:
        staging_now.discard(staging.name)


def write_file(
    path: Path, writer: Callable[[Callable[[Any], object]], object], hashing: contextlib.ExitStack | None = None
) -> Output:
    """Write one new file and wait until the disk has it; its hash is complete when ``hashing`` is closed."""
    handle = disk.create(path)
    output = Output(lambda data: disk.write(handle, data))
    with contextlib.ExitStack() as here:
        (hashing or here).enter_context(output)
        try:
            writer(output.write)
            output.flush()
            disk.fsync(handle)
        except BaseException:
            with contextlib.suppress(OSError):  # The first error is the one to report.
                disk.close(handle)
            if output.error is not None:
                raise output.error from None
            raise
        disk.close(handle)
    return output


def share_file(source: Path, path: Path, size: int) -> bool:
    """Give a whole file of this size, which the disk has, a second name; return whether it is there and has got one."""
    try:
        status = os.lstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return False
        disk.link(source, path)
    except OSError:  # Another disk, or one without links.
        return False
    return True


def replace_file(path: Path, writer: Callable[[Callable[[Any], object]], object], needed: int) -> None:
    """Write a file in the place of the one with this name, if there is one; readers see one of the two, whole."""
    make_directory(path.parent)
    with stage(path, needed) as staging:
        write_file(staging, writer)
        disk.rename(staging, path)
        disk.fsync_directory(path.parent)


def put_file(files: Any, source: Path, place: str) -> None:
    """Copy a file into a file system of fsspec, whole or absent: an object is, and elsewhere what is renamed."""
    from fsspec import AbstractFileSystem

    if type(files).mv is AbstractFileSystem.mv:  # There is no rename: it copies.
        files.put_file(str(source), place)
        return
    folder, _, name = place.rpartition("/")
    hidden = f"{folder}/.{name}.part"
    try:
        files.put_file(str(source), hidden)
        files.mv(hidden, place)
    except Exception:
        with contextlib.suppress(Exception):  # The first error is the one to report.
            files.rm_file(hidden)
        raise


def install(staging: Path, directory: Path) -> None:
    """Rename a staged directory to its place; what stands there is moved aside, and `sweep` removes it."""
    aside = directory.with_name(aside_name(directory.name, "replaced")) if os.path.lexists(directory) else None
    if aside is not None:
        # If the process is killed between the two renames, `locate` finds the old one under its new name.
        disk.rename(directory, aside)
        disk.fsync_directory(directory.parent)
    try:
        disk.rename(staging, directory)
    except OSError:
        if aside is not None:
            with contextlib.suppress(OSError):
                disk.rename(aside, directory)
        raise
    disk.fsync_directory(directory.parent)


# ------------------------------------------------------------------------------------------------------- removing


def remove_checkpoint(directory: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, whole or damaged; a process that is killed during this leaves it whole or gone.

    What a user has put into its directory stays there, and the directory with it. Raise CheckpointError if it is not
    named like a checkpoint and contains such files, or if it cannot be removed.
    """
    directory = locate(Path(directory))
    refuse_foreign(directory)
    gone = directory.with_name(aside_name(directory.name, "deleting"))
    try:
        disk.rename(directory, gone)
        disk.fsync_directory(directory.parent)
        clear(gone)
    except OSError as error:
        raise CheckpointError(f"{directory} was not removed: {reason(error)}; remove it yourself") from error


def clear(path: Path) -> bool:
    """Remove a file, a link, or a checkpoint that was moved aside, and return whether it is gone.

    Only the files of a checkpoint are removed from a directory: others are a user's, and go back where they were.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            disk.remove_file(path)
            return True
        entries = entries_of(path)
        ours = [entry for entry in entries if is_known(entry.name) and not entry.is_dir(follow_symlinks=False)]
        for entry in ours:
            disk.remove_file(Path(entry.path))
        foreign = [Path(entry.path) for entry in entries if entry not in ours]
        if not foreign or not _give_back(path, foreign):
            disk.remove_directory(path)
    except FileNotFoundError:  # Another process was quicker.
        return True
    return not foreign


def _give_back(path: Path, foreign: list[Path]) -> bool:
    """Return a user's files to the directory that was moved aside with them; return whether some are still aside."""
    home = path.with_name(set_aside(path.name, "deleting") or original_name(path.name))
    if home == path:
        return True
    if not os.path.lexists(home):
        disk.rename(path, home)
        return True
    taken = [each for each in foreign if os.path.lexists(home / each.name)]
    for each in foreign:
        if each not in taken:
            disk.rename(each, home / each.name)
    return bool(taken)


# --------------------------------------------------------------------------------------------------------- errors


def not_saved(path: Path, error: OSError, needed: int, free: int | None = None) -> CheckpointError:
    """Return the error for what the disk refused to write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _free_bytes(path.parent) if free is None else free
        remedy = f"{needed} bytes are needed and {free} are free there. Free some space, or give another path"
    else:
        is_refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        remedy = "give another path" + ", or change its permissions" * is_refused
    made = CheckpointError(f"{path} was not saved: {reason(error)}; {remedy}. What was saved before is unchanged.")
    made.errno = error.errno or errno.EIO
    return made


def _free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that a path is on, or would be on; 0 if the system does not say."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0
