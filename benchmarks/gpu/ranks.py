"""DDP and FSDP on one rank, with NCCL: the weights are those of one process.

torchrun --nproc_per_node 1 -m gpu.ranks ENGINE FILE    # train, and write the weights
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from device.on_device.tasks import Task, dense, loader, weights
from torch.distributed.distributed_c10d import get_backend_config

from gpu.bitwise import deterministic_kernels
from gpu.report import Report
from gpu.settings import DEVICE
from zae.addons import FSDPAddon, MultiGPUAddon

ENGINES: dict[str, type] = {"MultiGPUAddon": MultiGPUAddon, "FSDPAddon": FSDPAddon}


def run(report: Report) -> None:
    """Start a rank for each engine, under torchrun, and compare."""
    expected = weights(train().unwrap())
    with tempfile.TemporaryDirectory() as folder:
        for name in ENGINES:
            with report.guard(name):
                compare(report, name, Path(folder) / f"{name}.pt", expected)


def compare(report: Report, name: str, path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Train in a rank, and compare its weights with those of one process."""
    own = ["--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "1"]
    launch = [sys.executable, "-m", "torch.distributed.run", *own]
    command = [*launch, "-m", "gpu.ranks", name, str(path)]
    # The machine may have no network: its own name leads nowhere then.
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    if done.returncode:
        report.check(name, False, f"the rank ended with {done.returncode}: {done.stderr[-600:]}")
        return
    stored = torch.load(path, weights_only=True)
    backend, found = stored["backend"], stored["weights"]
    worst = max(float((found[key] - expected[key]).abs().max()) for key in expected)
    verdict = "nccl" in backend and worst <= 1e-5
    report.check(name, verdict, f"backend {backend}, largest difference of a weight {worst:.1g}", difference=worst)


def train(task: Any = Task, *addons: type) -> Any:
    """Train for an epoch."""
    torch.manual_seed(0)
    trainer = task.add_on(*addons)(dense(0.0), DEVICE, optimizer=sgd, seed=0, log_bar=False)
    with deterministic_kernels():
        trainer.run(1, loader())
    return trainer


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


class Noting(Task):
    """A task that notes the backend of its ranks, which is there while they train."""

    backend = "none"

    def train_step(self, batch: Any) -> Any:
        Noting.backend = get_backend_config()
        return super().train_step(batch)


if __name__ == "__main__":
    trained = train(Noting, ENGINES[sys.argv[1]])
    torch.save({"backend": Noting.backend, "weights": weights(trained.unwrap())}, sys.argv[2])
