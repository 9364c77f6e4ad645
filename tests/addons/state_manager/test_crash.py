"""Killed, torn, refused and without power at every operation of a save: a run always continues from a whole state."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import faults, hand
from kit.faults import JournalDisk, KillingDisk, RefusingDisk, answer, everything, forked, installed
from zae.addons import StateManagerAddon
from zae.checkpoint.folder import list_checkpoints, newest_valid, verify
from zae.checkpoint.reader import load_checkpoint
from zae.errors import CheckpointDamaged, CheckpointError, ConfigError

Saving = faults.Task.add_on(StateManagerAddon)
STEPS = 4  # The save of this step is the one that is broken.


def trainer(folder: Path, **options: Any) -> Any:
    model = faults.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"save_path": folder, "save_every": 1, "keep_best": 0, "resume": "auto", "log_bar": False, **options}
    return Saving(model, "cpu", optimizer=optimizer, seed=5, **options)


def train(folder: Path, steps: int, **options: Any) -> Any:
    made = trainer(folder, **options)
    made.run(None, hand.loader(), max_steps=steps)
    return made


class Scene:
    """A run that has saved step 3, and what step 4 and step 5 are when nothing goes wrong."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.keep, self.base, self.start = keep, folder, folder / "start"
        train(self.start, STEPS - 1, keep_last=keep)
        self.ends = {steps: everything(train(folder / f"whole-{steps}", steps)) for steps in (3, 4, 5)}

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.start, self.base / name))

    def save(self, place: Path, disk: Any, **options: Any) -> Any:
        """Go on to step 4 on a double of the disk, which is there from the first operation after the step."""
        made = trainer(place, keep_last=self.keep, **options)
        made.setup()
        with installed(disk):
            made.run(None, hand.loader(), max_steps=STEPS)
        return made

    def operations(self, **options: Any) -> list[str]:
        """Return the names of the operations of a save."""
        place = self.copy("counted")
        disk = faults.Disk()
        self.save(place, disk, **options)
        shutil.rmtree(place)
        return [name for name, _ in disk.log]

    def check(self, place: Path, *, steps: tuple[int, ...] = (3, 4)) -> int:
        """Resume by itself: at one of these steps, bitwise, and on to the same end."""
        resumed = trainer(place, keep_last=self.keep)
        resumed.setup()
        step = resumed.progress_checker.step
        assert step in steps
        resumed.run(None, hand.loader(), max_steps=5)
        assert everything(resumed) == self.ends[5]
        left = [entry for entry in os.listdir(place) if entry.startswith(".")]
        assert left == [], "what the killed save left is gone after the next one"
        assert len(list_checkpoints(place)) <= self.keep
        return step


EVERY_THIRD = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
"""Of the operations of a save, the last one among them."""


@pytest.mark.sample(covering=1)
@EVERY_THIRD
@pytest.mark.parametrize("torn", [False, True], ids=["killed", "torn"])
@pytest.mark.parametrize("keep", [1, 3])
def test_killed_at_every_operation_of_a_save(folder: Path, keep: int, torn: bool, every: int) -> None:
    """SIGKILL before (or in the middle of) each file operation; the run continues from step 3 or 4."""
    scene = Scene(folder, keep)
    names = scene.operations()
    assert len(names) > 20
    found = []
    places = [at for at, name in enumerate(names) if name == "write" or not torn]  # Only a write can be torn.
    for at in reversed(places[::-every]):
        place = scene.copy(f"at-{at}")
        outcome = forked(scene.save, place, KillingDisk(at, torn))
        assert outcome.status == -signal.SIGKILL, outcome.error
        found.append(scene.check(place))
        shutil.rmtree(place)
    assert found == sorted(found), "once it is committed it stays"
    assert set(found) == ({3} if torn else {3, 4})


