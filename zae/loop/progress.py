"""Where a run stands, and when something is due."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from zae.common.sanity import check_counters
from zae.errors import CheckpointMismatch, ConfigError

__all__ = ["Every", "ProgressChecker", "warn_of_early_end"]

_log = logging.getLogger("zae")


@dataclass(frozen=True)
class Every:
    """A cadence: every so many optimizer steps, or every so many epochs.

    Parameters
    ----------
    steps : int, optional
        Due after each optimizer step whose number divides by this.
    epochs : int, optional
        Due at the end of each epoch whose number divides by this.
    after : int
        Not due up to and including this step (or epoch).

    Raises
    ------
    ConfigError
        Neither or both are given, or a number is not positive.

    Examples
    --------
    >>> Every(steps=100).due_at_step(200), Every(epochs=1).due_at_step(200)
    (True, False)
    >>> Every(epochs=2, after=2).due_at_epoch(2), Every(epochs=2, after=2).due_at_epoch(4)
    (False, True)
    """

    steps: int | None = None
    epochs: int | None = None
    after: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"{self} must have either steps or epochs; write Every(steps=100) or Every(epochs=1)")
        for name in ("steps", "epochs", "after"):
            value = getattr(self, name)
            least = 0 if name == "after" else 1
            if value is None:
                continue
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
                raise ConfigError(f"Every({name}={value!r}): {name} must be a whole number of at least {least}")
            object.__setattr__(self, name, int(value))

    @classmethod
    def parse(cls, value: Every | int | None, name: str, default: Every) -> Every:
        """Accept an Every, a number of steps, or None for the default.

        Parameters
        ----------
        value : Every, int or None
            What the user gave.
        name : str
            The argument's name, for the error.
        default : Every
            What None means.

        Returns
        -------
        Every
            The cadence.
        """
        if value is None:
            return default
        if isinstance(value, cls):
            return value
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0:
            return cls(steps=value)
        raise ConfigError(f"{name}={value!r}; write Every(steps=...) or Every(epochs=...), or a number of steps")

    def due_at_step(self, step: int) -> bool:
        """Whether it is due after this optimizer step.

        Parameters
        ----------
        step : int
            Optimizer steps so far.

        Returns
        -------
        bool
            Always False for a cadence of epochs.
        """
        return self.steps is not None and step % self.steps == 0 and step > self.after

    def due_at_epoch(self, epoch: int) -> bool:
        """Whether it is due at the end of this epoch.

        Parameters
        ----------
        epoch : int
            Epochs finished so far.

        Returns
        -------
        bool
            Always False for a cadence of steps.
        """
        return self.epochs is not None and epoch % self.epochs == 0 and epoch > self.after


@dataclass
class ProgressChecker:
    """The counters of a run; what a checkpoint keeps of "where we are".

    Attributes
    ----------
    epoch : int
        Epochs finished.
    step : int
        Optimizer steps begun since the first run: one for each accumulation window, whatever the number of
        optimizers. A step that fp16 scaling skipped is counted here, and in ``skipped_steps`` as well.
    batch : int
        Loader batches used since the first run.
    epoch_step, epoch_batch : int
        The same two, within the epoch that is open; both 0 between epochs.
    skipped_steps : int
        Steps that did not change the weights.
    nonfinite_steps : int
        Steps with a loss or a gradient norm that was NaN or infinite, left out or taken as ``on_nonfinite`` says.
    run_starts : list of [int, int]
        Epoch and step at which each call of ``run`` began: a resumed script's calls find their goal again.
    stop_reason : str or None
        Why the present run was told to stop.

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
    run_starts: list[list[int]] = field(default_factory=list)
    stop_reason: str | None = None

    @property
    def place(self) -> dict[str, int]:
        """The epoch that is open, or was just closed, and the step: what a row of the history begins with."""
        return {"epoch": self.epoch + bool(self.epoch_batch), "step": self.step}

    def advance(self, batches: int = 1, skipped: bool = False) -> None:
        """Count one optimizer step.

        Parameters
        ----------
        batches : int
            Loader batches it was made of.
        skipped : bool
            Whether it left the weights as they were.
        """
        self.step += 1
        self.epoch_step += 1
        self.batch += batches
        self.epoch_batch += batches
        if skipped:
            self.skipped_steps += 1

    def close_epoch(self) -> None:
        """Count the open epoch as finished."""
        self.epoch += 1
        self.epoch_step = self.epoch_batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take counters over.

        Parameters
        ----------
        state : mapping
            What ``state_dict`` returned.

        Raises
        ------
        CheckpointMismatch
            A counter is missing, not a number, or cannot be; nothing is changed then.
        """
        for each in fields(self):
            value = state.get(each.name, self)
            if value is self or (each.type == "int" and not isinstance(value, int)):
                raise CheckpointMismatch(f"the progress in the state has no proper {each.name!r}: {dict(state)!r:.200}")
        check_counters({each.name: state[each.name] for each in fields(self)})
        for each in fields(self):
            setattr(self, each.name, state[each.name])
        self.run_starts = [list(start) for start in self.run_starts]


def warn_of_early_end(progress: ProgressChecker, call: int, n_epoch: int | None, max_steps: int | None) -> None:
    """Say of a call of ``run`` that is over in a state, and asks for more epochs than it made, that it trains nothing.

    Parameters
    ----------
    progress : ProgressChecker
        The counters of the state.
    call : int
        The number of the call, from 0; another one follows it in the state.
    n_epoch, max_steps : int or None
        What the call asks for.
    """
    epochs, steps = (end - start for start, end in zip(progress.run_starts[call], progress.run_starts[call + 1]))
    if (n_epoch or 0) > epochs and (max_steps is None or max_steps > steps):
        said = (
            "call %d of run() trains nothing: it ended early in the state, after %d of %d epochs, before call %d began"
        )
        _log.warning(said, call + 1, epochs, n_epoch, call + 2)
