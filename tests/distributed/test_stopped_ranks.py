"""A rank that is stopped (SIGSTOP) or killed, and a store that dies with who serves it: the others end in words."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kit.faults import wait_for
from kit.rank_tasks import Task, build, forks, loader, same, weights
from kit.ranks import on_ranks
from kit.scripts import Script, Torchrun
from zae import DistributedError
from zae.addons import FSDPAddon, MultiGPUAddon, StateManagerAddon
from zae.distributed import drift
from zae.distributed import spawn as launching

AGAIN = "start the script again: with resume='auto' it continues from the newest checkpoint"
PLACES = ("step", "validation", "save")


SCRIPT = "import sys\nfrom distributed.test_stopped_ranks import be_rank\nbe_rank(*sys.argv[1:])\n"


class Stops(Task):
    """Ends or stops one rank, or its parent, in its sixth step, in the validation after the fifth, or in a save."""

    how = where = ""
    who = world = 0

    def train_step(self, batch):
        assert self.world_size == self.world
        self.suffer("step")
        return super().train_step(batch)

    def test_step(self, batch):
        self.suffer("validation")
        return super().test_step(batch)

    def state_dict(self):
        self.suffer("save")
        return super().state_dict()

    def suffer(self, where):
        if (where, self.rank) != (self.where, self.who) or self.progress_checker.step != 5:
            return
        Path("rank").write_text(str(os.getpid()))
        if self.how == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.5)
        else:
            os.kill(os.getpid(), signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)


def make(folder, device="cpu", engine=MultiGPUAddon, timeout=10.0):
    return build(Stops, (engine, StateManagerAddon), device, timeout=timeout, seed=1, save_path=folder, save_every=5,
                 keep_last=None, resume="auto")  # fmt: skip


def train(trainer, world, how="", who=0, where=""):
    trainer.how, trainer.who, trainer.where, trainer.world = how, who, where, world
    trainer.run(2, loader(24, 2, 3), loader(8, 2), valid_every=5)
    assert trainer.progress_checker.step == {2: 12, 3: 8}[world]
    return weights(trainer)


def is_gone(pid):
    return not Path("/proc", pid).exists() or ") Z " in Path("/proc", pid, "stat").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of the run that nothing has disturbed, by engine."""
    with forks():
        return {
            engine: train(make(tmp_path_factory.mktemp("whole") / "run", ["cpu", "cpu"], engine, 120.0), 2)
            for engine in (MultiGPUAddon, FSDPAddon)
        }


EXHAUSTIVE = [(who, where, MultiGPUAddon) for who in (0, 1) for where in PLACES if (who, where) != (0, "validation")]
EXHAUSTIVE += [(who, where, FSDPAddon) for who, where in zip((1, 0, 1), PLACES)]


@pytest.mark.parametrize(
    ("who", "where", "engine"),
    [(0, "validation", MultiGPUAddon), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE)],
)
def test_a_stopped_rank_that_was_spawned(who, where, engine, whole, monkeypatch):
    """It is named and killed, and the run goes on to bitwise the same end."""
    monkeypatch.setattr(launching, "GRACE_TIMEOUT_S", 1.0)  # Seconds that nobody is going to use.
    text = rf"rank {who} \(process \d+\) of 2 did not answer within timeout=10 s, .*If a signal has stopped it"
    with forks(), pytest.raises(DistributedError, match=text) as caught:
        train(make("run", ["cpu", "cpu"], engine), 2, "stop", who, where)
    assert "start the script again: with resume='auto' it continues from the newest checkpoint" in str(caught.value)
    assert is_gone(Path("rank").read_text())
    with forks():
        assert same(train(make("run", ["cpu", "cpu"], engine, 120.0), 2), whole[engine])


# ------------------------------------------------------------------------------------------ ranks of a launcher


