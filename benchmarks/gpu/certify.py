"""`python -m zae certify` on a GPU: its verdicts, and what its hooks cost a step, none of which waits for the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu.report import Report
from gpu.settings import IS_EMULATED, SMALL
from zae.certify.runs import Script

SCRIPTS = Path(__file__).parent / "scripts"
VERDICTS = {"right": ([], 0, ""), "without the GPU's random state": (["--forget"], 1, "random state")}
"""By name: the options of the script, the exit status of certify, and the cause that it is to name."""


def run(report: Report) -> None:
    """Certify a script, right and with a mistake; then time two networks with and without the hooks."""
    with tempfile.TemporaryDirectory() as folder, working_in(folder):
        for name, (options, status, cause) in VERDICTS.items():
            with report.guard(name):
                certify(report, name, options, status, cause)
        for name in ("ten million", "gpt"):
            with report.guard(name):
                time_hooks(report, name)


@contextmanager
def working_in(folder: str) -> Iterator[None]:
    """Work in a folder, of which certify makes copies."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def certify(report: Report, name: str, options: list[str], status: int, cause: str) -> None:
    """Certify the script, and look at the verdict."""
    command = [sys.executable, "-m", "zae", "certify", "--kills", "3", "--json", str(SCRIPTS / "own_loop.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode not in (0, 1):
        report.check(name, False, f"certify ended with {done.returncode}: {done.stderr[-600:]}")
        return
    found = json.loads(done.stdout)
    said = "; ".join(f"{each['name']}: {each['verdict']} {each['message']}" for each in found["promises"])
    causes = {each["cause"] or "" for each in found["promises"]}
    report.check(name, done.returncode == status and cause in causes, said[:900])


def time_hooks(report: Report, name: str) -> None:
    """Time a step with and without the hooks."""
    command = [sys.executable, str(SCRIPTS / "timed.py"), name, *(["--small"] if SMALL else [])]
    bare = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    with tempfile.TemporaryDirectory() as home:
        watched = Script(command, Path(home)).run("watched").attempts[0].words
    (before, *_), (after, waits, *places) = bare.split(), watched.strip().splitlines()[-1].split(maxsplit=2)
    ratio = float(after) / float(before)
    detail = f"a step took {before} ms, and {after} ms with hooks ({ratio:.2f}); {waits} places waited {places}"
    report.measured(name, detail, ratio=ratio, step_ms=float(before), hooked_ms=float(after))
    if IS_EMULATED:
        report.leave_out(f"{name}: no step waits", "the emulation says nothing of waits in this way")
    else:
        report.check(f"{name}: no step waits", waits == "0", "; ".join(places))
