"""Folders that may be checkpoints: what is in them, and what of it is a user's own."""

from __future__ import annotations

import os
import re
from pathlib import Path

from zae.errors import CheckpointError, ConfigError
from zae.storage.manifest import MODEL_FILES, STATE, STATE_TENSORS
from zae.storage.names import original_name

__all__ = ["KNOWN", "MANIFEST", "entries_of", "holds_checkpoint", "refuse_foreign"]

MANIFEST = "manifest.json"
"""The file of what a checkpoint says of itself."""

KNOWN = {MANIFEST, STATE_TENSORS, STATE, *MODEL_FILES.values()}
"""The names of all files that a checkpoint may have."""

_OURS = re.compile(r"(?:step|crash)-\d{8,18}")


def entries_of(parent: Path) -> list[os.DirEntry[str]]:
    """List a directory; one that is absent holds nothing.

    Parameters
    ----------
    parent : Path
        The directory.

    Returns
    -------
    list of DirEntry
        What is in it.

    Raises
    ------
    ConfigError
        It is a file.

    Examples
    --------
    >>> entries_of(Path("runs/no-such-run"))
    []
    """
    try:
        with os.scandir(parent) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise ConfigError(f"{parent} is a file, not a directory; give the directory that holds checkpoints") from error


def holds_checkpoint(directory: Path) -> bool:
    """Say whether a folder is a checkpoint, perhaps a damaged one: not one that holds nothing but a user's files.

    Parameters
    ----------
    directory : Path
        Named like one.

    Returns
    -------
    bool
        True for an empty folder: its files were lost.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "notes.txt").write_text("mine")
    ...     holds_checkpoint(Path(folder))
    False
    """
    try:
        names = {entry.name for entry in entries_of(directory)}
    except OSError:  # It may not be looked into, which is told when it is read.
        return True
    return not names or not names.isdisjoint(KNOWN)


def refuse_foreign(directory: Path) -> None:
    """Refuse to replace or remove what is not plainly a checkpoint: a wrong path must not cost anybody's files.

    Parameters
    ----------
    directory : Path
        Where a checkpoint is to stand, or to be removed.

    Raises
    ------
    CheckpointError
        It is not named like one, and holds other files.

    Examples
    --------
    >>> refuse_foreign(Path("runs/no-such-run"))
    """
    if not os.path.lexists(directory) or _OURS.fullmatch(original_name(directory.name)):
        return
    foreign = sorted(entry.name for entry in entries_of(directory) if entry.name not in KNOWN)
    if foreign:
        raise CheckpointError(
            f"{directory} holds {foreign[0]!r}, which is no part of a checkpoint; it is neither replaced nor removed: "
            "choose another directory"
        )
