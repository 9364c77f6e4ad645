"""Checkpoints in a store that is slow, fails, hangs or lists late: real file systems of fsspec, and real kills."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from kit import faults, hand
from kit.faults import Child, everything, forked, wait_for
from kit.ranks import on_ranks
from kit.stores import ERRORS, OPERATIONS, Failing, FaultyFiles, Gate, LateFiles, files_in, planned
from zae import Every
from zae.addons import MultiGPUAddon, StateManagerAddon
from zae.addons.state_manager import FsspecCheckpointer
from zae.doctor.checkpoints import examine_url
from zae.errors import CheckpointError, CheckpointNotFound, ConfigError


@pytest.fixture(autouse=True)
def _no_plan() -> Any:
    yield
    FaultyFiles.plan = None
    LateFiles.seen.clear()


def trainer(url: str, folder: Path, cls: Any = faults.Task, **options: Any) -> Any:
    options = {"save_every": 1, "keep_best": 0, "keep_last": 1, "resume": "auto", **options}
    return faults.build(cls, StateManagerAddon, save_path=folder, checkpointer=FsspecCheckpointer.at(url), **options)


def train(url: str, folder: Path, steps: int, **options: Any) -> Any:
    made = trainer(url, folder, **options)
    made.run(None, hand.loader(), max_steps=steps)
    return made


def checkpoints_in(store: Path) -> list[str]:
    """The checkpoints whose files are there, whole or not; the end of an epoch saves step 6 a second time."""
    return sorted({each[:13] for each in files_in(store)})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run of six steps ends with."""
    folder = tmp_path_factory.mktemp("whole")
    return everything(train(f"file://{folder}/store", folder / "local", 6))


@pytest.mark.parametrize(
    ("error", "background"),
    [
        ("client", False),
        *(
            pytest.param(error, background, marks=pytest.mark.exhaustive)
            for error in ERRORS
            for background in (False, True)
            if (error, background) != ("client", False)
        ),
    ],
    ids=lambda value: {True: "async", False: "now"}.get(value, value),
)
def test_a_store_fails_once_at_each_operation(tmp_path: Path, whole: Any, error: str, background: bool) -> None:
    """A run warns, or ends with an error that names the URL; started again it ends bitwise as without the fault."""
    begun = tmp_path / "begun"
    train(f"faulty://{begun}", tmp_path / "local", 3)
    names = ("makedirs", "put_file", "open") if error == "absent" else OPERATIONS  # A list may be without a folder.

    def run(at: int, policy: str, store: Path) -> list[str]:
        shutil.copytree(begun, store)
        made = trainer(
            f"faulty://{store}", tmp_path / f"{store.name}-local", on_save_error=policy, save_async=background
        )
        made.setup()
        FaultyFiles.plan = plan = Failing(at, error, names=names)
        try:
            made.run(None, hand.loader(), max_steps=5)
        finally:
            FaultyFiles.plan = None
        return plan.log

    log = run(10**6, "warn", tmp_path / "counted")
    assert set(log) == {*names} - {"get_file", "cat_file", "mv"}
    seen = []
    for at in range(0, len(log), 3 if error == "client" else 1):
        store, policy = tmp_path / f"at-{at}", "raise" if at % 2 else "warn"
        try:
            run(at, policy, store)
        except CheckpointError as raised:
            seen.append((policy, f"faulty://{store}" in str(raised), raised.errno is not None))
        assert len(checkpoints_in(store)) <= 3
        resumed = train(f"faulty://{store}", tmp_path / f"at-{at}-other", 6)
        assert everything(resumed) == whole
        assert checkpoints_in(store) == ["step-00000006"]
    assert ("raise", True, True) in seen
    assert set(seen) <= {("raise", True, True), ("warn", True, True)}


def test_a_client_that_draws_random_numbers_takes_none_of_training(tmp_path: Path, whole: Any) -> None:
    """botocore waits for a random time before it tries again."""
    with planned(lambda *_: random.random()):
        made = train(f"faulty://{tmp_path / 'store'}", tmp_path / "local", 6)
    assert everything(made) == whole


