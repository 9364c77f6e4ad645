"""What a run shows while it trains: nothing, or on a terminal a line for each epoch and one bar."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

from zae.display.text import cell, duration, fitting, number, terminal_columns, width_of
from zae.errors import printable

if TYPE_CHECKING:
    from zae.display.above_bar import AboveBar
    from zae.loop.run_view import Position, RunView

__all__ = ["Clock", "Display", "Terminal", "can_write", "is_on_a_terminal", "write_line"]

_log = logging.getLogger("zae")

_MIN_BAR_WIDTH = 8  # Columns that a bar has at least.
_MARK_WIDTH = 8  # Columns of "best", or of "(best)" for a validation within the epoch, after a line.
_LAST_COLUMNS = ("time", "steps/s")  # The last columns of the table; a metric that comes later goes before them.


class Display:
    """What a run shows while it trains: by default nothing, and what the run says goes to the log."""

    shown = False
    """Whether something is shown within an epoch, when it is due."""

    def open(self, run: RunView) -> None:
        """Begin an epoch."""

    def due(self) -> bool:
        """Return whether it is time to redraw."""
        return False

    def update(self, run: RunView) -> None:
        """Redraw."""

    def end_epoch(self, run: RunView) -> None:
        """End the steps of an epoch; its validation follows."""

    def validation(self, run: RunView) -> None:
        """Show a validation within an epoch."""

    def line(self, run: RunView) -> None:
        """Show the row of a finished epoch."""

    def report(self, run: RunView, text: str, level: int = logging.INFO) -> None:
        """Show a sentence about the run; ``level`` is that of the log, where nothing is shown."""
        _log.log(level, "%s", text)

    def fail(self, run: RunView, error: BaseException) -> None:
        """Show the error that ends the run."""

    def close(self, run: RunView) -> None:
        """End the display."""


class Clock:
    """The time since a run began, and the speed of its steps."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None
        self._epoch_began = 0.0, 0
        self.speed = 0.0

    def begin_epoch(self, step: int) -> None:
        """Note the beginning of an epoch, and of the run where it is the first."""
        self._epoch_began = time.perf_counter(), step
        self._began = self._began or self._epoch_began

    def read(self, step: int) -> None:
        """Measure the steps per second of the open epoch."""
        began, first = self._epoch_began
        self.speed = (step - first) / max(time.perf_counter() - began, 1e-9)

    def summary(self, at: Position) -> list[str]:
        """Return what was done in all, in what time and at what speed."""
        epochs, steps = at.epoch - 1, at.step - (self._began[1] if self._began else at.step)
        speed = f"{number(steps / self.elapsed, 3)} steps/s" if steps and self.elapsed else ""
        done = f"{epochs:,} epoch{'' if epochs == 1 else 's'}, {at.step:,} steps"
        return [done, duration(self.elapsed), *filter(None, [speed])]

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began[0] if self._began else 0.0

    def texts(self, at: Position) -> dict[str, str]:
        """Return the time, the time to come and the speed as text; empty for what is not known."""
        done = at.step - (self._began[1] if self._began else at.step)
        remaining_s = self.elapsed / done * at.steps_left if done > 0 and at.steps_left else 0.0
        return {
            "time": duration(self.elapsed),
            "ETA": f"ETA {duration(remaining_s)}" if remaining_s else "",
            "speed": f"{number(self.speed, 3, aligned=True)} steps/s" if self.speed else "",
        }