@pytest.mark.sample(covering=1)
@EVERY_THIRD
@pytest.mark.parametrize("background", [False, True], ids=["", "async"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_disk_that_refuses_from_any_operation_on(folder: Path, code: int, background: bool, every: int) -> None:
    """The older checkpoint is intact, the error says path and reason, the next save leaves nothing stray."""
    scene = Scene(folder, 2)
    refused = 0
    for at in range(0, len(scene.operations()), every):
        place = scene.copy(f"at-{at}")
        disk = RefusingDisk(at, code)
        try:
            scene.save(place, disk, save_async=background)
        except CheckpointError as error:
            refused += 1
            text = str(error)
            assert os.strerror(code) in text
            assert str(place) in text
            if "was not saved" in text and code == errno.ENOSPC:
                assert "bytes are needed" in text
                assert "are free" in text
        assert scene.check(place) in (3, 4)
        shutil.rmtree(place)
    assert refused > 5


def test_on_save_error_warn_trains_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning for each save that failed, the weights of a run without a disk, and saves once there is room."""
    scene = Scene(folder, 2)
    place = scene.copy("warned")
    made = trainer(place, keep_last=2, on_save_error="warn")
    made.setup()
    disk = RefusingDisk(8, errno.ENOSPC)
    with installed(disk):
        made.run(None, hand.loader(), max_steps=5)
    warnings = [record.getMessage() for record in caplog.records if "not saved at step" in record.getMessage()]
    assert [text.split()[4] for text in warnings] == ["4:", "5:", "5:"]  # At the end of the run it is tried again.
    assert everything(made) == scene.ends[5]
    assert made.last_path.name == "step-00000003"
    made.save_state()
    assert made.last_path.name == "step-00000005"
    assert verify(made.last_path)["step"] == 5


@pytest.mark.parametrize("background", [False, True])
def test_a_file_in_the_place_of_the_folder_is_a_disk_that_refuses(folder: Path, background: bool, caplog: Any) -> None:
    """Made while the run continues; it trains on, and another error is not hidden by it."""

    class Hindered(Saving):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.progress_checker.epoch in (1, 4):
                self.checkpoints.settle()
                shutil.rmtree(self.save_path)
                self.save_path.write_text("in the way")
            if self.progress_checker.epoch == 5:
                raise ValueError("of the task")

    model, place = faults.classifier(), folder / "run"
    options = {"on_save_error": "warn", "save_async": background, "log_bar": False}
    made = Hindered(model, "cpu", optimizer=torch.optim.AdamW(model.parameters()), save_path=place, **options)
    assert made.run(3, hand.loader())["epoch"] == 3
    refused = [each.message for each in caplog.records if "not saved at step" in each.message]
    assert len(refused) >= 2
    assert all(f"{place} is a file, not a directory" in text for text in refused)
    place.unlink()
    with pytest.raises(ValueError, match="of the task"):
        made.run(3, hand.loader())
    assert "the state could not be saved" in caplog.text


def test_a_real_disk_that_is_full(folder: Path) -> None:
    """A file system of a megabyte where it can be mounted, else the kernel's own limit on a file."""
    place = folder / "small"
    place.mkdir()
    steps, text, left = answer(_on_a_full_disk, place)
    assert "No space left" in text or "File too large" in text
    assert "bytes are needed" in text
    assert (steps, left) == (6, ["step-00000006"])


def _on_a_full_disk(place: Path) -> Any:
    new_mounts, new_user = 0x00020000, 0x10000000
    flags = new_mounts | (new_user if os.getuid() else 0)
    ctypes.CDLL(None).unshare(flags)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True).returncode:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    def build(width: int, **options: Any) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Saving(model, "cpu", optimizer=optimizer, save_path=place, log_bar=False, **options)

    build(8).run(1, hand.loader())
    text = ""
    try:
        build(60000, overwrite=True).run(1, hand.loader())
    except CheckpointError as error:
        text = str(error)
    again = build(8, resume=True)
    again.run(1, hand.loader())
    return again.progress_checker.step, text, sorted(os.listdir(place))


def test_power_loss_leaves_the_old_or_the_new(folder: Path) -> None:
    """Of what was not fsynced each part is kept, lost or cut by chance, 200 times: always step 3 or 4, whole."""
    scene = Scene(folder, 1)
    place = scene.copy("journal")
    disk = JournalDisk()
    scene.save(place, disk)
    kept = folder / "kept"
    shutil.copytree(scene.start, kept)
    # The journal speaks of `place` as it was before; its operations are played back on a copy of that.
    for name, args in disk.log:
        assert all(not isinstance(arg, Path) or place in (arg, *arg.parents) for arg in args), name
    shutil.rmtree(place)
    shutil.copytree(kept, place)
    steps = []
    for seed in range(200):
        upto = random.Random(seed).randrange(len(disk.log) + 1)
        left = folder / f"left-{seed}"
        disk.crash(place, left, upto, seed)
        found = newest_valid(left)
        assert found is not None
        steps.append(found[1]["step"])
        shutil.rmtree(left)
    assert set(steps) == {3, 4}
    for seed in range(200):  # And what was reported as saved is saved, whatever is lost.
        left = folder / f"done-{seed}"
        disk.crash(place, left, len(disk.log), seed)
        found = newest_valid(left)
        assert found is not None
        assert found[1]["step"] == 4
        if seed % 20 == 0:
            scene.check(left, steps=(4,))
        shutil.rmtree(left)


def test_a_save_without_fsync_would_be_caught(folder: Path) -> None:
    """The same power losses find a disk on which fsync does nothing, so the test can fail."""
    scene = Scene(folder, 1)
    place = scene.copy("journal")
    disk = JournalDisk()
    scene.save(place, disk)
    disk.log = [(name, args) if "fsync" not in name else ("close", ()) for name, args in disk.log]
    shutil.rmtree(place)
    shutil.copytree(scene.start, place)
    lost = 0
    for seed in range(40):
        left = folder / f"left-{seed}"
        disk.crash(place, left, len(disk.log), seed)
        try:
            found = newest_valid(left)
            lost += found is None or found[1]["step"] != 4
        except CheckpointDamaged:
            lost += 1
    assert lost > 10


def test_one_whole_checkpoint_at_every_operation(folder: Path) -> None:
    """From the first save on there is a whole checkpoint before each operation on the disk."""
    place = folder / "run"

    class Watching(faults.Disk):
        seen = False

        def before(self, name: str, args: tuple[Any, ...]) -> None:
            whole = [path for path in list_checkpoints(place) if _is_whole(path)]
            assert whole or not self.seen
            self.seen = self.seen or bool(whole)

    scores = iter([0.5, 0.1, 0.4, 0.9, 0.3, 0.2])

    class Scored(faults.Task):
        def test_step(self, batch: Any) -> Any:
            return {"loss": score}

    made = Scored.add_on(StateManagerAddon)(
        model := faults.classifier(), "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.01), save_path=place,
        keep_last=1, keep_best=1, log_bar=False,
    )  # fmt: skip
    with installed(Watching()) as disk:
        for epoch in range(1, 7):
            score = next(scores)
            made.run(1, hand.loader(), [hand.data()[:4]])
            names = [path.name for path in list_checkpoints(place)]
            assert f"step-{6 * epoch:08d}" in names, "keep_best never removes the last"
            assert made.best_path.name in names, "keep_last never removes the best"
    assert disk.seen
    assert made.best_path.name == "step-00000012"


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def test_what_does_not_read_back_removes_nothing(folder: Path) -> None:
    """A new checkpoint that the disk has changed costs no older one."""

    class Rotting(faults.Disk):
        def before(self, name: str, args: tuple[Any, ...]) -> None:
            if name == "rename" and Path(args[1]).name == "step-00000004":
                state = Path(args[0]) / "state.json"
                data = bytearray(state.read_bytes())
                data[40] ^= 1
                state.write_bytes(data)

    scene = Scene(folder, 1)
    place = scene.copy("rotting")
    with pytest.raises(CheckpointDamaged, match=r"state\.json"):
        scene.save(place, Rotting())
    assert _is_whole(place / "step-00000003")
    assert scene.check(place) == 3


class Scored(faults.Task):
    """The first epoch is the best."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": (0.1, 0.5, 0.4)[self.progress_checker.epoch - 1]}


def test_killed_while_the_best_is_saved_once_more(folder: Path) -> None:
    """The run resumes by itself from either of the two of one step, and the best stays the best."""

    def build(place: Path) -> Any:
        model, cls = faults.classifier(), Scored.add_on(StateManagerAddon)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options = {"save_path": place, "keep_last": 1, "resume": "auto", "log_bar": False}
        return cls(model, "cpu", optimizer=optimizer, seed=5, **options)

    def run(place: Path, epochs: int) -> Any:
        made = build(place)
        made.run(epochs, hand.loader(), [hand.data()[:4]])
        return made

    def save_again(place: Path, disk: Any) -> None:
        made = run(place, 1)
        with installed(disk):
            made.save_state()

    whole = run(folder / "whole", 3)
    save_again(folder / "counted", disk := faults.Disk())
    renames = [index for index, (name, _) in enumerate(disk.log) if name == "rename"]
    assert ".replaced-" in str(disk.log[renames[0]][1][1])
    for at in (renames[1], renames[1] + 1, len(disk.log) - 2):  # One is moved aside; both are there; one is half gone.
        place = folder / f"at-{at}"
        assert forked(save_again, place, KillingDisk(at)).status == -signal.SIGKILL
        assert build(place).restore_best().name == "step-00000006"
        went_on = run(place, 3)
        assert everything(went_on) == everything(whole)
        assert sorted(os.listdir(place)) == sorted(os.listdir(folder / "whole")) == ["step-00000006", "step-00000018"]
        assert went_on.best_path == place / "step-00000006"
        assert _is_whole(went_on.restore_best())


def test_what_was_passed_over_once_is_no_other_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged checkpoint that later ones do not replace stops no later start of the script."""
    options = {"save_every": 2, "keep_last": 3}
    train(folder / "run", 4, **options)
    train(folder / "run", 5, **options)  # Step 5 is the end of this one, and of no other.
    state = folder / "run" / "step-00000005" / "state.json"
    state.write_bytes(state.read_bytes()[:-1])
    loaded = trainer(folder / "run", **options)
    loaded.load_state()
    assert (loaded.progress_checker.step, caplog.text.count("passed over")) == (4, 1), "load_state says so too"
    caplog.clear()
    train(folder / "run", 8, **options)
    assert "passed over" in caplog.text
    caplog.clear()
    ended = train(folder / "run", 10, **options)
    assert "passed over" not in caplog.text
    assert everything(ended) == everything(train(folder / "whole", 10, **options))
    assert state.exists(), "what may be restored from a copy is left where it is"


def test_what_could_not_be_removed_is_no_other_run(folder: Path) -> None:
    """An old checkpoint that the disk did not let go stops no later start; one of another run does."""

    class Holding(faults.Disk):
        def before(self, name: str, args: tuple[Any, ...]) -> None:
            if name == "rename" and ".deleting-" in str(args[1]):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(args[0]))

    with installed(Holding()):
        train(folder / "run", 3, keep_last=1)
    assert len(list_checkpoints(folder / "run")) == 3
    ended = train(folder / "run", 4, keep_last=1)
    assert ended.progress_checker.step == 4
    train(folder / "other", 1)
    shutil.copytree(folder / "other" / "step-00000001", folder / "run" / "step-00000001", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=r"1 checkpoint of another run.*step-00000001"):
        train(folder / "run", 5, keep_last=1)


