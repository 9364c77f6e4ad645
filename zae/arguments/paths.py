"""Check the paths and URLs that options are given; each error says what to write."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from zae.errors import ConfigError

__all__ = ["check_file", "check_folder", "check_partial", "check_url"]


def check_folder(path: Any, name: str) -> Path:
    """Refuse a path that cannot be a writable folder, without creating it."""
    folder = _path_of(path, name, "folder")
    _check_place(folder.absolute(), f"{name}={str(path)!r}")
    return folder


def check_file(path: Any, name: str, example: str) -> Path:
    """Refuse a path that cannot be a writable file, without creating it."""
    file = _path_of(path, name, "file").absolute()
    if os.path.isdir(file):
        raise ConfigError(f"{name}={str(file)!r} is a folder; give a file in it: {str(file / example)!r}")
    _check_place(file.parent, f"{name}={str(path)!r}")
    if os.path.exists(file) and stat.S_IFMT(os.stat(file).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK):
        raise ConfigError(f"{name}={str(file)!r} is a pipe or a socket, which may block; give a file")
    if os.path.exists(file) and not os.access(file, os.W_OK):
        raise ConfigError(f"{name}={str(file)!r} cannot be written to; give another path or change its rights")
    return file


def check_url(name: str, url: str, **options: Any) -> tuple[Any, str]:
    """Return the file system of fsspec for a URL, and the path in it; refuse a URL that has none."""
    import fsspec  # A dependency of torch.

    try:
        files, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"{name}={url!r} cannot be used: {error}; give one that fsspec knows") from error
    return files, path


def check_partial(files: Any) -> list[str]:
    """Return the files that a checkpoint may lack; refuse a str, which iterates over its characters."""
    if not isinstance(files, (list, tuple, set, frozenset)):
        example = files if isinstance(files, str) else "state.json"
        raise ConfigError(f"allow_partial={files!r}; it must be a list of files: [{example!r}]")
    return list(files)


def _path_of(path: Any, name: str, kind: str) -> Path:
    """Return the path with its home folder expanded; refuse what cannot be a path."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ConfigError(f"{name}={path!r}; it must be the path of a {kind}")
    expanded = Path(path)
    try:
        expanded = expanded.expanduser()
        os.stat(expanded)
    except RuntimeError:
        raise ConfigError(f"{name}={str(path)!r}: there is no such home folder; write the path in full") from None
    except (OSError, ValueError) as error:  # A missing or unreadable path is not an error here.
        if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{name}={str(path)!r} cannot be a path: {reason}; give another path") from None
    return expanded


def _check_place(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be written to or created."""
    # Not the methods of Path: they raise where they have no permission.
    present = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if not os.path.isdir(present):
        raise ConfigError(f"{option}: {present} is a file, not a folder; give another path")
    if not os.access(present, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: {present} cannot be written to; give another path or change its rights")
