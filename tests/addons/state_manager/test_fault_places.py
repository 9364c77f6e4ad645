"""The folder of a run: two runs that want one, stale locks, and places that cannot be written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from kit import faults, hand
from kit.faults import Child, KillAddon, answer, build, everything, forked, wait_for
from zae import Trainer
from zae.addons import (
    JSONLLoggerAddon,
    LedgerAddon,
    StateManagerAddon,
    TensorBoardLoggerAddon,
)
from zae.errors import CheckpointError, ConfigError

# --- two runs, and places


def test_a_second_run_is_refused(folder: Path) -> None:
    """The second one is told process, host and start at construction; the first one trains on untouched."""
    ready = folder / "ready"

    class Waiting(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            ready.touch()
            wait_for((folder / "go").exists)
            return super().train_step(batch)

    child = Child(lambda: everything(_trained(build(Waiting, StateManagerAddon, save_path=folder / "run"))))
    early = build(faults.Task, StateManagerAddon, save_path=folder / "run")  # Made before the first one runs.
    wait_for(ready.exists)
    with pytest.raises(ConfigError) as caught:
        build(faults.Task, StateManagerAddon, save_path=folder / "run")
    text = str(caught.value)
    assert f"process {child.pid} " in text
    assert os.uname().nodename in text
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d", text)
    with pytest.raises(ConfigError, match=f"process {child.pid} "):
        early.run(1, hand.loader())
    (folder / "go").touch()
    assert child.wait().result == everything(_trained(build(faults.Task, StateManagerAddon, save_path=folder / "own")))


def _trained(trainer: Any) -> Any:
    trainer.run(1, hand.loader())
    return trainer


def test_many_at_once(folder: Path) -> None:
    """Of several that begin at once exactly one has the folder, again and again."""
    for number in range(5):
        place, decided = folder / str(number), folder / f"decided-{number}"
        decided.mkdir()

        class Holding(faults.Task):
            """Holds the folder until each of the others is refused, or trains as well."""

            def train_step(self, batch: Any, decided: Path = decided) -> dict[str, Any]:
                (decided / str(os.getpid())).touch()
                wait_for(lambda: len(os.listdir(decided)) == 4)
                return super().train_step(batch)

        def run(task: Any = Holding, place: Path = place, decided: Path = decided) -> bool:
            try:
                build(task, StateManagerAddon, save_path=place).run(1, hand.loader())
            except ConfigError:
                (decided / str(os.getpid())).touch()
                return False
            return True

        children = [Child(run) for _ in range(4)]
        assert sorted(child.wait().result for child in children) == [False, False, False, True]


def test_a_stale_lock_is_taken_over(folder: Path) -> None:
    """The lock of a killed process, of a torn write, and of a number that another process has now."""
    run = folder / "run"
    add_ons = (StateManagerAddon, KillAddon)
    assert forked(lambda: _trained(build(faults.Task, *add_ons, save_path=run, kill_at=3)) and None).status == -9
    lock = run / ".lock"
    assert lock.exists()
    _trained(build(faults.Task, StateManagerAddon, save_path=run, resume="auto"))
    assert not lock.exists()
    for text in ("", "{", "[]", '{"pid": 1, "host": "elsewhere"}', json.dumps({"pid": os.getpid(), "host": "x"})):
        lock.write_text(text)
        _trained(build(faults.Task, StateManagerAddon, save_path=run, resume="auto"))
        assert not lock.exists()


def test_workers_that_outlive_a_killed_run_do_not_hold_its_folder(folder: Path) -> None:
    """A process that the run has forked lives on; the run is started again at once."""
    run, ends = folder / "run", os.pipe()

    class Killed(faults.Task):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if os.fork() == 0:
                os.close(ends[1])
                os.read(ends[0], 1)  # Until the test closes the other end.
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    if (pid := os.fork()) == 0:
        build(Killed, StateManagerAddon, save_path=run).run(1, hand.loader())
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert (run / ".lock").exists()
    _trained(build(faults.Task, StateManagerAddon, save_path=run, resume="auto"))
    os.close(ends[1])
    os.close(ends[0])


def test_a_copy_of_a_live_run_is_free(folder: Path) -> None:
    """A folder that is copied while its run continues brings the lock along; a run in the copy begins."""

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


def test_a_folder_that_is_removed_in_mid_run_is_locked_again(folder: Path) -> None:
    """With its next save; where another run has made the folder in the meantime, that one has it."""
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


def test_one_process_and_two_trainers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two runs of one process do not share a folder at the same time, but one after the other they do."""

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


def test_places_that_cannot_be_written(folder: Path) -> None:
    """A file in the way, or a folder without the right, is found at construction."""
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
def test_paths_that_no_system_takes(add_on: Any, option: str, path: str) -> None:
    """Refused at construction, in words."""
    with pytest.raises(ConfigError, match=rf"^{option}='.*(cannot be a path|there is no such home folder)"):
        build(faults.Task, add_on, **{option: path})


def test_a_save_that_fails_ends_the_run_by_default(folder: Path) -> None:
    """On_save_error="raise" is the default; the loggers and the lock are closed."""
    made = build(faults.Task, StateManagerAddon, save_path=folder / "run", save_every=1)
    with faults.installed(faults.RefusingDisk(30, 5)), pytest.raises(CheckpointError):
        made.run(1, hand.loader())
    assert issubclass(type(made), Trainer)
    assert nn.Module in type(made.unwrap()).__mro__
