"""What runs in each Python process of the script: a copy on its path, which its ``sitecustomize`` starts.

It records the optimizer steps (``steps.py``), refuses changes outside of the copy (``guard.py``), and tells the parent
each change of a file before it is made. The parent stops all processes, takes a snapshot, and lets them go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import guard, steps

PLAN = "RESUMECHECK_PLAN"
"""The environment variable that holds what to do, as JSON."""

_LOGS = (".csv", ".jsonl", ".log", ".tsv", ".txt", ".out", ".lock")
_EVENTS_OF_A_LOG = 8  # A save may write such a file; a log is written at each step.
_NOT_THE_SCRIPT = (f"{os.sep}torch{os.sep}serialization", f"{os.sep}safetensors{os.sep}", f"{os.sep}shutil.py")
_OMP_PAUSE_HARD = 2

Plan = dict[str, Any]


class Watch:
    """Tell the parent what this process does to the files of the copy, and what its optimizer does."""

    def __init__(self, plan: Plan, fork: Fork | None = None) -> None:
        self.plan, self.fork = plan, fork
        self.work = os.path.join(plan["work"], "")
        self.counts: dict[str, int] = {}
        self.file: int | None = None
        self.pid = os.getpid()
        self.recorder: Any = None
        guard.Guard(plan["writable"], plan["refusal"], then=self.change)
        guard.when_imported("torch", self.watch_torch)
        guard.when_imported("safetensors.torch", self.watch_safetensors)

    # --- files

    def change(self, operation: str, *paths: str) -> None:
        """Tell the parent of a change before it is made, and wait until it has taken a snapshot."""
        *sources, path = paths
        if not self.plan["snapshots"] or not path.startswith(self.work) or f"{os.sep}__pycache__" in path:
            return
        if self._is_busy_log(path, operation) or (operation == "mkdir" and os.path.isdir(path)):
            return
        message = {"kind": "file", "operation": operation, "path": path[len(self.work) :]}
        if operation == "rename":
            message["source"] = sources[0][len(self.work) :] if sources[0].startswith(self.work) else sources[0]
        self.tell({**message, **self._situation()})

    def _is_busy_log(self, path: str, operation: str) -> bool:
        """Return whether a file is a log whose first changes were told."""
        if operation == "append" and not path.endswith((".pt", ".pth", ".ckpt")):
            return True
        if not path.endswith(_LOGS) and "tfevents" not in path:
            return False
        self.counts[path] = self.counts.get(path, 0) + 1
        return self.counts[path] > _EVENTS_OF_A_LOG

    def _situation(self) -> dict[str, Any]:
        """Return who changes a file, and when."""
        is_aside = threading.current_thread() is not threading.main_thread() or os.getpid() != self.plan["pid"]
        situation: dict[str, Any] = {"row": self.recorder.count if self.recorder else 0}
        situation["thread"] = f"{os.getpid()}-{threading.get_ident()}" if is_aside else ""
        situation["line"] = line_of_the_script(self.work)
        if self.recorder is not None and not is_aside:
            self.recorder.note_states()
        return situation

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to the parent, and wait for its answer; without one this process ends at once."""
        message["rank"] = rank_of_process()
        answer = b""
        # An error is never one of the script's: it would take it for an answer of its own call.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.connect(self.plan["socket"])
            line.sendall(json.dumps(message).encode() + b"\n")
            answer = line.recv(1)
        if not answer:
            os.kill(os.getpid(), signal.SIGKILL)

    # --- saves

    def watch_torch(self, torch: Any) -> None:
        """Record the steps, and what is given to torch.save."""
        more = {}
        if self.fork is not None:
            more["before_step"] = self.fork.before_step
            torch.set_num_threads = steps.wrap(torch.set_num_threads, self.fork.set_num_threads)
        self.recorder = steps.Recorder(torch, self.write, self.plan["by"], **more)
        os.register_at_fork(after_in_child=self.begin_process)
        torch.save = steps.wrap(torch.save, self.save)

    def watch_safetensors(self, module: Any) -> None:
        """See the tensors that are given to save_file."""
        module.save_file = steps.wrap(module.save_file, self.save)

    def save(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Tell what is saved, by its weights; where another thread saves, also when the file is whole."""
        value, f, *_ = [*args, *(kwargs[name] for name in ("obj", "tensors", "f", "filename") if name in kwargs)]
        with self.recorder.torch.no_grad():
            content = {"tensors": self.recorder.fingerprints_in(value), "holds": describe(self.recorder.torch, value)}
        situation = self._situation()
        name = str(f) if isinstance(f, (str, os.PathLike)) else str(getattr(f, "name", ""))
        self.tell({"kind": "content", "path": os.path.basename(name), **content, **situation})
        result = original(*args, **kwargs)
        if situation["thread"]:
            self.tell({"kind": "written", **situation})
        return result

    # --- rows

    def begin_process(self) -> None:
        """Begin as a process that has done nothing, unless it is to go on as the one that waited."""
        if self.fork is None or not self.fork.is_waiting:
            self.recorder.begin_process()

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to the file of this process, and stop where the plan says so."""
        if self.file is None or self.pid != os.getpid():
            self.pid = os.getpid()  # A forked process has a file of its own.
            path = os.path.join(self.plan["folder"], f"rows-{rank_of_process()}-{os.getpid()}.jsonl")
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self.file, (json.dumps(row) + "\n").encode())
        if row["kind"] != "step":
            return
        if row["n"] == self.plan["limit"]:
            handled = callable(signal.getsignal(signal.SIGTERM))
            self.tell({"kind": "limit", "row": row["n"], "handles_sigterm": handled})
        elif self.plan["snapshots"] and os.path.exists(self.plan["changed"]):
            self.tell({"kind": "step", "row": row["n"]})


