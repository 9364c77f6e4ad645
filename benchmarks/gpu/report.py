"""What the checks found: a line each while they run, and all of them as JSON."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpu.settings import IS_EMULATED, WHERE

Figures = dict[str, float]


class Report:
    """The checks of a run, in the order in which they were made."""

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self._section = ""
        self._began = time.perf_counter()

    def check(self, name: str, passed: bool | None, detail: str = "", **figures: float) -> None:
        """Note a check that passed or failed, or (None) could not be made here; and print its line."""
        entry = {"section": self._section, "name": name, "passed": passed, "detail": detail, "figures": figures}
        self.checks.append(entry)
        verdict = {True: "ok", False: "FAILED", None: "left out"}[passed]
        verdict += f" on {WHERE}" if IS_EMULATED else ""
        text = f"{verdict}: {detail}" if detail else verdict
        elapsed = time.perf_counter() - self._began
        sys.stdout.write(f"[{elapsed:6.1f}] {self._section}: {name}: {text}\n")
        sys.stdout.flush()

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Make a check fail where its block raises, and go on with the next one."""
        try:
            yield
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self.check(name, False, f"{type(error).__name__}: {first_line[:300]}")
            traceback.print_exc(limit=-4)

    def run(self, name: str, section: Callable[[Report], None]) -> None:
        """Run a section; its error does not stop the others."""
        self._section = name
        began = time.perf_counter()
        with self.guard("the section"):
            section(self)
        self.seconds[name] = round(time.perf_counter() - began, 1)

    def failed(self, section: str | None = None) -> Sequence[str]:
        """Return the names of the checks that failed, with their sections."""
        found = [each for each in self.checks if each["passed"] is False]
        return [f"{each['section']}: {each['name']}" for each in found if section in (None, each["section"])]

    def summary(self) -> str:
        """Say in one line how many checks were made, and which failed."""
        failed = self.failed()
        left_out = sum(each["passed"] is None for each in self.checks)
        made = len(self.checks) - left_out
        parts = [f"{made} checks on {WHERE}", f"{len(failed)} failed"]
        if left_out:
            parts.append(f"{left_out} left out")
        parts.append(f"{sum(self.seconds.values()):.0f} s")
        text = ", ".join(parts)
        return f"{text}: {'; '.join(failed)}" if failed else text
