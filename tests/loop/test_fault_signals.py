"""A run that a signal stops: the step is finished and saved, on every rank, and a shell sees the status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from kit import faults, hand
from kit.faults import Child, KillAddon, answer, build, everything, forked, wait_for
from kit.rank_tasks import forks
from zae import Every
from zae.addons import (
    StateManagerAddon,
)
from zae.addons.mpu import MultiGPUAddon
from zae.checkpoint.folder import list_checkpoints, newest_valid
from zae.errors import DistributedError

# --- signals


class Signalled(faults.Task):
    """A task that is sent a signal at a place."""

    def __init__(self, *args: Any, at: int = 11, number: int = signal.SIGTERM, times: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at, self.number, self.times = at, number, times

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step + 1 == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
        return super().train_step(batch)


def long_run(folder: Path, cls: Any = Signalled, **options: Any) -> Any:
    made = build(cls, StateManagerAddon, save_path=folder / "run", save_every=Every(epochs=9), resume="auto", **options)
    made.run(3, hand.loader(), hand.loader(9, 4, seed=8, shuffle=False))
    return everything(made)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the end of the run that gets no signal."""
    return answer(long_run, tmp_path_factory.mktemp("straight"), faults.Task)


@pytest.mark.sample(count=2)
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)  # fmt: skip
@pytest.mark.parametrize("at", [1, 5, 6, 11, 18])
def test_finish_the_step_and_save(folder: Path, number: int, status: int, at: int, straight: Any) -> None:
    """The step is finished and saved, the status is 143 or 130, and the resumed end is the same."""
    outcome = forked(lambda: long_run(folder, number=number, at=at) and None)
    assert outcome.status == status, outcome.error
    newest = newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == at
    assert not (folder / "run" / ".lock").exists()
    assert answer(long_run, folder, faults.Task) == straight


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(folder: Path, number: int) -> None:
    """The same signal again kills, though the step goes on and on; what was saved is whole."""

    class Endless(Signalled):
        def train_step(self, batch: Any) -> dict[str, Any]:
            out = super().train_step(batch)
            while self.progress_checker.step == 9:
                torch.ones(64, 64) @ torch.ones(64, 64)
            return out

    outcome = forked(lambda: long_run(folder, Endless, at=10, times=2, number=number) and None)
    assert outcome.status == -number  # Else it would not end, which `forked` says.


def test_a_closed_terminal_sends_two_signals(folder: Path) -> None:
    """The system and the shell send SIGHUP each: the second does not end the step. Under nohup there is none."""
    outcome = forked(lambda: long_run(folder, number=signal.SIGHUP, at=10, times=2) and None)
    assert outcome.status == 129, outcome.error
    newest = newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == 10

    def ignored() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        long_run(folder / "nohup", number=signal.SIGHUP, at=10, times=2)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    outcome = forked(ignored)
    assert outcome.status == 0, outcome.error
    assert not list((folder / "nohup").glob("run/crash-*"))


def test_a_run_beside_the_main_thread_says_that_it_cannot_catch_signals(folder: Path, caplog: Any) -> None:
    trainer = build(faults.Task, StateManagerAddon, save_path=folder / "run")
    quiet = build(faults.Task, StateManagerAddon, save_path=folder / "quiet", save_on_signal=False)
    for each, said in ((quiet, 0), (trainer, 1)):
        thread = threading.Thread(target=each.run, args=(1, hand.loader(8)))
        thread.start()
        thread.join()
        assert each.last_path is not None
        assert sum("not in the main thread" in record.message for record in caplog.records) == said


def test_a_signal_in_a_validation_and_while_data_is_waited_for(folder: Path, straight: Any) -> None:
    """Wherever it comes, at most one more update is made before the save."""

    class InValidation(faults.Task):
        def test_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.step == 6 and not self.test_metrics:
                self.test_metrics["sent"] = 1.0
                os.kill(os.getpid(), signal.SIGTERM)
            return super().test_step(batch)

    class InData(faults.Task):
        def batches(self, loader: Any) -> Any:
            for index, batch in enumerate(super().batches(loader)):
                if self.progress_checker.step == 8 and index:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

    for cls, step in ((InValidation, 6), (InData, 9)):
        place = folder / cls.__name__
        assert forked(lambda place=place, cls=cls: long_run(place, cls) and None).status == 143
        newest = newest_valid(place / "run")
        assert newest is not None
        assert newest[1]["step"] == step
        assert answer(long_run, place, faults.Task) == straight


def two_ranks(folder: Path, seed: int, **options: Any) -> Any:
    faults.ambient(seed)
    model = faults.classifier()
    made = faults.Task.add_on(StateManagerAddon, MultiGPUAddon, KillAddon)(
        model, ["cpu", "cpu"], optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), seed=7, log_bar=False,
        save_path=folder, save_every=1, resume="auto", timeout=120.0, **options,
    )  # fmt: skip
    with forks():
        made.run(2, hand.loader(), hand.loader(9, 4, seed=8, shuffle=False))
    state = made.state_dict()["MultiGPUAddon"]
    assert state["world_size"] == len(state["ranks"]) == 2
    return everything(made)


