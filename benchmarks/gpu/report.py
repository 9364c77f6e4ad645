"""What the checks found: a line each while they run, and all of them as JSON."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
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

    def check(self, name: str, passed: bool, detail: str = "", **figures: float) -> None:
        """Note a check that passed or failed."""
        self._note("ok" if passed else "failed", name, detail, figures)

    def measured(self, name: str, detail: str, **figures: float) -> None:
        """Note figures that fail nothing by themselves."""
        self._note("measured", name, detail, figures)

    def leave_out(self, name: str, reason: str) -> None:
        """Note a check that cannot be made here."""
        self._note("left out", name, reason, {})

    def _note(self, verdict: str, name: str, detail: str, figures: Figures) -> None:
        """Keep an entry, and print its line."""
        entry = {"section": self._section, "name": name, "verdict": verdict, "detail": detail, "figures": figures}
        self.checks.append(entry)
        text = verdict.upper() if verdict == "failed" else verdict
        text += f" on {WHERE}" if IS_EMULATED else ""
        text += f": {detail}" if detail else ""
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

    def failed(self) -> list[str]:
        """Return the names of the checks that failed, with their sections."""
        return [f"{each['section']}: {each['name']}" for each in self.checks if each["verdict"] == "failed"]

    def summary(self) -> str:
        """Say in one line how many checks were made, and which failed."""
        failed = self.failed()
        count = Counter(each["verdict"] for each in self.checks)
        made = count["ok"] + count["failed"]
        seconds = sum(self.seconds.values())
        text = f"{made} checks on {WHERE}, {len(failed)} failed, {count['left out']} left out, {seconds:.0f} s"
        return f"{text}: {'; '.join(failed)}" if failed else text
