"""A rank that raises, is killed or hangs between two steps of the others: one error that names it, and a way on."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit.rank_tasks import Task, build, forks, loader, same, weights
from zae import DistributedError
from zae.addons import FSDPAddon, MultiGPUAddon, PipelineAddon, StateManagerAddon
from zae.checkpoint.reader import load_checkpoint
from zae.distributed import spawn as launching
from zae.distributed.rank_process import has_lost_peer, has_timed_out

ENDS = {
    "raise": (ValueError, r"^bad sample \[rank {who} of 2\]"),
    "kill": (DistributedError, r"rank {who} of 2 \(process \d+\) was killed by signal 9 \(SIGKILL\)"),
    "hang": (DistributedError, r"rank {who} \(process \d+\) of 2 did not answer within timeout=8 s"),
}


class Fails(Task):
    """Fails on one rank in its sixth step, or after its fifth, when the others may be in the sixth."""

    how = where = ""
    who = 0

    def train_step(self, batch):
        self.fail("step")
        return super().train_step(batch)

    def on_step_end(self, outputs):
        super().on_step_end(outputs)
        self.fail("end")

    def fail(self, where):
        if (where, self.rank) != (self.where, self.who) or self.progress_checker.step != 5:
            return
        if self.how == "raise":
            raise ValueError("bad sample")
        if self.how in ("kill", "term"):
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGTERM)
        while self.how == "hang":
            time.sleep(0.1)


def run(folder, how="", who=0, where="step", engine=MultiGPUAddon):
    timeout = 8.0 if how == "hang" else 200.0
    trainer = build(
        Fails, (engine, StateManagerAddon), ["cpu", "cpu"], timeout=timeout, seed=1, save_path=folder, save_every=2,
        keep_last=None, resume="auto",
    )  # fmt: skip
    trainer.how, trainer.who, trainer.where = how, who, where
    rows = 4 if engine is PipelineAddon else 2  # Its ranks share a batch, those of the others take one each.
    with forks():
        return trainer, trainer.run(2, loader(16, rows, 3))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that gives the weights and history of an engine's run that nothing has disturbed."""

    @functools.cache
    def run_whole(engine):
        trainer, metrics = run(tmp_path_factory.mktemp("whole") / "run", engine=engine)
        assert metrics["step"] == 8
        return weights(trainer), metrics

    return run_whole


CASES = [(MultiGPUAddon, *case) for case in itertools.product(ENDS, (0, 1), ("step", "end"))]
CASES += [(FSDPAddon, "raise", 1, "step"), (FSDPAddon, "kill", 0, "end"), (FSDPAddon, "hang", 1, "step")]
CASES += [(PipelineAddon, "raise", 1, "step"), (PipelineAddon, "kill", 0, "end"), (PipelineAddon, "hang", 1, "step")]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(("engine", "how", "who", "where"), CASES)
def test_a_rank_fails_and_the_run_goes_on(engine, how, who, where, whole, monkeypatch, capfd):
    """Nothing aborts or is half there; a resume ends bitwise."""
    monkeypatch.setattr(launching, "GRACE_TIMEOUT_S", 1.0)  # Seconds that nobody is going to use.
    kind, text = ENDS[how]
    begun = time.monotonic()
    with pytest.raises(kind, match=text.format(who=who)):
        run("run", how, who, where, engine)
    assert time.monotonic() - begun < 150  # What is known at once waits for no timeout.
    assert not dist.is_initialized()
    assert not re.search("terminate called|SIGABRT|Fatal Python", capfd.readouterr().err)
    saved = sorted(path.name for path in Path("run").iterdir() if not path.name.startswith("crash-"))
    assert [name for name in saved if name.startswith("step-")] == ["step-00000002", "step-00000004"]
    assert not [name for name in saved if "tmp" in name]
    for path in Path("run").glob("[cs]*-*"):
        load_checkpoint(path)
    trainer, metrics = run("run", engine=engine)
    expected, history = whole(engine)
    assert same(weights(trainer), expected)
    assert metrics["step"] == history["step"]
    assert metrics["train_metrics_history"] == history["train_metrics_history"]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("engine", "where", "last"), [(MultiGPUAddon, "step", 7), (MultiGPUAddon, "end", 6), (FSDPAddon, "step", 7)]
)
def test_a_signal_to_one_rank_ends_all_of_them_one_step_later(engine, where, last, whole):
    """SIGTERM in the sixth step of one rank, or after the fifth: all end after the next, and go on bitwise."""
    with pytest.raises(SystemExit) as caught:
        run("run", "term", 1, where, engine)
    assert caught.value.code == 143
    assert max(path.name for path in Path("run").glob("step-*")) == f"step-{last:08}"
    trainer, metrics = run("run", engine=engine)
    assert same(weights(trainer), whole(engine)[0])
    assert metrics["train_metrics_history"] == whole(engine)[1]["train_metrics_history"]


