"""What is saved apart when a run fails: the state as it was found, by the one process that came first."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zae import files

__all__ = ["crash_name", "forget_claims", "save_crash", "say_what_it_lacks"]

_log = logging.getLogger("zae")
_CLAIM = ".crash-"


def crash_name(step: int) -> str:
    """Return the name of the folder.

    Examples
    --------
    >>> crash_name(12)
    'crash-00000012'
    """
    return f"crash-{step:08d}"


def save_crash(
    folder: Path, step: int, ranks: tuple[int, int], token: str, write: Callable[..., None], error: BaseException
) -> None:
    """Save the state of a failed run beside its checkpoints; what fails here is only logged.

    Of several ranks the first one to fail saves, and asks the others for nothing: weights, optimizer and counters are
    the same on all of them, but the random streams of the others are lost, and what is saved says so.

    Parameters
    ----------
    folder : Path
        Where the run saves.
    step : int
        Its number is in the name.
    ranks : (int, int)
        The number of this rank, and how many there are.
    token : str
        The same on every rank, and another one in every run.
    write : callable
        Called with the folder of the state, the older ones that it replaces, and what its manifest is to say.
    error : BaseException
        Why the run ends.
    """
    target, name = folder / crash_name(step), type(error).__name__
    newest = next(iter(files.list_checkpoints(folder)), None)
    regular = f"the newest regular checkpoint is {newest}" if newest else "there is no regular checkpoint"
    try:
        if ranks[1] > 1:
            files.filesystem.mkdir(folder / f"{_CLAIM}{step:08d}-{token}")
        older = [path for path in folder.glob("crash-*") if path != target]
        alone = {"rank": ranks[0]} if ranks[1] > 1 else {}
        write(target, older, {"error": name, **alone})
    except FileExistsError:  # Another rank was here first.
        return
    except Exception as second:
        _log.warning("%s: the state could not be saved in %s (%s); %s", name, target, second, regular)
        return
    by = f" by rank {ranks[0]} of {ranks[1]} alone" if ranks[1] > 1 else ""
    _log.warning("%s: the state is saved in %s%s; %s", name, target, by, regular)


def forget_claims(folder: Path) -> None:
    """Remove what ranks that failed in an earlier run have marked as theirs."""
    for path in folder.glob(f"{_CLAIM}*"):
        with contextlib.suppress(OSError):
            files.filesystem.remove_directory(path)


def say_what_it_lacks(path: Path, manifest: Mapping[str, Any]) -> None:
    """Warn that a run cannot go on exactly from the state that one of several ranks has saved alone."""
    rank, world = manifest["info"].get("rank"), manifest["world_size"]
    if rank is not None and world > 1:
        _log.warning(
            "%s was saved by rank %d of %d alone, as it failed: weights, optimizer and counters are those of that "
            "step, but the random streams and the records of the other ranks are lost, and the rest of the epoch may "
            "have another order; the end is not exactly that of an uninterrupted run", path, rank, world,
        )  # fmt: skip
