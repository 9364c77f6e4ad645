"""Faults while a run goes on: it keeps running, or it stops in time with the truth, and nothing is lost."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kit import faults, hand
from kit.faults import Child, KillAddon, answer, everything, forked
from kit.rank_tasks import forks
from zae import Every, Trainer
from zae.addons import (
    AMPAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    StateManagerAddon,
    TensorBoardLoggerAddon,
)
from zae.addons.mpu import MultiGPUAddon
from zae.errors import CheckpointError, ConfigError, DistributedError, NonFiniteError
from zae.loop.nonfinite import LATEST, NonFiniteGuard
from zae.storage import files


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory."""
    made = faults.memory_folder()
    yield made
    shutil.rmtree(made)


class Bad(faults.Task):
    """A task whose loss is not finite at some steps."""

    def __init__(self, *args: Any, bad: Any = (5,), value: float = math.nan, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bad, self.value = bad, value

    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        if self.progress_checker.step + 1 in self.bad:
            out["loss"] = out["loss"] * self.value
        return {**out, "part": 0.25}


def build(cls: Any, *add_ons: Any, lr: float = 0.01, **options: Any) -> Any:
    model = faults.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return cls.add_on(*add_ons)(model, "cpu", optimizer=optimizer, seed=7, log_bar=False, **options)


# --- not finite


@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon,), (AMPAddon,), (StateManagerAddon, EMAAddon)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fd1_p34_raise_before_the_step(folder: Path, value: float, add_ons: Any) -> None:
    """F-D1, P-34: step, epoch, loss, its parts and the learning rate are named; the weights are those of step 4."""
    options: dict[str, Any] = {"save_path": folder / "run", "save_every": 1, "decay": 0.9}
    options = options if StateManagerAddon in add_ons else {}
    accumulate = {"gradient_accumulation_steps": 2} if GradientAccumulationAddon in add_ons else {}
    plain = build(faults.Task, *add_ons, **options | ({"save_path": folder / "plain"} if options else {}), **accumulate)
    loader = hand.loader(40, batch_size=4)
    plain.run(None, loader, max_steps=4)
    made = build(Bad, *add_ons, value=value, **options, **accumulate)
    with pytest.raises(NonFiniteError) as caught:
        made.run(None, loader, max_steps=20)
    text = str(caught.value)
    assert all(word in text for word in ("step 5", "epoch 1", f"loss {value:g}", "part 0.25", "lr 0.01", "of step 4"))
    parameters = [{name: p.detach() for name, p in each.unwrap().named_parameters()} for each in (made, plain)]
    assert faults.fingerprint(parameters[0]) == faults.fingerprint(parameters[1])
    assert everything(made)["optimizer"] == everything(plain)["optimizer"]
    if options:
        assert made.last_path.name == "step-00000004"


def test_fd1_a_gradient_norm_that_is_not_finite(folder: Path) -> None:
    """F-D1: a finite loss with a gradient that is not is caught where clipping computes the norm."""

    class Root(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            out = super().train_step(batch)
            if self.progress_checker.step == 2:  # sqrt(0) is 0, and its gradient is infinite.
                out["loss"] = out["loss"] + (self.model[0].weight * 0).square().sum().sqrt()
            return out

    made = build(Root, gradient_clip=1.0)
    with pytest.raises(NonFiniteError, match=r"step 3 .*gradient norm nan"):
        made.run(1, hand.loader())
    assert made.progress_checker.step == 2
    assert all(torch.isfinite(p).all() for p in made.unwrap().parameters())
    model = faults.classifier()
    body, head = list(model[:-1].parameters()), list(model[-1].parameters())
    two = Root(
        model, "cpu", gradient_clip=1.0, optimizer=[torch.optim.SGD(body, 0.1), torch.optim.SGD(head, 0.1)], seed=1
    )
    with pytest.raises(NonFiniteError, match="step 3 "):
        two.run(1, hand.loader())


@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon,), (AMPAddon,)])
def test_fd1_skip_leaves_the_step_out(add_ons: Any) -> None:
    """F-D1: "skip" is a step that never was for weights, optimizer, schedule and average; it is counted and logged."""
    options = {"gradient_accumulation_steps": 2} if GradientAccumulationAddon in add_ons else {}
    options |= {"precision": "fp16", "loss_scale": (8.0, 1.0)} if AMPAddon in add_ons else {}
    seen: dict[int, str] = {}

    class Watched(Bad):
        def on_step(self) -> None:
            seen[self.progress_checker.step] = everything(self)["optimizer"] + everything(self)["model"][:0]

        def checkpoint(self) -> None:
            super().checkpoint()
            weights = {
                key: value for key, value in self.model_state().items() if "running" not in key and "num" not in key
            }
            seen[self.progress_checker.step] = faults.fingerprint(weights) + everything(self)["optimizer"]

    made = build(
        Watched,
        EMAAddon,
        *add_ons,
        bad=(2, 3),
        decay=0.9,
        on_nonfinite="skip",
        log_every=1,
        gradient_clip=1.0,
        **options,
    )
    metrics = made.run(None, hand.loader(40, batch_size=4), max_steps=5)
    assert seen[1] == seen[2] == seen[3] != seen[4] != seen[5]
    assert metrics["nonfinite_steps"] == metrics["skipped_steps"] == 2
    assert made.log_history[-1]["nonfinite_steps"] == 2
    losses = [row["train/loss"] for row in made.log_history]
    assert [math.isnan(value) for value in losses] == [False, True, True, False, False], "P-34: never replaced in a log"


