"""Files that are hashed while they are written or read."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from zae.errors import CheckpointDamaged

REMEDY = "Restore the file from a copy, or delete this checkpoint and resume from an older one."
"""What to do about a damaged file."""

CHUNK = 8 << 20
"""The most bytes in one write or read."""

_MAX_WAITING = 16  # Pieces that wait for their hash while the next are written: memory must not grow.
_BATCH_BYTES = 1 << 20  # Smaller pieces are collected: one write for a thousand small tensors.


class Output:
    """Counts and hashes what is written, and passes it on in large pieces.

    Large pieces are hashed by a thread while they, and other files, are written. After a failed write, ``error`` is
    what it raised, and every later one raises it again. `close` must be called in any case, and then `hexdigest`.
    """

    def __init__(self, write: Callable[[memoryview], object]) -> None:
        self.size = 0
        self.error: BaseException | None = None
        self._write = write
        self._pending = bytearray()
        self._digest = hashlib.sha256()
        self._hasher: threading.Thread | None = None
        self._queue: queue.Queue[memoryview | None] = queue.Queue(_MAX_WAITING)

    def write(self, data: Any) -> None:
        """Write a buffer, which must not change before it is hashed; small ones are collected."""
        if self.error is not None:
            raise self.error
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        if len(view) < _BATCH_BYTES:
            self._pending += view
            if len(self._pending) >= _BATCH_BYTES:
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

    def close(self) -> None:
        """Let the thread end once it has hashed what was written."""
        if self._hasher is not None:
            self._queue.put(None)

    def hexdigest(self) -> str:
        """Return the SHA-256 of everything written, when the thread has ended."""
        if self._hasher is not None:
            self._hasher.join()
        return self._digest.hexdigest()

    def _emit(self, data: memoryview) -> None:
        """Hash one piece and write it: in this thread while the file is small, then hashed by the other one."""
        if self._hasher is None and len(data) >= _BATCH_BYTES:
            hasher = threading.Thread(target=self._hash_all, name="zae-sha256", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is started while the interpreter shuts down
                hasher.start()
                self._hasher = hasher
        if self._hasher is None:
            self._digest.update(data)
        else:
            self._queue.put(data)
        try:
            self._write(data)
        except BaseException as error:
            self.error = error  # torch.save raises another error instead
            raise
        self.size += len(data)

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
        while data := self._file.read(_BATCH_BYTES):
            self._digest.update(data)
        digest = self._digest.hexdigest()
        if digest != expected:
            raise CheckpointDamaged(
                f"{self.path}: changed since it was written, or of another checkpoint: "
                f"expected sha256 {expected[:12]}, got {digest[:12]}. {REMEDY}"
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
