"""Start a training script as its user does, each time in a fresh copy of the working folder, watch it, and kill it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zae.certify import guard, watcher
from zae.errors import ConfigError, ZaeError

__all__ = ["Attempt", "OutOfTime", "Run", "Script"]

_POLL = 0.02  # Seconds between two looks at a process.
_GRACE = 60.0  # Seconds that a script has to end after a signal.
_LARGE = 64 << 20  # Bytes of a file from which on a copy of the folder has a link to it.
_MOST = 4 << 30  # Bytes that are copied for a run at most.
_LOGS = (".csv", ".json", ".jsonl", ".log", ".md", ".png", ".svg", ".tsv", ".txt", ".yaml", ".yml")
_SAVED = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".pkl", ".tar", ".h5")
_LEFT_OUT = {".git", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


class OutOfTime(ZaeError):
    """The time of the command is over."""


@dataclass
class Attempt:
    """One start of the script, until it ended or was killed."""

    events: dict[int, list[dict[str, Any]]]
    """What each rank has written down."""
    status: int
    """The exit status; negative for a signal."""
    words: str
    """The last lines that it printed."""
    seconds: float
    is_late: bool = False
    """Whether it was still running long after a signal to end."""

    def rows(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the rows of the optimizer steps of a rank."""
        return [each for each in self.events.get(rank, []) if each["e"] == "step"]

    def first(self, kind: str, rank: int = 0) -> dict[str, Any] | None:
        """Return the first event of a kind."""
        return next((each for each in self.events.get(rank, []) if each["e"] == kind), None)

    def all(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return all events of a kind."""
        return [each for each in self.events.get(rank, []) if each["e"] == kind]

    def trained(self, key: str) -> int:
        """Return how many "parameters" or "bytes" all optimizers of the first rank train."""
        return sum(each[key] for each in self.all("optimizer"))

    def is_checkpoint(self, path: str | Path, size: int) -> bool:
        """Whether a file may hold the model: a log of a small model is soon as large."""
        name = Path(path).name
        is_log = name.endswith(_LOGS) or "tfevents" in name
        return not is_log and size >= self.trained("bytes") // 4


@dataclass
class Run:
    """A run of the script from its beginning: one attempt, or several where it was killed and started again."""

    name: str
    kill: dict[str, Any] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    has_saved: bool = False
    """Whether a checkpoint was there when it was killed."""


class Script:
    """The command of a script, and where its runs lie."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        resume_with: Sequence[str] = (),
        checkpoints: str | None = None,
        deadline: float = float("inf"),
    ) -> None:
        if not hasattr(signal, "SIGSTOP"):
            raise ConfigError("certify stops processes by SIGSTOP, which this system does not have; use WSL on Windows")
        self.origin, self.folder, self.deadline = Path.cwd().resolve(), folder.resolve(), deadline
        self.spellings = _spellings(self.origin)
        self.command, self.resume_with = _executable(command), list(resume_with)
        self.count = 0
        self.checkpoints = None if checkpoints is None else Path(checkpoints)
        if self.checkpoints is not None and self.is_shared and any(self.checkpoints.glob("*")):
            raise ConfigError(
                f"--checkpoints {checkpoints} is outside of the working folder and not empty: its files would be "
                "resumed from, and lost. Move them, or give another folder"
            )
        self.has_folder = self.checkpoints is not None and self.checkpoints.is_dir()
        watch = folder / "watch"
        watch.mkdir()
        shutil.copyfile(watcher.__file__, watch / "sitecustomize.py")
        shutil.copyfile(guard.__file__, watch / "certify_guard.py")

    @property
    def is_shared(self) -> bool:
        """Whether the checkpoints lie where a copy of the working folder does not have them."""
        return self.checkpoints is not None and not self.checkpoints.resolve().is_relative_to(self.origin)

    def run(self, name: str, kill: Mapping[str, Any] | None = None) -> Run:
        """Run the script in a new copy of the folder; where it is killed, start it again until it ends."""
        self.count += 1
        found, home = Run(name, dict(kill or {})), self.folder / f"{self.count:02d}"
        self._copy(home / "work")
        try:
            found.attempts.append(self._start(home, found.kill, []))
            if found.kill and found.attempts[0].first("kill", found.kill.get("rank", 0)):
                found.has_saved = self._has_saved(home, found.attempts[0])
                found.attempts.append(self._start(home, {}, self.resume_with if found.has_saved else []))
        finally:
            self._clean(home)
        return found

    # --- the folder

    def _copy(self, target: Path) -> None:
        """Copy the working folder without checkpoints; link large files that are none."""
        skipped = None if self.checkpoints is None else self.checkpoints.resolve()
        left = _MOST
        for here, folders, names in os.walk(self.origin):
            base = Path(here)
            kept = [each for each in folders if each not in _LEFT_OUT and (base / each).resolve() != skipped]
            environments = [each for each in kept if (base / each / "pyvenv.cfg").exists()]
            folders[:] = [each for each in kept if each not in environments]
            place = target / base.relative_to(self.origin)
            place.mkdir(parents=True, exist_ok=True)
            for each in (*folders, *environments):
                if (base / each).is_symlink() or each in environments:
                    self._link(place / each, (base / each).resolve(), target)
            for each in names:
                file = base / each
                size = file.stat().st_size if file.is_file() else 0
                if file.is_symlink() or (size > _LARGE and file.suffix not in _SAVED):
                    self._link(place / each, file.resolve(), target)
                    continue
                left -= size
                if left < 0:
                    raise ConfigError(
                        f"the files of {self.origin} are more than {_MOST >> 30} GB, and each run gets a copy; start "
                        "certify in a folder with the script alone, or name the checkpoints: --checkpoints FOLDER"
                    )
                if file.is_file():
                    shutil.copy2(file, place / each)

    def _link(self, place: Path, end: Path, target: Path) -> None:
        """Make a link in a copy; one to another place of the folder leads to that of the copy."""
        copied = target / end.relative_to(self.origin) if end.is_relative_to(self.origin) else end
        place.symlink_to(end if copied == place else copied)

    def _clean(self, home: Path) -> None:
        """Remove what a run has written."""
        shutil.rmtree(home / "work", ignore_errors=True)
        if self.is_shared and self.checkpoints is not None:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            if self.has_folder:
                self.checkpoints.mkdir()

    def _has_saved(self, home: Path, attempt: Attempt) -> bool:
        """Whether a checkpoint lies in the folder of a run that was killed."""
        start = attempt.first("start")
        if start is None:
            return False
        root = self.checkpoints if self.is_shared and self.checkpoints is not None else home / "work"
        found = [(each, each.stat()) for each in root.rglob("*") if each.is_file() and not each.is_symlink()]
        new = [(each, stat.st_size) for each, stat in found if stat.st_mtime >= start["wall"] - 0.1]
        return any(attempt.is_checkpoint(each, size) for each, size in new)

    # --- processes

    def _start(self, home: Path, kill: dict[str, Any], more: Sequence[str]) -> Attempt:
        """Start the script once, and wait for its end."""
        if time.monotonic() > self.deadline:
            raise OutOfTime("the time was over")
        log = home / f"log-{len(list(home.glob('log-*')))}"
        work, temporary = home / "work", home / "tmp"
        log.mkdir()
        temporary.mkdir(exist_ok=True)
        roots = [str(work)]
        if self.is_shared and self.checkpoints is not None:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            roots.append(str(self.checkpoints))
        given = {name: self._map(value, work) for name, value in os.environ.items()}
        caches, moved_caches = guard.writable_caches(given, str(temporary), str(self.origin))
        refusal = str(log / "refusal.json")
        plan: dict[str, Any] = {"folder": str(log), "roots": roots, "kill": kill, "parent": os.getpid()}
        plan |= {"writable": [*roots, str(temporary), str(log), *caches], "refusal": refusal}
        own = str(self.folder / "watch")
        path = os.pathsep.join(filter(None, [own, given.get("PYTHONPATH", "")]))
        environment = {**given, **moved_caches, watcher.PLAN: json.dumps(plan), "PYTHONPATH": path}
        environment |= {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        launcher = [sys.executable, "-I", guard.__file__, json.dumps(plan["writable"])]
        command = [*launcher, *(self._map(each, work) for each in (*self.command, *more))]
        began = time.monotonic()
        with open(log / "output.txt", "ab") as output:
            process = subprocess.Popen(
                command,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                late = self._wait(process, log, kill, refusal)
            finally:
                _kill_all(process)
        events: dict[int, list[dict[str, Any]]] = {}
        logs = [_read(file) for file in log.glob("log-*.jsonl")]
        for lines in sorted(filter(None, logs), key=lambda lines: float(lines[0]["wall"])):
            events.setdefault(lines[0]["rank"], []).extend(lines)
        words = (log / "output.txt").read_bytes()[-8000:].decode(errors="replace")
        self._check_refusal(guard.read_refusal(refusal), words, work)
        return Attempt(events, process.returncode, words, time.monotonic() - began, late)

    def _map(self, text: str, work: Path) -> str:
        """Let a text that names the working folder name a copy of it."""
        return guard.map_paths(text, self.spellings, str(work))

    def _check_refusal(self, refusal: Mapping[str, str] | None, words: str, work: Path) -> None:
        """Refuse a script that would change what is outside of its copy; it was stopped before."""
        if refusal is not None:
            path = refusal["path"]
            if Path(path).is_relative_to(self.folder):
                path = os.path.relpath(path, work)
            raise ConfigError(
                f"the script would {refusal['operation']} {path}, outside of its working folder; it was stopped "
                "before, and nothing is changed. All runs work in copies of the folder: let the script write below "
                "it, or name an empty folder where it saves: --checkpoints FOLDER"
            )
        denied = next((line for line in words.splitlines() if "Permission denied" in line), None)
        if denied is not None and guard.has_landlock():
            raise ConfigError(
                f"a program of the script was not allowed to change what is outside of its working folder: "
                f"{denied.strip()[:300]}. Nothing is changed. Let it write below the folder, or name an empty folder "
                "where it saves: --checkpoints FOLDER"
            )

    def _wait(self, process: subprocess.Popen[bytes], log: Path, kill: Mapping[str, Any], refusal: str) -> bool:
        """Wait for the end; return whether a signal did not end it."""
        told = None
        while process.poll() is None:
            if os.path.exists(refusal):
                return False
            if (log / "mark-step").exists() or (log / "mark-save").exists():
                return False
            if (log / "mark-term").exists() and told is None:
                process.send_signal(signal.Signals[kill["signal"]])
                told = time.monotonic()
            if told is not None and time.monotonic() - told > _GRACE:
                return True
            if time.monotonic() > self.deadline:
                raise OutOfTime("the time was over")
            time.sleep(_POLL)
        return False


def _spellings(folder: Path) -> list[str]:
    """Return the names of the working folder: a shell may have come to it through a link."""
    names = [str(folder)]
    shell = os.environ.get("PWD", "")
    if os.path.isabs(shell) and shell != names[0] and os.path.realpath(shell) == names[0]:
        names.insert(0, shell)
    return names


def _executable(command: Sequence[str]) -> list[str]:
    """Return the command that starts the script: a Python file is started by this interpreter."""
    words = list(command)
    if not words:
        raise ConfigError("there is no script to certify; write: python -m zae certify train.py")
    first = Path(words[0])
    if first.suffix == ".py":
        if not first.is_file():
            raise ConfigError(f"{first} is not a file; give the script as you start it: certify train.py --epochs 3")
        outside = not first.resolve().is_relative_to(Path.cwd().resolve())
        return [sys.executable, str(first.resolve()) if outside else words[0], *words[1:]]
    found = shutil.which(words[0])
    if found is None:
        raise ConfigError(
            f"{words[0]} is neither a Python file nor a program; write: certify train.py, or "
            "certify -- torchrun --nproc-per-node 2 train.py"
        )
    return [found, *words[1:]]


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started, by SIGKILL."""
    for pid in _descendants(process.pid) if process.poll() is None else []:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a process; a line that a kill has cut off is none."""
    rows = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _parents() -> Iterator[tuple[int, int]]:
    """Yield each process and its parent: as Linux lists them, else by the program ps."""
    if Path("/proc/self/stat").exists():
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # It has ended.
                yield int(file.parent.name), int(file.read_text().rpartition(")")[2].split()[1])
        return
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        pid, parent = line.split()
        yield int(pid), int(parent)


def _descendants(root: int) -> list[int]:
    """Return a process and what it has started, parents first, as they are now."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
