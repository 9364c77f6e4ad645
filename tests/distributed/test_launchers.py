"""What a launcher says in the environment: a class that does not join its ranks, and what only Accelerate takes."""

import json
import re
import socket
import subprocess
import sys
import time

import pytest
import torch
from distributed.test_slurm import STEP
from torch.utils.data import DataLoader, Dataset

from kit.accelerators import fresh_state
from kit.rank_tasks import Task, build, forks, loader
from kit.scripts import Script
from zae import ConfigError, DistributedError
from zae.addons import (
    AccelerateAddon,
    AMPAddon,
    EMAAddon,
    FSDPAddon,
    MultiGPUAddon,
    PipelineAddon,
    TensorParallelAddon,
)
from zae.checkpoint.locks import FolderLock
from zae.distributed.launcher import join, launcher_variables


def test_a_class_that_does_not_join_the_ranks_of_a_launcher_is_refused(monkeypatch):
    """Each rank would train alone, on all of the data; alone in a launcher, or beside others by SLURM, is meant."""
    for name, value in {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    trainer = build(Task)
    assert trainer.run(1, loader(8, 2))["step"] == 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert trainer.run(1, loader(8, 2))["step"] == 8
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"started 2 ranks .*add_on\(MultiGPUAddon\).* independent, unset RANK"):
        trainer.run(1, loader(8, 2))
    assert trainer.progress_checker.step == 8
    assert trainer.evaluate(loader(8, 2))
    monkeypatch.delenv("RANK")
    assert trainer.run(1, loader(8, 2))["step"] == 12


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ACCELERATE_USE_FSDP", "true", "FSDP: train with FSDPAddon"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "train with DeepSpeedAddon"),
    ],
)
def test_what_accelerate_launch_was_asked_for_is_not_passed_over(name, value, text, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert build(Task, (MultiGPUAddon,)).run(1, loader(8, 2))["step"] == 4
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"accelerate launch was asked for .*{text}"):
        build(Task, (MultiGPUAddon,))


ENGINES = (MultiGPUAddon, FSDPAddon, TensorParallelAddon, PipelineAddon)


@pytest.mark.parametrize("add_ons", [(), (EMAAddon,), *((each,) for each in ENGINES)])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_a_precision_of_accelerate_launch_is_not_passed_over(add_ons, precision, monkeypatch):
    """One process, or a rank: what would train in the types of the model says so, and what to write."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    build(Task, add_ons)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    said = rf"asked for mixed_precision={precision} .*\.add_on\(AMPAddon\) and precision='{precision}'.*AccelerateAddon"
    with pytest.raises(ConfigError, match=said):
        build(Task, add_ons)
    if precision == "bf16":
        assert build(Task, (AMPAddon, *add_ons), precision="bf16").precision == "bf16"


def test_a_precision_of_accelerate_launch_that_an_engine_takes(monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with fresh_state():
        trainer = build(Task, (AccelerateAddon,))
        trainer.run(1, loader(8, 2))
        assert trainer.accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_are_those_of_the_launcher_before_the_first_run(engine, monkeypatch):
    trainer = build(Task, (engine,))
    assert (trainer.rank, trainer.world_size, trainer.is_main) == (0, 1, True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer = build(Task, (engine,))
    assert (trainer.rank, trainer.world_size, trainer.is_main) == (1, 2, False)


def test_an_address_where_nobody_answers_is_named(monkeypatch):
    """It is set, so nothing says to set it; without one the variables are named."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    where = rf"^rank 1 of 2 could not meet the others at 127\.0\.0\.1:{port} \(MASTER_ADDR and MASTER_PORT\) within "
    with pytest.raises(DistributedError, match=rf"{where}.*whether rank 0 has begun.*nc -vz 127\.0\.0\.1 {port}"):
        join("gloo", 1.0)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(DistributedError, match="a launcher must set MASTER_ADDR and MASTER_PORT too"):
        join("gloo", 1.0)


STOPPED_STORE = """
import os, signal, sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
before = store.num_keys()
print("serves", flush=True)
while store.num_keys() == before:
    time.sleep(0.005)
os.kill(os.getpid(), signal.SIGSTOP)
"""
JOINING = """
from zae.distributed.launcher import join
join("gloo", 2.0)
"""


def test_ranks_that_connect_are_given_up_in_time(tmp_path):
    """Torch waits without an end for what serves the store, where that is stopped or the link goes down just then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = subprocess.Popen([sys.executable, "-c", STOPPED_STORE, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout.readline() == "serves\n"
        (tmp_path / "rank.py").write_text(JOINING)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        rank = Script(tmp_path / "rank.py", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", **address)
        status, _, said = rank.end()
    finally:
        served.kill()
        served.wait()
    assert status != 0
    assert re.search(rf"rank 1 of 2 could not meet the others at 127\.0\.0\.1:{port} .* within timeout=2 s", said), said


def test_a_shell_of_srun_is_no_task():
    """`srun --pty bash` has the variables of its step, and the other tasks of the step run no script."""
    task = {**STEP, "SLURM_JOB_NODELIST": "node1"}
    assert launcher_variables(task)["RANK"] == "5"
    assert launcher_variables({**task, "SLURM_PTY_PORT": "40111", "SLURM_PTY_WIN_COL": "80"}) == {}


class Slow(Dataset):
    """Samples of which one takes long in every second rank."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(3.0 * (index == 5))
        return torch.ones(3), torch.ones(1)


class TimesOut(Task):
    """A step that asks a service, which does not answer one rank."""

    def train_step(self, batch):
        if self.rank == 1 and self.progress_checker.step == 2:
            raise RuntimeError("the service timed out")
        return super().train_step(batch)


@pytest.mark.parametrize("who", ["loader", "step"])
def test_what_times_out_on_one_rank_alone_is_that_rank_s_error(who):
    """It is no exchange with the others."""
    if who == "loader":
        task, data = Task, DataLoader(Slow(), batch_size=1, num_workers=1, timeout=1.0)
    else:
        task, data = TimesOut, loader(16, 2)
    with forks(), pytest.raises(RuntimeError, match=r"timed out.*\[rank 1 of 2\]") as caught:
        build(task, (MultiGPUAddon,), ["cpu", "cpu"], timeout=60.0).run(1, data)
    assert type(caught.value) is RuntimeError
    assert "network" not in str(caught.value.__notes__)


def test_a_lock_is_alive_where_the_clock_of_this_host_is_ahead(tmp_path, monkeypatch):
    """The time of the file is that of the disk, and so is the time that it is compared with."""
    other = FolderLock(tmp_path)
    other.acquire()
    path = tmp_path / ".lock"
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    with pytest.raises(ConfigError, match=r"is in use: process .* on host elsewhere"):
        FolderLock(tmp_path).acquire()