def test_fd1_warn_takes_the_step_and_never_saves_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F-D1: "warn" trains on; no checkpoint of weights that are not finite replaces one of finite ones."""
    made = build(
        Bad, StateManagerAddon, on_nonfinite="warn", save_path=folder / "run", save_every=1, keep_last=1, keep_best=0
    )
    metrics = made.run(2, hand.loader())
    assert metrics["nonfinite_steps"] == 8, "from step 5 on all are"
    assert "The step was taken all the same" in caplog.text
    assert "holds NaN or an infinity" in caplog.text
    assert made.last_path.name == "step-00000004"
    assert files.verify(made.last_path)["step"] == 4
    weights = files.load_weights(made.last_path)
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_fd1_weights_that_went_bad_unseen_are_not_saved(folder: Path) -> None:
    """F-D1: gradients that nobody looked at spoil the weights: the save refuses, the last good one stays."""

    class Spoiled(faults.Task):
        def optimizer_step(self) -> bool:
            stepped = super().optimizer_step()
            if self.progress_checker.step == 3:
                with torch.no_grad():
                    self.model[0].weight[0, 0] = math.inf
            return stepped

    made = build(Spoiled, StateManagerAddon, save_path=folder / "run", save_every=1, keep_last=1, keep_best=0)
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        made.run(1, hand.loader())
    assert [path.name for path in files.list_checkpoints(folder / "run")] == ["step-00000003"]


def test_fd1_an_overflow_of_the_loss_scale_is_no_error() -> None:
    """F-D1, P-05: what GradScaler skips is its own business."""
    made = build(faults.Task, AMPAddon, precision="fp16", loss_scale=(2.0**30, 1.0), gradient_clip=1.0)
    metrics = made.run(3, hand.loader())
    assert metrics["skipped_steps"] > 5
    assert metrics["nonfinite_steps"] == 0


def test_fd1_the_late_look_of_an_accelerator(folder: Path) -> None:
    """F-D1: where a look waits for the device it comes after 64 steps at most, and before anything is saved."""

    class Far(NonFiniteGuard):
        """As if every loss were on an accelerator."""

        def allows(self, trainer: Any, outputs: Any) -> bool:
            for out, _ in outputs:
                self._waiting.append(out["loss"].detach())
                self._steps.append(trainer.progress_checker.step + 1)
            if len(self._waiting) >= LATEST:
                self.settle(trainer)
            return True

    loader = hand.loader(800, batch_size=4)
    made = build(Bad, StateManagerAddon, bad=(70,), save_path=folder / "run", save_every=50, keep_last=None)
    made.nonfinite = Far("raise")
    with pytest.raises(NonFiniteError, match="step 70 was nan"):
        made.run(1, loader)
    assert 70 <= made.progress_checker.step <= 70 + LATEST
    assert made.last_path.name == "step-00000050"
    soon = build(Bad, StateManagerAddon, bad=(49,), save_path=folder / "soon", save_every=50, keep_last=None)
    soon.nonfinite = Far("raise")
    with pytest.raises(NonFiniteError, match="step 49 was nan"):
        soon.run(1, loader)
    assert files.list_checkpoints(folder / "soon") == []


def test_on_nonfinite_is_checked() -> None:
    """E11: the option says what it may be."""
    with pytest.raises(ConfigError, match="did you mean 'raise'"):
        build(faults.Task, on_nonfinite="rise")


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


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)  # fmt: skip
@pytest.mark.parametrize("at", [1, 5, 6, 11, 18])
def test_fd2_fd3_p26_finish_the_step_and_save(folder: Path, number: int, status: int, at: int) -> None:
    """F-D2, F-D3, P-26: the step is finished and saved, the status is 143 or 130, and the resumed end is the same."""
    whole = answer(long_run, folder / "whole", faults.Task)
    outcome = forked(lambda: long_run(folder, number=number, at=at) and None)
    assert outcome.status == status, outcome.error
    newest = files.newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == at
    assert not (folder / "run" / ".lock").exists()
    assert answer(long_run, folder, faults.Task) == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_fd2_a_second_signal_ends_at_once(folder: Path, number: int) -> None:
    """F-D2: the same signal again kills, though the step goes on and on; what was saved is whole."""

    class Endless(Signalled):
        def train_step(self, batch: Any) -> dict[str, Any]:
            out = super().train_step(batch)
            while self.progress_checker.step == 9:
                torch.ones(64, 64) @ torch.ones(64, 64)
            return out

    began = time.monotonic()
    outcome = forked(lambda: long_run(folder, Endless, at=10, times=2, number=number) and None)
    assert outcome.status == -number
    assert time.monotonic() - began < 30


def test_fd2_a_closed_terminal_sends_two_signals(folder: Path) -> None:
    """The system and the shell send SIGHUP each: the second does not end the step. Under nohup there is none."""
    outcome = forked(lambda: long_run(folder, number=signal.SIGHUP, at=10, times=2) and None)
    assert outcome.status == 129, outcome.error
    newest = files.newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == 10

    def ignored() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        long_run(folder / "nohup", number=signal.SIGHUP, at=10, times=2)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    outcome = forked(ignored)
    assert outcome.status == 0, outcome.error
    assert not list((folder / "nohup").glob("run/crash-*"))


def test_fd2_a_run_beside_the_main_thread_says_that_it_cannot_catch_signals(folder: Path, caplog: Any) -> None:
    trainer = build(faults.Task, StateManagerAddon, save_path=folder / "run")
    quiet = build(faults.Task, StateManagerAddon, save_path=folder / "quiet", save_on_signal=False)
    for each, said in ((quiet, 0), (trainer, 1)):
        thread = threading.Thread(target=each.run, args=(1, hand.loader(8)))
        thread.start()
        thread.join()
        assert each.last_path is not None
        assert sum("not in the main thread" in record.message for record in caplog.records) == said


def test_fd2_a_signal_in_a_validation_and_while_data_is_waited_for(folder: Path) -> None:
    """P-26: wherever it comes, at most one more update is made before the save."""
    whole = answer(long_run, folder / "whole", faults.Task)

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
        newest = files.newest_valid(place / "run")
        assert newest is not None
        assert newest[1]["step"] == step
        assert answer(long_run, place, faults.Task) == whole


def two_ranks(folder: Path, seed: int, **options: Any) -> Any:
    faults.ambient(seed)
    model = faults.classifier()
    made = faults.Task.add_on(StateManagerAddon, MultiGPUAddon, KillAddon)(
        model, ["cpu", "cpu"], optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), seed=7, log_bar=False,
        save_path=folder, save_every=1, resume="auto", timeout=60.0, **options,
    )  # fmt: skip
    with forks():
        made.run(2, hand.loader(), hand.loader(9, 4, seed=8, shuffle=False))
    state = made.state_dict()["MultiGPUAddon"]
    assert state["world_size"] == len(state["ranks"]) == 2
    return everything(made)


def test_p26_p12_a_signal_to_one_rank(folder: Path) -> None:
    """P-26, P-12, F-B3, F-D5: SIGTERM to rank 1 alone saves that step and ends both; then SIGKILL to it; bitwise."""
    whole = two_ranks(folder / "whole", 1)
    with pytest.raises(SystemExit) as caught:
        two_ranks(folder / "run", 2, kill_at=2, kill_with=signal.SIGTERM, kill_rank=1)
    assert caught.value.code == 143
    assert max(path.name for path in files.list_checkpoints(folder / "run")) == "step-00000002"
    with pytest.raises(DistributedError, match=r"rank 1 of 2 \(process \d+\) was killed by signal 9"):
        two_ranks(folder / "run", 3, kill_at=4, kill_rank=1)
    assert max(path.name for path in files.list_checkpoints(folder / "run")) == "step-00000004"
    assert two_ranks(folder / "run", 4) == whole


def test_fd2_a_signal_to_the_whole_group(folder: Path) -> None:
    """P-26: a cluster signals the loader's workers as well; they die, and the state of the last step is saved."""

    def run() -> Any:
        made = build(faults.Task, StateManagerAddon, save_path=folder / "run", save_every=Every(epochs=99), log_every=1)
        log = made.log
        made.log = lambda metrics, step: (log(metrics, step), (folder / "step").write_text(str(step)))
        made.run(10**6, hand.loader(400, num_workers=2))

    child = Child(run)
    step = folder / "step"
    while not (step.exists() and int(step.read_text() or 0) > 5):
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGTERM)
    outcome = child.wait()
    assert outcome.status == 143, outcome.error
    newest = files.newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] >= 5
    assert not list((folder / "run").glob("crash-*"))


