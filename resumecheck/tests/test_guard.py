"""What a script would change outside of its copy is refused before it is changed, by Landlock and without it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resumecheck import guard

WRITES = {
    "open": "open(path, 'wb').write(b'changed')",
    "append": "open(path, 'ab').write(b'changed')",
    "update": "open(path, 'r+b').write(b'changed')",
    "torch.save": "import torch; torch.save({'a': torch.ones(3)}, path)",
    "safetensors": "import torch; from safetensors.torch import save_file; save_file({'a': torch.ones(3)}, path)",
    "save_pretrained": "from transformers import GPT2Config, GPT2Model\n"
    "GPT2Model(GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=9)).save_pretrained(os.path.dirname(path))",
    "HDF5": "import h5py; h5py.File(path, 'w')",
    "HDF5, beside it": "import h5py; h5py.File(path + '.h5', 'a')",
    "remove": "os.remove(path)",
    "rename away": "os.rename(path, 'here.pt')",
    "rename onto it": "open('new.pt', 'w').close(); os.replace('new.pt', path)",
    "a folder is removed": "import shutil; shutil.rmtree(os.path.dirname(path))",
    "truncate": "os.truncate(path, 0)",
    "a hard link": "os.link(path, 'link.pt'); open('link.pt', 'w').close()",
    "a link": "os.symlink(path, 'link.pt'); open('link.pt', 'w').close()",
    "a new folder": "os.makedirs(os.path.dirname(path) + '/more/and/more')",
    "an error is caught": "\nwhile True:\n    try: open(path, 'w')\n    except OSError: pass",
    "a worker": "import multiprocessing; multiprocessing.Process(target=open, args=(path, 'w')).start()",
}
"""Ways to change a file of the user."""
BY_PROGRAMS = {
    "a shell": "os.system(f'echo changed > {path}')",
    "cp": "import subprocess; subprocess.run(['cp', __file__, path])",
    "rm": "import subprocess; subprocess.run(['rm', path])",
    "Python without site": "import subprocess, sys; "
    "subprocess.run([sys.executable, '-I', '-c', f'open({path!r}, \"w\")'])",
}
"""Ways that no Python process with the guard sees."""


FOR_THE_KERNEL = [way for way in (*WRITES, *BY_PROGRAMS) if way != "an error is caught"]  # That one never ends.
needs_landlock = pytest.mark.skipif(not guard.has_landlock(), reason="a kernel without Landlock")


def in_every_run(ways: Iterable[str], *chosen: str) -> list[Any]:
    """Mark all but a few ways."""
    return [way if way in chosen else pytest.param(way, marks=pytest.mark.exhaustive) for way in ways]


def sums(folder: Path) -> dict[str, str]:
    """Return the SHA-1 of each file."""
    files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
    return {str(each): hashlib.sha1(each.read_bytes()).hexdigest() for each in files}


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder that does not lie in /dev/shm, which Landlock leaves to all processes as a whole."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def run_guarded(disk: Path) -> Callable[..., tuple[int, dict[str, str] | None]]:
    """Run a line in a copy beside the user's file; return its status and what was refused."""
    (disk / "user").mkdir()
    (disk / "user" / "last.pt").write_text("of a week")
    (disk / "copy").mkdir()
    (disk / "log").mkdir()
    (disk / "watch").mkdir()
    (disk / "watch" / "the_guard.py").write_text(Path(guard.__file__).read_text())
    writable, refusal = [str(disk / "copy"), str(disk / "log")], str(disk / "log" / "refusal")
    (disk / "watch" / "sitecustomize.py").write_text(f"import the_guard; the_guard.Guard({writable!r}, {refusal!r})\n")

    def run(line: str, *, has_hook: bool, has_landlock: bool) -> tuple[int, dict[str, str] | None]:
        (disk / "copy" / "script.py").write_text(f"import os\npath = {str(disk / 'user' / 'last.pt')!r}\n{line}\n")
        command = [sys.executable, "script.py"]
        if has_landlock:
            command = [sys.executable, "-I", guard.__file__, json.dumps(writable), *command]
        environment = {**os.environ, "TMPDIR": str(disk / "copy"), "PYTHONDONTWRITEBYTECODE": "1"}
        if has_hook:
            environment["PYTHONPATH"] = str(disk / "watch")
        before = sums(disk / "user")
        process = subprocess.run(command, cwd=disk / "copy", env=environment, timeout=60, capture_output=True)
        assert sums(disk / "user") == before
        assert len(list((disk / "user").iterdir())) == 1
        return process.returncode, guard.read_refusal(refusal)

    return run


