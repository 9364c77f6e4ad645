"""The names of checkpoints, of their files, and of what stands beside a checkpoint while it is written or removed.

::

    .staging-<name>-<host>-<pid>-<token>     being written; left behind only by a process that was killed
    .replaced-<name>-<token>                 what stood at <name> before; it stands in while <name> is missing
    .deleting-<name>-<token>                 being removed
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket

from zae.errors import ConfigError

MANIFEST = "manifest.json"
# By format; in the last one the tensors that ranks hold in parts are in further files, see zae.checkpoint.writer.
MODEL_FILES = {"safetensors": "model.safetensors", "ckpt": "model.ckpt", "sharded": "model.safetensors"}
STATE_TENSORS = "state.safetensors"
STATE = "state.json"
SHARDS = "shards.json"
KNOWN = {MANIFEST, STATE_TENSORS, STATE, *MODEL_FILES.values()}
"""All files that a checkpoint may have, without those of shards and of rows."""

_STEP = re.compile(r"step-(\d{8,18})")
_OURS = re.compile(r"(?:step|crash)-\d{8,18}")
_ASIDE = re.compile(r"\.(replaced|deleting)-(.+)-[0-9a-f]{16}")
_STAGED = re.compile(r"\.staging-.+-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}")
_SHARD = re.compile(r"shard-\d{5}\.safetensors")
PIECE = re.compile(r"(train_history|valid_history|log_history)-(\d{1,12})-(\d{1,12})\.json")
"""The files of rows: the list, its first row in the file, and the row after the last, see zae.checkpoint.rows."""
_MAX_AGE_S = 24 * 3600.0


def has_checkpoint_name(name: str) -> bool:
    """Return whether a directory has a name that zae gives to checkpoints."""
    return _OURS.fullmatch(name) is not None


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
    return name in KNOWN or name == SHARDS or any(pattern.fullmatch(name) for pattern in (_SHARD, PIECE))


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
    return age > _MAX_AGE_S or (host == _host() and (pid == os.getpid() or not is_running(pid)))


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


@functools.cache
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