class Terminal(Display):
    """A table that grows by one line an epoch, and below it the bar of the open epoch, redrawn by time."""

    interval = 0.2
    """Seconds between two redraws: reading a loss from an accelerator waits for it."""

    def __init__(self) -> None:
        self.shown = True
        self._clock = Clock()
        self._bar: Any = None
        self._above: list[AboveBar] = []
        self._next = 0.0
        self._widths: dict[str, int] = {}
        self._header: list[str] = []

    def open(self, run: RunView) -> None:
        at = run.position()
        self._clock.begin_epoch(at.step)
        if not self.shown:
            return
        self._remove_bar()
        from tqdm import tqdm  # ~40 ms, and only a shown bar needs it

        # The time between redraws is ours to keep (mininterval=0): a redraw reads the loss, tqdm's own do not.
        form = "{desc} |{bar}| {n_fmt}/{total_fmt}{postfix}" if at.epoch_steps else "{desc}, step {n_fmt}{postfix}"
        style: dict[str, Any] = {"leave": False, "dynamic_ncols": True, "mininterval": 0, "bar_format": form}
        self._bar = tqdm(total=at.epoch_steps, initial=at.epoch_step, desc=at.title, **style)
        from zae.display.above_bar import AboveBar

        self._above = [AboveBar(name) for name in ("stdout", "stderr") if getattr(sys, name) is not None]
        self._next = time.perf_counter() + self.interval

    def due(self) -> bool:
        return self._bar is not None and time.perf_counter() >= self._next

    def update(self, run: RunView) -> None:
        at = run.position()
        self._clock.read(at.step)
        texts = self._clock.texts(at)
        metrics = [f"{printable(key, kept='')} {number(value, aligned=True)}" for key, value in run.current().items()]
        # In the order in which they are shown, each with its rank: the last ranks are left out first.
        parts = [(3, texts["time"]), (0, texts["ETA"]), (2, texts["speed"]), *zip([1, *range(4, 99)], metrics)]
        parts = [(rank, text) for rank, text in parts if text]
        room = _width() - len(f"{at.title} || {at.epoch_step}/{at.epoch_steps}") - _MIN_BAR_WIDTH
        while parts and sum(len(text) + 2 for _, text in parts) > room:
            parts.remove(max(parts))
        self._bar.set_postfix_str(", ".join(text for _, text in parts), refresh=False)
        self._bar.update(at.epoch_step - self._bar.n)
        self._next = time.perf_counter() + self.interval

    def end_epoch(self, run: RunView) -> None:
        self._clock.read(run.position().step)
        self._remove_bar()

    def line(self, run: RunView) -> None:
        if not self.shown:
            return
        self._remove_bar()
        row, mark = run.last_row()
        row = {**row, "time": duration(self._clock.elapsed), "steps/s": number(self._clock.speed, 3, aligned=True)}
        widths = {name: width_of(name, value) for name, value in row.items()} | self._widths
        names = [*(name for name in widths if name not in _LAST_COLUMNS), *_LAST_COLUMNS]
        self._widths = {name: widths[name] for name in names}
        columns = fitting(self._widths, _width() - _MARK_WIDTH)
        if columns != self._header:
            self._header = columns
            self._write("  ".join(cell(name).rjust(self._widths[name]) for name in columns))
        cells = [cell(row.get(name)).rjust(self._widths[name]) for name in columns]
        self._write("  ".join(cells) + (f"  {mark}" if mark else ""))

    def report(self, run: RunView, text: str, level: int = logging.INFO) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._wrap(text)
        if self._bar is not None:
            self._bar.refresh()

    def fail(self, run: RunView, error: BaseException) -> None:
        self._remove_bar()
        self._header = []  # An error has no summary: its message follows.

    def close(self, run: RunView) -> None:
        self._remove_bar()
        if self._header and self.shown:
            self._wrap("; ".join([", ".join(self._clock.summary(run.position())), *run.ending()]))
        self._header = []

    def _wrap(self, text: str) -> None:
        """Write a sentence, in as many lines as it needs."""
        for line in textwrap.wrap(printable(text), max(20, _width()), break_long_words=False):
            self._write(line)

    def _write(self, text: str) -> None:
        """Write a line; a closed terminal does not end the run."""
        self.shown = self.shown and write_line(text)

    def _remove_bar(self) -> None:
        """End the bar and free its line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            for line in self._above:
                line.end()
            self._above = []


def can_write() -> bool:
    """Return whether there is a standard error to write to: it may be None, or closed."""
    return sys.stderr is not None and not getattr(sys.stderr, "closed", False)


def write_line(text: str) -> bool:
    """Write a whole line to standard error; return whether it took it: its reader may be gone."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # The last where it is None by now, or cannot be flushed.
        return False
    return True


def is_on_a_terminal() -> bool:
    """Return whether standard error is a terminal: it may be None, or what only writes, or closed."""
    ask = getattr(sys.stderr, "isatty", None)
    try:
        return ask is not None and bool(ask())
    except ValueError:
        return False


def _width() -> int:
    """Return the columns of the terminal of standard error, less one: some wrap a line that fills them."""
    return (terminal_columns(sys.stderr) or shutil.get_terminal_size().columns) - 1
