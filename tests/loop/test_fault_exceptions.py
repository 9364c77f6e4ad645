"""A run that an exception ends: it is saved apart, and the error says where it happened."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from kit import faults, hand
from kit.faults import answer, build, wait_for
from zae import Every
from zae.addons import GradientAccumulationAddon, JSONLLoggerAddon, StateManagerAddon
from zae.checkpoint import filesystem
from zae.checkpoint.folder import verify
from zae.checkpoint.reader import load_checkpoint

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


def test_an_exception_saves_apart(folder: Path) -> None:
    """The user's traceback comes first and unchanged; crash-00000007 displaces nothing and is not resumed."""
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
    manifest, _, state = load_checkpoint(folder / "run" / "crash-00000007")
    assert manifest["info"]["error"] == "ValueError"
    assert manifest["info"]["in_step"] is True
    assert state["progress"]["step"] == 7
    again = build(faults.Task, StateManagerAddon, save_path=folder / "run", resume=True)
    again.setup()
    assert again.progress_checker.step == 6
    looked = build(faults.Task, StateManagerAddon, save_path=folder / "look", resume=folder / "run" / "crash-00000007")
    looked.setup()
    assert looked.progress_checker.step == 7


def test_a_copy_of_what_a_failed_run_has_left_is_the_users(folder: Path) -> None:
    """The state of a later failure takes the place of the earlier one, and of no folder that is named alike."""
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
    assert verify(kept)["step"] == 7


def test_a_disk_that_refuses_hides_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the crash checkpoint cannot be written, the error is still the user's."""

    class Broken(Failing):
        def fail(self) -> None:
            filesystem.disk = faults.RefusingDisk(0, 28)
            super().fail()

    made = build(Broken, StateManagerAddon, save_path=folder / "run", save_every=1)
    before = filesystem.disk
    try:
        with pytest.raises(ValueError, match="the user's own words"):
            made.run(3, hand.loader())
    finally:
        filesystem.disk = before
    assert "could not be saved" in caplog.text


def test_out_of_memory_says_what_was_computed(folder: Path) -> None:
    """Step, shapes and dtypes of the batch are noted, also inside an accumulation window, and D4 holds."""

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
    """Its worker dies, once a file is there, or raises, at a sample."""

    def __init__(self, how: str, asked: Path = Path()) -> None:
        self.how, self.asked, self.data = how, asked, hand.data(40)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 30 and self.how != "killed in a step":
            if self.how == "killed":
                wait_for(self.asked.exists)
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("sample 30 is unreadable")
        return self.data[index]


class AsksForTheLast(faults.Task):
    """Touches a file when the next batch is the one at which the worker dies.

    None of its earlier batches is on its way then: the memory of such a batch could not be fetched from a dead process,
    and depending on when it dies, torch would raise one or another error of a connection.
    """

    asked: Path

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step == 6:
            self.asked.touch()
        return super().train_step(batch)


