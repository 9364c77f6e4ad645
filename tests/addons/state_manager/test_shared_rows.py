"""A long history: checkpoints share the files of its rows, and each of them is whole by itself."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import faults, hand
from kit.faults import Disk, JournalDisk, KillingDisk, RefusingDisk, everything, forked, installed, reseal
from zae.addons import StateManagerAddon
from zae.addons.state_manager import FsspecCheckpointer
from zae.checkpoint.folder import list_checkpoints, newest_valid, verify
from zae.checkpoint.reader import load_checkpoint
from zae.errors import CheckpointDamaged, CheckpointError

ROWS = 150  # An epoch records more than a file of rows begins with.


class Recording(faults.Task):
    """A task that records many rows in each epoch, some of them not finite."""

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        for index in range(ROWS):
            self.log({"row": float("nan") if index % 50 == 0 else index / 3}, self.progress_checker.step)


Saving = Recording.add_on(StateManagerAddon)


def make(folder: Path, **options: Any) -> Any:
    model = faults.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"save_path": folder, "keep_best": 0, "resume": "auto", "log_bar": False, **options}
    return Saving(model, "cpu", optimizer=optimizer, seed=5, **options)


def train(folder: Path, epochs: int, **options: Any) -> Any:
    made = make(folder, **options)
    made.run(epochs, hand.loader(), valid_loader=hand.loader())
    return made


def rows_in(path: Path) -> str:
    return repr(load_checkpoint(path)[2]["records"]["log_history"])


def rows_of(trainer: Any, count: int | None = None) -> str:
    return repr(trainer.log_history[:count])


def files_of_rows(path: Path) -> set[str]:
    return {each.name for each in path.glob("*_history-*")}


def test_what_was_saved_before_is_not_written_again(folder: Path) -> None:
    """A checkpoint has a second name of the files of the one before, and new files for new rows alone."""
    train(folder, 3, keep_last=None)
    older, newer = reversed(list_checkpoints(folder)[:2])
    shared = files_of_rows(older)
    assert shared < files_of_rows(newer)
    for name in shared:
        assert os.path.samefile(older / name, newer / name)
    assert (newer / "state.json").stat().st_size < 1.5 * (older / "state.json").stat().st_size


@pytest.mark.parametrize("options", [{}, {"save_async": True}, {"save_format": "ckpt"}], ids=["", "async", "ckpt"])
def test_each_checkpoint_has_the_whole_history(folder: Path, options: Any) -> None:
    """Also where it alone is left, at another place, and a run that continues there has the rest as well."""
    whole = train(folder / "whole", 4, keep_last=None, **options)
    for path in list_checkpoints(folder / "whole"):
        alone = folder / f"alone-{path.name}"
        shutil.copytree(path, alone / path.name)
        count = len(load_checkpoint(path)[2]["records"]["log_history"])
        assert rows_in(alone / path.name) == rows_of(whole, count)
    shutil.rmtree(folder / "whole")
    for alone in folder.glob("alone-*"):
        continued = train(alone, 4, **options)
        assert rows_of(continued) == rows_of(whole)
        assert everything(continued) == everything(whole)


def test_older_checkpoints_may_go_first_and_last(folder: Path) -> None:
    """keep_last removes the ones that the newest shares its files with, and somebody the newest of all."""
    whole = train(folder / "whole", 5)
    train(folder / "run", 3, keep_last=1)
    [only] = list_checkpoints(folder / "run")
    verify(only)
    made = make(folder / "run")
    checkpoint = made.checkpoint

    def remove() -> None:
        checkpoint()
        shutil.rmtree(made.last_path)  # The next save finds no files to share.

    made.checkpoint = remove
    made.on_epoch_end()
    made.checkpoint = checkpoint
    train(folder / "again", 3)
    shutil.rmtree(list_checkpoints(folder / "again")[1])
    assert rows_of(train(folder / "again", 5)) == rows_of(whole)


def test_resume_from_an_older_one_after_newer_rows(folder: Path) -> None:
    """Rows that the newer checkpoints have do not come back, and theirs stay as they are."""
    first = train(folder / "run", 4, keep_last=None)
    newest = list_checkpoints(folder / "run")[0]
    kept = rows_in(newest)
    older = list_checkpoints(folder / "run")[2]
    other = make(folder / "other", resume=older)
    other.run(3, hand.loader(), valid_loader=hand.loader())
    other.log({"row": -1.0}, 0)
    other.run(1, hand.loader(), valid_loader=hand.loader())
    assert rows_in(newest) == kept == rows_of(first)
    assert rows_in(other.last_path) == rows_of(other)
    assert rows_of(other) != rows_of(first)


def test_a_script_that_removes_rows(folder: Path) -> None:
    """What a script removes from the history is not in the next checkpoint."""
    made = train(folder, 2)
    del made.log_history[:100]
    made.run(1, hand.loader(), valid_loader=hand.loader())
    assert rows_in(made.last_path) == rows_of(made)


def test_a_disk_without_links(folder: Path) -> None:
    """The rows are written again."""

    class WithoutLinks(Disk):
        def before(self, name: str, args: tuple[Any, ...]) -> None:
            if name == "link":
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with installed(WithoutLinks()):
        made = train(folder, 3, keep_last=None)
    newer, older, _ = list_checkpoints(folder)
    name = min(files_of_rows(older))
    assert not os.path.samefile(older / name, newer / name)
    assert rows_in(newer) == rows_of(made)


def test_a_file_of_rows_that_was_damaged(folder: Path) -> None:
    """It is named; what is left of the history can be loaded, and the next checkpoint is whole again."""
    made = train(folder, 2)
    newest = list_checkpoints(folder)[0]
    name = "log_history-0-128.json"
    data = bytearray((newest / name).read_bytes())
    data[9] ^= 1
    (newest / name).write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=name):
        load_checkpoint(newest)
    with pytest.raises(CheckpointDamaged, match="all of 2 checkpoints are damaged"):
        train(folder, 3)
    resumed = train(folder, 3, resume=newest, allow_partial=[name])
    assert repr(resumed.log_history[: len(made.log_history) - 128]) == repr(made.log_history[128:])
    assert rows_in(resumed.last_path) == rows_of(resumed)


@pytest.mark.parametrize("change", ["gap", "other", "list", "format"])
def test_files_of_rows_that_zae_has_not_written(folder: Path, change: str) -> None:
    """Rows that are missing, too many or none are damage, whatever the manifest says."""
    path = train(folder, 2).last_path
    file = path / "log_history-0-128.json"
    manifest = json.loads((path / "manifest.json").read_bytes())
    if change == "gap":
        file.unlink()
        del manifest["files"][file.name]
        (path / "manifest.json").write_text(json.dumps(manifest))
    elif change == "other":
        file.unlink()
        file.write_text(json.dumps([{"row": 1}] * 127))
    elif change == "list":
        file.unlink()
        file.write_text(json.dumps({"row": 1}))
    reseal(path, **({"format": 1} if change == "format" else {}))
    with pytest.raises(CheckpointDamaged, match="history"):
        load_checkpoint(path)


def test_in_a_store(folder: Path) -> None:
    """Each checkpoint of a store is whole, and a run on another machine continues it."""
    store = FsspecCheckpointer.at(f"file://{folder}/store")
    whole = train(folder / "whole", 4)
    train(folder / "here", 3, checkpointer=store)
    assert rows_of(train(folder / "there", 4, checkpointer=store)) == rows_of(whole)


class Scene:
    """A run that has saved an epoch, and a process that continues it: its second save shares a file of rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.end = everything(train(folder / "whole", 4))
        train(folder / "start", 1, keep_last=1)

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.folder / "start", self.folder / name))

    def save(self, place: Path, disk: Any, before: Path | None = None) -> None:
        """Train two more epochs, from the first save on with a double of the disk."""
        made = make(place, keep_last=1)
        with contextlib.ExitStack() as stack:

            def install(_: Path) -> None:
                del made.on_save
                if before is not None:
                    shutil.copytree(place, before)
                stack.enter_context(installed(disk))

            made.on_save = install
            made.run(3, hand.loader(), valid_loader=hand.loader())

    def operations(self) -> list[str]:
        """Return the names of the operations of the second save."""
        disk = Disk()
        self.save(self.copy("counted"), disk)
        return [name for name, _ in disk.log]

    def check(self, place: Path) -> None:
        """Go on to the same end."""
        resumed = train(place, 4, keep_last=1)
        assert everything(resumed) == self.end
        assert rows_in(resumed.last_path) == rows_of(resumed)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_killed_at_every_operation(folder: Path, every: int) -> None:
    """The run continues to the same end, whichever names the files of rows had then."""
    scene = Scene(folder)
    names = scene.operations()
    assert "link" in names
    for at in [at for at, name in enumerate(names) if name not in ("create", "fsync", "close")][::every]:
        place = scene.copy(f"at-{at}")
        assert forked(scene.save, place, KillingDisk(at)).status == -signal.SIGKILL
        scene.check(place)
        shutil.rmtree(place)


def test_power_loss(folder: Path) -> None:
    """What was reported as saved has its rows, whatever was lost that was not brought to the disk."""
    scene = Scene(folder)
    place = scene.copy("journal")
    disk = JournalDisk()
    scene.save(place, disk, folder / "before")
    [path] = list_checkpoints(place)
    rows = rows_in(path)
    shutil.rmtree(place)
    shutil.copytree(folder / "before", place)
    for seed in range(60):
        left = folder / f"left-{seed}"
        upto = len(disk.log) if seed % 2 else seed * len(disk.log) // 60
        disk.crash(place, left, upto, seed)
        found = newest_valid(left)
        assert found is not None
        if seed % 2:
            assert rows_in(found[0]) == rows
        shutil.rmtree(left)


def test_a_full_disk(folder: Path) -> None:
    """The checkpoint before stays, and the next save is whole."""
    scene = Scene(folder)
    for at in range(0, scene.operations().index("rename"), 4):
        place = scene.copy(f"at-{at}")
        with pytest.raises(CheckpointError, match="was not saved"):
            scene.save(place, RefusingDisk(at, errno.ENOSPC))
        scene.check(place)
