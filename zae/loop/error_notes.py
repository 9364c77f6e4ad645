"""What a failed run adds to its exception: a note of where it happened; the traceback stays as it is."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import getattr_static
from types import FrameType
from typing import TYPE_CHECKING, Any

from zae.common.argument_checks import describe_batch
from zae.common.torch_private import shut_down_workers
from zae.data.loading import describe
from zae.data.workers import mute_workers, part_from_workers, unmute_workers

if TYPE_CHECKING:
    from zae.trainer import Trainer

__all__ = ["explain_error", "undisturbed"]


def explain_error(trainer: Trainer, error: BaseException) -> None:
    """Note on an exception in which epoch, step and batch it was raised, or of which loader.

    Nothing is kept for it while all goes well: the batch is read from the frames of the traceback.

    Parameters
    ----------
    trainer : Trainer
        Whose run failed.
    error : BaseException
        Its notes are printed after its own message.

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
    if not isinstance(error, Exception):
        return
    if isinstance(error, TypeError) and ".log() got an unexpected keyword" in str(error):
        error.add_note("zae: to record a number of a batch, return it from the step: return {'loss': loss, 'x': value}")
    progress = trainer.progress_checker
    where = f"in epoch {progress.epoch + 1}, step {progress.step + 1} (batch {progress.epoch_batch + 1})"
    try:
        note = _note(trainer, error, where)
    except Exception as other:  # Of the user's objects, which are asked for their shapes and names: theirs comes first.
        note = f"{where}, on {trainer.device}; what is known of it could not be told ({type(other).__name__}: {other})"
    if not note or f"zae: {note}" in getattr(error, "__notes__", ()) or note in str(error):
        return
    has_died = "DataLoader worker (pid" in str(error) or " is dead: " in note
    if not (has_died and _say_in_text(error, f"a worker of a loader has died {note}")):
        error.add_note(f"zae: {note}")


def _say_in_text(error: Exception, text: str) -> bool:
    """Add to the message of an exception, where it has one; of a dead worker torch says no more than its number."""
    text = f"{text}; a system that runs out of memory kills processes"
    if isinstance(error, OSError) and error.strerror:
        error.strerror = f"{error.strerror} ({text})"
    elif isinstance(error, (RuntimeError, EOFError, OSError)) and len(error.args) <= 1:
        error.args = (f"{str(error).strip()} ({text})".strip(),)
    return text in str(error)


def _note(trainer: Trainer, error: Exception, where: str) -> str:
    """What is known of the place of an error: its batch, or the loader that failed; empty when it is elsewhere."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    walked = _walked(trainer, frames, error)
    if walked is not None:
        asked, loader = walked
        workers = getattr(loader, "num_workers", 0)
        return f"{asked}, from {describe(loader)}" + (f", num_workers={workers}" if workers else "") + _dead(frames)
    tested = [f for f in frames if any(_is(f, name, "zae.loop.evaluation") for name in ("_test", "_record_all"))]
    if tested and "batch" in tested[0].f_locals and not _asks_for_data(frames, tested[-1]):
        batch = describe_batch(tested[0].f_locals["batch"])
        return (
            f"in an evaluation after step {trainer.progress_checker.step}, on {trainer.device}; the batch was {batch}"
        )
    if any(_is(frame, "run_batch", "zae.trainer") for frame in frames) and trainer.mode == "train":
        batch = _local(frames, "gradients", "micro_batch", _local(frames, "run_batch", "batch", None))
        return f"{where}, on {trainer.device}; the batch was {describe_batch(batch)}"
    return ""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep torch from raising once more, for a loader's worker that died, while an error is dealt with."""
    mute_workers()
    try:
        yield
    finally:
        unmute_workers()


def _dead(frames: list[FrameType]) -> str:
    """Which workers of a loader have died: what is raised then may be no more than a broken connection."""
    # Looked up without asking the objects: one whose making was interrupted may answer with any error.
    selves: list[Any] = [frame.f_locals.get("self") for frame in frames]
    found = [getattr_static(each, "_workers", None) for each in selves]
    dead = []
    for index, worker in enumerate(next((each for each in found if isinstance(each, list)), [])):
        worker.join(1.0 if index == 0 else 0.1)  # It is on its way, when it is why this was raised.
        if worker.exitcode:
            how = f"killed by signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit status {worker.exitcode}"
            dead.append(f"; DataLoader worker {index} (pid {worker.pid}) is dead: {how}")
    if dead:  # Its other workers have nobody to work for, and torch is not to tell of this one again when they end.
        for iterator in selves:
            if getattr_static(iterator, "_shutdown_workers", None) is not None:
                part_from_workers(iterator)
                with suppress(Exception):
                    shut_down_workers(iterator)
    return "".join(dead)


def _asks_for_data(frames: list[FrameType], frame: FrameType) -> bool:
    """Whether what a frame called, and what failed there, was a loader."""
    called = frames[frames.index(frame) + 1 :][:1]
    modules = ("torch.utils.data.", "torchdata.", "zae.data.gather", "zae.loop.stop_signals")
    return any(str(each.f_globals.get("__name__")).startswith(modules) for each in called)


def _walked(trainer: Trainer, frames: list[FrameType], error: Exception) -> tuple[str, Any] | None:
    """When a loader was asked for a batch, and which: that of the evaluation, or that of the epoch."""
    progress = trainer.progress_checker
    tests = [
        f for f in frames if _is(f, "test_epoch", "zae.loop.evaluation") or _is(f, "outputs_of", "zae.loop.evaluation")
    ]
    below = frames[frames.index(tests[-1]) :] if tests else []
    inside = [f for f in below if f.f_globals.get("__name__") != "zae.loop.evaluation"]
    if inside and _asks_for_data([tests[-1], *inside], tests[-1]):
        return f"while a batch was asked for in an evaluation after step {progress.step}", tests[-1].f_locals["loader"]
    walks = [
        f for f in frames if f.f_globals.get("__name__") == "zae.data.loading" and f.f_code.co_name != "check_loader"
    ]
    if walks or "DataLoader worker" in str(error):
        batch = f"while batch {progress.epoch_batch + 1} of epoch {progress.epoch + 1} was asked for"
        return batch, trainer._position.loader
    return None


def _is(frame: FrameType, function: str, module: str) -> bool:
    return frame.f_code.co_name == function and frame.f_globals.get("__name__") == module


def _local(frames: list[FrameType], function: str, name: str, default: Any) -> Any:
    """Return a local variable of the outermost frame of one of the trainer's methods."""
    found = [f for f in frames if _is(f, function, "zae.trainer")]
    return next((f.f_locals[name] for f in found if name in f.f_locals), default)
