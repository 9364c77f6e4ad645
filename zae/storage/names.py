"""The names that checkpoints have on the disk, and those of the formats."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from pathlib import PurePath

from zae.errors import ConfigError

__all__ = [
    "aside_name",
    "checkpoint_name",
    "is_abandoned",
    "original_name",
    "parse_format",
    "set_aside",
    "staging_name",
    "step_of",
    "weights_format",
]

_STEP = re.compile(r"step-(\d{8,18})")
_ASIDE = re.compile(r"\.(replaced|deleting)-(.+)-[0-9a-f]{16}")
_STAGED = re.compile(r"\.staging-.+-([0-9a-f]{8})-(\d+)-[0-9a-f]{16}")
_FORMATS = {"safetensors": "safetensors", "safetensor": "safetensors", "ckpt": "ckpt"}
_SUFFIXES = {**{f".{name}": kind for name, kind in _FORMATS.items()}, ".pt": "ckpt", ".pth": "ckpt"}
_OLD = 24 * 3600.0


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of a step.

    Parameters
    ----------
    step : int
        The number of optimizer steps done.

    Returns
    -------
    str
        Names sort as their steps do.

    Raises
    ------
    ConfigError
        The step is negative.

    Examples
    --------
    >>> checkpoint_name(12)
    'step-00000012'
    """
    if step < 0:
        raise ConfigError(f"step is {step}; a checkpoint belongs to a step from 0 on")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for.

    Parameters
    ----------
    name : str
        Any name.

    Returns
    -------
    int or None
        None where `checkpoint_name` does not make such names.

    Examples
    --------
    >>> step_of("step-00000012"), step_of("best")
    (12, None)
    """
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def staging_name(name: str) -> str:
    """Return an unpredictable hidden name under which `name` is written, with this host and process in it.

    Parameters
    ----------
    name : str
        What is to be written.

    Returns
    -------
    str
        ``.staging-<name>-<host>-<pid>-<token>``.

    Examples
    --------
    >>> staging_name("best") == staging_name("best")
    False
    """
    return f".staging-{name}-{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def is_abandoned(name: str, age: float) -> bool:
    """Say whether a staging name is of a process that no longer runs.

    Parameters
    ----------
    name : str
        Any name; it is not one that this process is writing at the moment.
    age : float
        Seconds since something was written there. After a day nobody is writing, on whatever host.

    Returns
    -------
    bool
        False for names that `staging_name` does not make.

    Examples
    --------
    >>> is_abandoned(staging_name("best"), 0.0), is_abandoned("best", 1e9)
    (True, False)
    """
    match = _STAGED.fullmatch(name)
    return match is not None and (age > _OLD or (match[1] == _host() and not _runs(int(match[2]))))


def aside_name(name: str, kind: str) -> str:
    """Return a new hidden name for a directory that makes room.

    Parameters
    ----------
    name : str
        Its name; of one that is hidden so already, the name it had before.
    kind : str
        "replaced" or "deleting".

    Returns
    -------
    str
        ``.<kind>-<name>-<token>``.

    Examples
    --------
    >>> set_aside(aside_name(aside_name("best", "replaced"), "deleting"), "deleting")
    'best'
    """
    match = _ASIDE.fullmatch(name)
    return f".{kind}-{name if match is None else match[2]}-{secrets.token_hex(8)}"


def set_aside(name: str, kind: str) -> str | None:
    """Return the name that a directory had before it was hidden.

    Parameters
    ----------
    name : str
        Any name.
    kind : str
        "replaced" or "deleting".

    Returns
    -------
    str or None
        None where `aside_name` does not make such names of this kind.

    Examples
    --------
    >>> set_aside(aside_name("best", "replaced"), "replaced"), set_aside("best", "replaced")
    ('best', None)
    """
    match = _ASIDE.fullmatch(name)
    return match[2] if match is not None and match[1] == kind else None


def original_name(name: str) -> str:
    """Return the name that a checkpoint is to have, also of one that a killed save has left moved aside.

    Parameters
    ----------
    name : str
        Any name.

    Returns
    -------
    str
        Where `aside_name` has not made it for what is replaced, the name itself.

    Examples
    --------
    >>> original_name(aside_name("step-00000012", "replaced")), original_name("step-00000012")
    ('step-00000012', 'step-00000012')
    """
    return set_aside(name, "replaced") or name


def parse_format(name: str) -> str:
    """Return the one name of a model format.

    Parameters
    ----------
    name : str
        "safetensors", "safetensor" or "ckpt", with or without a leading dot.

    Returns
    -------
    str
        "safetensors" or "ckpt".

    Raises
    ------
    ConfigError
        Any other name.

    Examples
    --------
    >>> parse_format(".safetensor")
    'safetensors'
    >>> parse_format("pickle")
    Traceback (most recent call last):
    ...
    zae.errors.ConfigError: the model format 'pickle' is unknown; write 'safetensors' or 'ckpt'
    """
    found = _FORMATS.get(str(name).removeprefix("."))
    if found is None:
        raise ConfigError(f"the model format {name!r} is unknown; write 'safetensors' or 'ckpt'")
    return found


def weights_format(path: PurePath) -> str:
    """Return the format that the suffix of a file of weights stands for.

    Parameters
    ----------
    path : PurePath
        The file.

    Returns
    -------
    str
        "safetensors" or "ckpt".

    Raises
    ------
    ConfigError
        Any other suffix.

    Examples
    --------
    >>> weights_format(PurePath("model.pth"))
    'ckpt'
    """
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        *most, last = _SUFFIXES
        raise ConfigError(
            f"{path}: the suffix {path.suffix!r} is no format of weights; write {', '.join(most)} or {last}"
        )
    return found


def _host() -> str:
    """Return a short name of this host that fits into a file name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _runs(pid: int) -> bool:
    """Say whether another process of this number runs on this host."""
    if pid == os.getpid():  # left by an earlier process of this number, as in a container that was started again
        return False
    if os.name == "nt":  # where signal 0 is Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