def start(world, *arguments):
    """Start the ranks as a launcher without an agent does: rank 0 serves the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = Path("ranks.py").absolute()
    path.write_text(SCRIPT)
    given = [str(each) for each in (world, *arguments)]
    with forks():
        return [Script(path, *given, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(world)]


def be_rank(world, how="", who="0", where=""):
    """Train in a script, and keep the weights."""
    held = train(make("run", timeout=10.0 if how == "stop" else 120.0), int(world), how, int(who), where)
    torch.save(held, f"end-{os.environ['RANK']}.pt")


SILENT = "rank {who} of {world} did not answer within timeout=10 s. It is stopped"
KILLED = "rank {who} of {world} ended without an error: it was killed"
DEAD = r"the store of the process group at 127.0.0.1:\d+ does not answer: what serves it \(rank 0, .*\) has ended"
CASES = [
    (3, "stop", 1, "validation", SILENT),
    (2, "kill", 0, "save", DEAD),
    (2, "stop", 0, "save", DEAD),
    (2, "stop", 0, "step", DEAD),
    (2, "stop", 1, "step", SILENT),
    (2, "stop", 1, "save", SILENT),
    (3, "kill", 1, "step", KILLED),
]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("world", "how", "who", "where", "text"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES[2:])],
)
def test_a_rank_of_a_launcher_and_the_store_that_it_serves(world, how, who, where, text, whole):
    """The last line of each other rank names the rank that does not answer, or the store, and says what to do."""
    ranks = start(world, how, who, where)
    try:
        ends = [each.end() for rank, each in enumerate(ranks) if rank != who]
    finally:
        ranks[who].kill()
    for status, _, said in ends:
        assert status == 1
        last = said.splitlines()[-1]
        assert re.search(text.format(who=who, world=world), last), said
        assert AGAIN in last
        assert not re.search(r"terminate called|\(SIGABRT\)|Fatal Python", said)
    again = start(world)
    assert [each.end()[0] for each in again] == [0] * world
    ends = [torch.load(f"end-{rank}.pt", weights_only=True) for rank in range(world)]
    assert all(same(ends[0], end) for end in ends[1:])
    if world == 2:
        assert same(ends[0], whole[MultiGPUAddon])


def test_ranks_that_all_lost_a_connection():
    """Where nobody reports another error, the network is the cause; a cause is named with its error."""
    summarize_ranks = drift.summarize_ranks
    assert summarize_ranks({1: "", 2: ""}, 3, 0, "").startswith(
        "all 3 ranks lost a connection, and none reports another error"
    )
    assert (
        summarize_ranks({1: "", 2: "ValueError: bad sample"}, 3, 0, "") == "rank 2 of 3 failed: ValueError: bad sample"
    )


class Fails(Task):
    """Raises on some ranks when step 3 has ended, after which the state is saved."""

    who = (1,)

    def on_step_end(self, outputs):
        super().on_step_end(outputs)
        if self.rank in self.who and self.progress_checker.step == 3:
            raise ValueError("bad sample")


@on_ranks(2, 3)
def test_ranks_that_wait_to_save_are_told_that_another_one_fails(world, tmp_path):
    """They do not wait for the timeout, though its process is still there."""
    trainer = build(Fails, (MultiGPUAddon, StateManagerAddon), save_path=tmp_path / "run", save_every=3, seed=1)
    rank = trainer.rank
    told = rf"rank {rank} of {world} called save_state, and rank 1 of {world} failed: ValueError: bad sample"
    with pytest.raises(ValueError if rank == 1 else DistributedError, match="bad sample" if rank == 1 else told):
        trainer.run(1, loader(12 * world, 2))
    Path(tmp_path, f"ended-{rank}").touch()
    wait_for(lambda: len(list(tmp_path.glob("ended-*"))) == world)
    os._exit(0)  # What rank 1 has not exchanged is still under way.


@on_ranks(2)
def test_ranks_that_have_all_failed_may_make_a_call_together(world, tmp_path):
    """One of them later than the others look for failures."""
    trainer = build(Fails, (MultiGPUAddon, StateManagerAddon), save_path=tmp_path / "run", save_every=3, seed=1)
    trainer.who = (0, 1)
    with pytest.raises(ValueError, match="bad sample"):
        trainer.run(1, loader(12 * world, 2))
    if trainer.rank == 1:
        time.sleep(3)
    trainer.engine.rendezvous("save_state")


# ------------------------------------------------------------------------------------------------ under torchrun


def agent(*arguments, restarts=0):
    Path("ranks.py").write_text(SCRIPT)
    place = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--rdzv_id", "one"]
    with forks():
        return Torchrun(*place, "--nproc_per_node", "2", "--max-restarts", restarts, "ranks.py", 2, *arguments)


@pytest.mark.exhaustive  # The agent waits 30 s for a stopped rank before it kills it.
def test_a_stopped_rank_of_torchrun(whole):
    """torchrun kills it, and starts the ranks again: the end is bitwise the same."""
    status, _, said = agent("stop", 1, "step").end()
    assert status == 1
    assert SILENT.format(who=1, world=2) in said
    assert is_gone(Path("rank").read_text())
    assert agent().end()[0] == 0
    assert same(torch.load("end-0.pt", weights_only=True), whole[MultiGPUAddon])


@pytest.mark.exhaustive
def test_an_agent_of_torchrun_that_is_killed(whole):
    """Its ranks end at their next checkpoint, in words: nobody would start them again."""
    Path("ranks.py").write_text(SCRIPT)
    line = "-m torch.distributed.run --standalone --nproc_per_node 2 ranks.py 2 agent 1 step"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *line.split()], env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)  # fmt: skip
    said, _ = process.communicate(timeout=600)  # Its ranks have ended too, which write to the same pipe.
    assert process.returncode == -signal.SIGKILL
    assert is_gone(Path("rank").read_text())
    assert "does not answer: what serves it (rank 0, the agent of torchrun," in said, said
    assert not re.search(r"terminate called|\(SIGABRT\)|Fatal Python", said)
    assert agent().end()[0] == 0
    assert same(torch.load("end-0.pt", weights_only=True), whole[MultiGPUAddon])
