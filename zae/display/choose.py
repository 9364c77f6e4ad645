"""Choose how a process shows its run: in a notebook, on a terminal, in plain lines, or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from zae.display.lines import Lines
from zae.display.terminal import Display, Terminal, can_write, is_on_a_terminal

__all__ = ["choose_display", "draw_elsewhere", "is_in_a_notebook"]

_elsewhere: Callable[[dict[str, str], str], Any] | None = None


def draw_elsewhere(output: Callable[[dict[str, str], str], Any]) -> None:
    """Draw the runs of this process in the notebook of another one, to which ``output`` sends what it takes."""
    global _elsewhere
    _elsewhere = output


def is_in_a_notebook() -> bool:
    """Return whether a kernel executes the cells of a notebook in this process."""
    shell = sys.modules.get("IPython")
    return shell is not None and "IPKernelApp" in getattr(shell.get_ipython(), "config", {})


def choose_display(log_bar: bool | str) -> Display:
    """Return the display for this process: of a notebook, of a terminal, plain lines, or none.

    A terminal that cannot overwrite a line, or whose output a CI service keeps, gets lines, unless ``log_bar`` says
    "bar".
    """
    if not log_bar:
        return Display()
    if log_bar != "lines" and (_elsewhere is not None or is_in_a_notebook()):
        from zae.display.notebook import Notebook, Output

        return Notebook(_elsewhere or Output())
    if not can_write():
        return Display()
    keeps_lines = bool(os.environ.get("CI")) or os.environ.get("TERM") == "dumb"
    has_bar = log_bar == "bar" or (log_bar != "lines" and is_on_a_terminal() and not keeps_lines)
    return Terminal() if has_bar else Lines()
