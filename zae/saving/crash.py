"""What is saved apart when a run fails: the state as it was found, by the one process that came first."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zae.storage import filesystem
from zae.storage.checkpoint import list_checkpoints

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["crash_name", "crashes_in", "forget_claims", "save_crash", "say_what_it_lacks", "was_in_step"]

_log = logging.getLogger("zae")
_CLAIM = ".crash-"
_CRASH = re.compile(r"crash-\d{8,18}")


def crash_name(step: int) -> str:
    """Return the name of the folder.

    Examples
    --------
    >>> crash_name(12)
    'crash-00000012'
    """
    return f"crash-{step:08d}"


def crashes_in(folder: Path) -> list[Path]:
    """List the states of failed runs in a folder, the highest step first; a copy under another name is none of them.

    Examples
    --------
    >>> crashes_in(Path("runs/no-such-run"))
    []
    """
    found = (path for path in folder.glob("crash-*") if _CRASH.fullmatch(path.name))
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), reverse=True)


def was_in_step(trainer: Trainer, error: BaseException, began_at: int, rested_at: int) -> bool | None:
    """Tell whether a run failed in the middle of a step, from its first forward to its checkpoint.

    Nothing is noted for it at the beginning of a step: that is read from the frames of the tracebacks.

    Parameters
    ----------
    trainer : Trainer
        Whose run failed.
    error : BaseException
        As it was raised.
    began_at, rested_at : int
        How many batches had been used when the run began, and when it was between two steps for the last time; -1
        where that has not been yet.

    Returns
    -------
    bool or None
        None before the first step.

    Examples
    --------
    >>> import torch
    >>> from zae import Trainer
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         return {"loss": self.model(batch).no_such_method()}
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    >>> try:
    ...     trainer.run_batch(torch.ones(8, 2))
    ... except AttributeError as error:
    ...     was_in_step(trainer, error, 0, -1), was_in_step(trainer, ValueError("of another place"), 0, -1)
    (True, None)
    """
    if trainer.progress_checker.pending_validation and trainer.current_run.signals:
        return False  # The validation would have been given up: the state is that of before it.
    last = began_at if rested_at < 0 else rested_at
    in_step = trainer.progress_checker.batch != last or _is_of_a_step(trainer, error)
    return None if last < 0 or (rested_at < 0 and not in_step) else in_step


def _is_of_a_step(trainer: Trainer, error: BaseException) -> bool:
    """Whether an exception, or one that it was made of, has come out of a step of this trainer."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_code.co_name != "run_batch":  # By its name: a task may put something around the trainer's own.
                continue
            if not frame.f_locals or frame.f_locals.get("self") is trainer:  # One that was cleared does not say whose.
                return True
        waiting += [more for more in (each.__cause__, each.__context__) if more is not None]
    return False


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
    regular = "there is no regular checkpoint"
    try:
        if newest := next(iter(list_checkpoints(folder)), None):
            regular = f"the newest regular checkpoint is {newest}"
        if ranks[1] > 1:
            filesystem.disk.mkdir(folder / f"{_CLAIM}{step:08d}-{token}")
        older = [path for path in crashes_in(folder) if path != target]
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
            filesystem.disk.remove_directory(path)


def say_what_it_lacks(path: Path, manifest: Mapping[str, Any]) -> None:
    """Warn that a run cannot go on exactly from the state that one of several ranks has saved alone."""
    rank, world = manifest["info"].get("rank"), manifest["world_size"]
    if rank is not None and world > 1:
        _log.warning(
            "%s was saved by rank %d of %d alone, as it failed: weights, optimizer and counters are those of that "
            "step, but the random streams and the records of the other ranks are lost, and the rest of the epoch may "
            "have another order; the end is not exactly that of an uninterrupted run", path, rank, world,
        )  # fmt: skip
