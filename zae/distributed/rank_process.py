"""The process of one spawned rank: join the others, work, report, and end when the parent does."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import platform
import re
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from zae import random_state
from zae.device import exchange_current, is_out_of_memory
from zae.distributed import transfer
from zae.errors import DistributedError

__all__ = [
    "SIGNALS",
    "Report",
    "Task",
    "has_lost_peer",
    "has_timed_out",
    "is_spawned",
    "leave",
    "main_of_rank",
    "note_failure",
    "show",
    "summarize",
]

_OF_AN_EXCHANGE = re.compile(r"gloo|nccl", re.IGNORECASE)
_OF_A_CONNECTION = re.compile(r"connection (closed|reset|refused)|broken pipe|timed out|timeout", re.IGNORECASE)
_OF_A_TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_OURS = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))
_LOADING = str(Path(torch.__file__).parent / "utils" / "data")
_PR_SET_PDEATHSIG = 1

SIGNALS: dict[int, str] = {
    signal.SIGKILL: "the system kills a process so when memory runs out",
    signal.SIGABRT: "gloo ends a process so when ranks exchange different tensors: all ranks must call the same blocks "
    "of the model in the same order, and a step that exchanges tensors itself needs lockstep=True (MultiGPUAddon, "
    "AccelerateAddon). Set TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment for a traceback",
}
"""What the end of a rank by a signal often means."""

_WITH_FP32_PRECISION = (
    "cuda.matmul",
    "cudnn",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)


def _settings() -> dict[str, Any]:
    """Settings of torch to copy to a new process."""
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32": _float32_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        # A spawned process would spawn the workers of its loaders too, which takes seconds in each epoch.
        "start": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
    }


def _apply(settings: dict[str, Any], world: int) -> None:
    multiprocessing.set_start_method(settings["start"], force=True)
    torch.set_default_dtype(settings["dtype"])
    torch.set_num_threads(max(1, settings["threads"] // world))
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    _set_float32_precision(settings["float32"])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = settings["cudnn"]


def _float32_precision() -> dict[str, Any]:
    """Return how precise float32 is, in the names that the script uses.

    Torch refuses to read its older settings, of functions, once a script has used the newer, ``fp32_precision``.
    """
    try:
        return {
            "matmul": torch.get_float32_matmul_precision(),
            "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        }
    except RuntimeError:
        return {name: attrgetter(name)(torch.backends).fp32_precision for name in _WITH_FP32_PRECISION}


def _set_float32_precision(settings: dict[str, Any]) -> None:
    if "matmul" in settings:
        torch.set_float32_matmul_precision(settings["matmul"])
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = settings["tf32"]
        return
    for name, value in settings.items():
        if value != attrgetter(name)(torch.backends).fp32_precision:
            attrgetter(name)(torch.backends).fp32_precision = value


def _random() -> dict[str, Any]:
    return {key: value for key, value in random_state.capture().items() if key in random_state.HOST}


@dataclass(frozen=True)
class Task:
    """What a rank needs before it can unpack its work."""

    rank: int
    devices: tuple[str, ...]
    rendezvous_address: str
    backend: str
    timeout: float
    folder: str
    parent: int
    settings: dict[str, Any] = field(default_factory=_settings)
    random: dict[str, Any] = field(default_factory=_random)
    seed: int = field(default_factory=torch.initial_seed)  # For the devices, which the parent does not touch.

    @property
    def world(self) -> int:
        return len(self.devices)


@dataclass
class Report:
    """A message from a rank to its parent: that it has begun, shows something, is failing, has failed, or is done."""

    kind: str  # "began", "shows", "failing", "failed" or "done"
    when: float = 0.0
    lost_peer: bool = False
    summary: str = ""
    text: str = ""
    packed: bytes | None = None
    shown: tuple[Any, ...] = ()

    @classmethod
    def of(cls, kind: str, error: BaseException, when: float) -> Report:
        """Describe an error, and pickle it if possible."""
        text = "".join(traceback.format_exception(error))
        lost = has_lost_peer(error) or getattr(error, "from_rank", None) is not None
        return cls(kind, when, lost, summarize(error), text, _pickle_error(error))

    def rebuild(self, rank: int, world: int) -> BaseException:
        """Rebuild the error of a rank, with its type if possible."""
        who = f"rank {rank} of {world}"
        error: BaseException = DistributedError(f"{self.summary} [{who}]")
        if self.packed is not None:
            error = pickle.loads(self.packed)
            if error.args == (str(error),):
                error.args = (f"{error.args[0]} [{who}]",)
        error.add_note(f"\nraised in {who}; its traceback:\n\n{self.text.rstrip()}")
        return error


def has_lost_peer(error: BaseException) -> bool:
    """Return whether an exchange with other ranks has failed.

    A loader, a database or a script of the user may time out too: what they raise is an error of this rank.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):  # NCCL names itself where memory is short.
        return False
    if _OF_AN_EXCHANGE.search(str(error)):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_torch = bool(files) and files[-1].startswith(_OURS) and not any(file.startswith(_LOADING) for file in files)
    return is_of_torch and bool(_OF_A_CONNECTION.search(str(error)))


