"""`python -m zae doctor` without a path: each fault is staged for real, and found with its remedy."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zae.cli import main
from zae.doctor.environment import examine, table_of


@pytest.fixture(autouse=True)
def _limits_put_back() -> Iterator[None]:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
    kept = {kind: resource.getrlimit(kind) for kind in kinds}
    yield
    for kind, limits in kept.items():
        resource.setrlimit(kind, limits)


def findings() -> dict[str, str]:
    """What is found in the present folder, with the remedy of each."""
    return {each["found"]: each["remedy"] for each in examine(Path.cwd())["findings"]}


def check(stage: Callable[[], object], found: str, remedy: str) -> None:
    """Stage a fault, and find just that one more than before."""
    before = findings()
    stage()
    after = findings()
    new = {text: after[text] for text in after.keys() - before.keys()}
    assert len(new) == 1, new
    [(text, remedy)] = new.items()
    assert found in text
    assert remedy in remedy


def test_limits_of_a_process() -> None:
    """Few open files; a file that may not be large, so that one cannot be written either."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    check(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (900, most)), "may open 900 files", "ulimit -n")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    check(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, most)), "a file may have 2 MB at most",
          "ulimit -f unlimited")  # fmt: skip
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, most))
    [cannot] = [text for text in findings() if "a process cannot write to it (File too large)" in text]
    assert findings()[cannot].startswith("start in another folder")


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by root."""
    monkeypatch.chdir("/proc")
    found = findings()
    [text] = [each for each in found if "a process cannot write to it" in each]
    assert found[text] == "start in another folder, or give a save_path on another disk"


def test_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The status follows from the faults; ``--json`` has what the text has; the folder is left as it was."""
    monkeypatch.setenv("NCCL_DEBUG", "\x1b[31m")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for broken in (False, True):
        if broken:
            resource.setrlimit(resource.RLIMIT_NOFILE, (900, most))
        status = main(["doctor", "--json"])
        report = json.loads(capsys.readouterr().out)
        assert status == (0 if report["healthy"] else 1)
        assert report["healthy"] is not bool(report["findings"])
        assert not (broken and report["healthy"])
        assert {"python", "zae", "torch", "disk"} <= report["facts"].keys()
        assert report["variables"]["NCCL_DEBUG"] == "\x1b[31m"
        text = table_of(report)
        assert all(each["remedy"] in text for each in report["findings"])
        assert "\x1b" not in text
        assert report["findings"] or text.endswith("nothing is wrong\n")
    assert os.listdir() == []


@pytest.mark.exhaustive
def test_small_disks(tmp_path: Path) -> None:
    """A full disk, and the shared memory of a container, mounted for one process; it needs the right to mount."""
    script = f"""
mount -t tmpfs -o size=64m tmpfs /dev/shm && mkdir -p {tmp_path} && mount -t tmpfs -o size=1m tmpfs {tmp_path} &&
cd {tmp_path} && head -c 900000 /dev/zero > full; {sys.executable} -m zae doctor --json"""
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(unshare, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 1, done.stderr
    found = {each["found"]: each["remedy"] for each in json.loads(done.stdout)["findings"]}
    [cannot] = [each for each in found if "No space left on device" in each]
    assert "give a save_path on another disk" in found[cannot]
    [small] = [each for each in found if f"kB free in {tmp_path}, and 1 GB are advised" in each]
    assert "free some space" in found[small]
    [shared] = [each for each in found if "free in /dev/shm, and" in each]
    assert "--shm-size=1g" in found[shared]
