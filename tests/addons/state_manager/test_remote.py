"""Checkpoints in file systems of fsspec, and in zip files by the class of a page: killed, refused, resumed, pruned."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from kit import faults, hand
from kit.blocks import Blocks, find_page
from kit.faults import everything, forked
from zae import Every
from zae.addons import StateManagerAddon
from zae.addons.state_manager import Checkpointer, FsspecCheckpointer
from zae.addons.state_manager.checkpointer import FolderCheckpointer
from zae.cli import main
from zae.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ConfigError

STEPS = 4  # The save of this step is the one that is broken.


def trainer(checkpointer: Any, folder: Path, cls: Any = faults.Task, **options: Any) -> Any:
    model = faults.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"save_every": 1, "keep_best": 0, "keep_last": 1, "resume": "auto", "log_bar": False, **options}
    return cls.add_on(StateManagerAddon)(
        model, "cpu", optimizer=optimizer, seed=5, save_path=folder, checkpointer=checkpointer, **options
    )


def train(checkpointer: Any, folder: Path, steps: int, **options: Any) -> Any:
    made = trainer(checkpointer, folder, **options)
    made.run(None, hand.loader(), max_steps=steps)
    return made


def names(made: Any) -> list[str]:
    return [path.name for path in made.checkpointer.list_saved(made.checkpointer.folder)]


CHANGING = ("makedirs", "put_file", "rm_file", "rmdir")


class BreakingFiles(LocalFileSystem):
    """The local disk as a store: each operation that changes it is counted, and number `at` is broken."""

    cachable = False

    def __init__(self, at: int = -1, how: str = "kill", **options: Any) -> None:
        super().__init__(**options)
        self.at, self.how, self.log = at, how, list[str]()

    def _before(self, name: str, args: tuple[Any, ...]) -> None:
        self.log.append(name)
        now = len(self.log) - 1
        if self.how == "refuse" and 0 <= self.at <= now:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if now != self.at:
            return
        if self.how == "tear" and name == "put_file":
            data = Path(args[0]).read_bytes()
            Path(args[1]).write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


def _counted(name: str) -> Any:
    def operate(self: BreakingFiles, *args: Any, **kwargs: Any) -> Any:
        self._before(name, args)
        return getattr(LocalFileSystem, name)(self, *args, **kwargs)

    return operate


for _name in CHANGING:
    setattr(BreakingFiles, _name, _counted(_name))


def save_on(files: BreakingFiles, store: Path, folder: Path, again: bool) -> BreakingFiles:
    """Go on to step 4 in a store that breaks; with ``again``, save that step a second time in one that does."""
    made = trainer(FsspecCheckpointer.at(f"file://{store}"), folder)
    made.setup()
    if not again:
        made.checkpointer.files = files
    made.run(None, hand.loader(), max_steps=STEPS)
    if again:
        made.checkpointer.files = files
        made.save_state()
    return files


@pytest.mark.parametrize(
    ("how", "again"),
    [
        ("kill", False),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("tear", False), ("kill", True), ("tear", True))
        ),
    ],
    ids=lambda value: {True: "again", False: "next"}.get(value, value),
)
def test_killed_at_each_operation_of_a_store(tmp_path: Path, how: str, again: bool) -> None:
    """Killed before or within each operation, with one checkpoint to keep: the run ends bitwise as without it.

    "again" saves the same step a second time, as the score of a validation does.
    """
    whole = everything(train(FolderCheckpointer, tmp_path / "whole", 6))

    begun = train(FsspecCheckpointer.at(f"file://{tmp_path / 'begun'}"), tmp_path / "local", STEPS - 1)
    assert names(begun) == ["step-00000003"]

    def prepare(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "begun", tmp_path / name))

    log = save_on(BreakingFiles(), prepare("counted"), tmp_path / "counted-local", again).log
    assert log.count("put_file") == 4
    assert "rm_file" in log
    found = []
    for at in [at for at, name in enumerate(log) if name == "put_file" or how == "kill"]:
        store, local = prepare(f"at-{at}"), tmp_path / f"at-{at}-local"
        outcome = forked(save_on, BreakingFiles(at, how), store, local, again)
        assert outcome.status == -signal.SIGKILL, outcome.error
        elsewhere = tmp_path / f"at-{at}-other"  # Another machine goes on.
        resumed = trainer(FsspecCheckpointer.at(f"file://{store}"), elsewhere)
        resumed.setup()
        found.append(resumed.progress_checker.step)
        resumed.run(None, hand.loader(), max_steps=6)
        assert everything(resumed) == whole
        assert names(resumed) == ["step-00000006"]
        full = [each for each in os.listdir(store) if os.listdir(store / each)]  # Object storage has no folders.
        assert [each[:13] for each in full] == ["step-00000006"]
        assert [each for each in os.listdir(elsewhere) if each != ".lock"] == []
    assert found == sorted(found)
    assert set(found) == ({4} if again else {3} if how == "tear" else {3, 4})


@pytest.mark.parametrize("background", [False, True], ids=["", "async"])
def test_a_store_that_refuses(tmp_path: Path, background: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the URL; the older checkpoint is whole; with "warn" training continues."""
    at = FsspecCheckpointer.at(f"file://{tmp_path / 'store'}")
    train(at, tmp_path / "local", 3)
    for number in (0, 2, 4):
        made = trainer(at, tmp_path / "local", save_async=background)
        made.setup()
        made.checkpointer.files = BreakingFiles(number, "refuse")
        with pytest.raises(CheckpointError, match=r"file://.*step-00000004 was not saved: OSError") as caught:
            made.run(None, hand.loader(), max_steps=4)
        assert (caught.value.errno, os.strerror(errno.ENOSPC) in str(caught.value)) == (errno.ENOSPC, True)
        assert "step-00000003" in names(made)
    warned = trainer(at, tmp_path / "local", on_save_error="warn", save_async=background)
    warned.setup()
    warned.checkpointer.files = BreakingFiles(0, "refuse")
    assert warned.run(None, hand.loader(), max_steps=5)["step"] == 5
    assert "not saved at step 5" in caplog.text
    resumed = train(at, tmp_path / "local", 6)
    assert names(resumed) == ["step-00000006"]