def test_a_signal_to_one_rank(folder: Path) -> None:
    """SIGTERM to rank 1 alone saves the step after it and ends both; then SIGKILL; bitwise."""
    whole = two_ranks(folder / "whole", 1)
    with pytest.raises(SystemExit) as caught:
        two_ranks(folder / "run", 2, kill_at=2, kill_with=signal.SIGTERM, kill_rank=1)
    assert caught.value.code == 143
    assert max(path.name for path in list_checkpoints(folder / "run")) == "step-00000003"
    with pytest.raises(DistributedError, match=r"rank 1 of 2 \(process \d+\) was killed by signal 9"):
        two_ranks(folder / "run", 3, kill_at=4, kill_rank=1)
    assert max(path.name for path in list_checkpoints(folder / "run")) == "step-00000004"
    assert two_ranks(folder / "run", 4) == whole


def test_a_signal_to_the_whole_group(folder: Path) -> None:
    """A cluster signals the loader's workers as well; they die, and the state of the last step is saved."""

    def run() -> Any:
        made = build(faults.Task, StateManagerAddon, save_path=folder / "run", save_every=Every(epochs=99), log_every=1)
        log = made.log
        made.log = lambda metrics, step: (log(metrics, step), (folder / "step").write_text(str(step)))
        made.run(10**6, hand.loader(400, num_workers=2))

    child = Child(run)
    step = folder / "step"
    wait_for(lambda: step.exists() and int(step.read_text() or 0) > 5)
    os.killpg(child.pid, signal.SIGTERM)
    outcome = child.wait()
    assert outcome.status == 143, outcome.error
    newest = newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] >= 5
    assert not list((folder / "run").glob("crash-*"))


def test_a_worker_dies_with_the_lock_of_the_others(folder: Path) -> None:
    """A worker may be killed while it holds what torch waits for without an end: the run saves and ends."""
    held = []

    class Held(DataLoader[Any]):
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            held.append(weakref.ref(iterator))
            return iterator

    class Hit(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.step == 2:
                held[0]()._workers_done_event._cond.acquire()  # As if by a worker that has ended.
                os.killpg(os.getpid(), signal.SIGTERM)
            return super().train_step(batch)

    def run() -> None:
        made = build(Hit, StateManagerAddon, save_path=folder / "run", save_every=Every(epochs=99))
        made.run(1, Held(hand.data(40), batch_size=4, num_workers=2))

    outcome = Child(run).wait()
    assert outcome.status == 143, outcome.error
    newest = newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == 3


def test_handlers_that_were_there(folder: Path) -> None:
    """An earlier handler is called after the save, and all are back in place after a run."""
    calls: list[Any] = []

    def mine(number: int, frame: Any) -> None:
        calls.append((number, sorted(path.name for path in list_checkpoints(folder / "run"))))

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as caught:
            long_run(folder, at=4)
        assert caught.value.code == 143
        assert calls == [(signal.SIGTERM, ["step-00000004"])]
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
        long_run(folder, faults.Task)
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(KeyboardInterrupt):
            long_run(folder / "other", number=signal.SIGINT, at=2)
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_not_the_main_thread(folder: Path) -> None:
    """In another thread there are no signals, and no error."""
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(long_run(folder, faults.Task)))
    thread.start()
    thread.join(600)
    assert len(ended) == 1


@pytest.mark.exhaustive
def test_the_status_that_a_shell_sees(folder: Path) -> None:
    """A script that gets Ctrl-C ends with 130 for its shell, after the save."""
    script = folder / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = {[str(each) for each in Path(__file__).parents[:2]]!r}\n"
        # Where it is installed, torch imports it at exit, and Python forgets that Ctrl-C ended the script.
        "sys.modules['tabulate'] = None\n"
        "import test_fault_signals, signal, pathlib\n"
        f"test_fault_signals.long_run(pathlib.Path({str(folder)!r}), number=signal.SIGINT, at=3)\n"
    )
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} {script}; echo $?"], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip() == "130", done.stderr
    *_, saved, last = done.stderr.splitlines()
    assert "saved at step 3" in saved
    assert last == "KeyboardInterrupt", "where it was raised tells nothing"
    newest = newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == 3


def test_no_handler_of_a_run_outlives_it(folder: Path) -> None:
    """Neither where a run ends before another that began within it, nor where others put its handler back."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}

    def begun(name: str) -> Any:
        made = build(faults.Task, StateManagerAddon, save_path=folder / name)
        made.setup()
        made.on_run_begin()
        return made

    outer, inner = begun("outer"), begun("inner")
    of_runs = {number: signal.getsignal(number) for number in numbers}
    outer.teardown()
    assert {number: signal.getsignal(number) for number in numbers} == of_runs, "the other run goes on"
    again = begun("outer")
    inner.teardown()
    again.teardown()
    assert {number: signal.getsignal(number) for number in numbers} == before

    calls = []
    try:
        signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
        mine, made = signal.getsignal(signal.SIGUSR1), begun("one")
        of_run = [signal.getsignal(number) for number in numbers]
        signal.signal(signal.SIGTERM, lambda number, frame: of_run[0](number, frame))  # A library's, which continues.
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        made.teardown()
        for number, handler in zip(numbers[1:], of_run[1:]):
            signal.signal(number, handler)  # As a library does that was there for a while.
        signal.raise_signal(signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        ended = forked(lambda: (signal.signal(signal.SIGTERM, of_run[0]), signal.raise_signal(signal.SIGTERM)))
        assert ended.status == -signal.SIGTERM
        next_one = begun("one")
        next_one.teardown()
        assert signal.getsignal(signal.SIGUSR1) is mine, "what it was put over is not counted"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
