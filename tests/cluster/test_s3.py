"""Checkpoints over the protocol of S3: s3fs against a server of moto in a separate process.

Needs the packages s3fs, moto, flask and flask-cors of PyPI: pip install -e '.[cluster]'.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import fsspec
import pytest

from kit import faults, hand
from kit.faults import everything, forked
from zae.addons import StateManagerAddon
from zae.addons.state_manager import FsspecCheckpointer
from zae.addons.state_manager.checkpointer import FolderCheckpointer
from zae.cli import main
from zae.errors import CheckpointError

pytestmark = pytest.mark.cluster


def store() -> Any:
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def trainer(url: str | None, folder: Path, **options: Any) -> Any:
    checkpointer = FolderCheckpointer if url is None else FsspecCheckpointer.at(url)
    options = {"save_every": 1, "keep_best": 0, "keep_last": 2, "resume": "auto", **options}
    return faults.build(faults.Task, StateManagerAddon, save_path=folder, checkpointer=checkpointer, **options)


def train(url: str | None, folder: Path, steps: int, **options: Any) -> Any:
    made = trainer(url, folder, **options)
    made.run(None, hand.loader(), max_steps=steps)
    return made


def names(url: str) -> set[str]:
    """The checkpoints and files below a URL; the end of an epoch saves step 6 a second time."""
    root = url.removeprefix("s3://")
    found = {each[len(root) + 1 :].partition("/")[0] for each in store().find(root)}
    return {each[:13] if each.startswith("step-") else each for each in found}


def test_a_run_on_several_machines(bucket: str, tmp_path: Path) -> None:
    """Resumed bitwise with another local folder; pruned; weights and log are there; another run is refused."""
    url = f"{bucket}/machines"
    options = {"save_weights_every": 2, "keep_weights": 1, "save_async": True}
    whole = everything(train(None, tmp_path / "whole", 6, **options))
    for steps in (2, 4, 6):
        made = train(url, tmp_path / f"local-{steps}", steps, **options)
    assert everything(made) == whole
    assert names(url) == {"step-00000005", "step-00000006", "weights-00000006.safetensors"}
    other = trainer(f"{bucket}/unused", tmp_path / "unused")
    other.apply_weights(f"{url}/weights-00000006.safetensors")
    assert hand.digest(other.unwrap()) == hand.digest(made.unwrap())
    with pytest.raises(Exception, match="checkpoints of another run"):
        train(url, tmp_path / "other", 2, resume=False)


def test_damage_and_unfinished_uploads(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit and a missing file are passed over, and doctor names them; a run removes what has no manifest."""
    url = f"{bucket}/damage"
    train(url, tmp_path / "local", 4, keep_last=None)
    files = store()
    data = bytearray(files.cat_file("runs/damage/step-00000004.1/model.safetensors"))
    data[len(data) // 2] ^= 1
    files.pipe_file("runs/damage/step-00000004.1/model.safetensors", bytes(data))
    files.rm_file("runs/damage/step-00000003.1/state.json")
    files.pipe_file("runs/damage/step-00000009.1/model.safetensors", b"cut")
    files.pipe_file("runs/damage/notes.txt", b"mine")
    assert main(["doctor", url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [each["whole"] for each in report["checkpoints"]] == [False, False, True, True]
    assert (report["resume_from"], report["left_behind"]) == ("step-00000002", ["step-00000009.1"])
    resumed = trainer(url, tmp_path / "other")
    resumed.setup()
    assert resumed.progress_checker.step == 2
    resumed.run(None, hand.loader(), max_steps=6)
    assert everything(resumed) == everything(train(None, tmp_path / "whole", 6))
    assert names(url) == {"step-00000005", "step-00000006", "notes.txt"}


def _run_and_die(url: str, folder: Path, at: int, before: bool) -> None:
    """Save step 4, and kill this process before or after put number `at`; the client is the real one."""
    made = trainer(url, folder)
    made.setup()
    files, count = made.checkpointer.files, 0
    put_file = files.put_file

    def put_and_die(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == at and before:
            os.kill(os.getpid(), signal.SIGKILL)
        put_file(*args, **kwargs)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    files.put_file = put_and_die
    made.run(None, hand.loader(), max_steps=4)


def test_killed_at_each_upload(bucket: str, tmp_path: Path) -> None:
    """Another machine resumes from the newest whole one, to bitwise the same end, and removes the rest."""
    whole = everything(train(None, tmp_path / "whole", 6))
    found = []
    for at, before in ((1, True), (2, True), (4, True), (4, False)):
        url = f"{bucket}/killed-{at}-{before}"
        train(url, tmp_path / f"{at}-{before}", 3, keep_last=1)
        outcome = forked(_run_and_die, url, tmp_path / f"{at}-{before}-again", at, before)
        assert outcome.status == -signal.SIGKILL, outcome.error
        resumed = trainer(url, tmp_path / f"{at}-{before}-other", keep_last=1)
        resumed.setup()
        found.append(resumed.progress_checker.step)
        resumed.run(None, hand.loader(), max_steps=6)
        assert everything(resumed) == whole
        assert names(url) == {"step-00000006"}
    assert found == [3, 3, 3, 4]


@pytest.mark.parametrize("kind", ["gone", "hangs"])
def test_a_server_that_does_not_answer(bucket: str, tmp_path: Path, kind: str) -> None:
    """A resume ends with an error that names the URL, after the time of the client, and does not start from scratch."""
    url = f"{bucket}/{kind}"
    quick = {"retries": {"max_attempts": 1}, "connect_timeout": 1, "read_timeout": 0.2}
    train(url, tmp_path / "local", 2)
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as silent:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{9 if kind == 'gone' else silent.getsockname()[1]}")
        gone = FsspecCheckpointer.at(url, config_kwargs=quick, skip_instance_cache=True)
        options = {"on_save_error": "warn", "save_path": tmp_path / "other"}
        made = faults.build(faults.Task, StateManagerAddon, checkpointer=gone, resume="auto", **options)
        with pytest.raises(CheckpointError, match=rf"s3://runs/{kind}: its checkpoints were not listed: "):
            made.run(None, hand.loader(), max_steps=3)
    assert train(url, tmp_path / "other", 4).progress_checker.step == 4
