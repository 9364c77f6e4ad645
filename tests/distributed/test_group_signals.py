"""A signal to whole groups of processes, once or again and again: launchers, clusters and terminals send it so.

The ranks save and end with their workers, and the run that is started again ends bitwise as if nothing had happened.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import faults, hand
from kit.faults import Child, everything, wait_for
from kit.rank_tasks import forks
from kit.ranks import _be_rank
from zae import Every
from zae.addons import FSDPAddon, MultiGPUAddon, StateManagerAddon
from zae.checkpoint.folder import list_checkpoints

TERM = signal.SIGTERM
MANY = pytest.mark.exhaustive


class Noted(faults.Task):
    """Leaves its number as it trains, in steps that a signal may hit anywhere."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step == 2:
            Path(f"rank-{self.rank}").write_text(str(os.getpid()))
        time.sleep(0.004)
        return super().train_step(batch)


def train(folder: Path, engine: type, workers: int, **options: Any) -> Any:
    """Train as one of the ranks of a launcher; return what the run ends with."""
    model = faults.classifier()
    trainer = Noted.add_on(StateManagerAddon, engine)(
        model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), seed=7, log_bar=False, timeout=60.0,
        save_path=folder, save_every=Every(epochs=99), resume="auto", **options,
    )  # fmt: skip
    trainer.run(3, hand.loader(240, num_workers=workers), hand.loader(40, num_workers=workers))
    return everything(trainer)


_meetings = itertools.count()


def start(folder: Path, engine: type = MultiGPUAddon, workers: int = 2, **options: Any) -> list[Child]:
    """Start two ranks, each with its own group, as torchrun does."""
    for rank in (0, 1):
        Path(f"rank-{rank}").unlink(missing_ok=True)
    meeting = Path(f"meeting-{next(_meetings)}").absolute()
    meeting.mkdir()
    call = partial(train, folder, engine, workers, **options)
    with forks():
        return [Child(_be_rank, rank, 2, meeting, 60.0, None, call) for rank in (0, 1)]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def send(number: int, *targets: int, to: Callable[[int, int], None] = os.kill) -> None:
    for pid in targets:
        try:
            to(pid, number)
        except ProcessLookupError:
            continue


def by_a_launcher(number: int, ranks: list[int]) -> None:
    """To the group of each rank."""
    send(number, *ranks, to=os.killpg)


def by_a_cluster_and_a_launcher(number: int, ranks: list[int]) -> None:
    """To every process, of which the launcher passes it on to the groups."""
    every = [each for rank in ranks for each in (rank, *children(rank))]
    send(number, *random.sample(every, len(every)))
    time.sleep(random.random() * 0.02)
    by_a_launcher(number, ranks)


def again_and_again(number: int, ranks: list[int]) -> None:
    """By somebody who is impatient."""
    for _ in range(20):
        by_a_launcher(number, ranks)
        time.sleep(random.random() * 0.005)


WAYS = (by_a_launcher, by_a_cluster_and_a_launcher, again_and_again)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Callable[[type], Any]:
    """Return what a run of an engine ends with that nothing disturbs."""
    known: dict[type, Any] = {}

    def of(engine: type) -> Any:
        if engine not in known:
            ranks = start(tmp_path_factory.mktemp("whole"), engine, workers=0)
            outcomes = [rank.wait() for rank in ranks]
            assert [each.status for each in outcomes] == [0, 0], outcomes[0].error + outcomes[1].error
            known[engine] = [each.result for each in outcomes]
        return known[engine]

    return of


def repeat(count: int) -> Any:
    return pytest.param(count, marks=MANY if count > 1 else ())


