"""Stores that fail, hang and list late: file systems of fsspec over a local folder."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

__all__ = [
    "ERRORS",
    "OPERATIONS",
    "Failing",
    "FaultyFiles",
    "FaultyObjects",
    "Gate",
    "LateFiles",
    "files_in",
    "planned",
]

OPERATIONS = ("ls", "info", "makedirs", "put_file", "get_file", "cat_file", "open", "mv", "rm_file", "rmdir")


class FaultyFiles(LocalFileSystem):
    """A local folder as a store; `plan` is called before each operation, with its name and arguments."""

    protocol = "faulty"
    cachable = False
    plan: ClassVar[Callable[..., None] | None] = None


def _counted(name: str) -> Any:
    def operate(self: FaultyFiles, *args: Any, **kwargs: Any) -> Any:
        if FaultyFiles.plan is not None:
            FaultyFiles.plan(name, *args)
        return getattr(LocalFileSystem, name)(self, *args, **kwargs)

    return operate


for _name in OPERATIONS:
    setattr(FaultyFiles, _name, _counted(_name))


class FaultyObjects(FaultyFiles):
    """The same without a rename, as object storage is."""

    protocol = "objects"
    mv = AbstractFileSystem.mv


class LateFiles(FaultyFiles):
    """A store that answers a list with that of the call before: `seen` has it."""

    protocol = "late"
    seen: ClassVar[dict[str, list[str]]] = {}

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        try:
            found = LocalFileSystem.ls(self, path, detail=detail)
        except FileNotFoundError:
            found = []
        before, LateFiles.seen[path] = LateFiles.seen.get(path, found), found
        return before


for _cls in (FaultyFiles, FaultyObjects, LateFiles):
    fsspec.register_implementation(_cls.protocol, _cls, clobber=True)


@contextmanager
def planned(plan: Callable[..., None]) -> Iterator[Any]:
    """Call a plan before each operation of these stores."""
    FaultyFiles.plan = plan
    try:
        yield plan
    finally:
        FaultyFiles.plan = None


class ClientError(Exception):
    """An error of a client, which is no OSError."""


ERRORS: dict[str, Callable[[], Exception]] = {
    "full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "permission": lambda: PermissionError(errno.EACCES, "Access Denied"),
    "absent": lambda: FileNotFoundError("The specified bucket does not exist"),
    "client": lambda: ClientError("SlowDown"),
    "time": lambda: TimeoutError(),
}


class Failing:
    """A plan that raises at operation `at`, and as often as `times`; only those of `names` count."""

    def __init__(self, at: int, error: str, times: int = 1, names: tuple[str, ...] = OPERATIONS) -> None:
        self.at, self.error, self.times, self.names, self.log = at, error, times, names, list[str]()

    def __call__(self, name: str, *args: Any) -> None:
        if name in self.names:
            self.log.append(name)
            if self.at <= len(self.log) - 1 < self.at + self.times:
                raise ERRORS[self.error]()


class Gate:
    """A plan that holds operations until it is opened."""

    def __init__(self, *names: str) -> None:
        self.names, self.opened, self.reached = names, threading.Event(), threading.Event()

    def __call__(self, name: str, *args: Any) -> None:
        if name in self.names:
            self.reached.set()
            assert self.opened.wait(60)


def files_in(store: Path) -> list[str]:
    """List the files below a folder."""
    return sorted(str(each.relative_to(store)) for each in store.rglob("*") if each.is_file())