def bucket_options(folder: Path) -> dict[str, Any]:
    """Options of ``dir://``: the folders of a local one are buckets, and keys need no folder, as in object storage."""
    return {"path": str(folder), "fs": LocalFileSystem(auto_mkdir=True)}


@pytest.mark.parametrize("url", ["dir://bucket-typo/run", "dir://bucket-typo"])
@pytest.mark.parametrize("resume", ["auto", False])
def test_a_bucket_that_does_not_exist_is_refused_before_training_and_not_created(
    tmp_path: Path, url: str, resume: Any
) -> None:
    steps = []

    class Counting(faults.Task):
        def train_step(self, batch: Any) -> Any:
            steps.append(batch)
            return super().train_step(batch)

    (tmp_path / "store" / "bucket").mkdir(parents=True)
    at = FsspecCheckpointer.at(url, **bucket_options(tmp_path / "store"))
    with pytest.raises(ConfigError, match=f"url='{url}': there is no bucket 'bucket-typo'; correct the URL, or create"):
        train(at, tmp_path / "local", 2, cls=Counting, resume=resume)
    assert steps == []
    assert os.listdir(tmp_path / "store") == ["bucket"]


def test_an_empty_bucket_takes_checkpoints_and_no_save_makes_a_folder(tmp_path: Path) -> None:
    """Files of weights as well: in object storage, to make a folder makes the bucket."""
    bucket = tmp_path / "store" / "bucket"
    bucket.mkdir(parents=True)
    at = FsspecCheckpointer.at("dir://bucket/run", **bucket_options(tmp_path / "store"))
    train(at, tmp_path / "local", 2, save_weights_every=1)
    assert {"step-00000002.1", "weights-00000002.safetensors"} <= set(os.listdir(bucket / "run"))
    assert train(at, tmp_path / "other", 4).progress_checker.step == 4

    class NoFolders(DirFileSystem):
        cachable = False

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            raise AssertionError(f"{path} would be made")

    made = trainer(at, tmp_path / "local", save_weights_every=1)
    made.checkpointer.files = NoFolders(**bucket_options(tmp_path / "store"))
    made.run(None, hand.loader(), max_steps=6)
    assert names(made) == ["step-00000006"]