def test_what_failed_to_be_uploaded_takes_no_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A store that is full for a while: nothing is left of the uploads that failed, as on a disk."""
    store = tmp_path / "store"
    made = trainer(f"faulty://{store}", tmp_path / "local", on_save_error="warn", keep_last=None)
    FaultyFiles.plan = Failing(2, "full", 6, ("put_file",))  # The third file of the first checkpoint, and so on.
    made.run(None, hand.loader(), max_steps=9)
    failed = [each for each in caplog.messages if "was not saved: OSError" in each]
    assert len(failed) == 6
    assert checkpoints_in(store) == [f"step-0000000{step}" for step in (7, 8, 9)]


@pytest.mark.parametrize("error", sorted({*ERRORS} - {"absent"}))
def test_a_store_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, error: str) -> None:
    """Where `ls` fails, in the folder or in one below it, a run does not start from scratch."""
    store = tmp_path / "store"
    train(f"faulty://{store}", tmp_path / "local", 3)
    before = files_in(store)
    for at in (0, 1):
        made = trainer(f"faulty://{store}", tmp_path / "local")
        FaultyFiles.plan = Failing(at, error, 99, ("ls",))
        with pytest.raises(CheckpointError, match=r"faulty://.*: its checkpoints were not listed: "):
            made.run(None, hand.loader(), max_steps=4)
        FaultyFiles.plan = None
    assert files_in(store) == before


def test_a_store_that_fails_for_good_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The exception of the step is raised, and the log says that its state could not be saved."""

    class Broken(faults.Task):
        def train_step(self, batch: Any) -> Any:
            if self.progress_checker.step == 2:
                FaultyFiles.plan = Failing(0, "permission", 10**6)
                raise RuntimeError("a fault of the step")
            return super().train_step(batch)

    with pytest.raises(RuntimeError, match="a fault of the step"):
        train(f"faulty://{tmp_path / 'store'}", tmp_path / "local", 4, cls=Broken)
    assert "the state could not be saved in" in caplog.text


# --------------------------------------------------------------------------------------------------- slow, and kills


def test_training_continues_while_a_store_is_slow(tmp_path: Path, whole: Any) -> None:
    """With save_async, steps are made during an upload; the next save waits for it, and so does the end of the run."""
    gate, steps = Gate("put_file"), list[bool]()

    class Opening(faults.Task):
        def on_step_end(self, outputs: Any) -> None:
            super().on_step_end(outputs)
            if self.progress_checker.step in (3, 4):
                steps.append(gate.reached.wait(60) and not gate.opened.is_set())
            if self.progress_checker.step == 4:
                gate.opened.set()

    FaultyFiles.plan = gate
    store = tmp_path / "store"
    made = train(f"faulty://{store}", tmp_path / "local", 6, cls=Opening, save_async=True, save_every=2, keep_last=2)
    assert steps == [True, True]
    assert everything(made) == whole
    assert checkpoints_in(store) == ["step-00000004", "step-00000006"]


def _run_to_a_gate(store: Path, folder: Path, marker: Path, background: bool) -> None:
    """Train until an upload at step 4 is held; a file says so."""

    def plan(name: str, *args: Any) -> None:
        if name == "put_file" and "step-00000004.1/state.json" in args[1]:
            marker.write_text("reached")
            wait_for((marker.with_suffix(".go")).exists)

    made = trainer(f"faulty://{store}", folder, save_async=background)
    made.setup()
    FaultyFiles.plan = plan
    made.run(None, hand.loader(), max_steps=50)


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("background", [False, True], ids=["now", "async"])
def test_sigterm_during_an_upload(tmp_path: Path, whole: Any, background: bool) -> None:
    """The upload is finished, the last step is saved, and the status is 143; a resume is bitwise the same."""
    store, marker = tmp_path / "store", tmp_path / "marker"
    child = Child(_run_to_a_gate, store, tmp_path / "local", marker, background)
    wait_for(marker.exists)
    child.signal(signal.SIGTERM)
    marker.with_suffix(".go").touch()
    outcome = child.wait()
    assert outcome.status == 143, outcome.error
    (left,) = checkpoints_in(store)
    resumed = trainer(f"faulty://{store}", tmp_path / "other")
    resumed.setup()
    assert resumed.progress_checker.step == int(left[5:13])
    resumed = train(f"faulty://{store}", tmp_path / "other2", 50)
    straight = train(f"file://{tmp_path / 'straight'}", tmp_path / "straight-local", 50)
    assert everything(resumed) == everything(straight)