class Fork:
    """Wait at the first look at a file that is not the same in all runs, and go on from there in a fork for each.

    What comes before, the imports above all, is paid once. It waits before the first step at the latest: each fork has
    the rows of all of its steps. A fork may wait itself, as soon as it looks at what differs between the instants.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.is_over, self.is_waiting = plan, False, False
        self.begin_threads: Callable[[], Any] = lambda: None
        self.work = os.path.join(plan["work"], "")
        original = os.stat

        def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.look(path)
            return original(path, *args, **kwargs)

        os.stat = stat  # It has no event.
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: Any) -> None:
        """See what looks at files or changes them."""
        if self.is_over or not arguments:
            return
        if event in ("os.listdir", "os.scandir"):
            self.look(arguments[0] if arguments[0] is not None else ".", is_folder=True)
        elif event in ("open", "os.mkdir", "os.rename", "os.remove", "os.chdir", "subprocess.Popen", "os.fork"):
            if event in ("subprocess.Popen", "os.fork"):  # What it starts may look, and would not be forked.
                self.look(self.work + "?", is_folder=True)
            self.look(arguments[0])

    def look(self, path: Any, is_folder: bool = False) -> None:
        """Stop here, if a path is one that may differ and no import looks at it."""
        if self.is_over or not isinstance(path, (str, bytes, os.PathLike)):
            return
        full = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(path)))
        if not (full + os.sep).startswith(self.work) or full.endswith((".py", ".pyc", ".so")) or "__pycache__" in full:
            return
        name = full[len(self.work) :]
        if (not is_folder and (not name or name in self.plan["same"])) or os.getppid() != self.plan["parent"]:
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code.co_filename
            if code.startswith("<frozen importlib") or "/importlib/" in code:
                return
            frame = frame.f_back
        self.wait()
        self.look(path, is_folder)  # A fork may be one that waits for what differs.

    def set_num_threads(self, original: Any, count: int) -> None:
        """Note that there is a pool of threads, which a fork does not have, and waits for at its end."""
        original(count)
        self.begin_threads = functools.partial(original, count)

    def before_step(self) -> None:
        """Stop here, if nothing was looked at before the first step; a step of another process cannot be forked."""
        while not self.is_over:
            if os.getppid() != self.plan["parent"]:
                os._exit(1)
            self.wait()

    def wait(self) -> None:
        """Fork for each order of the parent; a child returns to the script, and this process waits for its end."""
        self.is_over = self.is_waiting = True
        if not is_forkable():
            os._exit(1)
        here = os.getcwd()
        line = socket.socket(socket.AF_UNIX)
        line.connect(self.plan["orders"])
        orders = line.makefile("r")
        line.sendall(b"ready\n")
        for text in orders:
            plan = json.loads(text)
            state = random.getstate()
            pid = os.fork()
            if not pid:
                random.Random.setstate(random._inst, state)  # A fork seeds it anew.
                self.is_waiting = False
                self.begin_threads()
                os.setsid()
                orders.close()
                line.close()
                self.plan.clear()
                self.plan.update(plan, pid=os.getpid())
                self.is_over = not plan["orders"]
                os.chdir(here)
                output = os.open(plan["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                os.environ[PLAN] = text
                return
            line.sendall(f"{pid}\n".encode())
            if not plan["orders"]:
                _, status = os.waitpid(pid, 0)
                line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)


def is_forkable() -> bool:
    """Return whether a fork of this process can go on: neither CUDA nor threads do; those of OpenMP are ended."""
    torch = sys.modules.get("torch")
    if threading.active_count() > 1 or (torch is not None and torch.cuda.is_initialized()):
        return False
    with open("/proc/self/maps") as file:
        libraries = {line.split()[-1] for line in file if "libgomp" in line or "libiomp" in line or "libomp" in line}
    return all(ctypes.CDLL(library).omp_pause_resource_all(_OMP_PAUSE_HARD) == 0 for library in libraries)


def rank_of_process() -> int:
    """Return the rank of this process, as a launcher says it."""
    return int(os.environ.get("RANK") or 0)


def line_of_the_script(work: str) -> str:
    """Name the line of the script that is on the stack, and the library's that saves for it."""
    own = os.path.dirname(os.path.realpath(__file__))
    frame: Any = sys._getframe(1)
    library = ""
    while frame is not None:
        name = os.path.realpath(frame.f_code.co_filename)
        if name.startswith(work):
            line = f"{name[len(work) :]}:{frame.f_lineno}"
            return f"{line} ({library})" if library else line
        if (
            not library
            and os.sep in name
            and not name.startswith(own)
            and not any(part in name for part in _NOT_THE_SCRIPT)
        ):
            library = f"{'/'.join(name.split(os.sep)[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return library


