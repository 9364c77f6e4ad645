"""Doubles of the disk that count, kill, tear, refuse and forget; and functions that run in a separate process."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kit import hand
from zae import AddOnBase, Trainer
from zae.checkpoint import filesystem
from zae.checkpoint.encoding import encode
from zae.checkpoint.filesystem import FileSystem
from zae.checkpoint.manifest import seal
from zae.checkpoint.tensor_bytes import byte_view, dense

OPERATIONS = [name for name in vars(FileSystem) if not name.startswith("_")]
CHANGING = ("mkdir", "create", "write", "link", "fsync", "rename")  # What a full disk refuses.

# --- disks


class Disk(FileSystem):
    """The real disk, with every operation counted and listed."""

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.names: dict[int, Path] = {}

    def before(self, name: str, args: tuple[Any, ...]) -> None:
        """Called before each operation."""

    @property
    def now(self) -> int:
        """The number of the operation at hand, from 0."""
        return len(self.log) - 1


def _counted(name: str) -> Callable[..., Any]:
    def operate(self: Disk, *args: Any) -> Any:
        self.log.append((name, args))
        self.before(name, args)
        result = getattr(FileSystem, name)(self, *args)
        if name == "create":
            self.names[result] = args[0]
        return result

    return operate


for _name in OPERATIONS:
    setattr(Disk, _name, _counted(_name))


class KillingDisk(Disk):
    """Kills this process before operation `at`; torn: after half of it, when it is a write."""

    def __init__(self, at: int, torn: bool = False) -> None:
        super().__init__()
        self.at, self.torn = at, torn

    def before(self, name: str, args: tuple[Any, ...]) -> None:
        if self.now == self.at:
            if self.torn and name == "write":
                FileSystem.write(self, args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)


class RefusingDisk(Disk):
    """Refuses from operation `at` on: a full disk what needs room, a broken one everything."""

    def __init__(self, at: int, code: int, until: int = 1 << 30) -> None:
        super().__init__()
        self.at, self.code, self.until = at, code, until

    def before(self, name: str, args: tuple[Any, ...]) -> None:
        if self.at <= self.now < self.until and (self.code != errno.ENOSPC or name in CHANGING):
            raise OSError(self.code, os.strerror(self.code), str(args[0]))


@contextmanager
def installed(disk: FileSystem) -> Iterator[Any]:
    """Let zae work on a double."""
    before, filesystem.disk = filesystem.disk, disk
    try:
        yield disk
    finally:
        filesystem.disk = before


class JournalDisk(Disk):
    """The real disk, from whose operations `crash` makes what a power loss could leave of them.

    What was not fsynced may be there, be absent or be cut, each on its own: the contents of a file wait for the fsync
    of the file, the names in a directory for that of the directory. A rename happens at once or not at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handles: dict[int, int] = {}

    def create(self, path: Path) -> int:
        self.log.append(("create", (path,)))
        handle = FileSystem.create(self, path)
        self.handles[self.now] = handle
        return handle

    def write(self, handle: int, data: memoryview) -> None:
        self.log.append(("write", (handle, bytes(data))))
        FileSystem.write(self, handle, data)

    def crash(self, start: Path, target: Path, upto: int, seed: int) -> None:
        """Make `target` what is left of `start` after the first `upto` operations and a power loss."""
        _Replay(self.log[:upto], self.handles, start, random.Random(seed)).build(target)