@pytest.mark.parametrize("way", in_every_run(WRITES, "torch.save", "remove", "an error is caught"))
def test_the_hook_refuses_and_ends_the_process(
    way: str, run_guarded: Callable[..., tuple[int, dict[str, str] | None]]
) -> None:
    """Also without Landlock: it says what was refused, and no handler goes on."""
    status, refusal = run_guarded(WRITES[way], has_hook=True, has_landlock=False)
    assert refusal is not None
    assert "/user" in refusal["path"]
    assert status == -9 or way == "a worker"


@needs_landlock
@pytest.mark.parametrize("way", in_every_run(FOR_THE_KERNEL, "rename away", "open", "cp"))
def test_landlock_holds_for_all_programs(
    way: str, run_guarded: Callable[..., tuple[int, dict[str, str] | None]]
) -> None:
    run_guarded((WRITES | BY_PROGRAMS)[way], has_hook=False, has_landlock=True)


@pytest.mark.parametrize(
    "line",
    [
        "open('new.pt', 'w').close(); os.replace('new.pt', 'last.pt'); os.remove('last.pt')",
        "os.makedirs('a/b'); open('a/b/c', 'w').close(); os.rename('a/b/c', 'c'); import shutil; shutil.rmtree('a')",
        "os.makedirs(os.path.dirname(path), exist_ok=True); open(path).read()",
        "import tempfile; tempfile.TemporaryFile(); open(os.devnull, 'w')",
        "import contextlib\nwith contextlib.suppress(OSError): os.remove(path + '.lock')",
        "import subprocess; subprocess.run(['cp', __file__, 'b.py'], check=True)",
    ],
)
def test_what_changes_the_copy_or_nothing_passes(
    line: str, run_guarded: Callable[..., tuple[int, dict[str, str] | None]]
) -> None:
    assert run_guarded(line, has_hook=True, has_landlock=guard.has_landlock()) == (0, None)


def test_paths_of_the_folder_become_those_of_the_copy() -> None:
    def mapped(text: str) -> str:
        return guard.map_paths(text, ["/home/me/run"], "/tmp/copy")

    assert mapped("/home/me/run") == "/tmp/copy"
    assert mapped("--out=/home/me/run/last.pt") == "--out=/tmp/copy/last.pt"
    assert mapped("/home/me/run/src:/home/me/run2:/home/me/run") == "/tmp/copy/src:/home/me/run2:/tmp/copy"
    for other in ("/home/me/run.old", "/data/home/me/run", "/home/me/run-2/last.pt", "run"):
        assert mapped(other) == other


def test_a_cache_that_does_not_exist_is_a_temporary_one(tmp_path: Path) -> None:
    """And so is one that holds the working folder: it would allow to change it."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "torch" / "run").mkdir(parents=True)
    environment = {
        "HF_HOME": str(tmp_path / "hub"),
        "TORCH_HOME": str(tmp_path / "torch"),
        "TRITON_CACHE_DIR": "/absent",
    }
    folders, variables = guard.writable_caches(environment, "/tmp/given", str(tmp_path / "torch" / "run"))
    assert str(tmp_path / "hub") in folders
    assert str(tmp_path / "torch") not in folders
    assert variables["TORCH_HOME"] == "/tmp/given/torch_home"
    assert variables["TRITON_CACHE_DIR"] == "/tmp/given/triton_cache_dir"