@pytest.mark.parametrize("background", [False, True], ids=["now", "async"])
def test_a_second_sigterm_ends_a_run_whose_store_hangs(tmp_path: Path, whole: Any, background: bool) -> None:
    """At once, and the run resumes from the checkpoint before."""
    store, marker = tmp_path / "store", tmp_path / "marker"
    child = Child(_run_to_a_gate, store, tmp_path / "local", marker, background)
    wait_for(marker.exists)
    outcome = None
    while outcome is None:
        child.signal(signal.SIGTERM)
        time.sleep(0.02)
        outcome = child.poll()
    assert outcome.status == -signal.SIGTERM, outcome.error
    resumed = trainer(f"faulty://{store}", tmp_path / "other")
    resumed.setup()
    assert resumed.progress_checker.step == 3
    resumed.run(None, hand.loader(), max_steps=6)
    assert everything(resumed) == whole


def test_a_kill_during_an_upload_leaves_nothing_on_the_local_disk(tmp_path: Path, whole: Any) -> None:
    """The temporary files of the killed process are removed by the next save on the same machine."""
    store, folder, marker = tmp_path / "store", tmp_path / "local", tmp_path / "marker"
    child = Child(_run_to_a_gate, store, folder, marker, False)
    wait_for(marker.exists)
    child.kill()
    assert [each for each in os.listdir(folder) if each.startswith(".staging")]
    assert everything(train(f"faulty://{store}", folder, 6)) == whole
    assert os.listdir(folder) == []
    assert checkpoints_in(store) == ["step-00000006"]


# ------------------------------------------------------------------------------------------ late lists, foreign files


def test_a_store_that_lists_late(tmp_path: Path, whole: Any) -> None:
    """A list without the newest objects, and with some that were removed: nothing whole is written over, none lost."""
    store, written = tmp_path / "store", list[str]()

    def plan(name: str, *args: Any) -> None:
        if name == "put_file":
            assert not os.path.exists(os.path.join(os.path.dirname(args[1]), "manifest.json"))
            written.append(args[1])

    FaultyFiles.plan = plan
    made = trainer(f"late://{store}", tmp_path / "local", keep_last=2)
    made.run(None, hand.loader(), max_steps=3)
    for _ in range(3):  # The same step again.
        made.save_state()
    assert len(written) == 4 * 6
    for at in (4, 5, 6):
        resumed = train(f"late://{store}", tmp_path / f"local-{at}", at, keep_last=2)
    assert everything(resumed) == whole
    LateFiles.seen.clear()
    train(f"late://{store}", tmp_path / "last", 7, keep_last=1)
    LateFiles.seen.clear()
    assert trainer(f"late://{store}", tmp_path / "last").checkpointer.list_saved(tmp_path / "last")[0].name[-1] == "7"


def test_a_checkpoint_that_is_listed_and_gone(tmp_path: Path) -> None:
    """The list of a store still has it: a resume takes the one before."""
    store = tmp_path / "store"
    train(f"late://{store}", tmp_path / "local", 3, keep_last=2)
    made = trainer(f"late://{store}", tmp_path / "local")
    made.checkpointer.list_saved(tmp_path / "local")
    shutil.rmtree(store / "step-00000003.1")
    with pytest.raises(CheckpointNotFound, match="no checkpoint step-00000003 in late://"):
        made.checkpointer.load_manifest(tmp_path / "local" / "step-00000003")
    made.checkpointer.list_saved(tmp_path / "local")
    LateFiles.seen[str(store)] = ["step-00000003.1", "step-00000002.1"]
    LateFiles.seen[f"{store}/step-00000003.1"] = ["manifest.json", "state.json"]
    made.setup()
    assert made.progress_checker.step == 2


