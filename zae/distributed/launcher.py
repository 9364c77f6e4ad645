"""Ranks that a launcher has started, torchrun or srun: who they are, and where they meet."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from zae.distributed.drift import in_time
from zae.distributed.rank_process import leave
from zae.errors import DistributedError

__all__ = ["join", "launched_world", "launcher_variables", "local_rank", "planned_world"]

_FIRST = re.compile(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)")  # Of gpu[07-09,12]-a,cpu3: gpu, 07, -a.
_PAUSE = 0.01  # Seconds between two looks at who has joined.

_joins = itertools.count()


def launched_world() -> tuple[int, int] | None:
    """Return the rank and the number of ranks that a launcher has set in the environment, None without one."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:  # srun may have started it.
        for name, value in launcher_variables(os.environ).items():
            os.environ.setdefault(name, value)
    rank, world = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    if (rank, world) in ((None, None), (None, "1"), ("0", None)):
        return None
    if rank is None or world is None or not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        variables = ", ".join(
            f"{name}={value}" for name, value in (("RANK", rank), ("WORLD_SIZE", world)) if value is not None
        )
        raise DistributedError(
            f"the environment has {variables}; a launcher sets both, and ranks count from 0 to WORLD_SIZE - 1: "
            "torchrun --nproc_per_node 2 script.py. To train in one process, unset RANK and WORLD_SIZE"
        )
    return int(rank), int(world)


def planned_world(devices: int) -> int:
    """Return how many ranks there are, or will be: those of a launcher, else one for each device."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    launched = launched_world()
    return launched[1] if launched is not None else devices


def local_rank() -> int:
    """Return the number of this rank on its machine: ``LOCAL_RANK``, else ``RANK``."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def join(backend: str, timeout: float, init_method: str | None = None) -> bool:
    """Join the ranks of a launcher, or use the process group that exists."""
    if dist.is_available() and dist.is_initialized():
        return True
    launched = launched_world()
    if launched is None:
        return False
    rank, world = launched
    waiting = timedelta(seconds=timeout)
    try:
        rendezvous = next(dist.rendezvous(init_method or "env://", rank, world, timeout=waiting))
        store: dist.Store = rendezvous[0]
        # All attempts of torchrun share its agent's store: without a prefix one finds the addresses of dead peers.
        prefix = f"zae/{_attempt(store, rank, world, timeout)}/{next(_joins)}"
        own_store = dist.PrefixStore(prefix, store)
        in_time(
            lambda: dist.init_process_group(backend, store=own_store, rank=rank, world_size=world, timeout=waiting),
            timeout,
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise DistributedError(_describe_failed_join(rank, world, init_method or "env://", timeout, error)) from error
    atexit.register(leave)
    return True


def _describe_failed_join(rank: int, world: int, init_method: str, timeout: float, error: Exception) -> str:
    """Return where the ranks were to meet, why a rank could not, and what to look at."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    reason = str(error).partition("\n")[0].rstrip(".")
    failed = f"rank {rank} of {world} could not meet the others at"
    within = f"within timeout={timeout:g} s: {reason}"
    if init_method == "env://" and not (host and port):
        return (
            f"{failed} env:// {within}. RANK and WORLD_SIZE are set, so a launcher must set MASTER_ADDR and "
            "MASTER_PORT too: torchrun --nproc_per_node 2 script.py; without a launcher, unset RANK and WORLD_SIZE"
        )
    place = f"{host}:{port} (MASTER_ADDR and MASTER_PORT)" if init_method == "env://" else init_method
    return (
        f"{failed} {place} {within}. Rank 0 serves this address: look whether rank 0 has begun, and all other ranks, "
        "whether the address is one of its machine and the same on all ranks, whether another process has the port, "
        f"and whether this machine reaches it: nc -vz {host or 'HOST'} {port or 'PORT'}. Where ranks take long to "
        "begin, write a longer timeout=..."
    )


def _attempt(store: dist.Store, rank: int, world: int, timeout: float) -> str:
    """Return a name that the ranks of this attempt have in common, and those of an attempt before did not have.

    One agent counts how often it has started its ranks again. Several agents count differently: there rank 0 makes a
    name, and answers each number that a rank has drawn with it, until all ranks have the answer to their own.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = uuid.uuid4().hex
    answered = dict[int, str]()
    deadline = time.monotonic() + timeout
    if rank:
        store.set(f"zae/rank/{rank}", number)
        name = store.get(f"zae/name/{number}").decode()
        store.add(f"zae/joined/{name}", 1)
        return name
    while store.add(f"zae/joined/{number}", 0) < world - 1:
        for peer in range(1, world):
            key = f"zae/rank/{peer}"
            if store.check([key]) and (drawn := store.get(key).decode()) != answered.get(peer):
                answered[peer] = drawn  # It may be that of a rank which has ended.
                store.set(f"zae/name/{drawn}", number)
        if time.monotonic() > deadline:
            raise DistributedError(f"{world} ranks did not join within timeout={timeout:g} s")
        time.sleep(_PAUSE)
    return number


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a launcher would set for a task of srun; nothing where it is the only one, or no task.

    The script of a job is not a task: there SLURM_PROCID is 0 and SLURM_NTASKS is that of the job, but no variable of
    a step is set. Nor is what is started by hand in a shell of `srun --pty`: the other tasks of that step have none.
    """
    rank, world = (environment.get(name, "") for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    is_shell = "SLURM_PTY_PORT" in environment
    if is_shell or not rank.isdecimal() or not world.isdecimal() or int(world) < 2:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = _FIRST.match(nodes)
    job = environment.get("SLURM_JOB_ID", "")
    if first is None or not job.isdecimal():
        raise DistributedError(
            f"srun has started {world} tasks, with SLURM_JOB_NODELIST={nodes!r} and SLURM_JOB_ID={job!r}, from which "
            "they cannot tell where to meet; set MASTER_ADDR, MASTER_PORT, RANK=$SLURM_PROCID and "
            "WORLD_SIZE=$SLURM_NTASKS in each task, or let srun start torchrun on each node"
        )
    step = environment.get("SLURM_STEP_ID", "0")
    port = 20000 + (int(job) + 997 * int(step if step.isdecimal() else 0)) % 40000
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": environment.get("SLURM_LOCALID", "0")}
    tasks_here = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if environment.get("SLURM_STEP_NUM_NODES", "1") == "1":
        variables["LOCAL_WORLD_SIZE"] = world
    elif tasks_here is not None and "," not in environment["SLURM_STEP_TASKS_PER_NODE"]:
        variables["LOCAL_WORLD_SIZE"] = tasks_here.group()
    return {**variables, "MASTER_ADDR": "".join(group or "" for group in first.groups()), "MASTER_PORT": str(port)}
