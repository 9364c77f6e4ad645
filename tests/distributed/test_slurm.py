"""Tasks of srun join as ranks, and jobs of submitit go on after they were preempted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
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


SUBMIT = """
    import os, signal, sys, time
    from pathlib import Path
    import submitit
    from recipe import Job, Tasks

    kind, folder, interrupts = {"one": Job, "two": Tasks}[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    executor = submitit.AutoExecutor(f"logs-{folder}", cluster="local")
    executor.update_parameters(timeout_min=10, tasks_per_node=1 if kind is Job else 2)
    job = executor.submit(kind(), folder)
    deadline = time.monotonic() + 240
    if interrupts:
        while not list(Path(folder).glob("step-*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for task in Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split():
            os.kill(int(task), signal.SIGUSR2)  # As SLURM does, before the time is over.
    print(job.results(), "Requeued" in (job.stdout() or ""))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["one", "two"])
def test_a_preempted_job_of_submitit(kind):
    """The recipe of launching.md: a job that was preempted is started again, and ends bitwise as one that was not."""
    texts = [(DOCS / name).read_text(encoding="utf-8") for name in ("features/scale.md", "engines/launching.md")]
    first, *blocks = re.findall(r"```python\n(.*?)```", "".join(texts), re.DOTALL)
    [recipe] = [block for block in blocks if "import submitit" in block]
    slow = "        time.sleep(0.4)\n        inputs, targets = batch\n"
    base = first.partition('if __name__ == "__main__":')[0].replace("        inputs, targets = batch\n", slow)
    Path("recipe.py").write_text(f"import time\n{base}\n{recipe.partition('if __name__')[0]}")
    Path("submit.py").write_text(textwrap.dedent(SUBMIT))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    ends = []
    for folder, interrupts in (("whole", "0"), ("run", "1")):
        began = time.monotonic()
        line = [sys.executable, "submit.py", kind, folder, interrupts]
        done = subprocess.run(line, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("[8] " if kind == "one" else "[4, 4] "), done.stdout
        assert done.stdout.endswith(f"{interrupts == '1'}\n"), (done.stdout, time.monotonic() - began)
        ends.append(torch.load(f"{folder}/end.pt", weights_only=True))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


SCRIPT = """
    import os, sys, time, torch
    from kit.rank_tasks import Task, build, loader, weights
    from zae.addons import MultiGPUAddon, StateManagerAddon

    class Slow(Task):
        def train_step(self, batch):
            assert self.world_size == 2
            if self.is_main:
                open("steps", "a").write(f"{self.progress_checker.step}\\n")
            time.sleep(float(sys.argv[2]))
            return super().train_step(batch)

    trainer = build(Slow, (MultiGPUAddon, StateManagerAddon), timeout=60.0, seed=1, save_path=sys.argv[1],
                    save_every=100, resume="auto")
    trainer.run(4, loader(20, 2, 3))
    if trainer.is_main:
        torch.save(weights(trainer), sys.argv[1] + ".pt")
"""
CLUSTER = {
    # As on a cluster of this machine alone: srun runs the command, and leaves its number to scancel.
    "srun": 'while [[ $1 == -* ]]; do shift; done; echo $$ > step.pid; exec "$@"',
    "scontrol": 'if [[ $1 == show ]]; then echo localhost; else echo "$@" >> requeued; fi',
    "scancel": 'echo "$@" >> canceled; kill -TERM "$(cat step.pid)"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def write_cluster(folder):
    """Write the commands of SLURM, and return the environment of a job."""
    folder.mkdir()
    for name, line in CLUSTER.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    tests = str(Path(__file__).parent.parent)
    return {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": tests}


def write_job(name, pause):
    """Write the job of the page, for two ranks on this machine and with the arguments of the script."""
    page = (DOCS / "engines" / "launching.md").read_text(encoding="utf-8")
    (job,) = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", page, re.M | re.S)
    for old, new in (("--nproc_per_node 8", "--nproc_per_node 2"), (" train.py &", f" train.py {name} {pause} &")):
        assert job.count(old) == 1
        job = job.replace(old, new)
    Path(f"{name}.sh").write_text(job)


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


@pytest.mark.exhaustive
def test_a_job_that_is_queued_again_before_its_time_is_over():
    """USR1 from SLURM saves, ends and queues the job again; its second life ends bitwise as one never stopped."""
    Path("train.py").write_text(textwrap.dedent(SCRIPT))
    environment = write_cluster(Path("bin").absolute())
    write_job("run", 0.3)
    write_job("whole", 0)
    subprocess.run(["bash", "whole.sh"], env=environment, check=True, timeout=600)
    assert len(Path("steps").read_text().split()) == 20
    Path("steps").unlink()
    with subprocess.Popen(["bash", "run.sh"], env=environment) as job:
        deadline = time.monotonic() + 100
        while not Path("steps").exists() or len(Path("steps").read_text().split()) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(100) == 0
    assert Path("requeued").read_text() == f"requeue {os.getpid()}\n"
    assert Path("canceled").read_text() == f"--signal=TERM {os.getpid()}\n"
    assert not Path("run.pt").exists()
    [saved] = Path("run").glob("step-*")
    again = {**environment, "SLURM_RESTART_COUNT": "1"}
    subprocess.run(["bash", "run.sh"], env=again, check=True, timeout=600)
    steps = [int(line) for line in Path("steps").read_text().split()]
    assert steps == list(range(20)), f"a step was lost or made twice after {saved.name}"
    one, other = (torch.load(f"{name}.pt", weights_only=True) for name in ("whole", "run"))
    assert all(torch.equal(a, b) for a, b in zip(one, other))
