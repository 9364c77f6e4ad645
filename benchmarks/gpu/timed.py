"""Train by hand, and print the milliseconds of a step and the places that waited: python -m gpu.timed JOB."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor, nn

from gpu.contestants import by_hand
from gpu.networks import Clock, Job
from gpu.settings import DEVICE, SMALL
from gpu.speed import LARGE_NETWORK


def ten_million() -> nn.Module:
    """Return ten layers of a million parameters."""
    layers = [layer for _ in range(10) for layer in (nn.Linear(1024, 1024, bias=False), nn.GELU())]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and classes on the device."""
    return torch.randn(4096, 1024, device=DEVICE), torch.randint(1024, (4096,), device=DEVICE)


JOBS = {
    "ten million": Job("ten million parameters", ten_million, batch, 8 if SMALL else 40, is_bf16=True),
    "gpt": LARGE_NETWORK,
}


def main() -> None:
    job = JOBS[sys.argv[1]]
    model, loader = job.model(), Clock(job.batches())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        by_hand(job, model, loader)
        torch.cuda.set_sync_debug_mode("default")
    places = {f"{each.filename}:{each.lineno}" for each in found if "synchronizing" in str(each.message)}
    sys.stdout.write(f"{loader.seconds() * 1e3:.3f} {', '.join(sorted(places))}\n")


if __name__ == "__main__":
    main()
