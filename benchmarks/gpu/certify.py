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
from gpu.settings import IS_EMULATED
from kit.scripts_that_resume import Case
from zae.certify.runs import Script

ON_GPU = (
    ("nn.Linear(64, 10))", 'nn.Linear(64, 10)).to("cuda")'),
    ('GradScaler("cpu"', 'GradScaler("cuda"'),
    ('autocast("cpu"', 'autocast("cuda"'),
    ("model(images), targets)", 'model(images.to("cuda")), targets.to("cuda"))'),
)
RESUMED = (
    ('"random": torch.get_rng_state(),', '"random": torch.get_rng_state(), "of the GPU": torch.cuda.get_rng_state(),'),
    (
        'torch.set_rng_state(state["random"])',
        'torch.set_rng_state(state["random"]); torch.cuda.set_rng_state(state["of the GPU"])',
    ),
)
CASES = {
    "right": Case("plain.py", edits=ON_GPU + RESUMED),
    "without the GPU's random state": Case("plain.py", cause="random state", edits=ON_GPU),
}


def run(report: Report) -> None:
    """Certify a script, right and with a mistake; then time two networks with and without the hooks."""
    with tempfile.TemporaryDirectory() as folder, working_in(folder):
        for name, case in CASES.items():
            with report.guard(name):
                certify(report, name, case)
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


def certify(report: Report, name: str, case: Case) -> None:
    """Certify the script, and look at the verdict."""
    command = [sys.executable, "-m", "zae", "certify", "--kills", "3", "--json", *case.command(Path())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode not in (0, 1):
        report.check(name, False, f"certify ended with {done.returncode}: {done.stderr[-600:]}")
        return
    promises = json.loads(done.stdout)["promises"]
    said = "; ".join(f"{each['name']}: {each['verdict']} {each['message']}" for each in promises)
    causes = {each["cause"] for each in promises if each["verdict"] == "failed"}
    report.check(name, causes == ({case.cause} if case.cause else set()), said[:900])


def time_hooks(report: Report, name: str) -> None:
    """Time a step with and without the hooks, which are to wait nowhere."""
    command = [sys.executable, "-m", "gpu.timed", name]
    bare = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    with tempfile.TemporaryDirectory() as home:
        watched = Script(command, Path(home)).run("watched").attempts[0].words
    before, _, waits_before = bare.strip().partition(" ")
    after, _, waits = watched.strip().splitlines()[-1].partition(" ")
    ratio = float(after) / float(before)
    detail = f"a step took {before} ms, and {after} ms with hooks ({ratio:.2f})"
    report.measured(name, detail, ratio=ratio, step_ms=float(before), hooked_ms=float(after))
    if IS_EMULATED:
        report.leave_out(f"{name}: no step waits", "the emulation says nothing of waits in this way")
    else:
        report.check(f"{name}: no step waits", waits == waits_before, f"{waits or 'nowhere'}")
