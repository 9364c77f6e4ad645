"""Notes on the exception of a failed run: where it happened, in which batch, or from which loader."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from zae.common.argument_checks import describe_batch
from zae.common.torch_private import shut_down_workers
from zae.data.loaders import describe
from zae.data.workers import mute_workers, part_from_workers, unmute_workers

if TYPE_CHECKING:
    from zae.loop.run import Run

__all__ = ["explain_error", "undisturbed"]


def explain_error(run: Run, error: BaseException) -> None:
    """Note on an exception the epoch, step and batch it was raised in, or the loader that raised it.

    Parameters
    ----------
    run : Run
        The run that failed; it knows its batch and its loader.
    error : BaseException
        Its notes are printed after its message.

    Examples
    --------
    >>> from zae import Trainer
    >>> import torch
    >>> class Task(Trainer):
    ...     def train_step(self, batch):
    ...         raise torch.OutOfMemoryError("no memory is left")
    ...     test_step = train_step
    >>> model = torch.nn.Linear(2, 1)
    >>> trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    >>> try:
    ...     _ = trainer.run(1, [torch.ones(8, 2)])
    ... except torch.OutOfMemoryError as error:
    ...     print(error.__notes__[0])
    zae: in epoch 1, step 1 (batch 1), on cpu; the batch was Tensor[8, 2] float32
    """
    if not isinstance(error, Exception) or run.trainer is None:
        return
    if isinstance(error, TypeError) and ".log() got an unexpected keyword" in str(error):
        error.add_note("zae: to record a number of a batch, return it from the step: return {'loss': loss, 'x': value}")
    place = _place(run)
    try:
        note = _note(run, error, place)
    except Exception as other:  # Raised by an object of the user that is described here; the first error matters more.
        note = f"{place}; what is known of it could not be told ({type(other).__name__}: {other})"
    if not note or f"zae: {note}" in getattr(error, "__notes__", ()) or note in str(error):
        return
    has_died = "DataLoader worker (pid" in str(error) or " is dead: " in note
    if not (has_died and _add_to_text(error, f"a worker of a loader has died {note}")):
        error.add_note(f"zae: {note}")


def _place(run: Run) -> str:
    progress = run.trainer.progress_checker
    if run.is_evaluating:
        return f"in an evaluation after step {progress.step}, on {run.trainer.device}"
    return (
        f"in epoch {progress.epoch + 1}, step {progress.step + 1} (batch {progress.epoch_batch + 1}), "
        f"on {run.trainer.device}"
    )


def _note(run: Run, error: Exception, place: str) -> str:
    """Return what is known: the batch, or the loader that was asked for one; empty outside of steps and loaders."""
    is_of_worker = "DataLoader worker" in str(error)  # torch raises it anywhere, in a step too.
    if run.batch is not None and not is_of_worker:
        return f"{place}; the batch was {describe_batch(run.batch)}"
    if not run.is_loading and not is_of_worker:
        return ""
    progress, loader = run.trainer.progress_checker, run.walked
    asked = f"while batch {progress.epoch_batch + 1} of epoch {progress.epoch + 1} was asked for"
    if run.is_evaluating:
        asked = f"while a batch was asked for in an evaluation after step {progress.step}"
    workers = getattr(loader, "num_workers", 0)
    return f"{asked}, from {describe(loader)}" + (f", num_workers={workers}" if workers else "") + _dead_workers(error)


def _add_to_text(error: Exception, text: str) -> bool:
    """Add to the message of an exception, where it has one; return whether it is there."""
    text = f"{text}; a system that runs out of memory kills processes"
    if isinstance(error, OSError) and error.strerror:
        error.strerror = f"{error.strerror} ({text})"
    elif isinstance(error, (RuntimeError, EOFError, OSError)) and len(error.args) <= 1:
        error.args = (f"{str(error).strip()} ({text})".strip(),)
    return text in str(error)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep torch from raising for a dead worker of a loader while another error is handled."""
    mute_workers()
    try:
        yield
    finally:
        unmute_workers()


def _dead_workers(error: Exception) -> str:
    """Describe the dead workers of the loader that raised; the error itself may only name a broken connection."""
    # Read without __getattr__: an object whose creation was interrupted may answer with any error.
    selves: list[Any] = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [getattr_static(each, "_workers", None) for each in selves]
    dead = []
    for index, worker in enumerate(next((each for each in found if isinstance(each, list)), [])):
        worker.join(1.0 if index == 0 else 0.1)  # It may still be ending.
        if worker.exitcode:
            how = f"killed by signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit status {worker.exitcode}"
            dead.append(f"; DataLoader worker {index} (pid {worker.pid}) is dead: {how}")
    if dead:  # End the other workers, so that torch does not raise for this one again when they end.
        for iterator in selves:
            if getattr_static(iterator, "_shutdown_workers", None) is not None:
                part_from_workers(iterator)
                with suppress(Exception):
                    shut_down_workers(iterator)
    return "".join(dead)