@pytest.mark.parametrize("count", [repeat(1), repeat(6)])
@pytest.mark.parametrize(
    ("way", "number", "engine", "options"),
    [
        pytest.param(by_a_launcher, TERM, MultiGPUAddon, {}, marks=MANY),
        pytest.param(by_a_cluster_and_a_launcher, TERM, MultiGPUAddon, {"save_async": True}, marks=MANY),
        (again_and_again, TERM, MultiGPUAddon, {"workers": 0}),
        pytest.param(again_and_again, signal.SIGUSR1, FSDPAddon, {"save_format": "sharded"}, marks=MANY),
        pytest.param(by_a_cluster_and_a_launcher, signal.SIGINT, MultiGPUAddon, {}, marks=MANY),
        pytest.param(by_a_cluster_and_a_launcher, signal.SIGHUP, MultiGPUAddon, {"workers": 1}, marks=MANY),
    ],
)
def test_ranks_save_and_end(way: Any, number: int, engine: type, options: Any, count: int, whole: Any) -> None:
    """Wherever the signal hits, and however often: a checkpoint of a step, from which the end is bitwise the same."""
    status = {signal.SIGINT: 130, signal.SIGHUP: 129}.get(number, 143)
    for index in range(count):
        folder = Path(f"run-{index}")
        ranks = start(folder, engine, **options)
        wait_for(lambda: all(Path(f"rank-{rank}").exists() for rank in (0, 1)))
        time.sleep(random.random() * 0.4)
        way(number, [each.pid for each in ranks])
        outcomes = [each.wait() for each in ranks]
        assert [each.status for each in outcomes] == [status] * 2, outcomes[0].error + outcomes[1].error
        assert [path.name for path in folder.glob("*crash*")] == []
        assert 2 <= int(list_checkpoints(folder)[0].name[5:]) < 90
        if index < 2:
            outcomes = [each.wait() for each in start(folder, engine, **options)]
            assert [each.result for each in outcomes] == whole(engine), outcomes[0].error


# ---------------------------------------------------------------------------------------------- launchers as they are

SCRIPT = """
    import os, pathlib, sys, time, torch
    from zae import Every, Trainer
    from zae.addons import MultiGPUAddon, StateManagerAddon

    class Task(Trainer):
        def train_step(self, batch):
            if self.progress_checker.step == 3:
                pathlib.Path(f"rank-{self.rank}").write_text(str(os.getpid()))
            time.sleep(0.01)
            return {"loss": self.model(batch).square().mean()}

        test_step = train_step

    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(list(torch.randn(4000, 4)), 4, shuffle=True, num_workers=int(sys.argv[1]))
    trainer = Task.add_on(StateManagerAddon, MultiGPUAddon)(
        lambda: torch.nn.Linear(4, 1), "cpu", optimizer=torch.optim.AdamW, seed=0, log_bar=False, save_path="run",
        save_every=Every(steps=10**6), resume="auto")
    trainer.run(1, loader, max_steps=int(sys.argv[2]))
    if trainer.is_main:
        torch.save(trainer.unwrap().state_dict(), "end.pt")
"""

LAUNCHERS = {
    "torchrun": "-m torch.distributed.run --standalone --nproc_per_node 2 script.py {}",
    "accelerate": "-m accelerate.commands.accelerate_cli launch --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --multi_gpu script.py {}",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "workers", "count"),
    [("torchrun", 2, 1), *((name, workers, 6) for name in LAUNCHERS for workers in (0, 2))],
)
def test_a_launcher_is_told_to_end(launcher: str, workers: int, count: int) -> None:
    """The launcher alone, or it and all processes below it, in turn; then the script is started again."""
    Path("script.py").write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}

    def launch(steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, *LAUNCHERS[launcher].format(f"{workers} {steps}").split()]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    for index in range(count):
        for path in (Path("rank-0"), Path("rank-1")):
            path.unlink(missing_ok=True)
        Path("run").rename(f"run-{index}") if Path("run").exists() else None
        agent = launch(400)
        wait_for(lambda: all(Path(f"rank-{rank}").exists() for rank in (0, 1)))
        time.sleep(random.random() * 0.3)
        ranks = children(agent.pid)
        workers_of = [each for rank in ranks for each in children(rank)]
        others = [*ranks, *workers_of] if (index + (count == 1)) % 2 else []
        send(TERM, agent.pid, *random.sample(others, len(others)))
        _, said = agent.communicate(timeout=300)
        assert agent.returncode != 0
        assert len(workers_of) >= 2 * workers
        assert [path.name for path in Path("run").glob("*crash*")] == [], said
        assert len(list_checkpoints("run")) == 1, said
    if count > 1:
        assert launch(400).wait(300) == 0
        resumed = torch.load("end.pt", weights_only=True)
        Path("run").rename("resumed")
        assert launch(400).wait(300) == 0
        straight = torch.load("end.pt", weights_only=True)
        assert all(torch.equal(resumed[name], straight[name]) for name in straight)
