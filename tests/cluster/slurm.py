"""SLURM of Debian on hosts of this machine: a head, and three nodes with two processors each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.hosts import Hosts, wait_for
from cluster.needs import need_root_and

PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL")
NODES = ("node1", "node2", "node3")
# SLURM's own times, shortened: SlurmdTimeout is 300 s by default (a lost node), cred_expire 120 s (a job that was
# queued again), and KillWait 30 s.
CONFIGURATION = """
ClusterName=zae
SlurmctldHost=head(10.88.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmdTimeout=20
MessageTimeout=10
KillWait=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node1 CPUs=2 NodeAddr=10.88.0.2
NodeName=node2 CPUs=2 NodeAddr=10.88.0.3
NodeName=node3 CPUs=2 NodeAddr=10.88.0.4
PartitionName=low Nodes=node[1-3] Default=YES PriorityTier=1 GraceTime=30
PartitionName=high Nodes=node[1-3] PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A cluster that runs, and what its commands say."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        need_root_and(PACKAGES)
        self.hosts = hosts
        self._folder = folder
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        # A network namespace has its own /sys, without control groups.
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munge.log", "pid-file": "munge.pid",
                 "seed-file": "munge.seed"}  # fmt: skip
        options = [f"--{option}={folder / file}" for option, file in files.items()]
        self.hosts.start("head", "munged", "--foreground", "--force", *options)
        wait_for((folder / "munge.socket").exists, "socket of munge", 10)
        self.hosts.start("head", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3", "three idle nodes")

    def __call__(self, command: str, *words: object) -> str:
        """Run a command of SLURM on the head, and return what it wrote."""
        return self.hosts.run("head", command, *words)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        (self._folder / f"{node}.spool").mkdir(exist_ok=True)
        self.hosts.start(node, "slurmd", "-D", "-N", node)

    def submit(self, *words: object, **environment: object) -> str:
        """Submit a job, and return its number."""
        line = ["sbatch", "--parsable", *words]
        return self.hosts.run("head", *line, **environment).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM knows of a job: JobState, ExitCode, Restarts, Reason and so on."""
        return dict(re.findall(r"(\S+?)=(\S*)", self("scontrol", "show", "job", "--oneliner", number)))

    def wait(self, number: str, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition is true; fail the test where the job ends before it."""

        def is_true_or_ended() -> object:
            return condition() or self.job(number)["JobState"] in ENDED

        wait_for(is_true_or_ended, what, 400)
        if not condition():
            pytest.fail(f"no {what}, but a job that is {self.job(number)['JobState']}:\n{self.log(number)}")

    def end(self, number: str) -> dict[str, str]:
        """Wait for the end of a job, and return what SLURM knows of it."""
        wait_for(lambda: self.job(number)["JobState"] in ENDED, f"end of job {number}", 400)
        return self.job(number)

    def set_time_limit(self, number: str, minutes: int) -> None:
        self("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")

    def bring_the_limit_near(self, number: str) -> None:
        """Let the time of a job be over in 35 to 95 s: SLURM looks every 30 s whether its signal is due."""
        hours, minutes, seconds = map(int, self.job(number)["RunTime"].split(":"))
        self.set_time_limit(number, 60 * hours + minutes + (1 if seconds < 25 else 2))

    @staticmethod
    def log(number: str) -> str:
        """Return what a job has written."""
        return Path(f"slurm-{number}.out").read_text()
