"""`python -m zae launch`: ranks that torchrun starts here, and a job of SLURM, run as on a cluster of one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zae.cli import main

TESTS = str(Path(__file__).parent.parent)


def launch(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["launch", *arguments])
    return status, *capsys.readouterr()


def test_ranks_on_this_machine() -> None:
    """The ranks of the script, with its arguments and its exit status; --json says how they would be started."""
    Path("train.py").write_text(
        "import os, sys, time\n"
        "os.write(1, f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\".encode())\n"
        "open(f\"{os.environ['RANK']}-{sys.argv[2]}\", 'w').close()\n"
        "while not all(os.path.exists(f'{rank}-{sys.argv[2]}') for rank in (0, 1)):\n"  # torchrun ends the other rank.
        "    time.sleep(0.01)\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    for status, given in ((0, "0"), (1, "3")):
        line = [sys.executable, "-m", "zae", "launch", "train.py", "-n", "2", "--", "--lr", given]
        done = subprocess.run(line, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == status, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 ['--lr', '{given}']" for rank in (0, 1)]
        assert status or done.stderr == ""


def test_what_is_written_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """bash reads the job; what cannot be meant is refused in a line."""
    Path("train.py").touch()
    status, said, _ = launch(capsys, "train.py", "-n", "4", "--json", "--", "a b")
    assert (status, json.loads(said)["command"][3:]) == (
        0, ["--standalone", "--nproc_per_node", "4", "--max-restarts", "0", "train.py", "a b"]
    )  # fmt: skip
    options = "--slurm -n 4 --nodes 2 --cpus-per-task 8 --max-restarts 3"
    status, text, _ = launch(capsys, "train.py", *options.split(), "--", "a b")
    assert status == 0
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    for part in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=4", "cpus-per-task=8", "requeue",
                 "signal=B:USR1@180"):  # fmt: skip
        assert f"#SBATCH --{part}\n" in text
    assert "export OMP_NUM_THREADS=2\n" in text
    assert "--nproc_per_node 4 --max-restarts 3 train.py 'a b' &" in text
    status, text, _ = launch(capsys, "train.py", "--slurm", "-n", "4", "--cpu")
    assert status == 0
    assert "gpus" not in text
    for given, words in {
        "trian.py -n 2": "trian.py is not a file; did you mean 'train.py'?",
        "train.py -n 0": "--ranks 0; it must be 1 or more",
        "train.py -n 2 --nodes 2": "--nodes is an option of --slurm",
        "train.py --slurm": "give the number of ranks for each machine of the job: -n 2",
        "train.py --cpu": "give the number of ranks for this machine",
    }.items():
        status, said, error = launch(capsys, *given.split())
        assert (status, said) == (2, "")
        assert words in error


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
}


def write_cluster(folder: Path) -> dict[str, str]:
    """Write the commands of SLURM, and return the environment of a job."""
    folder.mkdir()
    for name, line in CLUSTER.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    return {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": TESTS}


@pytest.mark.exhaustive
def test_a_job_that_is_queued_again_before_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    """USR1 from SLURM saves, ends and queues the job again; its second life ends bitwise as one never stopped."""
    Path("train.py").write_text("\n".join(line[4:] for line in SCRIPT.splitlines()))
    environment = write_cluster(Path("bin").absolute())
    for name, pause in (("run", "0.3"), ("whole", "0")):
        status, text, _ = launch(capsys, "train.py", "--slurm", "-n", "2", "--cpu", "--", name, pause)
        assert status == 0
        Path(f"{name}.sh").write_text(text)
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
