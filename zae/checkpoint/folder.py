"""The folders of checkpoints on the disk: found, verified, put into their place, and removed, each at once."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

from zae.checkpoint import filesystem
from zae.checkpoint.filesystem import clear, entries_of, staging_now
from zae.checkpoint.hashed_files import open_input, reason
from zae.checkpoint.manifest import Manifest, read_manifest
from zae.checkpoint.names import (
    MANIFEST,
    aside_name,
    has_checkpoint_name,
    is_abandoned,
    is_known,
    original_name,
    set_aside,
    step_of,
)
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError

__all__ = [
    "holds_checkpoint",
    "install",
    "is_whole",
    "list_checkpoints",
    "locate",
    "newest_valid",
    "put_back",
    "refuse_foreign",
    "refuse_links",
    "remove_checkpoint",
    "sweep",
    "verify",
]

_log = logging.getLogger("zae")
_Content = TypeVar("_Content")

# -------------------------------------------------------------------------------------------------- one checkpoint


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


def verify(directory: str | os.PathLike[str], *, skip: Collection[str] = ()) -> Manifest:
    """Read every byte of a checkpoint and compare its hashes with the manifest, which is returned.

    Files that `skip` names are not read, because the caller is going to. Errors are those of `load_checkpoint`.
    """
    directory = locate(Path(directory))
    manifest = read_manifest(directory)
    for name, entry in manifest["files"].items():
        if name not in skip:
            with open_input(directory / name, size=entry["size"]) as source:
                source.finish(entry["sha256"])
    return manifest


def is_whole(directory: Path) -> bool:
    """Return whether a checkpoint stands at this place and verifies."""
    try:
        return directory.is_dir() and bool(verify(directory))
    except CheckpointError:
        return False


def refuse_foreign(directory: Path) -> None:
    """Raise if a directory to be replaced or removed contains a user's files and is not named like a checkpoint."""
    if not os.path.lexists(directory) or has_checkpoint_name(original_name(directory.name)):
        return
    foreign = sorted(entry.name for entry in entries_of(directory) if not is_known(entry.name))
    if foreign:
        raise CheckpointError(
            f"{directory} contains {foreign[0]!r}, which is not part of a checkpoint; it is neither replaced nor "
            "removed: choose another directory"
        )


def install(staging: Path, directory: Path) -> Path | None:
    """Rename a staged directory to its place; what stands there is moved aside, and its new path returned."""
    aside = directory.with_name(aside_name(directory.name, "replaced")) if os.path.lexists(directory) else None
    if aside is not None:
        # If the process is killed between the two renames, `locate` finds the old one under its new name.
        filesystem.disk.rename(directory, aside)
        filesystem.disk.fsync_directory(directory.parent)
    try:
        filesystem.disk.rename(staging, directory)
    except OSError:
        if aside is not None:
            with contextlib.suppress(OSError):
                filesystem.disk.rename(aside, directory)
        raise
    filesystem.disk.fsync_directory(directory.parent)
    return aside


def remove_checkpoint(directory: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, whole or damaged; a process that is killed during this leaves it whole or gone.

    What a user has put into its directory stays there, and the directory with it. Raise CheckpointError if it is not
    named like a checkpoint and contains such files, or if it cannot be removed.
    """
    directory = locate(Path(directory))
    refuse_foreign(directory)
    gone = directory.with_name(aside_name(directory.name, "deleting"))
    try:
        filesystem.disk.rename(directory, gone)
        filesystem.disk.fsync_directory(directory.parent)
        clear(gone)
    except OSError as error:
        raise CheckpointError(f"{directory} was not removed: {reason(error)}; remove it yourself") from error


# ------------------------------------------------------------------------------------ the checkpoints of a run


def list_checkpoints(save_path: str | os.PathLike[str]) -> list[Path]:
    """List the directories named like checkpoints, the highest step first, without reading them.

    One that a killed save was about to replace comes right after the one that took its place. Raise ConfigError if
    `save_path` is a file.
    """
    checkpoints: list[tuple[int, bool, float, Path]] = []
    for entry in entries_of(Path(save_path)):
        name = original_name(entry.name)
        if (step := step_of(name)) is None or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # Removed since it was listed.
            age = entry.stat(follow_symlinks=False).st_mtime
            if not holds_checkpoint(Path(entry.path)):
                continue
            checkpoints.append((step, name == entry.name, age, Path(entry.path)))
    return [path for *_, path in sorted(checkpoints, reverse=True)]


def newest_valid(
    save_path: str | os.PathLike[str],
    read: Callable[[Path], _Content] = verify,  # type: ignore[assignment]
    paths: Iterable[Path] | None = None,
) -> tuple[Path, _Content, list[tuple[Path, str]]] | None:
    """Find the newest checkpoint in a folder that can be read, and warn of those that are passed over.

    Return it with its content, and the others with the reasons; None where the folder has none. ``paths`` are the
    checkpoints in it, where they are listed already.
    """
    passed_over: list[tuple[Path, str]] = []
    for path in list_checkpoints(save_path) if paths is None else paths:
        try:
            content = read(path)
        except (CheckpointDamaged, CheckpointNotFound) as error:
            passed_over.append((path, str(error)))
            continue
        for damaged, cause in passed_over:
            _log.warning("passed over %s, which is damaged (%s); taking %s", damaged, cause, path)
        return path, content, passed_over
    if not passed_over:
        return None
    reasons = "\n".join(f"  {path.name}: {reason}" for path, reason in passed_over)
    raise CheckpointDamaged(
        f"{save_path}: all of {len(passed_over)} checkpoints are damaged; restore one from a copy, or move them away "
        f"to start from scratch:\n{reasons}"
    )


def refuse_links(folder: Path, resumed: Path | None) -> None:
    """Refuse to start from scratch, or from an older checkpoint, if a link stands for a newer one."""
    steps = {path: step_of(path.name) or 0 for path in folder.glob("step-*") if path.is_symlink()}
    newest = max(steps, key=lambda path: steps[path], default=None)
    if newest is not None and steps[newest] > (step_of(resumed.name) or 0 if resumed else -1):
        raise CheckpointNotFound(
            f"{newest} is a link, and links are not followed; write resume={os.path.realpath(newest)!r}, give the "
            "folder that it points into as save_path, or remove the link"
        )


def put_back(parent: str | os.PathLike[str]) -> None:
    """Rename what a killed save has moved aside back to its place, unless a whole checkpoint stands there.

    No other process may save into this directory at the same time.
    """
    for path in list_checkpoints(parent):
        place = path.with_name(original_name(path.name))
        if place != path and not is_whole(place) and is_whole(path):
            with contextlib.suppress(OSError):  # It stands in until it can be renamed.
                install(path, place)


def sweep(parent: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed processes have left in a directory, and return it; every save ends with it."""
    removed: list[Path] = []
    with contextlib.suppress(OSError, ConfigError):
        for entry in entries_of(Path(parent)):
            path = Path(entry.path)
            if not entry.name.startswith("."):  # What has its name is in its place.
                continue
            with contextlib.suppress(OSError):  # What cannot be removed stays until the next time.
                if _is_stray(path) and clear(path):
                    removed.append(path)
    return removed


def _is_stray(path: Path) -> bool:
    """Return whether a directory entry is a left-over that nobody needs."""
    if set_aside(path.name, "deleting") is not None:
        return True
    if (replaced := set_aside(path.name, "replaced")) is not None:
        return is_whole(path.with_name(replaced))
    return path.name not in staging_now and is_abandoned(path.name, time.time() - path.lstat().st_mtime)
