"""What each add-on adds to a step: python benchmarks/addon_costs.py writes addon_costs.json beside this file.

Two trainers, one with the add-on, take short turns in one process, in CPU time: with, without, without, with. A round
is the ratio of both sums, so that a machine which becomes slower within a round does not count, and a pair of trainers
has the median of its rounds. Where the parameters lie in memory makes two equal trainers differ, so each pair is built
anew. The figure is the median of the pairs, with its 95 % interval. A control, two trainers without add-ons, is
measured in the same way: a figure within its interval is noise. On a busy machine the intervals grow.
``python benchmarks/addon_costs.py EMAAddon ...`` measures these alone, and the control.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from harness import loss_of, make

from _generators.costs import NOT_MEASURED, OPTIONS
from _generators.options import add_ons
from zae import Trainer

HERE = Path(__file__).resolve().parent
FILE = HERE / "addon_costs.json"
PAIRS, ROUNDS = 15, 7
"""Pairs of fresh trainers, and rounds of each."""
BOUNDS = 3, 11
"""Between these of 15 sorted pairs the median lies in 96 of 100 cases, whatever the distribution."""
STEPS = {"free": 100, "cnn": 3}
"""Optimizer steps of one turn: some 20 ms, so that a round is over before the machine's speed changes."""


class Task(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(self.model, batch)}

    test_step = train_step


class Nothing:
    """A callback with an event in each step."""

    def on_step_end(self, trainer: Any, outputs: Any) -> None:
        pass


def options_of(name: str) -> dict[str, Any]:
    """Return the options that the page of an add-on shows."""
    if name == "CallbackAddon":
        return {"callbacks": [Nothing]}
    return dict(eval(f"dict({OPTIONS.get(name, '')})"))


def build(workload: str, cls: Any, options: dict[str, Any]) -> Callable[[], None]:
    """Return a function that trains one turn; it has run once."""
    job = make(workload, Path())
    trainer = cls(job.model, "cpu", optimizer=job.optimizer, log_bar=False, **options)
    batches = list(job.loader)[: STEPS[workload]]

    def turn() -> None:
        trainer.run(1, batches)

    turn()
    return turn


def pair(workload: str, name: str, cls: Any) -> tuple[float, float]:
    """Return the ratio of a fresh pair of trainers, and the microseconds of a step without the add-on."""
    plain = build(workload, Task, {})
    with_it = build(workload, Task.add_on(cls) if name else Task, options_of(name) if name else {})
    ratios, seconds = [], []
    gc.collect()
    gc.freeze()  # Collections within a turn look at what the turn made, and not at all of torch.
    for _ in range(ROUNDS):
        first, before, after, last = (cpu_time(turn) for turn in (with_it, plain, plain, with_it))
        ratios.append((first + last) / (before + after))
        seconds.append((before + after) / 2 / STEPS[workload] * 1e6)
    gc.unfreeze()
    return median(ratios), median(seconds)


def cpu_time(turn: Callable[[], None]) -> float:
    """Return the seconds of CPU time that a turn takes, those of its threads included."""
    start = time.process_time()
    turn()
    return time.process_time() - start


def measure(workload: str, name: str, cls: Any) -> tuple[list[float], float]:
    """Return the median of the pairs between the bounds of its 95 % interval, and the microseconds of a plain step."""
    ratios, seconds = [], []
    for _ in range(PAIRS):
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            ratio, step = pair(workload, name, cls)
        ratios.append(ratio)
        seconds.append(step)
    ratios.sort()
    return [round(each, 3) for each in (ratios[BOUNDS[0]], median(ratios), ratios[BOUNDS[1]])], median(seconds)


def processor() -> str:
    """Return the name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def main() -> None:
    torch.set_num_threads(1)
    unmeasured = {name for names in NOT_MEASURED.values() for name in names}
    chosen = sys.argv[1:] or [name for name in add_ons() if name not in unmeasured]
    found: dict[str, Any] = {"machine": f"{processor()}, one thread, torch {torch.__version__.split('+')[0]}"}
    found |= {
        "steps": STEPS,
        "pairs": PAIRS,
        "rounds": ROUNDS,
        "spread": "its 95 % interval",
        "steps_us": {},
        "control": {},
        "add_ons": {},
    }
    for name in ("", *chosen):
        place = found["add_ons"].setdefault(name, {}) if name else found["control"]
        for workload in STEPS:
            place[workload], step = measure(workload, name, add_ons()[name] if name else None)
            found["steps_us"].setdefault(workload, round(step))
            sys.stdout.write(f"{name or 'control'} {workload} {place[workload]}\n")
            sys.stdout.flush()
    if not sys.argv[1:]:
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
