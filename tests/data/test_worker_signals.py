"""Workers of a loader survive a signal that asks the run to save and end, and nothing else is different about them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from kit import faults, hand
from kit.faults import Child, answer, build, everything, forked, wait_for
from zae import Every
from zae.addons import StateManagerAddon
from zae.checkpoint.folder import newest_valid
from zae.data.batch_limits import BatchLimits
from zae.data.sharding import shard
from zae.data.shards import Ranks
from zae.data.workers import iterate, keep_from_workers

TERM, INT, USR1, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
STATUS = {TERM: 143, INT: 130, USR1: 143, HUP: 129}


class Signalled(faults.Task):
    """Sends a signal to its whole group, workers included, at a moment of the run."""

    unsaved_attributes = ("at",)

    def __init__(self, *args: Any, at: str = "", number: int = TERM, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at, self.number = at, number

    def reach(self, moment: str) -> None:
        """Send the signal, and let the workers get it before anything else happens."""
        if moment == self.at and self.progress_checker.step in (6, 7):
            self.at = ""
            os.killpg(os.getpid(), self.number)
            time.sleep(0.1)

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.reach("step")
        return super().train_step(batch)

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.reach("validation" if self.progress_checker.pending_validation else "evaluation")
        return super().test_step(batch)

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.progress_checker.epoch == 1:
            self.evaluate(self.other)
            self.evaluated.touch()

    def state_dict(self) -> dict[str, Any]:
        self.reach("save")
        return super().state_dict()


def run(folder: Path, kind: type = DataLoader, at: str = "", number: int = TERM, **options: Any) -> Any:
    """Train two epochs over loaders with workers."""
    trainer = build(Signalled, StateManagerAddon, save_path=folder / "run", save_every=Every(epochs=1), resume="auto",
                    at=at, number=number)  # fmt: skip
    options = {"num_workers": 2, **options}
    trainer.other, valid = (hand.loader(40, seed=seed, shuffle=False, **options) for seed in (8, 9))
    trainer.evaluated = folder / "evaluated"
    trainer.run(2, kind(hand.data(24), 4, shuffle=True, **options), valid)
    return everything(trainer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Any:
    """Return what a run ends with that gets no signal: workers that persist take their seed from training once."""
    known: dict[bool, Any] = {}

    def of(options: Any) -> Any:
        persists = options.get("persistent_workers", False)
        if persists not in known:
            known[persists] = answer(lambda: run(tmp_path_factory.mktemp("whole"), persistent_workers=persists))
        return known[persists]

    return of


MANY = pytest.mark.exhaustive
CASES = [
    *[("evaluation", number, {}) for number in (TERM, INT, USR1, HUP)],
    ("evaluation", TERM, {"persistent_workers": True}),
    ("validation", TERM, {"persistent_workers": True}),
    ("step", INT, {"prefetch_factor": 1}),
    ("save", TERM, {"persistent_workers": True}),
    ("step", USR1, {"kind": StatefulDataLoader}),
    pytest.param("evaluation", TERM, {"multiprocessing_context": "spawn", "num_workers": 1}, marks=MANY),
    pytest.param("evaluation", INT, {"multiprocessing_context": "forkserver", "num_workers": 1}, marks=MANY),
]


@pytest.mark.sample(count=2)
@pytest.mark.parametrize(("at", "number", "options"), CASES)
def test_a_signal_to_the_whole_group(folder: Path, at: str, number: int, options: Any, whole: Any) -> None:
    """What is under way gets its batches, the state is saved, and the resumed end is bitwise the same."""
    outcome = forked(lambda: run(folder, at=at, number=number, **options) and None)
    assert outcome.status == STATUS[number], outcome.error
    newest = newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == (7 if at in ("step", "save") else 6)
    assert not list((folder / "run").glob("crash-*"))
    assert (folder / "evaluated").exists() == (at != "validation")
    if "kind" not in options:  # A stateful loader draws otherwise.
        assert answer(lambda: run(folder, **options)) == whole(options)


class Stream(IterableDataset[Any]):
    """Batches of one sample."""

    is_sharded = True

    def __iter__(self) -> Iterator[Any]:
        return iter(hand.data(24))


VIEWS = {
    "limit_batches": lambda loader: BatchLimits(20).of_training(loader),
    "ranks": lambda loader: shard(loader, True, Ranks(0, 2, lambda value: value, lambda agrees: agrees)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_signal_to_the_workers_of_a_stream(view: str) -> None:
    """Limited, or on several ranks, its loader is read by something else, and its workers survive as well."""

    def read() -> int:
        keep_from_workers(0, {TERM})
        batches = iterate(VIEWS[view](DataLoader(Stream(), 1, num_workers=1, prefetch_factor=1)))
        next(batches)
        for worker in children(os.getpid()):
            os.kill(worker, TERM)
        time.sleep(0.1)
        return 1 + len(list(batches))

    assert answer(read) == {"limit_batches": 20, "ranks": 24}[view]


class Program(Dataset[Any]):
    """Samples that are read by a program, which is terminated."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        with subprocess.Popen(["sleep", "100"]) as program:
            program.terminate()
            assert program.wait() == -TERM
        return hand.data(8)[index]


def test_what_workers_are_given_and_what_they_start(folder: Path) -> None:
    """Their own init function is called, and stays; a program that they start does not inherit anything."""

    def begin(worker: int) -> None:
        (folder / f"worker-{worker}").touch()

    def train() -> None:
        loader = DataLoader(Program(), 4, num_workers=1, worker_init_fn=begin)
        build(faults.Task, StateManagerAddon, save_path=folder / "run").run(1, loader)
        assert loader.worker_init_fn is begin
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()

    answer(train)
    assert (folder / "worker-0").exists()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_workers_end_without_their_run(folder: Path) -> None:
    """Where the run was killed, a signal ends them at once."""

    class Slow(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            (folder / "begun").touch()
            time.sleep(0.01)
            return super().train_step(batch)

    def train() -> None:
        build(Slow, StateManagerAddon, save_path=folder / "run").run(9, hand.loader(800, num_workers=2))

    child = Child(train)
    wait_for((folder / "begun").exists)
    workers = children(child.pid)
    for each in workers:
        os.kill(each, TERM)
    time.sleep(0.1)
    assert len(workers) == 2
    assert not any(map(is_gone, workers))
    child.signal(signal.SIGKILL)
    assert child.wait().status == -signal.SIGKILL
    for each in workers:
        os.kill(each, TERM)
    wait_for(lambda: all(map(is_gone, workers)), seconds=4)  # Torch looks for their parent every 5 s.


SCRIPT = """
    import tempfile, time, torch
    from zae import Trainer
    from zae.addons import StateManagerAddon

    class Task(Trainer):
        def train_step(self, batch):
            return {"loss": self.model(batch).square().mean()}
        test_step = train_step

    class Data(torch.utils.data.Dataset):
        hangs = torch.zeros(1).share_memory_()
        def __len__(self):
            return 8
        def __getitem__(self, index):
            if self.hangs and index == 7:
                time.sleep(1000)
            return torch.ones(2)

    model = torch.nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(Data(), 2, num_workers=2, persistent_workers=True)
    Task.add_on(StateManagerAddon)(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False,
                                   save_path=tempfile.mkdtemp()).run(1, loader)
    Data.hangs += 1
    rest = iter(loader)
    next(rest)
    print("end")
"""


@pytest.mark.exhaustive
def test_a_script_ends_that_leaves_workers_behind() -> None:
    """Those that persist, and one that hangs: Python ends them as it exits, without a word."""
    Path("script.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
