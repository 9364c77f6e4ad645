"""The progress of a run as plain lines, for a pipe, a file or a service that keeps them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zae.display.terminal import Clock, Display, write_line
from zae.display.text import cell, duration
from zae.errors import printable

if TYPE_CHECKING:
    from zae.loop.run_view import RunView

__all__ = ["Lines"]

_PLACE = ("epoch", "step")  # The entries of a row with which each line begins.


class Lines(Display):
    """A line for each epoch, for each validation within one, and after a minute without any.

    ``epoch 3/40, step 672, train_loss 0.0921, lr 0.002, valid_loss 0.1126, time 12s, ETA 2m28s, best``: each line is
    written at once and whole, so that it can stand beside those of ``print`` and ``logging``.
    """

    interval = 60.0
    """Seconds without a line after which one says where the open epoch is."""
    validation_interval = 1.0
    """Seconds between the lines of two validations within an epoch; one that comes earlier has no line."""

    def __init__(self) -> None:
        self.shown = True
        self._clock = Clock()
        self._has_rows = False
        self._next = time.perf_counter() + self.interval
        self._next_validation = 0.0

    def open(self, run: RunView) -> None:
        self._clock.begin_epoch(run.position().step)

    def due(self) -> bool:
        return time.perf_counter() >= self._next

    def update(self, run: RunView) -> None:
        at = run.position()
        of_total = f" of {at.epoch_steps}" if at.epoch_steps else ""
        row = {f"{at.epoch_step}{of_total}": "in this epoch", **run.current()}
        self._write_row(run, {"epoch": at.epoch, "step": at.step}, row)

    def validation(self, run: RunView) -> None:
        if time.perf_counter() < self._next_validation:
            return
        row, mark = run.last_validation()
        self._write_row(run, row, row, mark)
        self._next_validation = time.perf_counter() + self.validation_interval

    def end_epoch(self, run: RunView) -> None:
        self._clock.read(run.position().step)

    def line(self, run: RunView) -> None:
        row, mark = run.last_row()
        self._write_row(run, row, row, mark)
        self._has_rows = True

    def report(self, run: RunView, text: str, level: int = logging.INFO) -> None:
        self._write(f"warning: {text}" if level >= logging.WARNING else text)

    def fail(self, run: RunView, error: BaseException) -> None:
        self._has_rows = False  # An error has no summary: its message follows.

    def close(self, run: RunView) -> None:
        if self._has_rows:
            self._write("; ".join([", ".join(self._clock.summary(run.position())), *run.ending()]))
        self._has_rows = False

    def _write_row(self, run: RunView, place: Mapping[str, Any], row: Mapping[str, Any], mark: str = "") -> None:
        """Write where the run is, the metrics of a row, the time, and the time to come."""
        at = run.position()
        of_total = f"/{at.last_epoch}" if at.last_epoch else ""
        metrics = [f"{cell(name)} {cell(value)}" for name, value in row.items() if name not in _PLACE]
        remaining = self._clock.texts(at)["ETA"]
        parts = [f"epoch {place['epoch']}{of_total}", f"step {place['step']}", *metrics]
        parts += [f"time {duration(self._clock.elapsed)}", remaining, mark]
        self._write(", ".join(filter(None, parts)))

    def _write(self, text: str) -> None:
        """Write a line; a reader that is gone does not end the run."""
        self._next = time.perf_counter() + self.interval
        self.shown = self.shown and write_line(printable(text, kept=""))