def test_fd2_a_worker_dies_with_the_lock_of_the_others(folder: Path) -> None:
    """F-D2, P-26: a worker may be killed while it holds what torch waits for without an end: the run saves and ends."""
    held = []

    class Held(DataLoader[Any]):
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            held.append(weakref.ref(iterator))
            return iterator

    class Hit(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.step == 2:
                held[0]()._workers_done_event._cond.acquire()  # As if by a worker that is no more.
                os.killpg(os.getpid(), signal.SIGTERM)
            return super().train_step(batch)

    def run() -> None:
        made = build(Hit, StateManagerAddon, save_path=folder / "run", save_every=Every(epochs=99))
        made.run(1, Held(hand.data(40), batch_size=4, num_workers=2))

    outcome = Child(run).wait(20)
    assert outcome.status == 143, outcome.error
    newest = files.newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == 3


def test_fd2_handlers_that_were_there(folder: Path) -> None:
    """F-D2, P-26: an earlier handler is called after the save, and all are back in place after a run."""
    calls: list[Any] = []

    def mine(number: int, frame: Any) -> None:
        calls.append((number, sorted(path.name for path in files.list_checkpoints(folder / "run"))))

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


def test_fd2_not_the_main_thread(folder: Path) -> None:
    """F-D2: in another thread there are no signals, and no error."""
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(long_run(folder, faults.Task)))
    thread.start()
    thread.join(60)
    assert len(ended) == 1


