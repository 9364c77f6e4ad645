"""Write what a step prints, warns of or logs in whole lines above the bar of tqdm."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any

from tqdm import tqdm
from tqdm.utils import ObjectWrapper

__all__ = ["AboveBar"]

_CURSOR_MOVE = re.compile(r"\r|\x1b(?!\[[0-9;]*m)")
"""What begins a move of the cursor; a sequence that ends in m sets a colour."""


class AboveBar(ObjectWrapper):
    """Stands for standard output or standard error while a bar is shown: tqdm clears the bar before each line.

    What moves the cursor, as another bar does, is written as it is. A forked process, as a worker of a loader, has no
    bar to clear, and overwrites the line instead.

    Parameters
    ----------
    name : {"stdout", "stderr"}
        Which it stands for.
    """

    def __init__(self, name: str) -> None:
        stream = getattr(sys, name)
        super().__init__(stream)
        attributes = {
            "stands_for": name,
            "below": stream,
            "process": os.getpid(),
            "handlers": [handler for handler in _handlers() if handler.stream is stream],
            "beginning": "",  # The beginning of a line that has not ended.
            "is_writing": False,
        }
        for key, value in attributes.items():
            self.wrapper_setattr(key, value)  # Others are attributes of the stream.
        setattr(sys, name, self)
        for handler in attributes["handlers"]:
            handler.stream = self

    def __eq__(self, other: object) -> bool:
        """Return whether it writes to the same stream: tqdm asks whether a bar and a line share the terminal."""
        around = other.wrapper_getattr("_wrapped") if isinstance(other, ObjectWrapper) else other
        return bool(around is self.below)

    __hash__ = object.__hash__

    def write(self, text: Any) -> int:
        """Write the lines of a text; what follows the last one waits for its end."""
        if os.getpid() != self.process:
            return self._write_beside(text)
        # A newline alone on standard error moves the cursor to the line of another bar.
        is_newline = self.stands_for == "stderr" and not self.beginning and not text.strip("\n")
        if self.is_writing or is_newline or _CURSOR_MOVE.match(text):
            self.below.write(text)
            return len(text)
        lines, end, unfinished = (self.beginning + text).rpartition("\n")
        self.wrapper_setattr("beginning", unfinished)
        if end:
            self._write_lines(lines)
        return len(text)

    def _write_lines(self, lines: str) -> None:
        """Let tqdm clear its bars, and write whole lines in their place."""
        self.wrapper_setattr("is_writing", True)  # Another bar that is cleared for the lines writes here as well.
        try:
            tqdm.write(lines, file=self.below)
        finally:
            self.wrapper_setattr("is_writing", False)

    def _write_beside(self, text: Any) -> int:
        """Write whole lines of a forked process over the bar of the other process, which draws it again."""
        pending = self.beginning + text
        if pending.endswith("\n"):
            self.below.write(("\r\x1b[K" if self.below.isatty() else "") + pending)
            self.below.flush()
            pending = ""
        self.wrapper_setattr("beginning", pending)
        return len(text)

    def end(self) -> None:
        """Put the stream back, and write the beginning of a line that has not ended."""
        if getattr(sys, self.stands_for) is self:
            setattr(sys, self.stands_for, self.below)
        for handler in self.handlers:
            if handler.stream is self:
                handler.stream = self.below
        unfinished = self.beginning
        self.wrapper_setattr("beginning", "")
        if unfinished:  # On a terminal the next bar would overwrite it.
            self.below.write(unfinished + ("\n" if self.below.isatty() else ""))


def _handlers() -> list[Any]:
    """List the handlers of all loggers that write to a stream, and not to a file of their own."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in handlers if "stream" in vars(handler)]  # Others ask `sys` for it.
