"""A run of several ranks that has finished ends with exit status 0, whatever threads of gloo still do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kit.ranks import on_ranks
from zae.distributed.collectives import all_reduce, gather_objects

SCRIPT = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    import zae.addons
    from zae import Trainer

    class Task(Trainer):
        def train_step(self, batch):
            return {"loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}

        test_step = train_step

    engine, how = sys.argv[1:]
    if how == "own group":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.rand(256, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 16)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    plan = {"tensor_plan": {"0": ColwiseParallel(), "2": RowwiseParallel()}} if "Tensor" in engine else {}
    cls = Task.add_on(getattr(zae.addons, engine))
    trainer = cls(model, "cpu", optimizer=torch.optim.SGD, seed=0, log_bar=False, **plan)
    trainer.run(2, loader, loader)
    if how == "evaluate":
        trainer.evaluate(loader)
"""
ENGINES = ("MultiGPUAddon", "FSDPAddon", "TensorParallelAddon", "PipelineAddon", "AccelerateAddon")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("engine", "how", "count"),
    [("MultiGPUAddon", "run", 20), ("MultiGPUAddon", "own group", 10), *((name, "evaluate", 5) for name in ENGINES)],
)
def test_a_script_that_has_finished_ends_with_0(engine: str, how: str, count: int) -> None:
    """Two ranks without an agent, one job after another."""
    Path("script.py").write_text(textwrap.dedent(SCRIPT))
    for _ in range(count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "script.py", engine, how],
                env={**os.environ, **shared, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        said = [each.communicate(timeout=300)[1] for each in ranks]
        assert [each.returncode for each in ranks] == [0, 0], said


@on_ranks(2, 3)
def test_objects_and_sums_of_ranks(world: int) -> None:
    """Objects of any size, empty ones too, come from each rank; a sum is in its place."""
    rank = dist.get_rank()
    for value in (None, rank, "x" * 10 ** (2 * rank), {"a": torch.full((rank * 70_000,), rank)}, b""):
        found = gather_objects(value)
        assert len(found) == world
        assert str(found[rank]) == str(value)
    assert gather_objects(rank) == list(range(world))
    total = torch.ones(3)
    all_reduce(total)
    assert total.tolist() == [world] * 3
