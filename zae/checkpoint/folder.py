"""The checkpoints in the folder of a run: listed, the newest that can be read, and what killed processes have left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zae.checkpoint.directories import holds_checkpoint, install
from zae.checkpoint.filesystem import clear, entries_of, staging_now
from zae.checkpoint.names import is_abandoned, original_name, set_aside, step_of
from zae.checkpoint.reader import is_whole, verify
from zae.errors import CheckpointDamaged, CheckpointNotFound, ConfigError

__all__ = ["list_checkpoints", "newest_valid", "put_back", "refuse_links", "sweep"]

_Content = TypeVar("_Content")


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
    list_all: Callable[[Any], list[Path]] = list_checkpoints,
) -> tuple[Path, _Content, list[tuple[Path, str]]] | None:
    """Find the newest checkpoint that can be read, among those that ``list_all`` returns."""
    passed_over: list[tuple[Path, str]] = []
    for path in list_all(save_path):
        try:
            return path, read(path), passed_over
        except (CheckpointDamaged, CheckpointNotFound) as error:
            passed_over.append((path, str(error)))
    if not passed_over:
        return None
    reasons = "\n".join(f"  {path.name}: {reason}" for path, reason in passed_over)
    raise CheckpointDamaged(
        f"{save_path}: all of {len(passed_over)} checkpoints are damaged; restore one from a copy, or move them away "
        f"to start from scratch:\n{reasons}"
    )


def refuse_links(folder: Path, found: Path | None) -> None:
    """Refuse to start from scratch, or from an older checkpoint, if a link stands for a newer one."""
    steps = {path: step_of(path.name) or 0 for path in folder.glob("step-*") if path.is_symlink()}
    newest = max(steps, key=lambda path: steps[path], default=None)
    if newest is not None and steps[newest] > (step_of(found.name) or 0 if found else -1):
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
