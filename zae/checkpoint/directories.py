"""The directory of a checkpoint: found, put into its place, and removed, each at once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from zae.checkpoint import filesystem
from zae.checkpoint.filesystem import clear, entries_of
from zae.checkpoint.hashed_files import reason
from zae.checkpoint.names import (
    MANIFEST,
    aside_name,
    has_checkpoint_name,
    is_known,
    original_name,
    set_aside,
)
from zae.errors import CheckpointError, CheckpointNotFound, ConfigError


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
