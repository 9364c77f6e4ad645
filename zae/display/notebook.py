"""The display of a run in a notebook: one output, updated in place, with a table and curves."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from zae.display.html import block, escape, metrics_html, note_shown
from zae.display.terminal import Clock, Display, Source, Terminal, is_on_a_terminal
from zae.errors import printable

__all__ = ["Notebook", "choose_display"]


class Notebook(Display):
    """One output that is updated at most twice a second; its text is the table of a terminal."""

    interval = 0.5

    def __init__(self) -> None:
        self.shown = True
        self._clock = Clock()
        self._handle: Any = None
        self._next = 0.0
        self._error: BaseException | None = None

    def open(self, run: Source) -> None:
        self._clock.begin_epoch(run.position().step)
        if self._handle is None or time.perf_counter() >= self._next:
            self.update(run)

    def due(self) -> bool:
        return time.perf_counter() >= self._next

    def update(self, run: Source) -> None:
        at = run.position()
        self._clock.read(at.step)
        done = f"{at.epoch_step:,} of {at.epoch_steps:,} steps" if at.epoch_steps else f"step {at.epoch_step:,}"
        texts = self._clock.texts(at)
        parts = [f"{at.title}, {done}", texts["time"], texts["ETA"], texts["speed"]]
        bar = f"<progress value='{at.epoch_step}' max='{at.epoch_steps}' style='vertical-align:middle;width:9em'>"
        self._draw(run, " · ".join(filter(None, parts)), f"{bar}</progress> " if at.epoch_steps else "")
        self._next = time.perf_counter() + self.interval

    def end_epoch(self, run: Source) -> None:
        self._clock.read(run.position().step)

    def line(self, run: Source) -> None:
        if self.due():
            self.update(run)

    def fail(self, run: Source, error: BaseException) -> None:
        self._error = error

    def close(self, run: Source) -> None:
        """Leave the table, with how the run ended and no bar."""
        if self._handle is None:
            return
        at, error = run.position(), self._error
        parts = [*self._clock.summary(at), *run.ending()]
        if error is not None:
            said = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0][:200]
            where = f"epoch {at.epoch}, step {at.step + 1}"
            parts.append(f"ended in {where} by {said}")
        self._draw(run, " · ".join(filter(None, parts)), is_failed=error is not None)
        self._handle = None

    def _draw(self, run: Source, status: str, bar: str = "", *, is_failed: bool = False) -> None:
        """Show the output, or replace it."""
        from IPython import display  # It is running.

        metrics = run.metrics()
        text, rows = str(metrics), metrics.rows()  # With a row for the open epoch.
        style = "margin:4px 0" + (";border-left:4px solid #e5484d;padding-left:8px" if is_failed else "")
        table = metrics_html(rows, metrics.marks(rows)) if rows else ""
        page = block(f"<div style='{style}'>{bar}{escape(status)}</div>", table)
        data = {"text/plain": printable(f"{status}\n{text if rows else ''}".rstrip()), "text/html": page}
        if self._handle is None:
            self._handle = display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        note_shown(text)


def choose_display(enabled: bool) -> Display:
    """Return the display for this process: of a notebook, of a terminal, or none.

    A terminal that cannot overwrite a line, or whose output a CI service keeps, gets no bar.
    """
    if not enabled:
        return Display()
    shell = sys.modules.get("IPython")
    if shell is not None and "IPKernelApp" in getattr(shell.get_ipython(), "config", {}):
        return Notebook()
    if is_on_a_terminal():
        return Terminal(has_bar=not os.environ.get("CI") and os.environ.get("TERM") != "dumb")
    return Display()
