"""The display of a run in a notebook: one output, updated in place, with a table and curves."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zae.display.html import block, escape, metrics_html, note_shown
from zae.display.terminal import Clock, Display
from zae.errors import printable

if TYPE_CHECKING:
    from zae.loop.run_view import RunView

__all__ = ["Notebook", "Output", "hide_frames"]


def hide_frames(error: BaseException) -> None:
    """Let IPython leave out the frames of zae, and of the calls of modules, in what it shows of an error."""
    raised = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [frame for frame, _ in traceback.walk_stack(None)]
    for frame in (*raised, *called):
        if frame.f_globals.get("__name__", "").startswith(("zae.", "torch.nn.modules.module", "contextlib")):
            frame.f_locals["__tracebackhide__"] = True


class Output:
    """One output of the cell that is executed: shown at first, then replaced."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, data: dict[str, str], table: str) -> None:
        """Show a text and a page, and note the table in them."""
        if self._handle is None:
            from IPython import display  # It is running.

            self._handle = display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        note_shown(table)


class Notebook(Display):
    """One output that is updated at most twice a second; its text is the table of a terminal.

    Parameters
    ----------
    output : callable
        Takes what is to be shown, and replaces what it took before.
    """

    interval = 0.5

    def __init__(self, output: Callable[[dict[str, str], str], Any]) -> None:
        self.shown, self._is_drawn = True, False
        self._clock = Clock()
        self._output = output
        self._next = 0.0
        self._error: BaseException | None = None
        self._sentences: list[str] = []

    def open(self, run: RunView) -> None:
        self._clock.begin_epoch(run.position().step)
        if not self._is_drawn or time.perf_counter() >= self._next:
            self.update(run)

    def due(self) -> bool:
        return time.perf_counter() >= self._next

    def update(self, run: RunView) -> None:
        at = run.position()
        self._clock.read(at.step)
        done = f"{at.epoch_step:,} of {at.epoch_steps:,} steps" if at.epoch_steps else f"step {at.epoch_step:,}"
        texts = self._clock.texts(at)
        parts = [f"{at.title}, {done}", texts["time"], texts["ETA"], texts["speed"]]
        bar = f"<progress value='{at.epoch_step}' max='{at.epoch_steps}' style='vertical-align:middle;width:9em'>"
        self._draw(run, " · ".join(filter(None, parts)), f"{bar}</progress> " if at.epoch_steps else "")
        self._next = time.perf_counter() + self.interval

    def end_epoch(self, run: RunView) -> None:
        self._clock.read(run.position().step)

    def line(self, run: RunView) -> None:
        if self.due():
            self.update(run)

    def report(self, run: RunView, text: str, level: int = logging.INFO) -> None:
        self._sentences.append(text)
        self._draw(run, "")

    def fail(self, run: RunView, error: BaseException) -> None:
        self._error = error

    def close(self, run: RunView) -> None:
        """Leave the table, with how the run ended and no bar."""
        if not self._is_drawn:
            return
        at = run.position()
        error = self._error
        parts = [*self._clock.summary(at), *run.ending()]
        if error is not None:
            error_text = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0][:200]
            place = f"epoch {at.epoch}, step {at.step + 1}"
            parts.append(f"ended in {place} by {error_text}")
        self._draw(run, " · ".join(filter(None, parts)), is_failed=error is not None)

    def _draw(self, run: RunView, status: str, bar: str = "", *, is_failed: bool = False) -> None:
        """Show the output, or replace it."""
        metrics = run.metrics()
        text = str(metrics)
        rows = metrics.rows()  # With a row for the open epoch.
        style = "margin:4px 0" + (";border-left:4px solid #e5484d;padding-left:8px" if is_failed else "")
        table = metrics_html(rows, metrics.marks(rows)) if rows else ""
        messages = "".join(f"<div>{escape(sentence)}</div>" for sentence in self._sentences)
        page = block(messages, f"<div style='{style}'>{bar}{escape(status)}</div>", table)
        plain = "\n".join([*self._sentences, status, text if rows else ""])
        data = {"text/plain": printable(plain.rstrip()), "text/html": page}
        self._output(data, text)
        self._is_drawn = True
