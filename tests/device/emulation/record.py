"""What the emulated device reports: where the host waits, and what streams or the host do too early."""

from __future__ import annotations

import collections
import importlib.util
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from emulation.build import build

Frames = list[traceback.FrameSummary]


class Record:
    """Waits (while `counts_waits` is set) and violations, each with the lines that caused them.

    A violation is memory that a stream reads or writes before another is done with it, or pinned memory that the host
    changes while a copy from it is under way.
    """

    def __init__(self) -> None:
        self.counts_waits = False
        self.refuses_waits = False
        self.waits: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []

    def __call__(self, kind: str, text: str) -> None:
        """Note what the extension reports: "sync", "violation", or "mix" for operands on several devices."""
        if kind == "mix":
            self._refuse_mixed_operands(text)
        elif kind == "violation":
            self.violations.append(f"{text}: {_place()}")
        elif self.counts_waits:
            line = f"{text}: {_place()}"
            self.waits[line] += 1
            if self.refuses_waits:
                raise RuntimeError(f"called a synchronizing operation: {line}")

    def clear(self) -> None:
        """Forget what was reported so far."""
        self.waits.clear()
        self.violations.clear()

    def _refuse_mixed_operands(self, text: str) -> None:
        """Raise torch's error where zae itself mixes devices; the fallback of the emulation would copy instead."""
        own = _frames()
        if own and is_zae(own[-1].filename):
            raise RuntimeError(f"Expected all tensors to be on the same device: {text}: {_place()}")


def is_zae(filename: str) -> bool:
    """Whether a file belongs to zae."""
    return ("/zae/" in filename or "/addons/" in filename) and "/tests/" not in filename


def _frames() -> Frames:
    """Return the frames that are neither the emulation's nor Python's nor torch's."""
    foreign = ("/emulation/", "site-packages/torch/", "/lib/python3")
    return [frame for frame in traceback.extract_stack() if not any(part in frame.filename for part in foreign)]


def _place() -> str:
    """Name the last four lines of the stack, the innermost first."""
    return " < ".join(f"{_short(f.filename)}:{f.lineno} {f.name}" for f in reversed(_frames()[-4:]))


def _short(filename: str) -> str:
    for mark in ("/zae/", "/addons/"):
        if mark in filename and "/site-packages/" not in filename:
            return mark[1:] + filename.rpartition(mark)[2]
    return Path(filename).name


class StreamContext:
    """What `torch.cuda.stream(stream)` returns: the stream is the current one in the block; None is no stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def load(kind: str) -> ModuleType | Any:
    """Import the extension of a kind, built if necessary."""
    name = f"emulated_{kind}"
    spec = importlib.util.spec_from_file_location(name, build(kind))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = Record()