@pytest.mark.parametrize("scheme", ["faulty", "objects"])
def test_foreign_files_stay(tmp_path: Path, scheme: str, whole: Any) -> None:
    """Beside the checkpoints, and in their folders; names that are almost those of checkpoints are left alone."""
    store = tmp_path / "store"
    foreign = ["notes.txt", "step-00000009", "step-1.1", "step-00000008.1", "step-00000007.x/manifest.json",
               "data/step-00000012.1/manifest.json", "weights-1.safetensors", "step-00000002.1/notes.txt"]  # fmt: skip
    for name in foreign:
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text(name)
    made = train(f"{scheme}://{store}", tmp_path / "local", 6, save_weights_every=6)
    assert everything(made) == whole
    left = [each for each in files_in(store) if not each.startswith(("step-00000006", "weights-00000006"))]
    assert left == sorted(foreign)
    assert all((store / name).read_text() == name for name in foreign)


# -------------------------------------------------------------------------------------------- weights in the store


@pytest.mark.parametrize("scheme", ["faulty", "objects"])
def test_files_of_weights_are_in_the_store(tmp_path: Path, scheme: str) -> None:
    """By the same rule as on a disk, read back by their URL, and none on the local disk."""
    names = {}
    for kind, url in (("disk", None), ("store", f"{scheme}://{tmp_path / 'store'}")):
        options = {"save_weights_every": 2, "keep_weights": 1, "keep_best_weights": 1, "save_every": Every(epochs=1)}
        if url is None:
            made = faults.build(faults.Task, StateManagerAddon, save_path=tmp_path / kind, **options)
        else:
            made = trainer(url, tmp_path / "local", resume=False, **options)
        made.run(2, hand.loader(), [hand.data()[:4]])
        names[kind] = sorted(each.name for each in (tmp_path / kind).glob("weights-*"))
    assert names["store"] == names["disk"]
    assert names["store"]
    assert not list((tmp_path / "local").glob("**/*weights*"))
    newest = names["store"][-1]
    for name in names["store"]:
        read, written = load_file(tmp_path / "store" / name), load_file(tmp_path / "disk" / name)
        assert all(read[key].equal(written[key]) for key in written)
    made = trainer(f"{scheme}://{tmp_path / 'other'}", tmp_path / "local2")
    made.apply_weights(f"{scheme}://{tmp_path}/store/{newest}")
    assert hand.digest(made.unwrap()) == hand.digest(_loaded(tmp_path / "disk" / newest))
    assert examine_url(f"{scheme}://{tmp_path}/store")["weights"] == names["store"]
    with pytest.raises(CheckpointNotFound, match=r"there is no file .*nothing"):
        made.apply_weights(f"{scheme}://{tmp_path}/store/nothing.safetensors")
    with pytest.raises(ConfigError, match=r"start_from='s3://bucket/run' is a URL.*apply_weights"):
        trainer(f"{scheme}://{tmp_path / 'other'}", tmp_path / "local2", start_from="s3://bucket/run")
    for folder in (tmp_path / "store").glob("step-*"):
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"files? of weights of another run"):
        train(f"{scheme}://{tmp_path / 'store'}", tmp_path / "local3", 2, resume=False, save_weights_every=1)


def _loaded(path: Path) -> Any:
    model = faults.classifier()
    model.load_state_dict(load_file(path))
    return model