def test_fd3_the_status_that_a_shell_sees(folder: Path) -> None:
    """F-D3: a script that gets Ctrl-C ends with 130 for its shell, after the save."""
    script = folder / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = {[str(each) for each in Path(__file__).parents[:2]]!r}\n"
        # Where it is installed, torch imports it at exit, and Python forgets that Ctrl-C ended the script.
        "sys.modules['tabulate'] = None\n"
        "import test_fault, signal, pathlib\n"
        f"test_fault.long_run(pathlib.Path({str(folder)!r}), number=signal.SIGINT, at=3)\n"
    )
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} {script}; echo $?"], capture_output=True, text=True, timeout=90
    )
    assert done.stdout.strip() == "130", done.stderr
    assert "KeyboardInterrupt" in done.stderr
    newest = files.newest_valid(folder / "run")
    assert newest is not None
    assert newest[1]["step"] == 3


# --- exceptions


class Failing(faults.Task):
    """Fails in step 8."""

    error: Any = ValueError("the user's own words")

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step == 7:
            self.fail()
        return super().train_step(batch)

    def fail(self) -> None:
        raise self.error


def test_fd4_an_exception_saves_apart(folder: Path) -> None:
    """F-D4: the user's traceback comes first and unchanged; crash-00000007 displaces nothing and is not resumed."""
    made = build(Failing, StateManagerAddon, save_path=folder / "run", save_every=Every(epochs=1), keep_last=1)
    with pytest.raises(ValueError, match="the user's own words") as caught:
        made.run(3, hand.loader())
    assert caught.value is Failing.error
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"
    note = "zae: in epoch 2, step 8 (batch 2), on cpu; the batch was list(Tensor[4, 4] float32, Tensor[4] int64)"
    assert note in caught.value.__notes__
    names = sorted(path.name for path in (folder / "run").iterdir())
    assert names == ["crash-00000007", "step-00000006"]
    manifest, _, state = files.load_checkpoint(folder / "run" / "crash-00000007")
    assert manifest["info"]["error"] == "ValueError"
    assert manifest["info"]["in_step"] is True
    assert state["progress"]["step"] == 7
    again = build(faults.Task, StateManagerAddon, save_path=folder / "run", resume=True)
    again.setup()
    assert again.progress_checker.step == 6
    looked = build(faults.Task, StateManagerAddon, save_path=folder / "look", resume=folder / "run" / "crash-00000007")
    looked.setup()
    assert looked.progress_checker.step == 7


