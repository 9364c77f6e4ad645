"""The command, its pages and its exit status; the fixture of pytest; what a check that is killed leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kinds import LOOP

from resumecheck.__main__ import main

SOURCE = Path(__file__).resolve().parents[1]
pytest_plugins = ("resumecheck.pytest_plugin",)


def environment_with(temporary: Path) -> dict[str, str]:
    """Return variables by which a process finds resumecheck, and puts its folder to a place of the test."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(temporary)}


@pytest.fixture
def _in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    Path("train.py").write_text(LOOP + "train(every=10)\n")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_in_a_folder_with_a_script")
def test_the_command_prints_an_object_and_appends_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n")
    assert main(["--json", "--markdown", str(page), "--sigterm", "train.py"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["steps"], report["instants"]) == (0, 30, len(report["tried"]))
    assert [each["step"] for each in report["saves"]] == [10, 20]
    assert any("at SIGTERM" in note for note in report["notes"])
    text = page.read_text()
    assert text.startswith("before\n### `train.py` resumes to the same run")
    assert "| killed after step 21, the first after a save | passed |" in text


@pytest.mark.usefixtures("_in_a_folder_with_a_script")
def test_a_script_that_does_not_end_is_tried_for_its_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    endless = Path("train.py").read_text().replace("range(first, steps)", "itertools.count(first)")
    Path("train.py").write_text("import itertools\n" + endless)
    assert main(["--steps", "25", "train.py"]) == 0
    assert "only the first 25 steps were tried" in capsys.readouterr().out
    faulty = endless.replace('torch.set_rng_state(state["random"])', "pass")
    Path("train.py").write_text("import itertools\n" + faulty)
    assert main(["--steps", "25", "train.py"]) == 1
    assert "random state" in capsys.readouterr().out
    assert main(["--steps", "9", "train.py"]) == 2
    assert "nothing is saved in the first 9 steps" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_in_a_folder_with_a_script")
def test_a_fixture_of_pytest(resumes) -> None:  # type: ignore[no-untyped-def]
    assert resumes("python train.py", horizon=5).is_the_same()
    text = Path("train.py").read_text().replace('torch.set_rng_state(state["random"])', "pass")
    Path("train.py").write_text(text)
    with pytest.raises(AssertionError, match="random state: save"):
        resumes("python train.py", horizon=5).is_the_same()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_in_a_folder_with_a_script")
def test_the_time_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """What was tried until then is said; where nothing was, the status is 2."""
    slow = Path("train.py").read_text().replace("optimizer.step()", "optimizer.step(); __import__('time').sleep(0.3)")
    Path("train.py").write_text(slow)
    began = time.monotonic()
    assert main(["--minutes", "0.05", "train.py"]) == 2
    assert time.monotonic() - began < 30
    assert "stopped before the first run of the script ended" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_in_a_folder_with_a_script")
def test_the_time_ends_between_instants(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said how many were tried."""
    text = Path("train.py").read_text()
    waits = 'if os.path.exists("last.pt"):\n    __import__("time").sleep(600)\n'
    Path("train.py").write_text(text.replace("def train", waits + "\ndef train"))
    began = time.monotonic()
    assert main(["--minutes", "0.75", "train.py"]) == 2
    assert time.monotonic() - began < 75
    assert "stopped (the time was over): 0 of 5 instants were tried" in capsys.readouterr().out


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, at once."""
    monkeypatch.chdir(tmp_path)
    for arguments, words in {
        (): "there is no command; write: resumecheck -- python train.py",
        ("--", "no-such-launcher", "train.py"): "no-such-launcher is no program that can be started here",
    }.items():
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def exhaustive(*values: object) -> object:
    """Mark what does not run every time."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("number", "moments"),
    [
        (signal.SIGKILL, 1),
        exhaustive(signal.SIGKILL, 10),
        exhaustive(signal.SIGTERM, 4),
        exhaustive(signal.SIGINT, 4),
    ],
)
@pytest.mark.usefixtures("_in_a_folder_with_a_script")
def test_a_check_that_is_killed_leaves_nothing(number: signal.Signals, moments: int, tmp_path: Path) -> None:
    """No process and no file, at random moments of a check."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for wait in (random.uniform(0.5, 16) for _ in range(moments)):
        command = [sys.executable, "-m", "resumecheck", "--", "python", "train.py"]
        process = subprocess.Popen(
            command, env=environment_with(temporary), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(wait)
        process.send_signal(number)
        process.communicate(timeout=60)
        until = time.monotonic() + 30
        while (list(temporary.iterdir()) or _processes_with(temporary)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not list(temporary.iterdir())
        assert not _processes_with(temporary)


def _processes_with(folder: Path) -> list[str]:
    """Return the commands of the processes whose variables name a folder."""
    commands = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (each / "environ").read_bytes():
                commands.append((each / "cmdline").read_text())
        except OSError:  # It has ended.
            continue
    return commands
