"""`python -m zae doctor`: what it says of checkpoints that are whole, damaged, left behind and in use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import faults, hand
from kit.checkpoints import save_checkpoint
from zae.addons import EMAAddon, StateManagerAddon
from zae.checkpoint.folder import list_checkpoints, newest_valid
from zae.checkpoint.locks import FolderLock
from zae.cli import main
from zae.doctor.checkpoints import examine


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with three checkpoints."""
    model = faults.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = faults.Task.add_on(StateManagerAddon, EMAAddon)(
        model, "cpu", optimizer=optimizer, save_path=tmp_path / "run", keep_last=None, log_bar=False
    )
    made.run(3, hand.loader(), [hand.data()[:4]])
    return tmp_path / "run"


def doctor(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    status = main(["doctor", *map(str, arguments)])
    return status, capsys.readouterr().out


def test_all_is_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0; step, epoch, score, ranks, size, version and composition of each."""
    status, text = doctor(capsys, run)
    assert status == 0
    assert text.count("whole\n") == 3
    for word in (
        "step-00000018",
        "loss ",
        "EMAAddon, StateManagerAddon",
        " kB",
        "0.1.0",
        "resume=True resumes from",
    ):
        assert word in text
    status, text = doctor(capsys, run, "--json")
    report = json.loads(text)
    assert status == 0
    assert [each["step"] for each in report["checkpoints"]] == [18, 12, 6]
    assert report["resume_from"] == "step-00000018"
    assert report["checkpoints"][0]["world_size"] == 1
    assert doctor(capsys, run / "step-00000006")[0] == 0


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
def test_the_newest_is_damaged(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, the file and what to do; resume does just what is said."""
    path = run / "step-00000018" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    status, text = doctor(capsys, run)
    assert status == 1
    assert "DAMAGED" in text
    assert name in text
    assert "skips step-00000018 and resumes from step-00000012" in text
    found = newest_valid(run)
    assert found is not None
    assert found[0].name == "step-00000012"


def test_an_older_one_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0: the newest is whole."""
    (run / "step-00000006" / "state.json").unlink()
    status, text = doctor(capsys, run)
    assert status == 0
    assert "delete the damaged ones: step-00000006" in text


def test_none_and_no_folder(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None is whole: 1, with the way to save the weights; an empty folder: 1; no folder: 2."""
    for path in list_checkpoints(run):
        (path / "state.json").unlink()
    status, text = doctor(capsys, run)
    assert status == 1
    assert "allow_partial=" in text
    (tmp_path / "empty").mkdir()
    assert doctor(capsys, tmp_path / "empty")[0] == 1
    assert doctor(capsys, tmp_path / "missing")[0] == 2
    assert doctor(capsys, "~nobody-has-this-name/run")[0] == 2
    assert doctor(capsys, "x" * 300)[0] == 2  # No system looks that up: the status of a finding would be wrong.


def test_what_was_left_and_who_is_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Left-overs of killed saves, crash checkpoints and the holder are listed; nothing acts on the terminal."""
    (run / ".staging-step-00000024-00000000-1-0123456789abcdef").mkdir()
    (run / "crash-00000020").mkdir()
    about = {"run_id": "\x1b[31mred", "step": 19, "epoch": 0, "composition": ["\x1b]0;title\x07"], "world_size": 1}
    save_checkpoint(run / "step-00000019", {}, {}, manifest_info={**about, "info": {"monitor": "\x1b[2J"}})
    hostile = {"monitor": "loss", "score": "\x1b[3Jforged"}
    save_checkpoint(run / "step-00000018", {}, {}, manifest_info={**about, "step": 18, "info": hostile})
    lock = FolderLock(run)
    lock.acquire()
    (run / ".lock").write_text(json.dumps({"pid": 4, "host": "\x1b[5melsewhere", "since": "today"}))
    (run / ".staging-x\x1b[1m-00000000-1-0123456789abcdef").mkdir()
    status, text = doctor(capsys, run)
    assert status == 0
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "crash-00000020" in text
    assert "process 4 on host" in text
    assert "loss \\x1b[3Jforged" in text
    alone = (run / "step-00000019").rename(run.parent / "of \x1b[31mits own")
    assert "\x1b" not in doctor(capsys, alone)[1]
    report = examine(run)
    assert any(name.startswith(".staging-step-00000024") for name in report["left_behind"])
    lock.release()
    assert examine(run)["holder"] is None


def test_whoever_reads_may_have_had_enough(tmp_path: Path) -> None:
    """As ``head`` has: no traceback, and nothing that is told at the exit."""
    script = "import sys; from zae.cli import main; sys.exit(main(['diff', *sys.argv[1:]]))"
    for name in ("one", "other"):
        lines = [{"ledger": 1, "begins_after": 0}, {"step": 1, "stages": {name: name}}]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-c", script, str(tmp_path / "one"), str(tmp_path / "other")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # type: ignore[union-attr]
        told = process.stderr.read()  # type: ignore[union-attr]
    assert (process.returncode, told) == (2, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "2>/dev/full", ">&- 2>&-"])
def test_what_is_closed_ends_no_command_otherwise(closed: str, tmp_path: Path) -> None:
    """Without standard output or error the status is what it would be, and nothing else is told."""
    statuses = {"same": 0, "other": 1, "absent": 2}
    for name in ("one", "same", "other"):
        lines = [{"ledger": 1, "begins_after": 0}, {"step": 1, "stages": {"forward": {"loss": [name == "other"]}}}]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    called = f'"{sys.executable}" -m zae diff one "$name" {closed}; echo "$name $?" >> statuses'
    script = f"for name in {' '.join(statuses)}; do {called}; done"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (tmp_path / "statuses").read_text().split() == [str(each) for item in statuses.items() for each in item]
    assert "Traceback" not in done.stderr
    assert ">&-" not in closed.split() or done.stdout == ""


def test_a_name_in_a_ledger_does_not_act_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does what stands under it."""
    for run in ("one", "other"):
        lines = [{"ledger": 1, "begins_after": 0}, {"step": 1, "stages": {"forward": {"\x1b[2Jname": f"\x07{run}"}}}]
        (tmp_path / run).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    text = capsys.readouterr().out
    assert "\\x1b[2Jname differs" in text
    assert not {"\x1b", "\x07"} & set(text)
