"""Jobs of SLURM on a cluster of three nodes, with the job scripts of the pages.

Needs root, and Debian's packages iproute2, munge, slurm-client, slurmctld and slurmd. Each node is a network namespace.
SLURM's times are shortened in its configuration, slurm.py; nothing of SLURM is replaced.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.slurm import Slurm
from cluster.training import DOCS, TRAIN, checkpoints, has_ended_as_undisturbed

pytestmark = pytest.mark.cluster
SLOW = "run --pause $((SLURM_RESTART_COUNT ? 0 : 1))"
"""The arguments of the training: a step takes a second, and none after the job was queued again."""


def write_job(page: str, arguments: str, name: str = "job.sh") -> str:
    """Write the job script of a page, with the training of these tests, and return its name."""
    (job,) = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    # These nodes have no GPUs.
    job = job.replace(" --gpus-per-node=8", "").replace("--nproc_per_node 8", "--nproc_per_node 1")
    assert job.count(" train.py") == 1
    Path(name).write_text(job.replace(" train.py", f" {TRAIN} {arguments}"))
    return name


def wait_for_checkpoint(slurm: Slurm, job: str, folder: str = "run", besides: set[str] = frozenset()) -> None:
    """Wait until a job has written a checkpoint besides those that are known."""
    slurm.wait(job, lambda: checkpoints(folder) - besides, f"new checkpoint in {folder}")


def wait_for_restart(slurm: Slurm, job: str, number: int) -> None:
    slurm.wait(job, lambda: int(slurm.job(job)["Restarts"]) >= number, f"restart {number}")


def end_and_be_completed(slurm: Slurm, job: str) -> int:
    """Wait for the end of a job, and return how often it was restarted."""
    ended = slurm.end(job)
    assert ended["JobState"] == "COMPLETED", slurm.log(job)
    return int(ended["Restarts"])


def test_a_job_goes_on_after_each_time_limit(slurm: Slurm) -> None:
    """Two tasks of srun on two nodes meet two time limits, are queued again, and end bitwise as undisturbed."""
    script = write_job("howto/clusters.md", "run --pause $((SLURM_RESTART_COUNT < 2 ? 3 : 0))")
    job = slurm.submit("--nodes=2", "--signal=TERM@90", script)
    known: set[str] = set()
    for number in (1, 2):
        wait_for_checkpoint(slurm, job, besides=known)
        slurm.bring_the_limit_near(job)
        wait_for_restart(slurm, job, number)
        known = checkpoints("run")
        slurm.set_time_limit(job, 60)
    assert end_and_be_completed(slurm, job) == 2
    assert slurm.log(job).count("signal 15: saved at step") == 2, slurm.log(job)
    assert has_ended_as_undisturbed("run")


def test_a_job_with_torchrun_goes_on_after_a_time_limit(slurm: Slurm) -> None:
    """One agent of torchrun on each of two nodes, with the job of the page on launching."""
    script = write_job("engines/launching.md", "run --pause $((SLURM_RESTART_COUNT ? 0 : 3))")
    job = slurm.submit("--signal=B:USR1@90", script)
    wait_for_checkpoint(slurm, job)
    slurm.bring_the_limit_near(job)
    wait_for_restart(slurm, job, 1)
    slurm.set_time_limit(job, 60)
    assert end_and_be_completed(slurm, job) == 1
    assert has_ended_as_undisturbed("run")


def test_a_job_that_makes_room_goes_on_afterwards(slurm: Slurm) -> None:
    """A job of a partition with precedence takes all nodes: the training saves, is queued again, and goes on."""
    job = slurm.submit("--nodes=2", write_job("howto/clusters.md", SLOW))
    wait_for_checkpoint(slurm, job)
    urgent = slurm.submit("--partition=high", "--nodes=3", "--exclusive", "--wrap", "true")
    assert slurm.end(urgent)["JobState"] == "COMPLETED"
    assert end_and_be_completed(slurm, job) >= 1
    assert slurm.log(job).count("signal 15: saved at step") == 1, slurm.log(job)
    assert has_ended_as_undisturbed("run")


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_job_that_loses_a_node_goes_on_with_another(slurm: Slurm, node: str) -> None:
    """The first node has rank 0 and the job script, the second one the other rank."""
    job = slurm.submit("--nodes=2", write_job("howto/clusters.md", SLOW))
    wait_for_checkpoint(slurm, job)
    assert slurm.job(job)["NodeList"] == "node[1-2]"
    slurm.hosts.lose(node)
    wait_for_restart(slurm, job, 1)
    assert end_and_be_completed(slurm, job) == 1
    assert "node3" in slurm.job(job)["NodeList"].replace("[1,3]", "3").replace("[2-3]", "3")
    assert has_ended_as_undisturbed("run")


def test_the_tasks_of_an_array_are_runs_of_their_own(slurm: Slurm) -> None:
    """Each has its folder, all make room for another job, and each ends as it does undisturbed."""
    folder = "runs/array-$SLURM_ARRAY_TASK_ID"
    script = write_job(
        "howto/clusters.md", f"{SLOW.replace('run', folder, 1)} --engine none --seed $SLURM_ARRAY_TASK_ID"
    )
    array = slurm.submit("--array=0-2", script)
    jobs = [f"{array}_{number}" for number in range(3)]
    for number, job in enumerate(jobs):
        wait_for_checkpoint(slurm, job, f"runs/array-{number}")
    slurm.end(slurm.submit("--partition=high", "--nodes=3", "--exclusive", "--wrap", "true"))
    for number, job in enumerate(jobs):
        assert end_and_be_completed(slurm, job) >= 1
        assert has_ended_as_undisturbed(f"runs/array-{number}", None, seed=number)


@pytest.mark.parametrize("page", ["howto/clusters.md", "engines/launching.md"])
def test_a_training_that_fails_is_a_job_that_has_failed(slurm: Slurm, page: str) -> None:
    """Jobs that wait for its success do not start; those that wait for its failure do."""
    failing = slurm.submit("--nodes=2", write_job(page, "run --fails"))
    after = slurm.submit(f"--dependency=afterok:{failing}", "--wrap", "touch started")
    notice = slurm.submit(f"--dependency=afternotok:{failing}", "--wrap", "true")
    ended = slurm.end(failing)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
    assert "an error in the training" in slurm.log(failing)
    assert slurm.end(notice)["JobState"] == "COMPLETED"
    assert slurm.job(after)["Reason"] == "DependencyNeverSatisfied"
    assert not Path("started").exists()