class _Replay:
    """One power loss."""

    def __init__(self, log: list[Any], handles: dict[int, int], start: Path, draw: random.Random) -> None:
        self.log, self.handles, self.start, self.draw = log, handles, start, draw

    def build(self, target: Path) -> None:
        shutil.copytree(self.start, target, symlinks=True)
        contents, survivors = self._contents(), self._surviving_names()
        for index, (name, args) in enumerate(self.log):
            if index in survivors:
                self._apply(index, name, args, target, contents)

    def _inside(self, path: Path, target: Path) -> Path:
        return target / Path(path).relative_to(self.start)

    def _apply(self, index: int, name: str, args: tuple[Any, ...], target: Path, contents: dict[int, bytes]) -> None:
        """What a journal plays back; an operation whose object was lost is lost with it."""
        paths = [self._inside(Path(path), target) for path in args]
        try:
            if name == "mkdir":
                os.mkdir(paths[0])
            elif name == "create":
                with open(paths[0], "xb") as file:
                    file.write(contents[index])
            elif name == "rename":
                os.replace(*paths)
            elif name == "link":
                os.link(*paths)
            elif name == "remove_file":
                os.unlink(paths[0])
            else:
                shutil.rmtree(paths[0])
        except OSError:
            return

    def _contents(self) -> dict[int, bytes]:
        """The bytes of each file that was created, by the number of the operation."""
        made: dict[int, list[Any]] = {}
        open_now: dict[int, list[Any]] = {}
        for index, (name, args) in enumerate(self.log):
            if name == "create":
                made[index] = open_now[self.handles[index]] = [b"", 0]
            elif name == "write":
                open_now[args[0]][0] += args[1]
            elif name == "fsync":
                open_now[args[0]][1] = len(open_now[args[0]][0])
        return {index: self._lossy(data, durable) for index, (data, durable) in made.items()}

    def _lossy(self, data: bytes, durable: int) -> bytes:
        """Keep what was fsynced; of the rest all, nothing, a part, or zeros."""
        rest = data[durable:]
        cut = self.draw.randrange(len(rest) + 1)
        kept = self.draw.choice([rest, b"", rest[:cut], bytes(len(rest)), rest[:cut] + bytes(len(rest) - cut)])
        return data[:durable] + kept

    def _surviving_names(self) -> set[int]:
        """Operations on names: those before the fsync of their directory, and a part of the others."""
        kept = set()
        for index, (name, args) in enumerate(self.log):
            if name in ("mkdir", "create", "link", "rename", "remove_file", "remove_directory"):
                parent = Path(args[-1]).parent
                synced = any(
                    later == "fsync_directory" and Path(where[0]) == parent for later, where in self.log[index + 1 :]
                )
                if synced or self.draw.random() < 0.5:
                    kept.add(index)
        return kept


# --- processes


@dataclass
class Outcome:
    """How a process ended."""

    status: int  # The exit status; of a killed one, minus the signal.
    result: Any = None
    error: str = ""
    said: list[str] = field(default_factory=list)


class Child:
    """A function that runs in its own process: a fork, so that torch is imported once."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        warm()
        sys.stdout.flush()
        sys.stderr.flush()
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            self._be(write, function, args)
        os.close(write)
        os.set_blocking(read, False)
        self._pipe, self._data = os.fdopen(read, "rb"), b""

    @staticmethod
    def _be(write: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """The child: it never returns to the tests."""
        status, answer = 0, (None, "")
        # What earlier tests left to the collector has threads (a process group's, say) that a fork does not inherit:
        # to free it here would wait for them for ever, or abort.
        gc.freeze()
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            answer = (function(*args), "")
        except SystemExit as error:
            status = int(error.code or 0)
            answer = (None, "SystemExit")
        except KeyboardInterrupt:
            status, answer = 130, (None, "KeyboardInterrupt")
        except BaseException:
            status, answer = 1, (None, traceback.format_exc())
        finally:
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(status)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> Outcome | None:
        """Return how it ended, or None while it runs."""
        self._data += self._pipe.read() or b""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        with self._pipe:
            self._data += self._pipe.read() or b""
        result, error = pickle.loads(self._data) if self._data else (None, "")
        return Outcome(os.waitstatus_to_exitcode(status), result, error)

    def kill(self) -> Outcome:
        """Kill it with the processes that it has started."""
        os.killpg(self.pid, signal.SIGKILL)
        while (outcome := self.poll()) is None:
            time.sleep(0.001)
        return outcome

    def wait(self, seconds: float = 300.0) -> Outcome:
        """Wait for its end, which must come."""
        deadline = time.monotonic() + seconds
        while (outcome := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"a child did not end within {seconds} s")
            time.sleep(0.001)
        return outcome


@functools.cache
def warm() -> None:
    """Train once before the first fork: what torch imports then, no child has to import."""
    model = classifier()
    scheduled = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(scheduled, max_lr=0.1, total_steps=99)
    with torch.random.fork_rng(devices=[]):
        options: dict[str, Any] = {"scheduler_step_on_batch": True, "log_bar": False}
        Task(model, "cpu", optimizer=scheduled, scheduler=scheduler, **options).run(1, hand.loader())


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until a condition holds, which must come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come about within {seconds} s")
        time.sleep(0.002)


def forked(function: Callable[..., Any], *args: Any) -> Outcome:
    """Run a function in its own process, and wait for its end."""
    return Child(function, *args).wait()


def answer(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in its own process, where it must not fail."""
    outcome = forked(function, *args)
    assert outcome.status == 0, outcome.error or f"ended with {outcome.status}"
    return outcome.result