def test_a_bucket_that_may_not_be_listed_is_used(tmp_path: Path) -> None:
    """Rights may be given for a prefix alone."""

    class OnePrefix(DirFileSystem):
        cachable = False

        def exists(self, path: str) -> bool:
            return "/" in path and super().exists(path)

        def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
            if "/" not in path:
                raise PermissionError("Access Denied")
            return super().ls(path, detail, **options)

    (tmp_path / "store" / "bucket").mkdir(parents=True)
    made = trainer(FsspecCheckpointer.at("dir://bucket/run", **bucket_options(tmp_path / "store")), tmp_path / "local")
    made.checkpointer.files = OnePrefix(**bucket_options(tmp_path / "store"))
    made.run(None, hand.loader(), max_steps=2)
    assert names(made) == ["step-00000002"]


def test_kept_by_number_and_by_score(tmp_path: Path) -> None:
    """keep_last, keep_best, last_path, best_path and restore_best are those of folders, also after a resume."""

    class Scored(faults.Task):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": (0.3, 0.1, 0.5, 0.4, 0.6)[self.progress_checker.epoch - 1]}

    ends = []
    for name, checkpointer in (("folders", FolderCheckpointer), ("memory", FsspecCheckpointer.at("memory://kept/run"))):
        options = {"cls": Scored, "keep_last": 2, "keep_best": 1, "save_every": Every(epochs=1)}
        for epochs in (3, 5):
            made = trainer(checkpointer, tmp_path / name, **options)
            made.run(epochs, hand.loader(), [hand.data()[:4]])
        assert names(made) == ["step-00000030", "step-00000024", "step-00000012"]
        assert (made.last_path.name, made.best_path.name) == ("step-00000030", "step-00000012")
        assert made.restore_best() == tmp_path / name / "step-00000012"
        ends.append(everything(made))
    assert ends[0] == ends[1]
    found = fsspec.filesystem("memory").ls("/kept/run", detail=False)
    assert [each.rpartition("/")[2][:13] for each in sorted(found)] == [
        "step-00000012",
        "step-00000024",
        "step-00000030",
    ]


