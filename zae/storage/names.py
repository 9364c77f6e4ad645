"""Names on the disk: checkpoints, the files in them, and the hidden names that they have while they are replaced."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
from pathlib import Path

from zae.errors import CheckpointError, CheckpointNotFound, ConfigError

__all__ = [
    "KNOWN",
    "MANIFEST",
    "MODEL_FILES",
    "SHARDS",
    "STATE",
    "STATE_TENSORS",
    "aside_name",
    "checkpoint_name",
    "entries_of",
    "holds_checkpoint",
    "is_abandoned",
    "is_known",
    "is_running",
    "locate",
    "original_name",
    "refuse_foreign",
    "set_aside",
    "shard_name",
    "staging_name",
    "step_of",
]

MANIFEST = "manifest.json"
# By format; in the last one the tensors that ranks hold in parts are in further files, see zae.storage.share.
MODEL_FILES = {"safetensors": "model.safetensors", "ckpt": "model.ckpt", "sharded": "model.safetensors"}
STATE_TENSORS = "state.safetensors"
STATE = "state.json"
SHARDS = "shards.json"
KNOWN = {MANIFEST, STATE_TENSORS, STATE, *MODEL_FILES.values()}
"""All files that a checkpoint may have, without those of shards."""

_STEP = re.compile(r"step-(\d{8,18})")
_OURS = re.compile(r"(?:step|crash)-\d{8,18}")
_ASIDE = re.compile(r"\.(replaced|deleting)-(.+)-[0-9a-f]{16}")
_STAGED = re.compile(r"\.staging-.+-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}")
_SHARD = re.compile(r"shard-\d{5}\.safetensors")
_OLD = 24 * 3600.0


def checkpoint_name(step: int) -> str:
    """Return the directory name for the checkpoint of a step; names sort as their steps do."""
    if step < 0:
        raise ConfigError(f"step is {step}; the step of a checkpoint must be 0 or more")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for; None if `checkpoint_name` does not return such names."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def shard_name(rank: int) -> str:
    """Return the name of the file with the parts that a rank has written."""
    return f"shard-{rank:05d}.safetensors"


def is_known(name: str) -> bool:
    """Return whether a file of this name may be part of a checkpoint."""
    return name in KNOWN or name == SHARDS or _SHARD.fullmatch(name) is not None


# -------------------------------------------------------------------------------------------------- hidden names


def staging_name(name: str) -> str:
    """Return an unpredictable hidden name to write under: ``.staging-<name>-<host>-<pid>-<token>``."""
    return f".staging-{name}-{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def is_abandoned(name: str, age: float) -> bool:
    """Return whether this is a staging name of a process that no longer runs, last written `age` seconds ago."""
    match = _STAGED.fullmatch(name)
    if match is None:
        return False
    host, pid = match[1], int(match[2])
    # An earlier process had the number of this one, as in a container that was restarted.
    return age > _OLD or (host == _host() and (pid == os.getpid() or not is_running(pid)))


def aside_name(name: str, kind: str) -> str:
    """Return a new hidden name, of kind "replaced" or "deleting", for a directory that is moved aside."""
    match = _ASIDE.fullmatch(name)
    return f".{kind}-{name if match is None else match[2]}-{secrets.token_hex(8)}"


def set_aside(name: str, kind: str) -> str | None:
    """Return the name that a directory had before it was hidden; None if it is not hidden in this way."""
    match = _ASIDE.fullmatch(name)
    return match[2] if match is not None and match[1] == kind else None


def original_name(name: str) -> str:
    """Return the name of a checkpoint, also of one that a killed save has left moved aside."""
    return set_aside(name, "replaced") or name


# ---------------------------------------------------------------------------------------------------- directories


def entries_of(parent: Path) -> list[os.DirEntry[str]]:
    """List a directory; a missing one is empty."""
    try:
        with os.scandir(parent) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise ConfigError(f"{parent} is a file, not a directory; give the directory that holds checkpoints") from error


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
    if not os.path.lexists(directory) or _OURS.fullmatch(original_name(directory.name)):
        return
    foreign = sorted(entry.name for entry in entries_of(directory) if not is_known(entry.name))
    if foreign:
        raise CheckpointError(
            f"{directory} contains {foreign[0]!r}, which is not part of a checkpoint; it is neither replaced nor "
            "removed: choose another directory"
        )


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def is_running(pid: int) -> bool:
    """Return whether a process with this number runs on this host."""
    if os.name == "nt":  # Signal 0 is Ctrl-C there.
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
