"""Lock the folder of a run: two runs that save into one folder would overwrite each other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zae.errors import CheckpointDamaged, ConfigError, printable
from zae.storage import filesystem
from zae.storage.filesystem import make_directory, not_saved, read_whole

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
        with contextlib.suppress(OSError):  # There is no lock, or something else has its name.
            if self._handle is None:
                os.close(self._open(0))

    def acquire(self) -> None:
        """Lock the folder, which is made if it is missing; raise ConfigError if another run holds it."""
        if self._handle is not None:
            return
        make_directory(self.folder)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        path = self.folder / _NAME
        try:
            if path.exists() and not path.is_file():
                filesystem.disk.remove_file(path)
            self._handle = self._open(os.O_CREAT)
            while not self._is_in_place():  # Its holder has removed it since.
                os.close(self._handle)
                self._handle = self._open(os.O_CREAT)
            _holding.add(self)
            os.ftruncate(self._handle, 0)
            os.write(self._handle, json.dumps(about).encode())
        except OSError as error:
            self.release()
            raise not_saved(path, error, 0) from None

    def keep(self, target: Path) -> None:
        """Lock the folder again if it was removed since, before `target` is saved into it."""
        if self._handle is None or Path(os.path.abspath(target)).parent != self.folder or self._is_in_place():
            return
        gone, self._handle = self._handle, None
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
            if self._is_in_place():
                filesystem.disk.remove_file(self.folder / _NAME)
        self.forget()
        _holding.discard(self)

    def forget(self) -> None:
        """Close the file, which stays locked where another process has it open."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _open(self, flags: int) -> int:
        """Open and lock the file; raise ConfigError if it is locked already."""
        more = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK"))
        handle = os.open(self.folder / _NAME, os.O_RDWR | flags | more, 0o644)
        if not stat.S_ISREG(os.fstat(handle).st_mode) or _lock(handle):
            return handle
        os.close(handle)
        holder = _read(self.folder / _NAME)
        raise ConfigError(
            f"{self._option}={str(self.folder)!r} is in use: process {_plain(holder.get('pid'))} on host "
            f"{_plain(holder.get('host'))} saves there since {_plain(holder.get('since'))}; give another "
            f"{self._option}, or end that process"
        )

    def _is_in_place(self) -> bool:
        """Return whether the file that is open is the one in the folder: that may have been removed or copied."""
        assert self._handle is not None
        try:
            return os.path.samestat(os.fstat(self._handle), os.lstat(self.folder / _NAME))
        except FileNotFoundError:
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
        found = json.loads(read_whole(path, limit=4096))
    except (CheckpointDamaged, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


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
