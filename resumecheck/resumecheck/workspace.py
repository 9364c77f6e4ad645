"""The copy of the working folder that all runs share, one after another, and snapshots of it."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import Refused

__all__ = ["Entry", "Tree", "Workspace"]

_LARGE = 64 << 20  # Bytes from which on a file of the user is linked, not copied.
_LINKED = {".git", "node_modules"}
_LEFT_OUT = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
_MAX_SIBLINGS = 500
_CLONE = 0x40049409  # FICLONE: a copy that shares its blocks.


class Entry(NamedTuple):
    """What is at a path: a "dir", a "link" to its source, a "file" or "torn" with its content there, or "other"."""

    kind: str
    source: str = ""


Tree = dict[str, Entry]
"""A folder at an instant: each path in it."""


class Workspace:
    """Copy the working folder, keep what is in it at an instant, and bring an instant back."""

    def __init__(self, origin: Path, home: Path, without: Sequence[str], most_bytes: int) -> None:
        self.origin, self.without, self.most_bytes = origin, without, most_bytes
        self.work, self.store = home / "run" / origin.name, home / "store"
        self.work.mkdir(parents=True)
        self.store.mkdir()
        self.contents: dict[tuple[int, int, int], str] = {}
        self.stored_bytes = self.stored_files = 0
        self._link_siblings()
        self.base = self._read_origin()
        self.restore(self.base)

    def _link_siblings(self) -> None:
        """Let ``../data`` of the script be what it is; nobody can write there."""
        parent = self.origin.parent
        if parent in (Path("/"), Path.home()):
            return
        with contextlib.suppress(OSError):
            for sibling in list(parent.iterdir())[:_MAX_SIBLINGS]:
                if sibling != self.origin:
                    (self.work.parent / sibling.name).symlink_to(sibling)

    def _is_left_out(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.without)

    def _read_origin(self) -> Tree:
        """Return the user's folder: large files, environments and .git are links."""
        tree: Tree = {}
        for here, folders, names in os.walk(self.origin):
            base = Path(here)
            for folder in list(folders):
                path = base / folder
                name = str(path.relative_to(self.origin))
                is_environment = (path / "pyvenv.cfg").exists()
                if folder in _LEFT_OUT or self._is_left_out(name):
                    folders.remove(folder)
                elif path.is_symlink() or folder in _LINKED or is_environment:
                    folders.remove(folder)
                    tree[name] = Entry("link", self._end_of_link(path))
                else:
                    tree[name] = Entry("dir")
            for file_name in names:
                path = base / file_name
                name = str(path.relative_to(self.origin))
                if self._is_left_out(name) or not path.is_file():
                    continue
                if path.is_symlink() or path.stat().st_size > _LARGE:
                    tree[name] = Entry("link", self._end_of_link(path))
                else:
                    tree[name] = Entry("file", str(path))
        return tree

    def _end_of_link(self, path: Path) -> str:
        """Return where a link of the copy leads: a link within the folder leads to the place in the copy."""
        end = path.resolve()
        is_inner_link = path.is_symlink() and end.is_relative_to(self.origin)
        return str(self.work / end.relative_to(self.origin) if is_inner_link else end)

    def files(self) -> Iterator[tuple[str, Path, os.stat_result]]:
        """Yield the name, the path and the status of each entry of the copy, without what Python caches."""
        for here, folders, names in os.walk(self.work):
            folders[:] = [folder for folder in folders if folder != "__pycache__"]
            for entry in (*folders, *names):
                path = Path(here, entry)
                with contextlib.suppress(FileNotFoundError):  # A process of the script may still change something.
                    yield str(path.relative_to(self.work)), path, path.lstat()

    def snapshot(self) -> Tree:
        """Keep what is in the copy now; only what is new is stored."""
        return {name: entry for name, entry in self._read(self._content).items() if entry.kind != "other"}

    def _read(self, content: Callable[[Path, os.stat_result], str]) -> Tree:
        """Return what is in the copy now, with the content of each file as a function gives it."""
        tree: Tree = {}
        for name, path, status in self.files():
            if path.is_symlink():
                tree[name] = Entry("link", os.readlink(path))
            elif path.is_dir():
                tree[name] = Entry("dir")
            else:
                tree[name] = Entry("file", content(path, status)) if path.is_file() else Entry("other")
        return tree

    def _content(self, path: Path, status: os.stat_result) -> str:
        """Return where the content of a file is stored."""
        key = _identity(status)
        if key not in self.contents:
            self.stored_bytes += status.st_size
            if self.stored_bytes > self.most_bytes:
                raise Refused(
                    f"the snapshots of the files that the script writes take more than {self.most_bytes >> 30} GB. Let "
                    "it save less often, train a smaller model, or give --gigabytes"
                )
            self.stored_files += 1
            target = self.store / str(self.stored_files)
            _clone(path, target)
            self.contents[key] = str(target)
        return self.contents[key]

    def restore(self, tree: Tree) -> None:
        """Make the copy what it was at an instant; what is there already stays."""
        here = self._read(lambda path, status: self.contents.get(_identity(status), "?"))
        for name in sorted(here, reverse=True):
            if tree.get(name) != here[name]:
                path = self.work / name
                if here[name].kind == "dir":
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        for name, entry in sorted(tree.items()):
            if here.get(name) != entry:
                self._place(self.work / name, entry)

    def _place(self, path: Path, entry: Entry) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.kind == "dir":
            path.mkdir(exist_ok=True)
        elif entry.kind == "link":
            path.symlink_to(entry.source)
        else:
            _clone(Path(entry.source), path)
            if entry.kind == "torn":
                os.truncate(path, path.stat().st_size // 2)
            else:
                self.contents[_identity(path.stat())] = entry.source

    def is_new(self, tree: Tree, name: str) -> bool:
        """Return whether a file is not as the user's folder has it."""
        return name in tree and self.base.get(name) != tree[name]


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _clone(source: Path, target: Path) -> None:
    """Copy a file with its times and rights, without its bytes where the disk can."""
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new.fileno(), _CLONE, old.fileno())
        except OSError:
            shutil.copyfileobj(old, new, 1 << 20)
    shutil.copystat(source, target)
