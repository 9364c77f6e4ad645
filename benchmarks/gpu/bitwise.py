"""Training gives the bits of the loop by hand: three networks, eight ways to train each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device.on_device.tasks import MODELS, OPTIMIZERS, Task, loader, train_by_hand, weights

from gpu.report import Report
from gpu.settings import DEVICE
from zae.addons import AMPAddon, GradientAccumulationAddon

FP16: dict[str, Any] = {"autocast": torch.float16, "scaled": True}
WAYS: dict[str, tuple[str, dict[str, Any], tuple[type, ...], dict[str, Any]]] = {
    "sgd": ("sgd", {}, (), {}),
    "adamw": ("adamw", {}, (), {}),
    "fused": ("fused", {}, (), {}),
    "capturable": ("capturable", {}, (), {}),
    "bf16": ("adamw", {"autocast": torch.bfloat16}, (AMPAddon,), {"precision": "bf16"}),
    "fp16": ("adamw", FP16, (AMPAddon,), {"precision": "fp16"}),
    "fused fp16": ("fused", FP16, (AMPAddon,), {"precision": "fp16"}),
    "accumulated": ("adamw", {"accumulation": 2}, (GradientAccumulationAddon,), {"gradient_accumulation_steps": 2}),
}
"""By name: the optimizer, what the loop by hand is told, the add-ons, and their options."""


def run(report: Report) -> None:
    """Compare the weights after two epochs, to the bit."""
    with deterministic_kernels():
        for kind in MODELS:
            for way in WAYS:
                with report.guard(f"{kind}, {way}"):
                    compare(report, kind, way)


def compare(report: Report, kind: str, way: str) -> None:
    """Train a network by hand and by zae."""
    optimizer, by_hand, addons, options = WAYS[way]
    expected = train_by_hand(kind, OPTIMIZERS[optimizer], **by_hand)
    torch.manual_seed(0)
    trainer = Task.add_on(*addons)(
        MODELS[kind](), DEVICE, optimizer=OPTIMIZERS[optimizer], gradient_clip=1.0, log_bar=False, **options
    )
    trainer.run(2, loader(kind))
    found = weights(trainer.unwrap())
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    report.check(f"{kind}, {way}", not differing, f"these weights differ: {differing[:3]}" if differing else "")


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch choose kernels that give the same bits twice, and only warn where it has none."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