class _Killing:
    """A plan that tears an upload of weights, and kills the process."""

    def __init__(self, at: int, whole_puts: bool) -> None:
        self.at, self.whole_puts, self.count = at, whole_puts, 0

    def __call__(self, name: str, *args: Any) -> None:
        if name not in ("put_file", "mv") or not any("weights-" in str(each) for each in args):
            return
        self.count += 1
        if self.count == self.at:
            if name == "put_file" and not self.whole_puts:
                data = Path(args[0]).read_bytes()
                Path(args[1]).write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("scheme", ["faulty", "objects"])
def test_a_kill_during_an_upload_of_weights(tmp_path: Path, scheme: str) -> None:
    """Each file is whole or absent, and the resumed run makes the same files. A put of an object is atomic."""
    options = {"save_weights_every": 1, "keep_last": 2}
    train(f"{scheme}://{tmp_path / 'whole'}", tmp_path / "whole-local", 4, **options)
    for at in (1, 2, 3, 4):
        store = tmp_path / f"at-{at}"

        def run(at: int = at, store: Path = store) -> None:
            FaultyFiles.plan = _Killing(at, scheme == "objects")
            train(f"{scheme}://{store}", tmp_path / f"{store.name}-local", 4, **options)

        assert forked(run).status == -signal.SIGKILL
        for name in (each for each in files_in(store) if each.startswith("weights-")):
            assert (store / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        train(f"{scheme}://{store}", tmp_path / f"{store.name}-local", 4, **options)
        assert [each for each in files_in(store) if "weights" in each] == [
            each for each in files_in(tmp_path / "whole") if "weights" in each
        ]


def test_weights_that_a_store_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As for checkpoints: an error that names the URL, or a warning; what cannot be removed is a warning."""
    store = f"faulty://{tmp_path / 'store'}"
    options = {"save_weights_every": 1, "keep_weights": 1, "save_every": Every(epochs=9)}
    FaultyFiles.plan = Failing(0, "full", 1, ("put_file",))
    with pytest.raises(
        CheckpointError, match=r"faulty://.*weights-00000001\.safetensors was not saved: OSError"
    ) as told:
        train(store, tmp_path / "local", 3, **options)
    assert told.value.errno == errno.ENOSPC
    FaultyFiles.plan = Failing(0, "full", 1, ("put_file",))
    train(store, tmp_path / "local", 3, on_save_error="warn", **options)
    assert "not saved at step 1: faulty://" in caplog.text
    FaultyFiles.plan = Failing(0, "permission", 99, ("rm_file",))
    train(store, tmp_path / "local", 5, **options)
    assert "weights-00000003.safetensors was not removed: PermissionError" in caplog.text


# ------------------------------------------------------------------------------------------------- on several ranks


@on_ranks(2)
def test_two_ranks_with_a_store(world: int, tmp_path: Path) -> None:
    """Each with its own local disk: rank 0 alone uploads; all resume bitwise, and all get the error of an upload."""
    url, local = f"faulty://{tmp_path}/store", tmp_path / f"local-{dist.get_rank()}"
    options = {"save_weights_every": 2, "keep_weights": 1, "save_async": True}

    def run(steps: int, place: Path, url: str = url, **more: Any) -> Any:
        made = faults.build(faults.Task, MultiGPUAddon, StateManagerAddon, save_path=place, save_every=1, keep_best=0,
                            resume="auto", checkpointer=FsspecCheckpointer.at(url), **options, **more)  # fmt: skip
        made.run(None, hand.loader(), max_steps=steps)
        return made

    whole = run(5, tmp_path / f"whole-{dist.get_rank()}", f"file://{tmp_path}/whole")
    run(2, local)
    with planned(Failing(1, "full", names=("put_file",))):  # Of a rank that uploads nothing, it fails nothing.
        with pytest.raises(CheckpointError, match="step-00000003 was not saved: OSError"):
            run(4, local)
    dist.barrier()
    resumed = run(5, local)
    assert everything(resumed) == everything(whole)
    dist.barrier()
    assert checkpoints_in(tmp_path / "store") == ["step-00000004", "step-00000005", "weights-00000"]
    assert files_in(tmp_path / "store")[-1] == "weights-00000004.safetensors"
    assert files_in(local) == []