def test_damage_is_noticed_and_another_run_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit in the newest one: the one before is loaded. Without a resume, the store is not touched."""
    memory, at = fsspec.filesystem("memory"), FsspecCheckpointer.at("memory://damage/run")
    train(at, tmp_path / "local", 3, keep_last=2)
    with pytest.raises(ConfigError, match="contains 2 checkpoints of another run"):
        train(at, tmp_path / "other", 3, resume=False)
    path = "/damage/run/step-00000003.1/model.safetensors"
    data = bytearray(memory.cat_file(path))
    data[len(data) // 2] ^= 1
    memory.pipe_file(path, bytes(data))
    resumed = trainer(at, tmp_path / "local", keep_last=2)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        resumed.load_state(tmp_path / "local" / "step-00000003")
    resumed.setup()
    assert resumed.progress_checker.step == 2
    assert "passed over" in caplog.text
    with pytest.raises(CheckpointNotFound, match="no checkpoint step-00000009 in memory://damage/run"):
        resumed.load_state(tmp_path / "local" / "step-00000009")


def test_the_doctor_examines_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory, url = fsspec.filesystem("memory"), "memory://doctor/run"
    train(FsspecCheckpointer.at(url), tmp_path / "local", 3, keep_last=2)
    memory.pipe_file("/doctor/run/step-00000009.1/model.safetensors", b"cut")
    assert main(["doctor", url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report["checkpoints"]] == ["step-00000003", "step-00000002"]
    assert (report["resume_from"], report["left_behind"]) == ("step-00000003", ["step-00000009.1"])
    memory.pipe_file("/doctor/run/step-00000003.1/state.json", b"x")
    memory.pipe_file("/doctor/run/step-00000002.1/manifest.json", b"{")
    assert main(["doctor", url]) == 1
    shown = capsys.readouterr().out
    assert "step-00000003: state.json" in shown or "state.json: cut short" in shown
    assert shown.count("DAMAGED") == 2
    assert main(["doctor", "memory://doctor/nothing"]) == 1
    assert 'resume="auto" starts a new run here' in capsys.readouterr().out
    assert main(["doctor", "nosuch://bucket"]) == 2
    assert "nosuch" in capsys.readouterr().err


def test_a_failed_run_is_stored_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The state of a failed run is in the store, named in the log, resumed by its path, and replaced by the next."""

    class Failing(faults.Task):
        fails = True

        def train_step(self, batch: Any) -> Any:
            if self.fails and self.progress_checker.step == 2:
                raise RuntimeError("a fault of the step")
            return super().train_step(batch)

    at = FsspecCheckpointer.at("memory://failed/run")
    with pytest.raises(RuntimeError, match="a fault of the step"):
        train(at, tmp_path / "local", 4, cls=Failing)
    assert "crash-00000002" in caplog.text
    assert "the newest regular checkpoint is" in caplog.text
    made = trainer(at, tmp_path / "local", resume=tmp_path / "local" / "crash-00000002")
    assert [path.name for path in made.checkpointer.list_saved(tmp_path / "local", "crash")] == ["crash-00000002"]
    made.setup()
    assert made.progress_checker.step == 2


def test_what_is_refused(tmp_path: Path) -> None:
    """Each error names what was given, and what to write."""
    make = partial(trainer, folder=tmp_path)
    with pytest.raises(ConfigError, match="url='nowhere://a' cannot be used: Protocol not known"):
        make(FsspecCheckpointer.at("nowhere://a"))
    with pytest.raises(ConfigError, match="FsspecCheckpointer cannot store save_format='sharded'; write save_format="):
        make(FsspecCheckpointer.at("memory://a"), save_format="sharded")
    with pytest.raises(ConfigError, match=r"checkpointer='memory://a'; it must be a class derived from zae\.addons\."):
        make("memory://a")
    with pytest.raises(ConfigError, match="checkpointer returned a dict; give a class"):
        make(lambda *args, **options: {})


# ---------------------------------------------------------------------------------------- the class of the page


@pytest.fixture(scope="module")
def zipped() -> Any:
    """The class that docs/extending/checkpoint_storage.md shows."""
    blocks = Blocks(find_page("checkpoint_storage"))
    code = next(str(each.parsed) for each in blocks.document if "class ZipCheckpointer" in each.parsed)
    module = types.ModuleType("zip_checkpointer")
    sys.modules["zip_checkpointer"] = module
    exec(compile(code.split("trainer = ")[0], "zip_checkpointer.py", "exec"), vars(module))
    yield module.ZipCheckpointer
    del sys.modules["zip_checkpointer"]


def _save_and_die(cls: Any, folder: Path, at: int) -> int:
    """Go on to step 4, and kill this process before line number `at` of the class is executed; count the lines."""
    made, count = trainer(cls, folder), 0
    made.setup()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != "zip_checkpointer.py":
            return None
        if event == "line":
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    made.run(None, hand.loader(), max_steps=STEPS)
    sys.settrace(None)
    return count