def test_nothing_leaves_the_folder(folder: Path) -> None:
    """Staging is a sibling, no rename crosses a disk, nothing is written after the commit; TMPDIR is not used."""
    scene = Scene(folder, 1)
    place = scene.copy("sibling")
    disk = faults.Disk()
    scene.save(place, disk)
    renames = [(Path(args[0]), Path(args[1])) for name, args in disk.log if name == "rename"]
    assert all(source.parent == target.parent == place for source, target in renames)
    commit = next(i for i, (name, args) in enumerate(disk.log) if name == "rename" and "step-" in str(args[1]))
    assert {name for name, _ in disk.log[commit + 1 :]} <= {
        "fsync_directory",
        "rename",
        "remove_file",
        "remove_directory",
    }


def test_nothing_bypasses_the_module(folder: Path) -> None:
    """F: every change that Python makes to the disk during a run goes through zae.checkpoint.filesystem.disk."""
    place = folder / "run"

    def watched() -> list[str]:
        made = trainer(place, keep_last=1)
        changes: list[str] = []
        through = [0]

        class Counting(faults.Disk):
            def before(self, name: str, args: tuple[Any, ...]) -> None:
                through[0] += 1

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)) and str(place) in str(args[0]):
                if args[2] & (os.O_WRONLY | os.O_RDWR):
                    changes.append(f"create {args[0]}")
            elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"):
                changes.append(f"{event} {args[0]}")

        sys.addaudithook(hook)
        with installed(Counting()) as disk:
            made.run(None, hand.loader(), max_steps=3)
        known = ("mkdir", "create", "rename", "remove_file", "remove_directory")
        return [len(changes), sum(name in known for name, _ in disk.log)]  # type: ignore[list-item]

    seen, counted = answer(watched)
    assert seen == counted
    assert seen > 20


