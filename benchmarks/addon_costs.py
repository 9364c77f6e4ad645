"""What each add-on adds to a step: python benchmarks/addon_costs.py writes addon_costs.json beside this file.

Two trainers, one with the add-on, train in turns in one process, in CPU time: with, without, without, with. The figure
is the ratio of both sums, so that a machine which becomes slower within a round does not count. The pages of add-ons
show the median of the rounds and the quartiles, and those of two trainers without add-ons, which are the noise.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness import cpu_time, loss_of, make

from kit.addon_pages import NOT_MEASURED, OPTIONS
from kit.options_page import add_ons
from zae import Trainer

HERE = Path(__file__).resolve().parent
ROUNDS = 9
STEPS = {"free": 200, "cnn": 8}
"""Optimizer steps of one turn."""


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
    return dict(eval(f"dict({OPTIONS[name]})"))


def build(workload: str, cls: Any, options: dict[str, Any]) -> Callable[[], None]:
    """Return a function that trains one turn; it has run once."""
    job = make(workload, Path())
    trainer = cls(job.model, "cpu", optimizer=job.optimizer, log_bar=False, **options)
    batches = list(job.loader)[: STEPS[workload]]

    def turn() -> None:
        trainer.run(1, batches)

    turn()
    return turn


def measure(workload: str, name: str, cls: Any) -> tuple[list[float], float]:
    """Return the quartiles of the ratio, and the microseconds of a step without the add-on; None is no add-on."""
    plain = build(workload, Task, {})
    with_it = build(workload, Task if cls is None else Task.add_on(cls), {} if cls is None else options_of(name))
    ratios, seconds = [], []
    for _ in range(ROUNDS):
        first, before, after, last = (cpu_time(turn) for turn in (with_it, plain, plain, with_it))
        ratios.append((first + last) / (before + after))
        seconds.append((before + after) / 2 / STEPS[workload] * 1e6)
    return [round(each, 3) for each in quantiles(ratios, n=4)], sorted(seconds)[ROUNDS // 2]


def processor() -> str:
    """Return the name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": f"{processor()}, one thread, torch {torch.__version__.split('+')[0]}"}
    found |= {"steps": STEPS, "rounds": ROUNDS, "steps_us": {}, "none": {}, "add_ons": {}}
    for name, cls in {"": None, **add_ons()}.items():
        if name in NOT_MEASURED:
            continue
        place = found["add_ons"].setdefault(name, {}) if name else found["none"]
        for workload in STEPS:
            with tempfile.TemporaryDirectory() as folder, chdir(folder):
                place[workload], step = measure(workload, name, cls)
            found["steps_us"].setdefault(workload, round(step))
            sys.stdout.write(f"{name or 'no add-on'} {workload} {place[workload]}\n")
            sys.stdout.flush()
    (HERE / "addon_costs.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
