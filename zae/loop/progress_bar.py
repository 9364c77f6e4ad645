"""The progress bar: one for the open epoch, one line for each finished one, nothing when not on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from zae.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Bar"]

_INTERVAL = 0.2  # Seconds between two redraws: reading a loss from an accelerator waits for it.


class Bar:
    """A tqdm bar over the batches of an epoch, redrawn by time.

    Parameters
    ----------
    enabled : bool
        Whether it may be shown at all. It stays quiet when standard error is not a terminal (or a notebook).

    Attributes
    ----------
    shown : bool
        Whether it draws anything.

    Examples
    --------
    >>> bar = Bar(enabled=False)
    >>> bar.open("epoch 1", 10)
    >>> bar.due()
    False
    """

    def __init__(self, enabled: bool) -> None:
        self.shown = enabled and (_on_a_terminal() or _in_notebook())
        self._bar: Any = None
        self._next = 0.0
        self._columns: list[str] = []

    def open(self, title: str, total: int | None, done: int = 0) -> None:
        """Begin an epoch.

        Parameters
        ----------
        title : str
            What stands before the bar.
        total : int or None
            Batches of the epoch, when they are known.
        done : int
            Batches done already, after a resume.
        """
        if not self.shown:
            return
        self.close()
        from tqdm.auto import tqdm  # ~40 ms, and only a shown bar needs it

        # The time between redraws is ours to keep (mininterval=0): a redraw reads the loss, tqdm's own do not.
        style: dict[str, Any] = {"unit": "batch", "leave": False, "dynamic_ncols": True, "mininterval": 0}
        self._bar = tqdm(total=total, initial=done, desc=title, **style)
        self._next = time.perf_counter() + _INTERVAL

    def due(self) -> bool:
        """Whether it is time to redraw."""
        return self._bar is not None and time.perf_counter() >= self._next

    def update(self, done: int, read: Callable[[], Mapping[str, float]]) -> None:
        """Redraw.

        Parameters
        ----------
        done : int
            Batches of this epoch so far.
        read : callable
            Returns what to show; it is only called for a redraw.
        """
        text = ", ".join(f"{key} {_short(value)}" for key, value in read().items())
        self._bar.set_postfix_str(printable(text, kept=""), refresh=False)
        self._bar.update(done - self._bar.n)
        self._next = time.perf_counter() + _INTERVAL

    def line(self, row: Mapping[str, Any], mark: str = "") -> None:
        """Write the line of a finished epoch above the bar.

        Parameters
        ----------
        row : mapping
            Its numbers.
        mark : str
            What stands at its end.
        """
        if not self.shown:
            return
        self.close()
        if not set(row) <= set(self._columns):
            self._columns = list(dict.fromkeys([*self._columns, *row]))
            self._write("  ".join(key.rjust(max(len(key), 8)) for key in self._columns))
        cells = [(_short(row[key]) if key in row else "-").rjust(max(len(key), 8)) for key in self._columns]
        self._write("  ".join(cells) + (f"  {mark}" if mark else ""))

    def _write(self, text: str) -> None:
        """Write a line; a terminal that was closed meanwhile does not end the run that it was to show."""
        try:
            sys.stderr.write(f"{printable(text, kept='')}\n")
        except (OSError, ValueError):
            self.shown = False

    def close(self) -> None:
        """End the bar and free its line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _short(value: Any) -> str:
    """A number in at most eight characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _on_a_terminal() -> bool:
    """Whether standard error is a terminal: it may be None, or what only writes, or closed."""
    ask = getattr(sys.stderr, "isatty", None)
    try:
        return ask is not None and bool(ask())
    except ValueError:
        return False


def _in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel, where standard error is no terminal and a bar is shown all the same."""
    shell = sys.modules.get("IPython")
    return shell is not None and "IPKernelApp" in getattr(shell.get_ipython(), "config", {})
