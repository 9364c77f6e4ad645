"""The counters of training, and its calls of ``run``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zae.errors import CheckpointMismatch

__all__ = ["NO_LIMIT", "SIGNALED", "TIME_IS_UP", "ProgressChecker", "RunCalls"]

_log = logging.getLogger("zae")
NO_LIMIT = sys.maxsize
# Reasons to stop after which a resumed run continues.
SIGNALED = "a signal asked for the end"
TIME_IS_UP = "max_time has passed"


@dataclass
class RunCalls:
    """The calls of `Trainer.run` in a state, and those that this process has made.

    A script that is started again makes its calls of ``run`` again: those that are over train nothing, and the last
    one in the state continues where it was interrupted.
    """

    starts: list[list[int]] = field(default_factory=list)
    index: int = 0  # Of the next call: how many this process has made.
    planned_steps: Any = ...

    @property
    def must_replay(self) -> bool:
        """Whether the next call is in the state, and so is made again; else it is a new one."""
        return self.index < len(self.starts)

    @property
    def present_start(self) -> tuple[int, int]:
        """The epoch and the step at which the call under way began; zeros before the first one."""
        epoch, step = self.starts[self.index - 1] if self.index else (0, 0)
        return epoch, step

    @property
    def is_completed(self) -> bool:
        """Whether the next call is in the state, with another one after it."""
        return self.index + 1 < len(self.starts)

    def warn_of_early_end(self, n_epoch: int | None, max_steps: int | None) -> None:
        """Warn that the next call, which is over, trains nothing although it asks for more epochs than it made."""
        first_epoch, first_step = self.starts[self.index]
        last_epoch, last_step = self.starts[self.index + 1]
        epochs = last_epoch - first_epoch
        steps = last_step - first_step
        if (n_epoch or 0) > epochs and (max_steps is None or max_steps > steps):
            _log.warning(
                "call %d of run() trains nothing: it ended early in the state, after %d of %d epochs, before call %d "
                "began",
                self.index + 1,
                epochs,
                n_epoch,
                self.index + 2,
            )


_COUNTERS = ("epoch", "step", "batch", "epoch_step", "epoch_batch", "skipped_steps", "nonfinite_steps")


@dataclass
class ProgressChecker:
    """The position of training: the counters that a checkpoint keeps.

    Attributes
    ----------
    epoch : int
        Epochs finished.
    step : int
        Optimizer steps since the first run, one for each accumulation window, whatever the number of optimizers. It
        counts a step when that has ended: in ``optimizer_step`` those before it, in ``on_step_end`` this one as well.
        A step that fp16 scaling skipped is counted here, and in ``skipped_steps`` as well.
    batch : int
        Loader batches used since the first run.
    epoch_step, epoch_batch : int
        The same two, within the open epoch; both 0 between epochs.
    skipped_steps : int
        Steps that did not change the weights.
    nonfinite_steps : int
        Steps with a loss or a gradient norm that was NaN or infinite.
    stop_reason : str or None
        Why the present run was asked to stop.
    pending_validation : {"", "step", "epoch"}
        The moment whose validation has begun and is not complete; a resumed run repeats it first.
    run_calls : RunCalls
        The calls of ``run``.
    is_seeded : bool
        Whether this process has set the trainer up, and seeded the random streams where a seed was given.

    Examples
    --------
    >>> progress = ProgressChecker()
    >>> progress.advance(batches=4)
    >>> progress.step, progress.batch, progress.epoch_batch
    (1, 4, 4)
    >>> progress.close_epoch()
    >>> progress.epoch, progress.epoch_batch
    (1, 0)
    """

    epoch: int = 0
    step: int = 0
    batch: int = 0
    epoch_step: int = 0
    epoch_batch: int = 0
    skipped_steps: int = 0
    nonfinite_steps: int = 0
    stop_reason: str | None = None
    pending_validation: str = ""
    run_calls: RunCalls = field(default_factory=RunCalls)
    is_seeded: bool = False

    @property
    def run_starts(self) -> list[list[int]]:
        """Epoch and step at which each call of ``run`` began."""
        return self.run_calls.starts

    @property
    def place(self) -> dict[str, int]:
        """The epoch that is open, or was just closed, and the step, with which a row of the history begins."""
        return {"epoch": self.epoch + bool(self.epoch_batch), "step": self.step}

    @property
    def moment(self) -> tuple[int, int, str]:
        """The epoch, the step and the pending validation, which are equal for two saves of the same state."""
        return self.epoch, self.step, self.pending_validation

    def advance(self, batches: int = 1, skipped: bool = False) -> None:
        """Count one optimizer step of so many loader batches; a ``skipped`` one left the weights as they were."""
        self.step += 1
        self.epoch_step += 1
        self.batch += batches
        self.epoch_batch += batches
        if skipped:
            self.skipped_steps += 1

    def close_epoch(self) -> None:
        """Count the open epoch as finished."""
        self.epoch += 1
        self.epoch_step = 0
        self.epoch_batch = 0

    def get_step(self) -> int:
        """Return the number of the next optimizer step, counted from 1, as zae-engine does."""
        return self.step + 1

    def get_epoch(self) -> int:
        """Return the number of the open or next epoch, counted from 1, as zae-engine does."""
        return self.epoch + 1

    def update_step(self) -> None:
        """Count one optimizer step of one batch, which `Trainer.run_batch` does itself."""
        self.advance()

    def update_epoch(self) -> None:
        """Count an epoch as finished, which `Trainer.run` does itself."""
        self.close_epoch()

    def init_state(self) -> None:
        """Begin again: every counter as in a new object."""
        vars(self).update(vars(ProgressChecker()))

    def entries(self) -> dict[str, Any]:
        """Return the entries of a state; the second only where a validation is pending."""
        entries: dict[str, Any] = {"progress": self.state_dict()}
        if self.pending_validation:
            entries["validation"] = self.pending_validation
        return entries

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ProgressChecker:
        """Return the progress in a whole state."""
        progress = cls()
        progress.load_state_dict(state["progress"])
        pending = state.get("validation", "")
        if pending not in ("", "step", "epoch"):
            raise CheckpointMismatch(
                f"the state has validation={pending!r:.80}, which is not '', 'step' or 'epoch'; load another checkpoint"
            )
        progress.pending_validation = pending
        return progress

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the beginnings of the calls of ``run`` as plain values."""
        starts = [list(start) for start in self.run_starts]
        counters = {name: getattr(self, name) for name in _COUNTERS}
        reason = None if self.stop_reason in (SIGNALED, TIME_IS_UP) else self.stop_reason
        return {**counters, "run_starts": starts, "stop_reason": reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, or change nothing if it is not valid; the next call of ``run`` is a new one."""
        for name in (*_COUNTERS, "run_starts", "stop_reason"):
            if name not in state or (name in _COUNTERS and not isinstance(state[name], int)):
                raise CheckpointMismatch(f"the progress in the state has no valid {name!r}: {dict(state)!r:.200}")
        for name in (*_COUNTERS, "stop_reason"):
            setattr(self, name, state[name])
        starts = [list(start) for start in state["run_starts"]]
        self.run_calls = RunCalls(starts, len(starts), self.run_calls.planned_steps)
