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
from zae.cli.doctor.environment import examine, table_of


@pytest.fixture(autouse=True)
def _limits_put_back() -> Iterator[None]:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
    kept = {kind: resource.getrlimit(kind) for kind in kinds}
    yield
    for kind, limits in kept.items():
        resource.setrlimit(kind, limits)


def findings() -> dict[str, tuple[str, bool]]:
    """What is found in the present folder, with the remedy of each, and whether it is a fault."""
    return {each["found"]: (each["remedy"], each["is_fault"]) for each in examine(Path.cwd())["findings"]}


def check(stage: Callable[[], object], found: str, remedy: str, is_fault: bool = True) -> None:
    """Stage a fault, and find just that one more than before."""
    before = findings()
    stage()
    after = findings()
    new = {text: after[text] for text in after.keys() - before.keys()}
    assert len(new) == 1, new
    [(text, (cure, fault))] = new.items()
    assert found in text
    assert remedy in cure
    assert fault is is_fault


@pytest.mark.parametrize(
    ("variables", "found", "remedy", "is_fault"),
    [
        ("OMP_NUM_THREADS=four", "OMP_NUM_THREADS='four' is not understood", "set it to a number of threads", True),
        ("OMP_NUM_THREADS=4096", "OMP_NUM_THREADS=4096, and there are", "set it to fewer", False),
        ("OMP_NUM_THREAD=1", "OMP_NUM_THREAD is set, which is not read", "write OMP_NUM_THREADS, or unset it", True),
        ("WORLDSIZE=2", "WORLDSIZE is set, which is not read", "write WORLD_SIZE", True),
        ("MASTER_ADDRESS=::1", "MASTER_ADDRESS is set, which is not read", "write MASTER_ADDR, or", True),
        ("CUBLAS_WORKSPACE_CONFIG=4096", "CUBLAS_WORKSPACE_CONFIG='4096' is not", "set it to :4096:8 or :16:8", True),
        ("NCCL_DEBUG=loud", "NCCL_DEBUG='loud' is not understood", "set it to WARN or INFO", True),
        ("RANK=0", "RANK is set, and WORLD_SIZE is not", "start the script with torchrun", True),
        ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR and MASTER_PORT are not both", "start the script with torchrun", True),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", "ranks are 0 to 1", "torchrun", True),
        ("MASTER_ADDR=127.0.0.1", "MASTER_ADDR without RANK and WORLD_SIZE", "or unset it", False),
        ("TMPDIR=/nowhere", "TMPDIR=/nowhere is not a folder that can be written to", "make it, or unset it", True),
    ],
)  # fmt: skip
def test_variables(variables: str, found: str, remedy: str, is_fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage() -> None:
        for each in variables.split():
            monkeypatch.setenv(*each.split("=", 1))

    named = (each.partition("=")[0] for each in variables.split())  # enable_full_determinism of Transformers sets some.
    for name in ("OMP_NUM_THREADS", "TMPDIR", *named):
        monkeypatch.delenv(name, raising=False)
    check(stage, found, remedy, is_fault)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    check(lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "97"), "CUDA_VISIBLE_DEVICES=97, and torch finds 0",
          "name devices that nvidia-smi -L lists", bool(torch.version.cuda))  # fmt: skip


def test_limits_of_a_process() -> None:
    """Few open files; a file that may not be large, so that one cannot be written either."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    check(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (900, most)), "may open 900 files", "ulimit -n")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    check(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, most)), "a file may have 2 MB at most",
          "ulimit -f unlimited")  # fmt: skip
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, most))
    [cannot] = [text for text in findings() if "a process cannot write to it (File too large)" in text]
    assert findings()[cannot][0].startswith("start in another folder")


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by root."""
    monkeypatch.chdir("/proc")
    found = findings()
    [text] = [each for each in found if "a process cannot write to it" in each]
    assert found[text] == ("start in another folder, or give a save_path on another disk", True)


def test_a_file_in_the_place_of_a_package() -> None:
    check(lambda: Path("numpy.py").touch(), "numpy.py is imported in the place of 'numpy'", "rename it")


@pytest.mark.parametrize(
    ("name", "version", "found", "remedy"),
    [
        ("neptune", "2.1.0", "neptune 2.1.0 is installed, and zae[neptune] needs neptune<2", "pip install "),
        ("safetensors", "0.3.1", "safetensors 0.3.1 is installed, and zae needs safetensors>=0.8", "pip install "),
    ],
)
def test_packages_that_do_not_fit(
    name: str, version: str, found: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage() -> None:
        folder = Path("site", f"{name}-{version}.dist-info")
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(Path("site").absolute()))

    check(stage, found, remedy)


def test_another_torch_than_the_one_that_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is too old for zae as well."""
    folder = Path("site", "torch-2.1.0.dist-info")
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    monkeypatch.syspath_prepend(str(Path("site").absolute()))
    found = "\n".join(findings())
    assert "torch 2.1.0 is installed, and zae needs torch>=2.6" in found
    assert "pip lists torch 2.1.0, and " in found


def test_a_torch_that_cannot_be_imported() -> None:
    """Exit status 1, in words, with all other checks done."""
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "loud"}
    command = [sys.executable, "-m", "zae", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    assert "FAULT: import torch fails: The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO" in done.stdout
    assert "-> set it to OFF, INFO or DETAIL; with anything else torch is not imported\n" in done.stdout
    assert "\ndisk " in done.stdout


def test_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The status follows from the faults; ``--json`` has what the text has; the folder is left as it was."""
    monkeypatch.setenv("NO_COLOR", "\x1b[31m")
    for broken in (False, True):
        if broken:
            monkeypatch.setenv("NCCL_DEBUG", "loud")
        status = main(["doctor", "--json"])
        report = json.loads(capsys.readouterr().out)
        assert status == (0 if report["healthy"] else 1)
        assert report["healthy"] is not any(each["is_fault"] for each in report["findings"])
        assert not (broken and report["healthy"])
        assert {"python", "zae", "torch", "disk"} <= report["facts"].keys()
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
