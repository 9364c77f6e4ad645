"""No step waits for the device: torch raises at the first place that would."""

from __future__ import annotations

from typing import Any

import torch
from device.on_device.compositions import COMPOSITIONS, DECIDES_ON_THE_HOST, WithMetric
from device.on_device.tasks import OPTIMIZERS, adamw, data, dense
from torch.utils.data import DataLoader, TensorDataset

from gpu.report import Report
from gpu.settings import DEVICE
from zae.addons import AMPAddon, PrefetchAddon

STEPS = 28
"""Below the number of losses after which they are looked at for NaN, which waits once."""
WARM = 4
"""Micro-batches that may wait: the first ones allocate, and look at what they get."""

MORE: dict[str, tuple[tuple[type, ...], dict[str, Any]]] = {
    "fused": ((), {"optimizer": OPTIMIZERS["fused"]}),
    "capturable": ((), {"optimizer": OPTIMIZERS["capturable"]}),
    "fp16, fused": ((AMPAddon,), {"precision": "fp16", "optimizer": OPTIMIZERS["fused"]}),
}

KNOWN = {
    **dict.fromkeys(DECIDES_ON_THE_HOST, "whether the optimizer steps is decided on the host"),
    "fp16, fused": "a fused optimizer may not be called after an overflow, so the host looks for one",
}
"""Compositions that wait once a step, and why."""


class Watched(WithMetric):
    """A task whose steps may not wait, but for the first ones."""

    def run_batch(self, batch: Any) -> None:
        if self.progress_checker.step < WARM:
            super().run_batch(batch)
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            super().run_batch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def run(report: Report) -> None:
    """Train with each composition; then with batches from pinned memory, which are copied without waiting."""
    for name, (addons, options) in {**COMPOSITIONS, **MORE}.items():
        model = options.get("model", dense)
        others = {key: value for key, value in options.items() if key != "model"}
        batches = on_device(options.get("gradient_accumulation_steps", 1))
        with report.guard(name):
            check(report, name, make(addons, model, **others), batches)
    for name, addons in {"pinned batches": (), "pinned batches, PrefetchAddon": (PrefetchAddon,)}.items():
        with report.guard(name):
            check(report, name, make(addons, dense), pinned())


def check(report: Report, name: str, trainer: Any, batches: Any) -> None:
    """Train; a wait that is known, and has a reason, fails nothing."""
    try:
        trainer.run(1, batches)
    except RuntimeError as error:
        if name not in KNOWN or "synchronizing" not in str(error):
            raise
        report.leave_out(name, f"waits once a step: {KNOWN[name]}")
    else:
        report.check(name, True, "no step waits")


def make(addons: tuple[type, ...], model: Any, **options: Any) -> Any:
    """Make a trainer of a watched task."""
    return Watched.add_on(*addons)(model(), DEVICE, **{"optimizer": adamw, "log_bar": False, **options})


def on_device(window: int) -> list[Any]:
    """Return batches that lie on the device, for so many steps of a window."""
    inputs, target = data(samples=16)
    return [(inputs.to(DEVICE), target.to(DEVICE))] * (STEPS * window)


def pinned() -> DataLoader[Any]:
    """Return a loader with a worker, whose batches are in pinned memory."""
    return DataLoader(TensorDataset(*data(samples=16 * STEPS)), 16, pin_memory=True, num_workers=1)