def describe(torch: Any, value: Any, depth: int = 0) -> Any:
    """Name what an object holds: {"model": "weights", "rng": "random state", ...}."""
    if isinstance(value, torch.Tensor):
        is_random = value.dtype == torch.uint8 and value.dim() == 1 and value.numel() in (16, 5056)
        return "random state" if is_random else "tensor"
    if isinstance(value, torch.nn.Module):
        return "model"
    if isinstance(value, dict):
        return _describe_dict(torch, value, depth)
    if isinstance(value, tuple) and len(value) in (3, 5) and value[0] in (3, "MT19937"):
        return "random state"
    if isinstance(value, (list, tuple)):
        kinds = [str(describe(torch, entry, depth + 1)) for entry in value[:8]] if depth < 3 else []
        return next((kind for kind in ("random state", "optimizer", "scheduler", "weights") if kind in kinds), "list")
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def _describe_dict(torch: Any, value: dict[Any, Any], depth: int) -> Any:
    keys = set(map(str, value))
    if {"state", "param_groups"} <= keys:
        return "optimizer"
    if {"last_epoch", "_step_count"} <= keys or "_last_lr" in keys:
        return "scheduler"
    if "growth_factor" in keys:
        return "loss scale"
    if value and all(isinstance(entry, torch.Tensor) for entry in value.values()):
        is_random = all(describe(torch, entry) == "random state" for entry in value.values())
        return "random state" if is_random else "weights"
    entries = (
        {str(key): describe(torch, entry, depth + 1) for key, entry in list(value.items())[:40]} if depth < 2 else {}
    )
    if depth == 0:
        return entries
    return "random state" if "random state" in entries.values() else "dict"


def start() -> None:
    """Watch this process as the environment says, then run the ``sitecustomize`` that was hidden by the watcher's."""
    if PLAN in os.environ:
        plan = {**json.loads(os.environ[PLAN]), "pid": os.getpid()}
        Watch(plan, Fork(plan) if plan["orders"] else None)
    own = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    others = [folder for folder in sys.path if os.path.realpath(folder or ".") != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
