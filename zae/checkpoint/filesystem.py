"""Every change of the disk: files that are whole or absent, whatever happens while they are written.

What is written gets a hidden name beside its place, is brought to the disk, and is renamed, so that no reader ever sees
a part of it (`zae.checkpoint.names`). Nothing else in zae changes a checkpoint, and all changes go through `disk`, one
operation at a time: a test that replaces it sees, and can break, each of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from zae.checkpoint.hashed_files import Output, reason
from zae.checkpoint.names import is_known, original_name, set_aside, staging_name
from zae.errors import CheckpointError, ConfigError

_LARGE_BYTES = 1 << 20  # Smaller pieces are left to the system.

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
        if size >= _LARGE_BYTES and hasattr(os, "posix_fadvise"):
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


def write_file(path: Path, writer: Callable[[Callable[[Any], object]], object]) -> Output:
    """Write one new file and wait until the disk has it; a thread may still compute the hash of what it returns."""
    handle = disk.create(path)
    output = Output(partial(disk.write, handle))
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
    finally:
        output.close()
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


def clear(path: Path) -> bool:
    """Remove a file, a link, or a checkpoint that was moved aside, and return whether it is gone.

    Only the files of a checkpoint are removed from a directory: others are a user's, and go back where they were.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            disk.remove_file(path)
            return True
        entries = entries_of(path)
        own_entries = [entry for entry in entries if is_known(entry.name) and not entry.is_dir(follow_symlinks=False)]
        for entry in own_entries:
            disk.remove_file(Path(entry.path))
        foreign = [Path(entry.path) for entry in entries if entry not in own_entries]
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
    taken = [path for path in foreign if os.path.lexists(home / path.name)]
    for path in foreign:
        if path not in taken:
            disk.rename(path, home / path.name)
    return bool(taken)


def not_saved(path: Path, error: OSError, needed: int, free: int | None = None) -> CheckpointError:
    """Return the error for what the disk refused to write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _free_bytes(path.parent) if free is None else free
        remedy = f"{needed} bytes are needed and {free} are free there. Free some space, or give another path"
    else:
        is_refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        remedy = "give another path" + ", or change its permissions" * is_refused
    failure = CheckpointError(f"{path} was not saved: {reason(error)}; {remedy}. What was saved before is unchanged.")
    failure.errno = error.errno or errno.EIO
    return failure


def _free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that a path is on, or would be on; 0 if the system does not say."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0