def ambient(seed: int) -> None:
    """The random streams of another process: nothing that is resumed may depend on them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --- what is trained


class Task(Trainer):
    """A classifier with dropout, whose labels also draw from Python's and NumPy's streams."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        noise = random.random() * 1e-3 + float(np.random.rand()) * 1e-3
        return {"loss": nn.functional.cross_entropy(self.model(inputs), targets) * (1 + noise), "noise": noise}

    def test_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        output = self.model(inputs)
        return {
            "loss": nn.functional.cross_entropy(output, targets),
            "hit": (output.argmax(1) == targets).float().mean(),
        }


class KillAddon(AddOnBase):
    """Kill the process after a step, before or after what is saved then."""

    layer = "observe"

    def __init__(
        self, *args: Any, kill_at: int = -1, kill_with: int = signal.SIGKILL, kill_rank: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.kill_at, self.kill_with, self.kill_rank = kill_at, kill_with, kill_rank

    def batches(self, loader: Any) -> Iterator[Any]:
        """Strike with a signal that asks for the end while data are waited for."""
        for batch in super().batches(loader):
            if self.kill_with != signal.SIGKILL and self._is_hit(self.progress_checker.step + 1):
                os.kill(os.getpid(), self.kill_with)
            yield batch

    def _is_hit(self, step: int) -> bool:
        return step == self.kill_at and self.rank == self.kill_rank

    def checkpoint(self) -> None:
        """Let the others save, then strike."""
        super().checkpoint()
        if self.kill_with == signal.SIGKILL and self._is_hit(self.progress_checker.step):
            os.kill(os.getpid(), self.kill_with)


def fingerprint(*values: Any) -> str:
    """One hash of nested plain values and tensors, bitwise."""
    structure, tensors = encode(list(values))
    sha = hashlib.sha256(json.dumps(structure, sort_keys=True).encode())
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(byte_view(dense(tensors[name], name)))
    return sha.hexdigest()


def everything(trainer: Any) -> dict[str, str]:
    """A hash of each part of what a run ends with, without the names that differ by chance."""
    state = copy.deepcopy(trainer.state_dict())
    for add_on in ("StateManagerAddon", "LoggerAddon"):
        state.pop(add_on, None)
    state["records"].pop("run")  # What it was given.
    return {key: fingerprint(value) for key, value in state.items()}


def memory_folder() -> Path:
    """A new folder in memory where there is one: a killed process does not care, and thousands of fsyncs do."""
    shared = "/dev/shm"
    return Path(tempfile.mkdtemp(prefix="zae-faults-", dir=shared if os.access(shared, os.W_OK) else None))


def reseal(directory: Path, **changes: Any) -> None:
    """Make the manifest fit the files again, as somebody would who means harm."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    for name, entry in manifest["files"].items():
        data = (directory / name).read_bytes()
        entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (directory / "manifest.json").write_bytes(seal({**manifest, **changes}))


def classifier(seed: int = 1) -> nn.Module:
    return hand.network(seed)


def build(cls: Any, *add_ons: Any, lr: float = 0.01, **options: Any) -> Any:
    """Make a trainer of the classifier."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return cls.add_on(*add_ons)(model, "cpu", optimizer=optimizer, seed=7, log_bar=False, **options)
