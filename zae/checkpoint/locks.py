"""Lock the folder of a run: two runs that save into one folder would overwrite each other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zae.checkpoint import filesystem
from zae.checkpoint.filesystem import make_directory, not_saved
from zae.checkpoint.hashed_files import read_whole
from zae.errors import CheckpointDamaged, ConfigError, printable

__all__ = ["FolderLock"]

_NAME = ".lock"
_holding: set[FolderLock] = set()  # Those of this process.


class FolderLock:
    """A file that the system locks (flock) while a run saves into a folder; it says which process that is.

    The system unlocks it when the process ends, however that happens. On a disk, or a system, without such locks
    nothing is locked.
    """

    def __init__(self, folder: Path, option: str = "save_path") -> None:
        self.folder, self._option = Path(os.path.abspath(folder)), option
        self._handle: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "option": self._option}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # A copy, or another process, does not hold the lock.

    def check(self) -> None:
        """Raise ConfigError if another run saves into the folder."""
        if any(os.environ.get(name, "0") != "0" for name in ("RANK", "SLURM_PROCID")):
            return  # The first rank of this very run may be the holder.
        path = self.folder / _NAME
        if self._handle is None and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):
                os.close(self._open(path))

    def acquire(self) -> None:
        """Lock the folder, which is made if it is missing; raise ConfigError if another run holds it."""
        if self._handle is not None:
            return
        make_directory(self.folder)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        text = memoryview(json.dumps(about).encode())
        try:
            self._handle = self._create(self.folder / _NAME)
            _holding.add(self)
            filesystem.disk.write(self._handle, text)
        except OSError as error:
            self.release()
            raise not_saved(self.folder / _NAME, error, 0) from None

    def keep(self, target: Path) -> None:
        """Lock the folder again if it was removed since, before `target` is saved into it."""
        if self._handle is None or Path(os.path.abspath(target)).parent != self.folder:
            return
        if _is_at(self._handle, self.folder / _NAME):
            return
        gone = self._handle
        self._handle = None
        try:
            self.acquire()
        except BaseException:
            self._handle = gone  # Not to save there without the lock, whatever is saved next.
            raise
        os.close(gone)

    def release(self) -> None:
        """Remove the lock."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):
            if _is_at(self._handle, self.folder / _NAME):
                filesystem.disk.remove_file(self.folder / _NAME)
        self.forget()
        _holding.discard(self)

    def forget(self) -> None:
        """Close the file, which stays locked where another process has it open."""
        handle = self._handle
        self._handle = None
        if handle is not None:
            os.close(handle)

    def _create(self, path: Path) -> int:
        """Make the file and lock it; one that nobody has locked is removed before."""
        while True:
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
                filesystem.disk.remove_file(path)
            is_new = True
            try:
                handle = filesystem.disk.create(path)
            except FileExistsError:
                is_new = False
                try:
                    handle = self._open(path)
                except FileNotFoundError:  # Its holder has just removed it.
                    continue
            try:
                if is_new and not _lock(handle):
                    raise self._in_use(path)
                # Whoever holds the lock of the file in the folder may remove it: no other process can.
                if _is_at(handle, path):
                    if is_new:
                        return handle
                    filesystem.disk.remove_file(path)
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _open(self, path: Path) -> int:
        """Open and lock the file that is there; raise ConfigError if it is locked already."""
        flags = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK"))
        handle = os.open(path, os.O_RDWR | flags)
        if _lock(handle):
            return handle
        os.close(handle)
        raise self._in_use(path)

    def _in_use(self, path: Path) -> ConfigError:
        holder = _read(path)
        return ConfigError(
            f"{self._option}={str(self.folder)!r} is in use: process {_plain(holder.get('pid'))} on host "
            f"{_plain(holder.get('host'))} saves there since {_plain(holder.get('since'))}; give another "
            f"{self._option}, or end that process"
        )


def _is_at(handle: int, path: Path) -> bool:
    """Return whether an open file is the one at this path: that may have been removed, or the folder copied."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:  # Removed, or something else is in the place of the folder.
        return False


def _lock(handle: int) -> bool:
    """Lock an open file, and return whether no other process, and nobody in this one, has done so."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, and some network disks.
        return True
    return True


def _read(path: Path) -> dict[str, Any]:
    """Return what a lock says; nothing if it is cut short, or not a file that zae has written."""
    try:
        content = json.loads(read_whole(path, limit=4096))
    except (CheckpointDamaged, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _plain(value: object) -> str:
    """Return what a lock says, without anything that a terminal would act on."""
    return printable(str(value), kept="")


def _forget_all() -> None:
    """Leave the locks to the process that was forked: a worker that outlives it must not hold them."""
    for lock in _holding:
        lock.forget()
    _holding.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
