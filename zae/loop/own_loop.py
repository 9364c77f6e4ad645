"""The loader of a `run_epoch` that is overridden: with it, an epoch loop of the user's own is a whole one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zae.compose.introspect import is_overridden
from zae.data.loaders import Proxy
from zae.data.workers import iterate
from zae.errors import TaskError

if TYPE_CHECKING:
    from zae.loop.run import Run

__all__ = ["loader_of_epoch", "without_loop"]


class _EpochLoader(Proxy):
    """A loader whose iteration begins the epoch, does after each step what is due there, and ends the epoch.

    So ``for batch in loader: self.run_batch(batch)`` logs, validates, saves and resumes as the default loop does. The
    override may also pass the loader on to ``super().run_epoch``, which then makes the loop.
    """

    def __init__(self, run: Run, loader: Any) -> None:
        super().__init__(loader)
        self._run = run
        self._steps: Generator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._steps is not None:
            raise self._error("iterates over its loader a second time; one call is one epoch: give run() more epochs")
        if self._run.activity.has_begun_epoch:  # The default loop reads it, within something of the user.
            self._warn_of_wrapper()
            return iterate(self.passed)
        self._steps = self._loop()
        return self._steps

    def _loop(self) -> Generator[Any]:
        """Yield what `run_batch` takes; this is the loop of `Trainer.run_epoch` from within."""
        run = self._run
        trainer = run.trainer
        if run.activity.has_begun_epoch:  # A user's generator asked for its iterator too early.
            self._warn_of_wrapper()
            yield from self.passed
            return
        loader = trainer.wrap_loader(self.passed, True)
        run.open_epoch(loader)
        is_complete = True
        with trainer.epoch_context():
            batches = run.batches(loader)
            for batch in batches:
                before = trainer.progress_checker.step
                is_left = False
                try:
                    yield batch  # Here the override calls run_batch.
                except GeneratorExit:  # The override has left its loop, and the epoch ends there.
                    is_left = True
                steps = trainer.progress_checker.step - before
                if is_left and not steps:  # It broke before the step: this batch is not used.
                    break
                if steps != 1 and not run.continuation.is_due:
                    raise self._error(
                        f"has made {steps} steps with a batch of its loader, and each batch is one; write for batch in "
                        "loader: self.run_batch(batch), and leave batches out, or repeat them, in the loader"
                    )
                if is_left:  # It broke after the step: what is due there is done, as after any other step.
                    run.extent.end_epoch_here()
                if run.after_step():
                    is_complete = run.ends_epoch(loader, batches)
                    break
        run.close_epoch(loader, is_complete)

    def throw(self, error: BaseException) -> None:
        """End the epoch by an error of the override."""
        # So that epoch_context is left with the error; one that came out of the generator has left it.
        if self._steps is not None and inspect.getgeneratorstate(self._steps) == inspect.GEN_SUSPENDED:
            self._steps.throw(error)

    def finish(self) -> None:
        """End the epoch when the override has returned; refuse one that made no epoch."""
        if self._steps is not None:  # After a ``break`` it waits at its ``yield``.
            self._steps.close()
        if not self._run.activity.has_begun_epoch:
            raise self._error(
                "has made no epoch; call super().run_epoch(loader), or iterate over the loader that it is given: "
                "for batch in loader: self.run_batch(batch)"
            )

    def _warn_of_wrapper(self) -> None:
        """Warn, once, of a loader around that of the run, which a resume looks for in vain."""
        if self._run.trainer.history.is_first_remark("the loader of run_epoch"):
            self._run.report(
                f"{self._owner().__name__}.run_epoch gives super().run_epoch(...) something else than its loader, and "
                "a checkpoint of this run cannot be resumed within it; write the loop itself: for batch in loader: "
                "self.run_batch(batch), with what you change of the batch, or give run() that other loader",
                logging.WARNING,
            )

    def _owner(self) -> Any:
        """Return the class whose ``run_epoch`` is called."""
        return next(cls for cls in type(self._run.trainer).__mro__ if "run_epoch" in vars(cls))

    def _error(self, fault: str) -> TaskError:
        return TaskError(f"{self._owner().__name__}.run_epoch {fault}")


@contextmanager
def loader_of_epoch(run: Run) -> Iterator[Any]:
    """Give `Trainer.run_epoch` its loader: that of the run, or for an override one that makes a loop a whole epoch."""
    if not is_overridden(run.trainer, "run_epoch"):
        yield run.loader
        return
    run.activity.has_begun_epoch = False
    loop = _EpochLoader(run, run.loader)
    try:
        yield loop
    except BaseException as error:
        loop.throw(error)
        raise
    loop.finish()


def without_loop(loader: Any) -> Any:
    """Return the loader itself, for the default loop."""
    return loader.passed if isinstance(loader, _EpochLoader) else loader