def test_the_storage_of_the_page_is_killed_at_its_lines(tmp_path: Path, zipped: Any) -> None:
    """A class of thirty lines that keeps zip files: killed before every sixth line, it resumes to bitwise the same."""
    whole = everything(train(FolderCheckpointer, tmp_path / "whole", 6))
    train(zipped, begun := tmp_path / "begun", STEPS - 1)
    assert sorted(os.listdir(begun)) == ["step-00000003.zip"]
    lines = forked(_save_and_die, zipped, shutil.copytree(begun, tmp_path / "counted"), 0).result
    assert lines > 20
    found = []
    for at in [*range(1, lines, 6), lines]:
        folder = Path(shutil.copytree(begun, tmp_path / f"at-{at}"))
        outcome = forked(_save_and_die, zipped, folder, at)
        assert outcome.status == -signal.SIGKILL, outcome.error
        resumed = trainer(zipped, folder)
        resumed.setup()
        found.append(resumed.progress_checker.step)
        resumed.run(None, hand.loader(), max_steps=6)
        assert everything(resumed) == whole
        assert sorted(os.listdir(folder)) == ["step-00000006.zip"]
    assert found == sorted(found)
    assert set(found) == {3, 4}


def test_the_storage_of_the_page_notices_flipped_bits_of_the_archive(tmp_path: Path, zipped: Any) -> None:
    """Bits of a file, of the directory of the archive, and its end: a resume takes the checkpoint before."""
    train(zipped, whole := tmp_path / "whole", STEPS, keep_last=2)
    newest = max(whole.glob("*.zip"))
    data = newest.read_bytes()
    directory = data.index(b"PK\x01\x02")
    bits = [100 * 8, directory * 8, 8 * (directory + 6) + 7, 8 * (directory + 8) + 5, 8 * (directory + 10)]
    bits += [8 * (directory + 24), 8 * (len(data) - 7) + 7]
    for bit in bits:
        folder = Path(shutil.copytree(whole, tmp_path / f"bit-{bit}"))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / newest.name).write_bytes(flipped)
        resumed = trainer(zipped, folder)
        resumed.setup()
        assert resumed.progress_checker.step == STEPS - 1, bit


class Listed(Checkpointer):
    """Copies of folders, listed with a function that fails for a missing folder."""

    refuses = False

    def names(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.startswith("step-")]

    def put(self, name: str, folder: Path) -> None:
        if self.refuses:
            raise ConnectionError("the client has lost the storage")
        shutil.copytree(folder, self.folder / name, dirs_exist_ok=True)

    def get(self, name: str, folder: Path, files: Any = None) -> None:
        shutil.copytree(self.folder / name, folder, dirs_exist_ok=True)

    def delete(self, name: str) -> None:
        shutil.rmtree(self.folder / name)


def test_an_error_of_a_storage_names_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder is made before it is listed; what put raises ends the run, or is warned of; a lost one is not found."""

    class Refusing(Listed):
        refuses = True

    made = train(Listed, tmp_path / "new", 2)
    with pytest.raises(
        CheckpointError, match=r"new: step-00000003 was not saved: ConnectionError: the client has lost"
    ):
        train(Refusing, tmp_path / "new", 3)
    warned = train(Refusing, tmp_path / "new", 3, on_save_error="warn")
    assert warned.progress_checker.step == 3
    assert "not saved at step 3" in caplog.text
    assert names(made) == ["step-00000002"]

    class Unread(Listed):
        def get(self, name: str, folder: Path, files: Any = None) -> None:
            raise NotImplementedError("a compression of another client")

    with pytest.raises(CheckpointError, match=r"new: step-00000002 was not loaded: NotImplementedError: a compression"):
        trainer(Unread, tmp_path / "new").setup()
    with pytest.raises(CheckpointNotFound, match=r"there is no checkpoint step-00000009 in .*new"):
        made.load_state(tmp_path / "new" / "step-00000009")


def test_a_class_without_a_method_is_told_which_one(tmp_path: Path) -> None:
    class Unfinished(Listed):
        put = Checkpointer.put

    with pytest.raises(ConfigError, match=r"Unfinished has no method put\(self, name, folder\); write one"):
        train(Unfinished, tmp_path, 1)
