"""Nodes that leave a run and come back: torchrun --nnodes 1:2, with real agents, one of which is killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.exhaustive

SCRIPT = """
    import json, os, sys, time, torch
    from zae import Trainer
    from zae.addons import GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon

    folder, pause = sys.argv[1], float(sys.argv[2])

    class Task(Trainer):
        def train_step(self, batch):
            time.sleep(pause)
            index, inputs, targets = batch
            row = {"time": time.time(), "step": self.progress_checker.step, "rank": self.rank,
                   "world": self.world_size, "seen": index.tolist()}
            with open(f"{folder}-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(row) + "\\n")
            return {"loss": (self.model(inputs) - targets).square().mean()}

        test_step = train_step

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    data = [torch.arange(37), torch.randn(37, 5, dtype=torch.double), torch.randn(37, 1, dtype=torch.double)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=6, shuffle=True)
    trainer = Task.add_on(GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon)(
        model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.05), gradient_clip=0.1, seed=3,
        global_batch_size=12, timeout=20.0, save_path=folder, save_every=2, resume="auto", reshard=True, log_bar=False)
    trainer.run(40, loader)
    if trainer.is_main:
        torch.save(trainer.unwrap().state_dict(), folder + ".pt")
"""
STEPS = 160  # 40 epochs with steps of 12, 12, 12 and 1 samples.


def rows(name: str) -> list[dict[str, Any]]:
    """Return what all processes have noted, in the order of time; the last line of one may be cut off."""
    lines = [line for path in Path().glob(f"{name}-*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return sorted(map(json.loads, lines), key=lambda row: row["time"])


def samples_of_steps(name: str) -> dict[int, list[int]]:
    """Return the samples of each step in the life in which it was made last: a step after the checkpoint is redone."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in rows(name):
        known = steps.setdefault(row["step"], [])
        if known and known[-1]["world"] != row["world"]:
            known.clear()
        known.append(row)
    found = {}
    for step, each in steps.items():
        batches = 12 // (6 * each[-1]["world"]) if step % 4 != 3 else 1
        own: dict[int, list[list[int]]] = {}
        for row in each:
            own.setdefault(row["rank"], []).append(row["seen"])
        found[step] = sorted(index for seen in own.values() for batch in seen[-batches:] for index in batch)
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def counts(world: int, after: int = 0) -> int:
    """Count the batches that so many ranks have noted."""
    return sum(row["world"] == world for row in rows("elastic")[after:])


def test_a_node_leaves_and_comes_back() -> None:
    """Each step has the samples of one process that nothing disturbs, and so have the weights, up to rounding."""
    Path("elastic.py").write_text(textwrap.dedent(SCRIPT))
    subprocess.run([sys.executable, "elastic.py", "whole", "0"], check=True, timeout=600)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=5"
    line = f"--nnodes 1:2 --nproc_per_node 1 --max-restarts 5 --rdzv_backend c10d --rdzv_id elastic --rdzv_endpoint \
        localhost:{port} --rdzv_conf {settings} elastic.py elastic 0.1"
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *line.split()], env=environment)

    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(start())]
        for each in range(2):
            wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)  # The first one has the list.
            agents.append(stack.enter_context(start()))
            before = len(rows("elastic"))
            wait_for(lambda n=before: counts(2, n) > 6)  # type: ignore[misc]
            if each == 0:
                children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
                for pid in (agents[1].pid, *map(int, children)):
                    os.kill(pid, signal.SIGKILL)
                before = len(rows("elastic"))
                wait_for(lambda n=before: counts(1, n) > 4)  # type: ignore[misc]
        assert [agents[0].wait(120), agents[2].wait(120)] == [0, 0]

    whole, elastic = samples_of_steps("whole"), samples_of_steps("elastic")
    assert len(whole) == STEPS
    assert whole == elastic
    for first in range(0, STEPS, 4):
        epoch = itertools.chain.from_iterable(elastic[step] for step in range(first, first + 4))
        assert sorted(epoch) == list(range(37))
    one, other = (torch.load(f"{name}.pt", weights_only=True) for name in ("whole", "elastic"))
    assert max((one[key] - other[key]).abs().max() for key in one) < 1e-12
    worlds = [row["world"] for row in rows("elastic") if row["rank"] == 0]
    assert [world for world, before in zip(worlds, [0, *worlds]) if world != before] == [2, 1, 2]