def has_timed_out(error: BaseException) -> bool:
    """Return whether an exchange has failed since another rank did not answer in time, in the words of gloo or NCCL."""
    return _OF_A_TIMEOUT.search(str(error)) is not None


def summarize(error: BaseException) -> str:
    """Return the type of an error and its text, cut off where it is long."""
    return traceback.format_exception_only(error)[0].strip()[:500]


def _pickle_error(error: BaseException) -> bytes | None:
    """Pickle an exception, or return None if it does not survive that."""
    try:
        data = pickle.dumps(error)
        again = pickle.loads(data)
    except Exception:
        return None
    return data if type(again) is type(error) and str(again) == str(error) else None


_connection: Connection | None = None  # To the parent of a spawned rank.
_failed_at: float | None = None  # When this rank has failed.


def is_spawned() -> bool:
    """Return whether this process is a rank that another one has started and watches."""
    return _connection is not None


def _send(report: Report) -> None:
    """Send a message to the parent of a spawned rank."""
    if _connection is not None:
        with suppress(OSError):  # The parent is gone, and this process is about to be.
            _connection.send(report)


def note_failure(error: BaseException) -> None:
    """Report at once to the parent that this rank fails, because other ranks fail as a consequence."""
    global _failed_at
    if is_spawned() and _failed_at is None:
        _failed_at = time.monotonic()
        _send(Report.of("failing", error, _failed_at))


def show(*shown: Any) -> None:
    """Give what the run shows to the function ``show`` of `spawn`, in the parent of a spawned rank."""
    _send(Report("shows", shown=shown))


def main_of_rank(task: Task, connection: Connection) -> None:
    """Run one rank; the entry point of its process."""
    global _connection
    _die_with(task.parent)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C in the terminal goes to the parent only, which passes it on once.
    _interrupt_once()
    _connection = connection
    _send(Report("began"))
    try:
        result = _work(task)
        if task.rank == 0:
            transfer.pack(result, Path(task.folder, "end"), "the result")
    except BaseException as error:
        note_failure(error)
        _send(Report.of("failed", error, cast(float, _failed_at)))
        leave()
        # The parent shows the error; a second traceback from here would only come between.
        sys.exit(1)
    _send(Report("done"))
    leave()


def _work(task: Task) -> Any:
    """Join the other ranks, and call the function."""
    env = {"RANK": task.rank, "LOCAL_RANK": task.rank, "WORLD_SIZE": task.world, "LOCAL_WORLD_SIZE": task.world}
    os.environ.update({key: str(value) for key, value in env.items()})
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, str(loopback))
    _apply(task.settings, task.world)
    device = torch.device(task.devices[task.rank])
    exchange_current(device)
    waiting = timedelta(seconds=task.timeout)
    try:
        dist.init_process_group(
            task.backend, store=_store(task, waiting), rank=task.rank, world_size=task.world, timeout=waiting
        )
    except RuntimeError as error:
        raise DistributedError(
            f"rank {task.rank} of {task.world} could not meet the others within timeout={task.timeout:g} s: {error}. "
            "Where a rank takes long to begin, to import the script for instance, write a longer timeout=..."
        ) from error
    # What lay on the caller's device, the first one, belongs on this rank's.
    elsewhere = {task.devices[0]: task.devices[task.rank]} if device.type != "cpu" else {}
    arguments = transfer.unpack(Path(task.folder, "begin"), elsewhere)
    torch.manual_seed(task.seed)
    random_state.restore(task.random)
    random_state.draw_as_rank(task.rank)
    return arguments.pop("function")(**arguments)


def _store(task: Task, waiting: timedelta) -> Any:
    """Return the store of the process group."""
    if task.rendezvous_address.startswith("file://"):
        path, _, prefix = task.rendezvous_address.removeprefix("file://").rpartition("#")
        return dist.PrefixStore(prefix, dist.FileStore(path, task.world))
    host, _, port = task.rendezvous_address.removeprefix("tcp://").rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=waiting, wait_for_workers=False)


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _interrupt_once() -> None:
    """Handle Ctrl-C only once: a second one would interrupt the cleanup."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)


def _die_with(parent: int) -> None:
    """Let the system kill this process when the parent dies; only Linux does."""
    if platform.system() != "Linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before that line.
        os._exit(1)