class EndsAll(Task):
    """Every rank ends in its third step, at the same time and without a word."""

    def train_step(self, batch):
        if self.progress_checker.step == 2:
            assert self.world_size == 2
            os._exit(9)
        return super().train_step(batch)


def test_ranks_that_all_end_at_once_are_an_error(monkeypatch):
    """However late this process is: here it sleeps from the first report until all ranks have ended."""
    real = launching._Ranks._note_deaths

    def late(ranks):
        real(ranks)
        for rank in ranks._ranks:
            rank.process.join()

    monkeypatch.setattr(launching._Ranks, "_note_deaths", late)
    trainer = build(EndsAll, (MultiGPUAddon,), ["cpu", "cpu"], timeout=60.0, seed=1)
    with forks(), pytest.raises(DistributedError, match=r"rank 0 of 2 \(process \d+\) ended"):
        trainer.run(2, loader(16, 2, 3))


class Deep(nn.Module):
    """Calls the larger of two blocks for some batches only."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3)) for width in (4, 8))

    def forward(self, inputs):
        return self.blocks[0](self.blocks[int(inputs.sum() > 0)](inputs))


class Depth(Task):
    def train_step(self, batch):
        return {"loss": self.model(batch[0]).square().mean()}


@pytest.mark.parametrize(
    ("level", "kind", "text"),
    [
        ("OFF", DistributedError, r"SIGABRT\); gloo .* the same blocks .*TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ("DETAIL", RuntimeError, r"(?s)Detected mismatch between collectives.*\[rank . of 2\]"),
    ],
)
def test_ranks_that_call_different_blocks(level, kind, text, monkeypatch):
    """gloo ends a rank, which the error explains; torch checks each exchange where it is asked to."""
    monkeypatch.setattr(launching, "GRACE_TIMEOUT_S", 1.0)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    dist.set_debug_level_from_env()  # As torch does when it is imported, which a fork does not do.
    rows = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]).repeat(4, 1)
    trainer = build(Depth, (FSDPAddon,), ["cpu", "cpu"], model=Deep(), timeout=60.0, seed=1)
    with forks(), pytest.raises(kind, match=text) as caught:
        trainer.run(1, DataLoader(TensorDataset(rows), 1))
    monkeypatch.undo()
    dist.set_debug_level_from_env()
    if level == "DETAIL":
        assert "in train_step" in "".join(caught.value.__notes__)


def test_a_rank_that_does_not_answer_is_not_one_that_has_ended():
    """A link that is down, in the words of gloo: it said that the rank was killed, as when memory runs out."""
    for text in ("Application timeout caused pair closure", "Timed out waiting 15000ms for recv operation to complete"):
        assert has_timed_out(RuntimeError(f"[gloo/transport/tcp/pair.cc:1] {text}"))
    assert not has_timed_out(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"))


def test_short_memory_in_an_exchange_is_no_lost_rank():
    """NCCL names itself where a device has no memory for its buffers: the cause is in this rank."""
    short = RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error: Cuda failure 2 'out of memory'"
    )
    assert not has_lost_peer(short)
    assert has_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"))