class KillsWorker(faults.Task):
    """Kills a worker of its loader in a step, where torch raises for it."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.step == 2:
            multiprocessing.active_children()[0].kill()
            time.sleep(600)  # The death interrupts it.
        return super().train_step(batch)


@pytest.mark.parametrize("how", ["killed", "killed in a step", "raises"])
def test_a_worker_dies(folder: Path, how: str) -> None:
    """At once an error names the worker and the dataset, and the crash checkpoint is there."""

    def run() -> Any:
        made = build(KillsWorker if "step" in how else AsksForTheLast, StateManagerAddon, save_path=folder / "run")
        made.asked = folder / "asked"
        began = time.monotonic()
        try:
            made.run(1, DataLoader(Poisoned(how, made.asked), batch_size=4, num_workers=2))
        except Exception as error:
            shown = "".join(traceback.format_exception(error))
            return shown, time.monotonic() - began, str(error), type(error)
        return None

    text, seconds, message, kind = answer(run)
    assert seconds < 100  # And not after the 600 s of the step.
    if how != "raises":  # In the exception itself: notes are not seen everywhere.
        assert kind is RuntimeError
        assert re.search(r"DataLoader worker \d? ?\(pid", message)
        assert "a worker of a loader has died while batch" in message
        assert "dataset Poisoned of length 40" in message
        assert text.count("dataset Poisoned of length 40") == 1
    assert ("has died" in message) == (how != "raises")
    assert "DataLoader worker" in text
    assert "dataset Poisoned of length 40" in text
    assert "num_workers=2" in text
    assert len(list((folder / "run").glob("crash-*"))) == 1


def test_the_batch_of_an_evaluation_is_named_where_it_is_the_cause() -> None:
    """A test_step that fails is noted with its batch; a dataset that fails, with the loader of the evaluation."""

    class Fails(faults.Task):
        def test_step(self, batch: Any) -> dict[str, Any]:
            raise ValueError("too dark")

    with pytest.raises(ValueError, match="too dark") as caught:
        build(Fails).run(1, hand.loader(), hand.loader(3, shuffle=False))
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
            call(build(faults.Task))
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


def test_what_cannot_be_described_hides_no_error() -> None:
    """Whatever objects are met on the way to the note, the error is the user's and tells its place."""

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
    first = "zae: in epoch 1, step 1 (batch 1), on cpu; the batch was Unsliced(Tensor[4, 4] float32)"
    for task, loader, note in ((Sums, Given(), second), (Fails, [Unsliced([torch.ones(4, 4)])], first)):
        with pytest.raises(ValueError, match="the user's own words") as caught:
            build(task).run(1, loader)
        assert caught.value.__context__ is None
        assert caught.value.__notes__ == [note]


@pytest.mark.parametrize("known", [True, False])
def test_a_loader_that_fails_within_a_window_is_named_with_the_number_of_its_batch(known: bool, tmp_path: Path) -> None:
    """Not the batch before it, whatever add-ons have threads or windows of their own."""

    class Given:
        def __iter__(self) -> Iterator[Any]:
            yield from [*hand.loader()][:3]
            raise KeyError("sample 30")

    class Counted(Given):
        def __len__(self) -> int:
            return 6

    options = {"gradient_accumulation_steps": 2, "jsonl_path": tmp_path / "log.jsonl"}
    loader = Counted() if known else Given()
    with pytest.raises(KeyError, match="sample 30") as caught:
        build(faults.Task, GradientAccumulationAddon, JSONLLoggerAddon, **options).run(1, loader)
    assert caught.value.__notes__ == [f"zae: while batch 4 of epoch 1 was asked for, from {type(loader).__name__}"]


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


def test_a_worker_dies_while_its_error_is_caught(folder: Path) -> None:
    """What torch raises for a dead worker, wherever Python is then, never takes the place of an error."""

    def run() -> Any:
        made, loader = build(faults.Task, StateManagerAddon, save_path=folder / "run"), Broken()
        strikes = []

        def trace(frame: Any, event: str, arg: Any) -> Any:
            """Kill a worker, and wait for its SIGCHLD, when the trainer has caught the error."""
            if event == "line" and frame.f_code.co_name == "scope" and sys.exc_info()[1] is not None and not strikes:
                strikes.append(frame.f_lineno)
                os.kill(loader.inner._workers[0].pid, signal.SIGKILL)
                os.waitid(os.P_PID, loader.inner._workers[0].pid, os.WEXITED | os.WNOWAIT)
            return trace if frame.f_code.co_name == "scope" else None

        sys.settrace(trace)
        try:
            made.run(1, loader)
        except Exception as error:
            sys.settrace(None)
            return type(error).__name__, len(strikes), signal.getsignal(signal.SIGCHLD).__module__
        return None

    assert answer(run) == ("ConnectionResetError", 1, "torch.utils.data._utils.signal_handling")
    assert [path.name for path in (folder / "run").iterdir()] == ["crash-00000003"]