def test_fd4_a_copy_of_what_a_failed_run_has_left_is_the_users(folder: Path) -> None:
    """F-D4: the state of a later failure takes the place of the earlier one, and of no folder that is named alike."""
    run = folder / "run"
    made = build(Failing, StateManagerAddon, save_path=run, save_every=Every(epochs=1))
    with pytest.raises(ValueError, match="own words"):
        made.run(3, hand.loader())
    kept = Path(shutil.copytree(run / "crash-00000007", run / "crash-00000007.kept"))
    (run / "crash-tests").mkdir()
    made = build(Failing, StateManagerAddon, save_path=run, save_every=Every(epochs=1), resume=True)
    made.fail = lambda: None
    made.test_step = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.run(3, hand.loader(), hand.loader())
    assert sorted(path.name for path in run.glob("crash-*")) == ["crash-00000007.kept", "crash-00000012", "crash-tests"]
    assert files.verify(kept)["step"] == 7


def test_fd4_a_disk_that_refuses_hides_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F-D4: when the crash checkpoint cannot be written, the error is still the user's."""

    class Broken(Failing):
        def fail(self) -> None:
            files.filesystem = faults.RefusingDisk(0, 28)
            super().fail()

    made = build(Broken, StateManagerAddon, save_path=folder / "run", save_every=1)
    before = files.filesystem
    try:
        with pytest.raises(ValueError, match="the user's own words"):
            made.run(3, hand.loader())
    finally:
        files.filesystem = before
    assert "could not be saved" in caplog.text


