"""Write what a step prints, warns of or logs in whole lines above the bar of tqdm."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any

from tqdm.contrib import DummyTqdmFile

__all__ = ["AboveBar"]

_MOVE = re.compile(r"\r|\x1b(?!\[[0-9;]*m)")
"""What begins a move of the cursor; a sequence that ends in m sets a colour."""


class AboveBar(DummyTqdmFile):
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
        handlers = [each for each in _handlers() if each.stream is stream]
        own = {"_name": name, "_process": os.getpid(), "_handlers": handlers, "_is_writing": False}
        for key, value in own.items():
            self.wrapper_setattr(key, value)  # Others are attributes of the stream.
        setattr(sys, name, self)
        for each in handlers:
            each.stream = self

    def __eq__(self, other: object) -> bool:
        """Return whether it writes to the same stream: tqdm asks whether a bar and a line share the terminal."""
        return self._wrapped is getattr(other, "_wrapped", other)

    __hash__ = object.__hash__

    def write(self, text: Any, nolock: bool = False) -> int:
        """Write the lines of a text; what follows the last one waits for its end."""
        if os.getpid() != self._process:
            return self._write_beside(text)
        # A newline alone on standard error moves the cursor to the line of another bar.
        is_move = bool(_MOVE.match(text)) or (self._name == "stderr" and not self._held() and not text.strip("\n"))
        if is_move or self._is_writing:
            self._wrapped.write(text)
            return len(text)
        self.wrapper_setattr("_is_writing", True)  # Another bar that is cleared for the line writes here as well.
        try:
            super().write(text, nolock)
        finally:
            self.wrapper_setattr("_is_writing", False)
        return len(text)

    def _write_beside(self, text: Any) -> int:
        """Write whole lines of a forked process over the bar of the other process, which draws it again."""
        self._buf.append(text)
        if text.endswith("\n"):
            self._wrapped.write(("\r\x1b[K" if self._wrapped.isatty() else "") + self._held())
            self._wrapped.flush()
            self._buf.clear()
        return len(text)

    def _held(self) -> str:
        """Return the beginning of a line that has not ended."""
        return "".join(self._buf)

    def end(self) -> None:
        """Put the stream back, and write the beginning of a line that has not ended."""
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._wrapped)
        for each in self._handlers:
            if each.stream is self:
                each.stream = self._wrapped
        rest = self._held()
        self._buf.clear()
        if rest:  # On a terminal the next bar would overwrite it.
            self._wrapped.write(rest + ("\n" if self._wrapped.isatty() else ""))


def _handlers() -> list[Any]:
    """List the handlers of all loggers that write to a stream, and not to a file of their own."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = [each for logger in loggers for each in getattr(logger, "handlers", ())]
    return [each for each in found if "stream" in vars(each)]  # Others ask `sys` for it.
