"""The bytes of one file on their way to and from the disk, hashed as they pass."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Self

from zae.errors import CheckpointDamaged, CheckpointError

__all__ = ["CHUNK", "CURE", "Input", "Output", "free_bytes", "not_saved", "opened", "read_whole", "reason"]

CURE = "Restore the file from a copy, or delete this checkpoint and resume from an older one."
"""What to do about a damaged file."""

CHUNK = 8 << 20
"""The most bytes in one write, and in one read."""

_AHEAD = 128 << 20  # the most bytes that wait for their hash while the next are written
_BATCH = 1 << 20  # smaller pieces are collected: one write for a thousand small tensors


class Output:
    """Measures and hashes what is written, and writes it in pieces of a good size.

    It is a context: large pieces are hashed by a thread, beside the writing and the waiting for the disk, and leaving
    the context ends that thread.

    Parameters
    ----------
    write : callable
        Writes all of one buffer to the file.

    Attributes
    ----------
    size : int
        The bytes written so far.
    error : BaseException or None
        What the first failed write raised; every later one raises it again.

    Examples
    --------
    >>> pieces = []
    >>> with Output(lambda data: pieces.append(bytes(data))) as output:
    ...     output.write(b"ab")
    ...     output.write(b"c")
    ...     output.flush()
    >>> pieces, output.size, output.hexdigest()[:12]
    ([b'abc'], 3, 'ba7816bf8f01')
    """

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self.size = 0
        self.error: BaseException | None = None
        self._write = write
        self._pending = bytearray()
        self._digest = hashlib.sha256()
        self._hasher: threading.Thread | None = None
        self._queue: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._ahead = 0  # bytes in the queue
        self._room = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._hasher is not None:
            self._queue.put(None)
            self._hasher.join()
            self._hasher = None

    def write(self, data: Any) -> None:
        """Take a buffer of any length, which stays as it is until the context is left; small ones are collected."""
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
        pending, self._pending = self._pending, bytearray()
        if pending:
            self._emit(memoryview(pending))

    def hexdigest(self) -> str:
        """Return the SHA-256 of all that was written, once the context is left."""
        return self._digest.hexdigest()

    def _emit(self, data: memoryview) -> None:
        """Hash one piece and write it."""
        self._hash(data)
        try:
            self._write(data)
        except BaseException as error:
            self.error = error  # torch.save raises something of its own instead
            raise
        self.size += len(data)

    def _hash(self, data: memoryview) -> None:
        """Hash a piece at once while the file is small, then by the thread: a thread costs as much as a megabyte."""
        if self._hasher is None and len(data) >= _BATCH:
            hasher = threading.Thread(target=self._hash_all, name="zae-sha256", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is started while the interpreter shuts down
                hasher.start()
                self._hasher = hasher
        if self._hasher is None:
            self._digest.update(data)
            return
        with self._room:  # a slower hash must not let the memory grow
            self._room.wait_for(lambda: self._ahead < _AHEAD)
            self._ahead += len(data)
        self._queue.put(data)

    def _hash_all(self) -> None:
        """Hash pieces until there are no more; hashing leaves Python's lock."""
        while (data := self._queue.get()) is not None:
            self._digest.update(data)
            with self._room:
                self._ahead -= len(data)
                self._room.notify()


