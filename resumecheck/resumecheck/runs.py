"""Start the script in an instant of its folder, watch it, stop it for snapshots, and end all of its processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Union

from . import guard, watch
from .errors import Refused, Stopped
from .workspace import Tree, Workspace

__all__ = ["Run", "Runner", "end_processes", "write_watcher"]

_POLL_S = 0.05
_FORK_TIMEOUT_S = 120.0
_SIGTERM_TIMEOUT_S = 60.0
_IDLE_TIMEOUT_S = 60.0
_REMOTE = ("s3://", "gs://", "gcs://", "az://", "abfs://", "abfss://", "hf://", "hdfs://", "oci://", "r2://")

Row = dict[str, Any]


@dataclass
class Run:
    """What one start of the script did, until it ended or was stopped."""

    events: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[int, list[Row]] = field(default_factory=dict)
    """The rows of the optimizer steps of each rank."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """The parameters of each optimizer."""
    weight_bytes: int = 0
    saw_backward: bool = False
    is_limited: bool = False
    """Whether it was stopped at its last step, and did not end."""
    is_stuck: bool = False
    """Whether it was ended since it took much longer than the reference."""
    handles_sigterm: bool = False
    status: int = 0
    output: str = ""
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self.status != 0 and not self.is_limited

    def count(self) -> int:
        """Return the steps of the first rank."""
        return len(self.rows.get(0, []))


class Runner:
    """The command of the script, and its processes."""

    def __init__(
        self,
        command: Sequence[str],
        home: Path,
        workspace: Workspace,
        *,
        allow: Sequence[str] = (),
        deadline: float = float("inf"),
    ) -> None:
        self.home, self.workspace, self.allow, self.deadline = home, workspace, list(allow), deadline
        self.by = "optimizer"
        self.logs, self.temporary = home / "logs", home / "tmp"
        self.refusal = str(self.logs / "refusal.json")
        for folder in (self.logs, self.temporary):
            folder.mkdir()
        write_watcher(home / "watch")
        origin, shell = str(workspace.origin), os.environ.get("PWD", "")
        is_spelling = os.path.isabs(shell) and os.path.realpath(shell) == origin  # A shell may come through a link.
        self.spellings = {origin, shell} if is_spelling else {origin}
        self.command = self._find(command)
        self.same: list[str] = []
        """The files that no instant changes: to look at them is no look at an instant."""
        self.patience_s = float("inf")
        """How long a run may take."""
        self.starts = self.forks = 0
        self.waiting: dict[tuple[tuple[str, ...], bool], Waiting | None] = {}
        """What can be forked, by the words that are added and whether it is late."""
        self.templates: list[subprocess.Popen[bytes]] = []
        self.numbers = itertools.count()

    def _find(self, command: Sequence[str]) -> list[str]:
        """Return the words of the command as they are started in the copy."""
        words = list(command)
        for word in words:
            if any(remote in word for remote in _REMOTE):
                raise Refused(
                    f"{word} is a remote folder, of which no copy is made: a run would read what another one has "
                    "written. Give a folder on this disk for the check"
                )
        if words[0].endswith(".py"):
            words.insert(0, "python")
        if shutil.which(words[0]) is None:
            raise Refused(f"{words[0]} is no program that can be started here; write: resumecheck -- python train.py")
        return [self._map(word) for word in words]

    def _map(self, text: str) -> str:
        return guard.map_paths(text, self.spellings, str(self.workspace.work))

    # --- one start

    def start(
        self,
        tree: Tree,
        *,
        more: Sequence[str] = (),
        limit: int | None = None,
        snapshots: bool = False,
        sigterm: bool = False,
        is_late: bool = False,
    ) -> Run:
        """Start the script in the folder of an instant, until its end or a number of steps.

        It is forked from a process of the script that waits, where there is one: as it first looks at the folder or,
        if it is late, at what differs between the instants.
        """
        if time.monotonic() > self.deadline:
            raise Stopped("the time was over")
        self.workspace.restore(tree)
        folder = self.logs / str(self.starts + self.forks)
        folder.mkdir()
        plan = self._plan(folder, limit, snapshots)
        run, began = Run(), time.monotonic()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(plan["socket"])
            server.listen(64)
            process: AnyProcess = self._fork(plan, tuple(more), is_late) or self._open(plan, more)
            try:
                self._serve(server, process, run, plan, sigterm)
            finally:
                _end(process)
        refusal = guard.read_refusal(self.refusal)
        run.status, run.seconds = process.returncode or 0, time.monotonic() - began
        run.output = Path(plan["output"]).read_bytes()[-8000:].decode(errors="replace")
        self._check_refusal(refusal, run.output)
        _read_rows(run, folder)
        return run

    def _plan(self, folder: Path, limit: int | None, snapshots: bool) -> dict[str, Any]:
        """Return what the processes of a run are told."""
        caches, moved = guard.writable_caches(
            {name: self._map(value) for name, value in os.environ.items()},
            str(self.temporary),
            str(self.workspace.origin),
        )
        self.moved_caches = moved
        writable = [str(self.workspace.work), str(self.temporary), str(self.logs), *caches, *self.allow]
        plan: dict[str, Any] = {"work": str(self.workspace.work), "folder": str(folder), "by": self.by, "orders": ""}
        plan |= {"socket": str(folder / "s"), "changed": str(folder / "changed"), "output": str(folder / "output.txt")}
        plan |= {"limit": limit, "snapshots": snapshots, "writable": writable, "refusal": self.refusal}
        Path(plan["output"]).touch()
        return plan

    def _open(self, plan: Mapping[str, Any], more: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start the command, where the kernel can with no right to change what is outside of the copy."""
        self.starts += 1
        environment = {name: self._map(value) for name, value in os.environ.items()} | self.moved_caches
        path = os.pathsep.join(filter(None, [str(self.home / "watch"), environment.get("PYTHONPATH", "")]))
        environment |= {watch.PLAN: json.dumps(plan), "PYTHONPATH": path, "TMPDIR": str(self.temporary)}
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "GIT_OPTIONAL_LOCKS": "0"}
        launcher = [sys.executable, "-I", str(guard.__file__), json.dumps(plan["writable"])]
        words = [*launcher, *self.command, *(self._map(word) for word in more)]
        with open(plan["output"], "ab") as output:
            return subprocess.Popen(
                words,
                cwd=self.workspace.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _fork(self, plan: dict[str, Any], more: tuple[str, ...], is_late: bool) -> ForkedProcess | None:
        """Go on from a process of the same command that waits; None without one."""
        waiting = self._waiting(plan, more, is_late)
        pid = waiting.fork(plan) if waiting is not None else 0
        if waiting is None or not pid:
            return None
        self.forks += 1
        return ForkedProcess(pid, waiting.line)

    def _waiting(self, plan: dict[str, Any], more: tuple[str, ...], is_late: bool) -> Waiting | None:
        """Return a process that waits, which is started the first time; one that is late is forked where it can be."""
        if (more, is_late) not in self.waiting:
            is_script = Path(self.command[0]).name.startswith("python") and self.command[1:2][0].endswith(".py")
            early = self._waiting(plan, more, False) if is_late and is_script else None
            can_wait = early is not None or is_late != is_script
            self.waiting[more, is_late] = self._let_wait(plan, more, is_late, early) if can_wait else None
        return self.waiting[more, is_late]

    def _let_wait(
        self, plan: dict[str, Any], more: Sequence[str], is_late: bool, early: Waiting | None
    ) -> Waiting | None:
        name = str(self.home / f"orders-{next(self.numbers)}")
        plan = {**plan, "orders": name, "same": self.same if is_late else [], "limit": None, "snapshots": False}
        plan["parent"] = os.getpid() if early is None else early.pid
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen(1)
            process = None
            if early is None:
                process = self._open(plan, more)
                self.templates.append(process)
                pid = process.pid
            else:
                pid = early.fork(plan)
            until = min(time.monotonic() + _FORK_TIMEOUT_S, self.deadline)
            while _stat(pid)[0] not in "ZX" and time.monotonic() < until:
                if line := _accept(server):
                    _read_line(line)
                    return Waiting(pid, line)
        if process is not None:
            _end(process)
        return None

    def close(self, can_wait: bool = True) -> None:
        """End the processes that wait; there are no more of them, if they cannot be forked."""
        for template in self.templates:
            _end(template)
        self.templates.clear()
        self.waiting = {} if can_wait else dict.fromkeys(self.waiting)

    # --- what the processes tell

    def _serve(
        self, server: socket.socket, process: AnyProcess, run: Run, plan: Mapping[str, Any], sigterm: bool
    ) -> None:
        """Answer the processes of the script until they end, or are to be ended."""
        end = time.monotonic() + self.patience_s
        while process.poll() is None:
            if time.monotonic() > self.deadline:
                raise Stopped("the time was over")
            if time.monotonic() > end or self._is_idle(process):
                run.is_stuck = True
                return
            if os.path.exists(self.refusal):
                return
            line = _accept(server)
            if line is None:
                continue
            with line:
                message = json.loads(line.makefile("r").readline() or "null")
                if message is None:
                    continue
                if message["kind"] == "limit":
                    run.is_limited, run.handles_sigterm = True, message["handles_sigterm"]
                    if not sigterm:
                        return
                    run.is_limited, end = False, min(end, time.monotonic() + _SIGTERM_TIMEOUT_S)
                    os.kill(process.pid, signal.SIGTERM)
                else:
                    self._take(message, process, run, plan)
                with contextlib.suppress(OSError):
                    line.sendall(b".")

    def _is_idle(self, process: AnyProcess) -> bool:
        """Return whether a fork has not computed for a long time: it may wait for a thread that it does not have."""
        if not isinstance(process, ForkedProcess):
            return False
        now, ticks = time.monotonic(), sum(map(int, _stat(process.pid)[11:15]))
        if ticks != process.ticks:
            process.ticks, process.idle_since = ticks, now
        return now - process.idle_since > _IDLE_TIMEOUT_S

    def _take(self, message: dict[str, Any], process: AnyProcess, run: Run, plan: Mapping[str, Any]) -> None:
        """Keep a message, and where it tells a change or a step after one, the folder as it is now."""
        changed = Path(plan["changed"])
        if message["kind"] in ("file", "step"):
            with _stopped(process.pid):
                message["tree"] = self.workspace.snapshot()
        if message["kind"] == "step":
            changed.unlink(missing_ok=True)
        elif message["kind"] in ("file", "written"):
            changed.touch()
        run.events.append(message)

    def _check_refusal(self, refusal: Mapping[str, str] | None, output: str) -> None:
        """Refuse a script that would change what is outside of the copy; it was stopped before."""
        remedy = (
            "Nothing is changed. Let it write below the working folder, or, if it is a cache that all runs may share, "
            "allow it: --allow FOLDER"
        )
        if refusal is not None:
            path = refusal["path"].replace(str(self.workspace.work.parent), str(self.workspace.origin.parent), 1)
            raise Refused(
                f"the script would {refusal['operation']} {path}, outside of the working folder, and was ended before. "
                f"{remedy}"
            )
        denied = next((line for line in output.splitlines() if "Permission denied" in line and self._is_ours(line)), "")
        if denied and guard.has_landlock():
            raise Refused(
                f"a program of the script was not allowed to change what is outside of the working folder "
                f"({denied.strip()[:300]}). {remedy}"
            )

    def _is_ours(self, line: str) -> bool:
        """Return whether a path in a line is outside of the copy, and one that could be changed without the guard."""
        allowed = [str(folder) for folder in (self.workspace.work, self.temporary, self.logs)]
        for word in re.findall(r"[^\s'\"`:=]*/[^\s'\"`:]*", line):
            path = os.path.realpath(self.workspace.work / word)
            existing = path if os.path.exists(path) else os.path.dirname(path)
            if not any(guard.is_within(path, folder) for folder in allowed) and os.access(existing, os.W_OK):
                return True
        return False


class Waiting(NamedTuple):
    """A process that waits to be forked."""

    pid: int
    line: socket.socket

    def fork(self, plan: Mapping[str, Any]) -> int:
        """Return the number of a new process, or 0."""
        self.line.sendall(json.dumps(plan).encode() + b"\n")
        return int(_read_line(self.line) or 0)


class ForkedProcess:
    """A process that another one has forked, with what is needed of subprocess.Popen."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self.line = pid, line
        self.returncode: int | None = None
        self.ticks, self.idle_since = -1, 0.0

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self.returncode is None and select.select([self.line], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end."""
        if self.returncode is None:
            self.returncode = int(_read_line(self.line) or -signal.SIGKILL)
        return self.returncode


def _accept(server: socket.socket) -> socket.socket | None:
    """Return the line of a process that calls, or None if none does for a moment."""
    return server.accept()[0] if select.select([server], [], [], _POLL_S)[0] else None


def _read_line(line: socket.socket) -> str:
    """Read a line and not a byte more, so that what follows is seen to be there."""
    content = b""
    while not content.endswith(b"\n"):
        byte = line.recv(1)
        if not byte:
            return ""
        content += byte
    return content.decode()


AnyProcess = Union["subprocess.Popen[bytes]", ForkedProcess]


def _read_rows(run: Run, folder: Path) -> None:
    """Read the rows of all processes."""
    for file in sorted(folder.glob("rows-*.jsonl")):
        rank = int(file.name.split("-")[1])
        for text in file.read_text().splitlines():
            if not text.endswith("}"):  # A kill has cut it off.
                continue
            row = json.loads(text)
            if row["kind"] == "step":
                run.rows.setdefault(rank, []).append(row)
            elif row["kind"] == "optimizer":
                run.names.setdefault(row["optimizer"], row["names"])
                run.weight_bytes += row["bytes"] if rank == 0 else 0
            else:
                run.saw_backward = True


def write_watcher(folder: Path) -> None:
    """Write what runs in each Python process that has a folder on its path."""
    package = folder / "resumecheck_watcher"
    package.mkdir(parents=True)
    for name in ("guard", "hashes", "steps", "watch"):
        shutil.copyfile(Path(__file__).with_name(f"{name}.py"), package / f"{name}.py")
    (folder / "sitecustomize.py").write_text("from resumecheck_watcher import watch\n\nwatch.start()\n")


# --- processes


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Stop a process and all that it has started."""
    pids = [pid, *_descendants(pid)]
    _signal(pids, signal.SIGSTOP)
    until = time.monotonic() + 1
    for process in pids:
        while _stat(process)[0] not in "TtZX" and time.monotonic() < until:
            time.sleep(0.0005)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _stat(pid: int) -> list[str]:
    """Return what Linux says of a process: its state, its parent, ...; "X" of one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["X", *["0"] * 20]


def _signal(pids: Sequence[int], number: int) -> None:
    for process in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _descendants(pid: int) -> list[int]:
    """Return what a process has started, and what these have, as they are now."""
    children: dict[int, list[int]] = {}
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        children.setdefault(int(_stat(process)[1]), []).append(process)
    result, left = [], [pid]
    while left:
        new = children.get(left.pop(), [])
        result += new
        left += new
    return result


def _end(process: AnyProcess) -> None:
    """Kill a process and all that it has started."""
    if process.poll() is None:
        _signal([process.pid, *_descendants(process.pid)], signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_processes(home: str) -> None:
    """Kill each process that was started for a check, by its environment: also those that have left their parents."""
    mark = os.path.join(home, "").encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pid = int(file.parent.name)
            if pid != os.getpid() and watch.PLAN.encode() in (content := file.read_bytes()) and mark in content:
                os.kill(pid, signal.SIGKILL)