def test_resume_auto(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """None: afresh, with a line; only torn ones: an error that lists each; the newest torn: one warning."""
    caplog.set_level(logging.INFO, "zae")
    place = folder / "run"
    train(place, 3, keep_last=3)
    assert sum("a new run begins" in record.getMessage() for record in caplog.records) == 1
    (place / "step-00000003" / "state.json").write_bytes(b"{")
    caplog.clear()
    made = trainer(place, keep_last=3)
    made.setup()
    assert made.progress_checker.step == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "step-00000003" in warnings[0]
    assert "; taking " in warnings[0]
    assert "step-00000002" in warnings[0]
    for step in (1, 2):
        (place / f"step-0000000{step}" / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamaged) as caught:
        trainer(place).run(None, hand.loader(), max_steps=4)
    assert all(f"step-0000000{step}" in str(caught.value) for step in (1, 2, 3))


def test_nothing_is_changed_by_what_is_damaged(folder: Path) -> None:
    """Flips, cuts and missing files are named before anything of the trainer has changed."""
    place = folder / "run"
    train(place, 2, keep_last=1)
    checkpoint = place / "step-00000002"
    made = trainer(folder / "other", resume=False)
    made.setup()
    before = everything(made)
    for path in sorted(checkpoint.iterdir()):
        data = path.read_bytes()
        size = len(data)
        flipped = [bytes([*data[:at], data[at] ^ 4, *data[at + 1 :]]) for at in range(0, size, size // 6 + 1)]
        for damaged in [*flipped, b"", data[: size // 2], data[:-1], None]:
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CheckpointDamaged, match=path.name):
                made.load_state(checkpoint)
            path.write_bytes(data)
        assert everything(made) == before
    made.load_state(checkpoint)
    assert made.progress_checker.step == 2


@pytest.mark.parametrize("lives", [25, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_200_kills_at_drawn_operations(folder: Path, lives: int) -> None:
    """The lives of one run, each killed at a drawn file operation: what was reported as saved is never lost."""
    place, reports = folder / "run", folder / "reports"
    draw = random.Random(0)
    saved, inside = 0, 0
    for number in range(lives):
        reports.write_text("")
        killing = KillingDisk(draw.randrange(70), torn=draw.random() < 0.5)
        outcome = forked(_live, place, reports, number, killing)
        assert outcome.status == -signal.SIGKILL, outcome.error
        for kind, step in map(str.split, reports.read_text().splitlines()):
            assert saved <= int(step) <= saved + 1, kind
            saved = int(step)
        inside += any(name.startswith((".staging", ".deleting")) for name in os.listdir(place))
    assert saved > lives / 2
    assert inside > lives / 2, "most were killed inside of a save"


def _live(place: Path, reports: Path, number: int, disk: KillingDisk) -> None:
    """One life: resume, and train until the disk kills it."""

    def report(line: str) -> None:
        with open(reports, "a") as file:
            file.write(line + "\n")

    faults.ambient(number)
    with installed(disk):
        made = trainer(place, keep_last=1 + number % 2)
        made.setup()
        report(f"resumed {made.progress_checker.step}")
        save = made.save_state

        def save_and_report(*args: Any) -> Any:
            path = save(*args)
            report(f"saved {made.progress_checker.step}")
            return path

        made.save_state = save_and_report
        made.run(10**6, hand.loader())


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
def test_any_file_cut_means_the_one_before(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One cut file of the newest checkpoint costs one interval, with a warning, and the end is the same."""
    place = folder / "run"
    train(place, 4, keep_last=2)
    whole = everything(train(folder / "whole", 6))
    path = place / "step-00000004" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    made = train(place, 6, keep_last=2)
    assert [record.levelname for record in caplog.records if "step-00000004" in record.getMessage()] == ["WARNING"]
    assert everything(made) == whole


def test_allow_partial(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing part is an error that names it, unless it was said that it may be missing."""
    place = folder / "run"
    weights = train(place, 3, keep_last=1).model_state()
    checkpoint = place / "step-00000003"
    (checkpoint / "state.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"state\.json.*is missing"):
        train(folder / "strict", 1, resume=checkpoint)
    made = trainer(folder / "partial", resume=checkpoint, allow_partial=["state.json"])
    made.setup()
    assert faults.fingerprint(dict(made.model_state())) == faults.fingerprint(dict(weights))
    assert made.progress_checker.step == 0
    assert "all but the weights starts a new run" in caplog.text
    with pytest.raises(ValueError, match="give resume=<its path>"):
        trainer(folder / "partial", allow_partial=["state.json"])


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("at", range(0, 60, 7))
def test_an_async_save_is_committed_by_the_same_rules(folder: Path, at: int) -> None:
    """Killed in the background thread, at some operations; what is there is whole."""
    scene = Scene(folder, 1)
    place = scene.copy("async")
    outcome = forked(lambda: scene.save(place, KillingDisk(at), save_async=True) and None)
    assert outcome.status in (-signal.SIGKILL, 0), outcome.error
    scene.check(place)


def test_an_async_save_is_of_the_step_it_was_asked_at(folder: Path) -> None:
    """save_async: a copy is written, while training continues, and bitwise what a plain save writes."""
    plain = train(folder / "plain", 6, keep_last=None)
    slow = faults.Disk()

    def wait(name: str, args: tuple[Any, ...]) -> None:
        if name == "write":
            time.sleep(0.005)  # Long enough for the next step to change every weight.

    slow.before = wait  # type: ignore[method-assign]
    with installed(slow):
        train(folder / "async", 6, keep_last=None, save_async=True)
    for step in range(1, 7):
        one, other = (load_checkpoint(folder / kind / f"step-{step:08d}")[1:] for kind in ("plain", "async"))
        for part in (one, other):
            part[1].pop("StateManagerAddon")
        assert faults.fingerprint(*one) == faults.fingerprint(*other)
    assert everything(plain)


def test_an_async_save_that_fails_surfaces_at_the_next_step(folder: Path) -> None:
    """save_async: the error comes after the next step at the latest, and teardown waits for the last save."""
    scene = Scene(folder, 2)
    place = scene.copy("async")
    made = trainer(place, keep_last=2, save_async=True)
    made.setup()
    disk = RefusingDisk(8, errno.ENOSPC)
    with installed(disk), pytest.raises(CheckpointError, match="No space left"):
        made.run(None, hand.loader(), max_steps=6)
    assert made.progress_checker.step <= 5
    done = train(scene.copy("waited"), 5, keep_last=2, save_async=True)
    assert verify(done.last_path)["step"] == 5


def test_golden_log_of_operations_is_json(folder: Path) -> None:
    """The manifest of what a trainer writes is plain JSON that names every file."""
    made = train(folder / "run", 1)
    manifest = json.loads((made.last_path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["model.safetensors", "state.json", "state.safetensors"]
    assert manifest["composition"] == ["StateManagerAddon"]
