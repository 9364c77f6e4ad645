"""Cadences: at which counts of steps or epochs something is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zae.arguments import Count, CountOrZero, check_argument
from zae.errors import ConfigError

if TYPE_CHECKING:
    from zae.loop.progress import ProgressChecker

__all__ = ["Every"]


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
            hint = "" if self.steps is None else "; on a command line write the steps alone: --save_every=100"
            raise ConfigError(
                f"{self} must have either steps or epochs; write Every(steps=100) or Every(epochs=1){hint}"
            )
        for name, kind in {"steps": Count | None, "epochs": Count | None, "after": CountOrZero}.items():
            object.__setattr__(self, name, check_argument(f"Every: {name}", getattr(self, name), kind))

    def __repr__(self) -> str:
        """Return it as it is written in a script."""
        values = {"steps": self.steps, "epochs": self.epochs, "after": self.after or None}
        arguments = [f"{name}={value}" for name, value in values.items() if value is not None]
        return f"Every({', '.join(arguments)})"

    @classmethod
    def parse(cls, value: Every | int | None, name: str, default: Every) -> Every:
        """Return an Every, also of a number of steps; None is the default. ``name`` is the argument, for the error."""
        if value is None:
            return default
        if isinstance(value, cls):
            return value
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0:
            return cls(steps=value)
        raise ConfigError(f"{name}={value!r}; write Every(steps=...) or Every(epochs=...), or a number of steps")

    def is_due(self, progress: ProgressChecker) -> bool:
        """Return whether it is due now: after a step in an open epoch, else at the end of an epoch."""
        if progress.epoch_batch:
            return self.due_at_step(progress.step)
        return self.due_at_epoch(progress.epoch)

    def due_at_step(self, step: int) -> bool:
        """Return whether it is due after this optimizer step; a cadence of epochs never is."""
        return self.steps is not None and step % self.steps == 0 and step > self.after

    def due_at_epoch(self, epoch: int) -> bool:
        """Return whether it is due at the end of this epoch; a cadence of steps never is."""
        return self.epochs is not None and epoch % self.epochs == 0 and epoch > self.after
