"""Tasks of srun join as ranks, and jobs end with the status of their training. tests/cluster has a real SLURM."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from kit.rank_tasks import Task, agree, build, forks, loader, same, weights
from kit.scripts import Script
from zae import DistributedError
from zae.addons import MultiGPUAddon
from zae.distributed.launcher import launcher_variables

DOCS = Path(__file__).parent.parent.parent / "docs"
STEP = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0"}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12]-a,cpu3", "gpu07-a"), ("node1", "node1"), ("a,b", "a"), ("rack2-[3-4]", "rack2-3")],
)
def test_what_srun_says_of_a_task(nodes, first):
    """The first host, and a port that each job has for itself; nothing for one task, or in the script of a job."""
    found = launcher_variables({**STEP, "SLURM_JOB_NODELIST": nodes})
    assert found == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": first,
        "MASTER_PORT": str(20000 + 123456 % 40000),
    }  # fmt: skip
    assert launcher_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": nodes}) == {}
    assert launcher_variables({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == {}
    with pytest.raises(
        DistributedError, match=r"srun has started 8 tasks, with SLURM_JOB_NODELIST='' .*let srun start"
    ):
        launcher_variables(STEP)


def be_task(folder):
    """Train as a task of srun, which has set no variable of a launcher."""
    assert "RANK" not in os.environ
    trainer = build(Task, (MultiGPUAddon,), timeout=120.0, seed=1)
    trainer.run(1, loader(16, 2, 3))
    assert trainer.world_size == 2
    assert agree(trainer)
    torch.save(weights(trainer), f"{folder}/{trainer.rank}.pt")


def test_two_tasks_of_srun_are_ranks(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    text = f"from distributed.test_slurm import be_task\nbe_task({str(tmp_path)!r})\n"
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    with forks():
        tasks = [Script(text, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in (0, 1)]
    for task in tasks:
        assert task.end() == (0, "", "")
    with forks():
        spawned = build(Task, (MultiGPUAddon,), ["cpu", "cpu"], timeout=120.0, seed=1)
        spawned.run(1, loader(16, 2, 3))
    ends = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert same(ends[0], ends[1])
    assert same(ends[0], weights(spawned))


@pytest.mark.parametrize("page", ["howto/clusters.md", "engines/launching.md"])
@pytest.mark.parametrize("status", [0, 1, 137, 143])
def test_a_job_ends_with_the_status_of_its_training(page, status, tmp_path):
    """SLURM calls a job COMPLETED, and starts those that depend on it, by this status alone."""
    (job,) = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    script = tmp_path / "job.sh"
    script.write_text(job)
    commands = {"srun": f"exit {status}", "scontrol": f'echo "$1" >> {tmp_path}/asked'}
    for name, line in commands.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/bash\n{line}\n")
        command.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"}
    ended = subprocess.run(["bash", script], env=variables, timeout=60)
    assert ended.returncode == status
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert ("requeue" in asked) == (status == 143 and "clusters" in page)
