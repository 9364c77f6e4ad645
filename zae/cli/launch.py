"""`python -m zae launch script.py`: start the ranks of a script by torchrun, here or in a job of SLURM."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from zae.cli import Answer
from zae.errors import ConfigError, did_you_mean

__all__ = ["add_arguments", "run", "write_job"]

_ABOUT = """
On this machine the ranks replace this command, and the exit status is theirs.
With --slurm a job for sbatch is printed: ... --slurm -n 4 | sbatch --time 8:00:00
takes the other options of sbatch. Before its time is over the ranks save and
end, and it is queued again: resume="auto" and a save_path that all nodes share
let the script continue. In the script write device="cuda" (or "cpu")."""
_ONLY_SLURM = ("nodes", "cpus_per_task")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = f"{parser.description}\n{_ABOUT}"
    parser.add_argument("script", metavar="script.py", help="the script to run on each rank")
    parser.add_argument("given", metavar="ARGUMENT", nargs="*", default=[], help="arguments for the script, after --")
    parser.add_argument(
        "-n", "--ranks", metavar="N", type=int, help="ranks on each machine (default: one for each GPU of this machine)"
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="how often torchrun starts the ranks again after one has failed (default: 0)",
    )
    parser.add_argument("--cpu", action="store_true", help="the ranks need no GPU: with --slurm none is asked for")
    parser.add_argument("--slurm", action="store_true", help="print a job for sbatch instead of starting the ranks")
    slurm = parser.add_argument_group("with --slurm")
    slurm.add_argument("--nodes", metavar="N", type=int, help="machines (default: 1)")
    slurm.add_argument(
        "--cpus-per-task", metavar="N", type=int, help="processors on each machine, for all of its ranks"
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Start the ranks in the place of this process, or return the job."""
    path = Path(arguments.script).expanduser()
    if not path.is_file():
        near = did_you_mean(path.name, (each.name for each in path.absolute().parent.glob("*.py")))
        raise ConfigError(f"{path} is not a file{near or '; give the script that each rank runs: train.py'}")
    for name in ("ranks", "nodes", "cpus_per_task"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}; it must be 1 or more")
    ranks = arguments.ranks or _count_gpus(arguments)
    if arguments.slurm:
        text = write_job(arguments, ranks)
        return Answer({"job": text}, text)
    for name in _ONLY_SLURM:
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} is an option of --slurm; write --slurm too, or leave it out")
    command = ["--standalone", *_torchrun(arguments, ranks)]
    # torchrun warns where the threads are not set, and takes one for each rank.
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _count_processors() // ranks)))
    command = [sys.executable, "-m", "torch.distributed.run", *command]
    if arguments.json:
        return Answer({"command": command, "environment": {"OMP_NUM_THREADS": threads}}, "")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)  # Signals then go to torchrun.


def _count_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_gpus(arguments: argparse.Namespace) -> int:
    """Count the GPUs of this machine; refuse to guess without one."""
    import torch

    if arguments.slurm or arguments.cpu or not torch.accelerator.is_available():
        where = "each machine of the job" if arguments.slurm else "this machine, which has no GPU"
        raise ConfigError(f"give the number of ranks for {where}: -n 2")
    return torch.accelerator.device_count()


def _torchrun(arguments: argparse.Namespace, ranks: int) -> list[str]:
    """Return the arguments of torchrun that a machine and a job have in common."""
    counts = ["--nproc_per_node", str(ranks), "--max-restarts", str(arguments.max_restarts)]
    return [*counts, arguments.script, *arguments.given]


def write_job(arguments: argparse.Namespace, ranks: int) -> str:
    """Return the script for sbatch.

    The time limit is announced to the script alone, by USR1: it asks the ranks to save and end, and queues the job
    again. torchrun kills ranks that have not ended within 30 s, unless it knows how long they may take to save.
    """
    stem, cpus = Path(arguments.script).stem, arguments.cpus_per_task
    options = [f"--job-name={stem}", f"--nodes={arguments.nodes or 1}", "--ntasks-per-node=1"]
    options += [] if arguments.cpu else [f"--gpus-per-node={ranks}"]
    options += [f"--cpus-per-task={cpus}"] if cpus else []
    options += ["--requeue", "--open-mode=append", f"--output={stem}-%j.out", "--signal=B:USR1@180"]
    lines = "\n".join(f"#SBATCH {each}" for each in options)
    srun = f"srun --cpus-per-task={cpus}" if cpus else "srun"
    return _JOB.format(
        options=lines,
        threads=f"export OMP_NUM_THREADS={max(1, cpus // ranks)}\n" if cpus else "",
        srun=f"{srun} --kill-on-bad-exit=1 {shlex.quote(sys.executable)} -m torch.distributed.run",
        script=shlex.join(_torchrun(arguments, ranks)),
    )


_JOB = """\
#!/bin/bash
{options}

requeue() {{
    echo "job $SLURM_JOB_ID: its time is nearly over; the ranks save, and the job is queued again"
    scancel --signal=TERM "$SLURM_JOB_ID"
    wait "$step" && exit 0 # It had come to its end.
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}}
trap requeue USR1

{threads}# Seconds in which the ranks may save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{srun} \\
    --nnodes "$SLURM_JOB_NUM_NODES" --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" \\
    --rdzv_endpoint "$head:$((20000 + SLURM_JOB_ID % 40000))" \\
    {script} &
step=$!
wait "$step"
"""