class Input:
    """Hashes what is read from an open file.

    Parameters
    ----------
    file : FileIO
        Open for reading, unbuffered.
    path : Path
        Its name, for messages.
    size : int
        Its size in bytes.

    Attributes
    ----------
    path : Path
        Its name.
    size : int
        Its size in bytes, when it was opened.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
    ...     path = Path(folder, "note")
    ...     path.write_bytes(b"abc")
    ...     with opened(path) as source:
    ...         buffer = bytearray(source.size)
    ...         source.fill(memoryview(buffer))
    ...         source.finish("0" * 64)
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointDamaged: ...note: changed since it was written, or of another checkpoint: \
expected sha256 000000000000, got ba7816bf8f01. Restore the file...
    """

    def __init__(self, file: FileIO, path: Path, size: int) -> None:
        self.size = size
        self.path = path
        self._file = file
        self._digest = hashlib.sha256()

    def fill(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes; a file that ends before is damaged."""
        while len(buffer):
            count = self._file.readinto(buffer[:CHUNK])
            if not count:
                raise CheckpointDamaged(f"{self.path}: ends before its {self.size} bytes. {CURE}")
            self._digest.update(buffer[:count])
            buffer = buffer[count:]

    def skip(self, data: memoryview) -> None:
        """Pass over the next bytes of the file, which somebody else has read: hash them as they were read."""
        self._digest.update(data)
        self._file.seek(len(data), os.SEEK_CUR)

    def finish(self, expected: str) -> None:
        """Read what is left, and compare the SHA-256 of the whole file with the expected one."""
        while data := self._file.read(_BATCH):
            self._digest.update(data)
        found = self._digest.hexdigest()
        if found != expected:
            raise CheckpointDamaged(
                f"{self.path}: changed since it was written, or of another checkpoint: "
                f"expected sha256 {expected[:12]}, got {found[:12]}. {CURE}"
            )


@contextlib.contextmanager
def opened(path: Path, *, size: int | None = None, limit: int | None = None) -> Iterator[Input]:
    """Open a plain file for reading; whatever keeps it from being read is damage.

    Parameters
    ----------
    path : Path
        The file; a link is not followed.
    size : int, optional
        The size it must have, in bytes.
    limit : int, optional
        The size it may have, in bytes.

    Yields
    ------
    Input
        The open file.

    Raises
    ------
    CheckpointDamaged
        It is missing, a link, a pipe or a directory, of another size, or the disk does not give it.

    Examples
    --------
    >>> with opened(Path("runs/no-such-run/state.json")):  # doctest: +ELLIPSIS
    ...     pass
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointDamaged: runs/no-such-run/state.json: is missing. Restore the file...
    """
    try:
        with FileIO(path, "rb", opener=_open_no_link) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointDamaged(f"{path}: is no plain file. {CURE}")
            if size is not None and status.st_size != size:
                raise CheckpointDamaged(
                    f"{path}: cut short or overwritten: expected {size} bytes, got {status.st_size}. {CURE}"
                )
            if limit is not None and status.st_size > limit:
                raise CheckpointDamaged(f"{path}: has {status.st_size} bytes; the limit is {limit}. {CURE}")
            yield Input(file, path, status.st_size)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path}: is missing. {CURE}") from error
    except OSError as error:
        kind = "is a link, which no checkpoint has" if path.is_symlink() else f"cannot be read: {reason(error)}"
        raise CheckpointDamaged(f"{path}: {kind}. {CURE}") from error


def read_whole(
    path: Path, *, size: int | None = None, limit: int | None = None, sha256: str | None = None
) -> bytearray:
    """Read a plain file into memory; what is returned is what was compared.

    Parameters
    ----------
    path, size, limit
        As for `opened`.
    sha256 : str, optional
        The hash it must have.

    Returns
    -------
    bytearray
        The whole file.

    Raises
    ------
    CheckpointDamaged
        As from `opened`, or the hash is another.

    Examples
    --------
    >>> read_whole(Path("runs/no-such-run/state.json"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zae.errors.CheckpointDamaged: runs/no-such-run/state.json: is missing. Restore the file...
    """
    with opened(path, size=size, limit=limit) as source:
        data = bytearray(source.size)
        source.fill(memoryview(data))
        if sha256 is not None:
            source.finish(sha256)
    return data


def reason(error: OSError) -> str:
    """Say in one line what the operating system reported, and for which file.

    Parameters
    ----------
    error : OSError
        As raised.

    Returns
    -------
    str
        Its words without its number.

    Examples
    --------
    >>> reason(OSError(28, "No space left on device", "runs/model"))
    'No space left on device (runs/model)'
    """
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def not_saved(path: Path, error: OSError, needed: int, free: int | None = None) -> CheckpointError:
    """Return the error for what the disk refused.

    Parameters
    ----------
    path : Path
        What was to be written.
    error : OSError
        As it was raised.
    needed : int
        The bytes that were to be written.
    free : int, optional
        The bytes that are free; counted now when not given.

    Returns
    -------
    CheckpointError
        Not raised yet.

    Examples
    --------
    >>> str(not_saved(Path("runs/model"), OSError(28, "No space left on device"), 400, 12))[:90]
    'runs/model was not saved: No space left on device; 400 bytes are needed and 12 are free th'
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(path.parent) if free is None else free
        cure = f"{needed} bytes are needed and {free} are free there. Free some space, or give another path"
    else:
        is_refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        cure = "Give another path" + ", or change its permissions" * is_refused
    return CheckpointError(f"{path} was not saved: {reason(error)}; {cure}. What was saved before is unchanged.")


def free_bytes(path: Path) -> int:
    """Count the free bytes of the disk that a path is on, or would be on.

    Parameters
    ----------
    path : Path
        It need not exist.

    Returns
    -------
    int
        0 where the system does not say.

    Examples
    --------
    >>> free_bytes(Path("runs/no-such-run")) >= 0
    True
    """
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def _open_no_link(path: str, flags: int) -> int:
    """Open without following a link, and without waiting for the other end of a pipe."""
    # Windows has neither flag; O_BINARY is its own.
    more = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    return os.open(path, flags | more)
