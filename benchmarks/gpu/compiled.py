"""CompileAddon: it compiles, two runs give the same bits, and a step takes as long as one compiled by hand."""

from __future__ import annotations

from typing import Any

import torch
from device.on_device.tasks import weights
from torch import nn

from gpu.contestants import Task, by_hand, seconds_of_a_step
from gpu.networks import Clock, Job, optimizer_of, small, small_batch
from gpu.report import Report
from gpu.settings import DEVICE, IS_EMULATED, SMALL, why_not_compiled
from zae.addons import CompileAddon

JOB = Job("small network, float32", small, small_batch, 8 if SMALL else 400, is_bf16=False)
BACKEND = "aot_eager" if IS_EMULATED else "inductor"
WAYS: dict[str, dict[str, Any]] = {
    "model": {"compile_target": "model"},
    "step": {"compile_target": "step"},
    "model, reduce-overhead": {"compile_target": "model", "compile_mode": "reduce-overhead"},
}


def run(report: Report) -> None:
    """Compile in each way."""
    reason = "" if IS_EMULATED else why_not_compiled()
    if reason:
        report.leave_out("torch.compile", reason)
        return
    seconds_of_a_step(JOB, by_hand)
    eager = seconds_of_a_step(JOB, by_hand)
    manual = seconds_of_a_step(JOB, compiled_by_hand)
    report.measured("by hand, eager", f"{1 / eager:.1f} steps/s", steps_per_second=1 / eager)
    report.measured("by hand, torch.compile", f"{1 / manual:.1f} steps/s", steps_per_second=1 / manual)
    for name, options in WAYS.items():
        with report.guard(name):
            if IS_EMULATED and "compile_mode" in options:
                report.leave_out(name, "the emulation has no graphs")
            else:
                measure(report, name, options)


def compiled_by_hand(job: Job, model: nn.Module, loader: Clock) -> None:
    """Train the compiled model by hand."""
    by_hand(job, torch.compile(model, backend=BACKEND, dynamic=False), loader)


def measure(report: Report, name: str, options: dict[str, Any]) -> None:
    """Train twice; a trainer that made no graph has trained eagerly, which is no result."""
    found, seconds, graphs = [], [], 0
    for _ in range(2):
        if not IS_EMULATED:  # Else the networks of other runs count towards the limit of graphs for one function.
            torch.compiler.reset()
        loader = Clock(JOB.batches())
        trainer = Task.add_on(CompileAddon)(
            JOB.model(), DEVICE, optimizer=optimizer_of, log_bar=False, compile_backend=BACKEND, **options
        )
        trainer.run(1, loader)
        found.append(weights(trainer.unwrap()))
        seconds.append(loader.seconds())
        graphs = trainer.compile_report["graphs"]
    differing = [key for key in found[0] if not torch.equal(found[0][key], found[1][key])]
    rate = 1 / min(seconds)
    detail = f"{rate:.1f} steps/s, {graphs} graphs" + (f", two runs differ: {differing[:2]}" if differing else "")
    report.check(name, graphs > 0 and not differing, detail, steps_per_second=rate, graphs=graphs)