def test_fd12_out_of_memory_says_what_was_computed(folder: Path) -> None:
    """F-D12: step, shapes and dtypes of the batch are noted, also inside an accumulation window, and D4 holds."""

    class Full(Failing):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    made = build(
        Full, StateManagerAddon, GradientAccumulationAddon, save_path=folder / "run", gradient_accumulation_steps=2
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        made.run(3, hand.loader())
    text = "".join(traceback.format_exception(caught.value))
    assert "step 8" in text
    assert "Tensor[4, 4] float32" in text
    assert (folder / "run" / "crash-00000007").is_dir()


class Poisoned(Dataset[Any]):
    """Its worker dies, or raises, at a sample."""

    def __init__(self, how: str) -> None:
        self.how, self.data = how, hand.data(40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 30 and self.how != "killed in a step":
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("sample 30 is unreadable")
        return self.data[index]


class KillsWorker(faults.Task):
    """Kills a worker of its loader in a step, where torch raises for it."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step == 2:
            multiprocessing.active_children()[0].kill()
            time.sleep(20)  # The death interrupts it.
        return super().train_step(batch)


@pytest.mark.parametrize("how", ["killed", "killed in a step", "raises"])
def test_fd7_a_worker_dies(folder: Path, how: str) -> None:
    """F-D7: within 10 s an error names the worker and the dataset, and the crash checkpoint is there."""

    def run() -> Any:
        made = build(KillsWorker if "step" in how else faults.Task, StateManagerAddon, save_path=folder / "run")
        began = time.monotonic()
        try:
            made.run(1, DataLoader(Poisoned(how), batch_size=4, num_workers=2))
        except Exception as error:
            shown = "".join(traceback.format_exception(error))
            return shown, time.monotonic() - began, str(error), isinstance(error, RuntimeError)
        return None

    text, seconds, message, is_of_torch = answer(run)
    assert seconds < 10
    if how != "raises":  # In the exception itself: notes are not seen everywhere.
        assert is_of_torch
        assert re.search(r"DataLoader worker \d? ?\(pid", message)
        assert "a worker of a loader has died while batch" in message
        assert "dataset Poisoned of length 40" in message
        assert text.count("dataset Poisoned of length 40") == 1
    assert ("has died" in message) == (how != "raises")
    assert "DataLoader worker" in text
    assert "dataset Poisoned of length 40" in text
    assert "num_workers=2" in text
    assert len(list((folder / "run").glob("crash-*"))) == 1


def test_fd4_the_batch_of_an_evaluation_is_named_where_it_is_the_cause() -> None:
    """F-D4: a test_step that fails is noted with its batch; a dataset that fails, with the loader of the evaluation."""

    class Fails(faults.Task):
        def test_step(self, batch: Any) -> dict[str, Any]:
            raise ValueError("too dark")

    with pytest.raises(ValueError, match="too dark") as caught:
        build(Fails, try_validation=False).run(1, hand.loader(), hand.loader(3, shuffle=False))
    note = "zae: in an evaluation after step 6, on cpu; the batch was list(Tensor[3, 4] float32, Tensor[3] int64)"
    assert caught.value.__notes__ == [note]
    bad, whole = DataLoader(Poisoned("raises"), batch_size=4), hand.loader()
    place = "from DataLoader, dataset Poisoned of length 40, batch_size=4, drop_last=False"
    for step, call in (
        (6, lambda made: made.run(1, whole, bad)),
        (0, lambda made: made.evaluate(bad)),
        (0, lambda made: made.inference(bad)),
    ):
        with pytest.raises(KeyError, match="sample 30") as other:
            call(build(faults.Task, try_validation=False))
        assert other.value.__notes__ == [
            f"zae: while a batch was asked for in an evaluation after step {step}, {place}"
        ]


class HalfMade:
    """Has none of its attributes yet, and says so with a KeyError: like a wrapper whose making was interrupted."""

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["file"]

    def fail(self) -> None:
        raise ValueError("the user's own words")


class Unsliced(list[Any]):
    """A batch whose parts can only be asked for one after another."""

    def __getitem__(self, index: Any) -> Any:
        raise KeyError("file")


def test_fd4_what_cannot_be_described_hides_no_error() -> None:
    """F-D4: whatever objects are met on the way to the note, the error is the user's and tells its place."""

    class Fails(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            HalfMade().fail()
            return {}

    def batches() -> Iterator[Any]:
        yield torch.ones(4, 4)
        HalfMade().fail()

    class Given:
        def __iter__(self) -> Iterator[Any]:
            return batches()

    class Sums(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(batch).sum()}

    second = "zae: while batch 2 of epoch 1 was asked for, from Given"
    first = "zae: in epoch 1, step 1 (batch 1), on cpu; what is known of it could not be told (KeyError: 'file')"
    for task, loader, note in ((Sums, Given(), second), (Fails, [Unsliced([torch.ones(4, 4)])], first)):
        with pytest.raises(ValueError, match="the user's own words") as caught:
            build(task).run(1, loader)
        assert caught.value.__context__ is None
        assert caught.value.__notes__ == [note]


class Broken:
    """A loader whose connection to a worker breaks at the fourth batch; the worker is still alive then."""

    def __init__(self) -> None:
        self.inner: Any = None

    def __iter__(self) -> Iterator[Any]:
        # Forks, as nobody is told of the death of what a server has started: Python 3.14 asks one.
        self.inner = iter(DataLoader(hand.data(40), batch_size=4, num_workers=2, multiprocessing_context="fork"))
        for _ in range(3):
            yield next(self.inner)
        raise ConnectionResetError("the worker's end is gone")


def test_fd7_a_worker_dies_while_its_error_is_caught(folder: Path) -> None:
    """F-D7, F-D4: what torch raises for a dead worker, wherever Python is then, never takes the place of an error."""

    def run() -> Any:
        made, loader = build(faults.Task, StateManagerAddon, save_path=folder / "run"), Broken()
        strikes = []

        def trace(frame: Any, event: str, arg: Any) -> Any:
            """Kill a worker, and wait for its SIGCHLD, when the trainer has caught the error."""
            if event == "line" and frame.f_code.co_name == "_run" and sys.exc_info()[1] is not None and not strikes:
                strikes.append(frame.f_lineno)
                os.kill(loader.inner._workers[0].pid, signal.SIGKILL)
                os.waitid(os.P_PID, loader.inner._workers[0].pid, os.WEXITED | os.WNOWAIT)
            return trace if frame.f_code.co_name == "_run" else None

        sys.settrace(trace)
        try:
            made.run(1, loader)
        except Exception as error:
            sys.settrace(None)
            return type(error).__name__, len(strikes), signal.getsignal(signal.SIGCHLD).__module__
        return None

    assert answer(run) == ("ConnectionResetError", 1, "torch.utils.data._utils.signal_handling")
    assert [path.name for path in (folder / "run").iterdir()] == ["crash-00000003"]


# --- two runs, and places


def test_fd10_a_second_run_is_refused(folder: Path) -> None:
    """F-D10: the second one is told process, host and start at construction; the first one trains on untouched."""
    ready = folder / "ready"

    class Waiting(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            ready.touch()
            while not (folder / "go").exists():
                time.sleep(0.002)
            return super().train_step(batch)

    child = Child(lambda: everything(_trained(build(Waiting, StateManagerAddon, save_path=folder / "run"))))
    early = build(faults.Task, StateManagerAddon, save_path=folder / "run")  # Made before the first one runs.
    while not ready.exists():
        time.sleep(0.002)
    with pytest.raises(ConfigError) as caught:
        build(faults.Task, StateManagerAddon, save_path=folder / "run")
    text = str(caught.value)
    assert f"process {child.pid} " in text
    assert os.uname().nodename in text
    assert time.strftime("%Y-%m-%d") in text
    with pytest.raises(ConfigError, match=f"process {child.pid} "):
        early.run(1, hand.loader())
    (folder / "go").touch()
    assert child.wait().result == everything(_trained(build(faults.Task, StateManagerAddon, save_path=folder / "own")))


def _trained(trainer: Any) -> Any:
    trainer.run(1, hand.loader())
    return trainer


def test_fd10_many_at_once(folder: Path) -> None:
    """F-D10: of several that begin at once exactly one has the folder, again and again."""
    for number in range(5):
        place = folder / str(number)

        class Slow(faults.Task):
            def train_step(self, batch: Any) -> dict[str, Any]:
                time.sleep(0.03)
                return super().train_step(batch)

        def run(place: Path = place) -> bool:
            try:
                build(Slow, StateManagerAddon, save_path=place).run(1, hand.loader())
            except ConfigError:
                return False
            return True

        children = [Child(run) for _ in range(4)]
        assert sorted(child.wait().result for child in children) == [False, False, False, True]


def test_fd10_a_stale_lock_is_taken_over(folder: Path) -> None:
    """F-D10: the lock of a killed process, of a torn write, and of a number that another process has now."""
    run = folder / "run"
    add_ons = (StateManagerAddon, KillAddon)
    assert forked(lambda: _trained(build(faults.Task, *add_ons, save_path=run, kill_at=3)) and None).status == -9
    lock = run / ".lock"
    assert lock.exists()
    _trained(build(faults.Task, StateManagerAddon, save_path=run, resume="auto"))
    assert not lock.exists()
    from zae.storage.locks import _identity

    reused = json.dumps({**_identity(), "started": "1", "token": "x"})
    for text in ("", "{", "[]", '{"pid": 1, "host": "elsewhere"}', reused):
        lock.write_text(text)
        if "elsewhere" in text:
            with pytest.raises(ConfigError, match="elsewhere"):
                build(faults.Task, StateManagerAddon, save_path=run, resume="auto")
            os.utime(lock, (time.time() - 600, time.time() - 600))  # No sign of life for ten minutes.
        _trained(build(faults.Task, StateManagerAddon, save_path=run, resume="auto"))


def test_fd10_a_copy_of_a_live_run_is_free(folder: Path) -> None:
    """F-D10: a folder that is copied while its run goes on brings the lock along; a run in the copy begins."""

    class Copied(faults.Task):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.progress_checker.epoch == 1:
                shutil.copytree(folder / "run", folder / "copy")
                with pytest.raises(ConfigError, match="is in use"):
                    build(faults.Task, StateManagerAddon, save_path=folder / "run", resume=True)
                beside = build(faults.Task, StateManagerAddon, save_path=folder / "copy", resume=True)
                beside.run(2, hand.loader())
                assert beside.progress_checker.step == 12

    made = build(Copied, StateManagerAddon, save_path=folder / "run")
    assert made.run(2, hand.loader())["step"] == 12


def test_fd2_no_handler_of_a_run_outlives_it(folder: Path) -> None:
    """F-D2: neither where a run ends before another that began within it, nor where others put its handler back."""
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
        signal.signal(signal.SIGTERM, lambda number, frame: of_run[0](number, frame))  # A library's, which goes on.
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


def test_fd10_a_folder_that_is_removed_in_mid_run_is_locked_again(folder: Path) -> None:
    """F-D10: with its next save; where another run has made the folder meanwhile, that one has it."""
    run, others = folder / "run", []

    class Removed(faults.Task):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.progress_checker.epoch in (1, 3):
                shutil.rmtree(run)
            if self.progress_checker.epoch == 2:
                with pytest.raises(ConfigError, match=f"in use: process {os.getpid()} "):
                    build(faults.Task, StateManagerAddon, save_path=run, resume=True)
            if self.progress_checker.epoch == 3:
                others.append(build(faults.Task, StateManagerAddon, save_path=run))
                others[0].setup()
                others[0].on_run_begin()

    with pytest.raises(ConfigError, match="in use: process"):
        build(Removed, StateManagerAddon, save_path=run).run(5, hand.loader())
    assert [path.name for path in run.iterdir()] == [".lock"]
    others[0].teardown()
    assert not (run / ".lock").exists()


def test_fd10_one_process_and_two_trainers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F-D10: two runs of one process do not share a folder at the same time, but one after the other they do."""

    class Nested(faults.Task):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            with pytest.raises(ConfigError, match=f"process {os.getpid()} "):
                build(faults.Task, StateManagerAddon, save_path=folder / "run")

    made = _trained(build(Nested, StateManagerAddon, save_path=folder / "run"))
    made.run(1, hand.loader())
    other = build(faults.Task, StateManagerAddon, save_path=folder / "run", resume=True)
    other.run(3, hand.loader())
    assert "call 1 of run() trains nothing: it ended early in the state, after 1 of 3 epochs" in caplog.text
    other.run(2, hand.loader())
    assert other.progress_checker.epoch == 3


def test_fd13_places_that_cannot_be_written(folder: Path) -> None:
    """F-D13: a file in the way, or a folder without the right, is found at construction."""
    (folder / "file").write_text("")
    for place in (folder / "file", folder / "file" / "run"):
        with pytest.raises(ConfigError, match="is a file"):
            build(faults.Task, StateManagerAddon, save_path=place)

    def as_nobody() -> None:
        if not os.getuid():
            os.setuid(65534)
        with pytest.raises(ConfigError, match="cannot be written to"):
            build(faults.Task, StateManagerAddon, save_path=folder / "closed" / "run")
        for add_on, option in ((StateManagerAddon, "save_path"), (JSONLLoggerAddon, "jsonl_path")):
            with pytest.raises(ConfigError, match=rf"{option}='.*/shut/deep/run': .* cannot be written to"):
                build(faults.Task, add_on, **{option: folder / "shut" / "deep" / "run"})

    os.chmod(folder, 0o755)
    (folder / "shut").mkdir(mode=0o000)  # Not even to be looked into.
    (folder / "closed").mkdir(mode=0o555)
    answer(as_nobody)
    (folder / "shut").chmod(0o755)
    build(faults.Task, StateManagerAddon, save_path=folder / "missing" / "deep" / "run")


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "~nobody-has-this-name/run"])
@pytest.mark.parametrize(
    ("add_on", "option"),
    [(StateManagerAddon, "save_path"), (JSONLLoggerAddon, "jsonl_path"), (LedgerAddon, "ledger_path"),
     (TensorBoardLoggerAddon, "log_dir")],
    ids=str,
)  # fmt: skip
def test_fd13_paths_that_no_system_takes(add_on: Any, option: str, path: str) -> None:
    """F-D13, F-E: refused at construction, in words."""
    with pytest.raises(ConfigError, match=rf"^{option}='.*(cannot be a path|has no home folder)"):
        build(faults.Task, add_on, **{option: path})


def test_p34_the_log_is_true(caplog: pytest.LogCaptureFixture) -> None:
    """P-34: a loss that is not finite is in the history as it was."""
    caplog.set_level(logging.WARNING)
    made = build(Bad, on_nonfinite="warn", bad=(2,), value=math.inf)
    metrics = made.run(1, hand.loader())
    assert not math.isfinite(metrics["train_metrics_history"][0]["train_loss"])


def test_a_save_that_fails_ends_the_run_by_default(folder: Path) -> None:
    """F-A3: on_save_error="raise" is the default; the loggers and the lock are closed."""
    made = build(faults.Task, StateManagerAddon, save_path=folder / "run", save_every=1)
    with faults.installed(faults.RefusingDisk(30, 5)), pytest.raises(CheckpointError):
        made.run(1, hand.loader())
    assert issubclass(type(made), Trainer)
    assert nn.Module in type(made.unwrap()).__mro__
