"""Find out, as a run of several ranks begins, whether all of them see what rank 0 writes."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from pathlib import Path

from zae.checkpoint.group import Group
from zae.errors import CheckpointError

__all__ = ["check_shared_disk"]

_log = logging.getLogger("zae")
PATIENCE_S = 2.0
"""Seconds in which a disk of the network may show what another machine has written."""


def check_shared_disk(folder: Path, group: Group, *, writes_on_all_ranks: bool) -> None:
    """Refuse a run whose ranks write to disks of their own; warn of one that its other ranks could not resume.

    All ranks call it. Rank 0 writes a file into the folder, for which the others look.
    """
    mark = folder / f".ranks-{group.gather(secrets.token_hex(8))[0]}"
    if group.rank == 0:
        with contextlib.suppress(OSError):  # A disk that refuses is named at the first save.
            mark.touch()
    was_written = group.gather(mark.exists())[0]
    is_seen = not was_written or _appears(mark)
    outcomes = group.gather((is_seen, socket.gethostname()))
    if group.rank == 0:
        with contextlib.suppress(OSError):
            mark.unlink()
    blind = [f"{rank} ({host})" for rank, (seen, host) in enumerate(outcomes) if not seen]
    if not blind:
        return
    text = (
        f"save_path={str(folder)!r}: rank {', '.join(blind[:4])} of {len(outcomes)} does not see what rank 0 "
        f"({outcomes[0][1]}) writes there, so that it is not a disk that all machines share"
    )
    if writes_on_all_ranks:
        raise CheckpointError(
            f"{text}, and with save_format='sharded' all ranks write one checkpoint. Give a folder on a shared disk, "
            "or save_format='safetensors', which rank 0 writes"
        )
    if group.rank == 0:
        _log.warning(
            "%s: a resume needs the checkpoints on all machines. Give a folder on a shared disk, or copy them there "
            "before the run is started again",
            text,
        )


def _appears(mark: Path) -> bool:
    """Return whether a file is seen, at once or soon."""
    deadline = time.monotonic() + PATIENCE_S
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
