"""Lock the folder of a run: two runs that save into one folder would overwrite each other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zae.errors import CheckpointDamaged, ConfigError
from zae.storage import filesystem
from zae.storage.filesystem import make_directory, replace_file
from zae.storage.hashed_io import read_whole
from zae.storage.names import is_running

__all__ = ["FolderLock"]

_NAME = ".lock"
_RENEWED = 30.0  # Seconds between two signs of life, for processes that cannot see whether this one lives.
_SILENT = 120.0  # Seconds without one, after which a process on another host counts as dead.
_held: dict[str, str] = {}  # Folders that this process holds, and the tokens of their locks.


class FolderLock:
    """A file that names who saves into a folder: process, host and since when.

    The lock of a killed process is replaced: at once if it ran on this host, after two minutes without a sign of life
    if it ran on another.
    """

    def __init__(self, folder: Path, option: str = "save_path") -> None:
        self.folder, self._option = Path(os.path.abspath(folder)), option
        self._token: str | None = None
        self._stop = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "option": self._option}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # A copy, or another process, does not hold the lock.

    def check(self) -> None:
        """Raise ConfigError if another run saves into the folder."""
        if any(os.environ.get(name, "0") != "0" for name in ("RANK", "SLURM_PROCID")):
            return  # The first rank of this very run may be the holder.
        holder = _read(self.folder / _NAME)
        if holder is None or holder.get("folder") not in (None, _number(self.folder)):
            return  # It is part of a copy of a locked folder.
        if self._token is not None and holder.get("token") == self._token:
            return
        if _alive(holder, self.folder / _NAME):
            raise ConfigError(
                f"{self._option}={str(self.folder)!r} is in use: process {_plain(holder.get('pid'))} on host "
                f"{_plain(holder.get('host'))} saves there since {_plain(holder.get('since'))}; give another "
                f"{self._option}, or end that process (if it is certainly dead, delete {self.folder / _NAME})"
            )

    def acquire(self) -> None:
        """Lock the folder, which is made if it is missing; raise ConfigError if another run holds it."""
        if self._token is not None:
            return
        self._token = os.urandom(8).hex()
        try:
            self._take(self._token)
        except BaseException:
            self.release()  # The disk may have refused after the file was renamed to its place.
            raise
        _held[str(self.folder)] = self._token
        self._stop = threading.Event()
        threading.Thread(target=_renew, args=(self.folder / _NAME, self._stop), name="zae-lock", daemon=True).start()

    def keep(self, target: Path) -> None:
        """Lock the folder again if it was removed since, before `target` is saved into it."""
        if self._token is None or Path(os.path.abspath(target)).parent != self.folder:
            return
        holder = _read(self.folder / _NAME)
        if holder is None or (holder.get("token"), holder.get("folder")) != (self._token, _number(self.folder)):
            self._take(self._token)

    def _take(self, token: str) -> None:
        make_directory(self.folder)
        with _alone(self.folder):
            self.check()
            mine = {**_identity(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z"), "token": token}
            mine["folder"] = _number(self.folder)
            text = json.dumps(mine).encode()
            replace_file(self.folder / _NAME, lambda write: write(text), len(text))

    def release(self) -> None:
        """Remove the lock."""
        token, self._token = self._token, None
        self._stop.set()
        if token is None:
            return
        _held.pop(str(self.folder), None)
        holder = _read(self.folder / _NAME)
        if holder is not None and holder.get("token") == token:
            with contextlib.suppress(OSError):
                filesystem.disk.remove_file(self.folder / _NAME)


def _identity() -> dict[str, Any]:
    """Describe this process so that another with the same number is not mistaken for it."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        # Processes of two containers may have the same host name and number without seeing each other.
        "place": _text("/proc/sys/kernel/random/boot_id") + _link("/proc/self/ns/pid"),
        "started": _start_of(os.getpid()),
    }


def _alive(holder: Mapping[str, Any], path: Path) -> bool:
    """Return whether the process that wrote a lock may still run."""
    here = _identity()
    if (holder.get("host"), holder.get("place")) != (here["host"], here["place"]):
        if holder.get("host") == here["host"] and not here["place"]:
            return False
        # A file that is made now tells the time of the disk: the clock of this host may differ from that of the other.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as probe:
            return os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime < _SILENT
        return False
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0 or _start_of(pid) != holder.get("started"):
        return False
    if pid == os.getpid():
        return holder.get("token") in _held.values()
    return is_running(pid)


def _start_of(pid: int) -> str:
    """Return when a process was started, in ticks since the machine was; empty if the system does not say."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] == "Z" else fields[19]


def _number(folder: Path) -> int:
    """Return the number of a folder on its disk, which a copy of it does not share."""
    return folder.stat().st_ino


def _read(path: Path) -> dict[str, Any] | None:
    """Read a lock; None if it is missing, cut short, or not a file that zae has written."""
    try:
        found = json.loads(read_whole(path, limit=4096))
    except (CheckpointDamaged, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _plain(value: object) -> str:
    """Return what a lock says, without anything that a terminal would act on."""
    return ascii(value)[:80] if not isinstance(value, str) else ascii(value)[1:-1][:80]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _renew(path: Path, stop: threading.Event) -> None:
    """Give signs of life: renew the time of the file."""
    while not stop.wait(_RENEWED):
        with contextlib.suppress(OSError):
            os.utime(path)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time read and write a lock, if the system supports it."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows has no such lock and cannot open folders.
        yield
        return
    try:
        with contextlib.suppress(OSError):  # Some network disks do not support it.
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
