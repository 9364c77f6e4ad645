"""Runs in processes of their own: start them in a clean process, wait for their answers, and kill them."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zae.errors import ZaeError

__all__ = ["Job", "JobFailed", "OutOfTime", "Workshop"]

_PRELOADED = ["zae.certify.preload", "zae.addons.mpu", "zae.addons.state_manager.addon"]
_POLL = 0.002  # Seconds between two looks at a process.


class JobFailed(ZaeError):
    """A run raised; the message is its error."""


class OutOfTime(ZaeError):
    """The time of the command is over."""


@dataclass(frozen=True)
class Job:
    """One run of the script's trainer, and how it differs from that of the script."""

    kind: str = "train"
    """A function of `zae.certify.child`."""
    leave_out: tuple[str, ...] = ("parallel",)
    """The layers, or names, of add-ons that the trainer lacks."""
    add: tuple[str, ...] = ()
    """Names of add-ons of ``zae.addons`` that it has as well."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options to set where the class takes them."""
    steps: int = 0
    """The most optimizer steps."""
    seconds: float = 0.0
    """End the run after so many; 0 does not."""
    is_shortened: bool = True
    """Whether an epoch takes at most a third of the steps, so that what follows an epoch is part of the run."""
    pause: float = 0.0
    """Seconds to wait after each step."""
    precision: str = "fp32"
    """What "plain" computes in: as the trainer has chosen it in a run."""
    rank: int = 0
    world: int = 1
    port: int = 0
    is_exact: bool = False
    """Whether the run is in float64, without what each rank draws or normalizes for its own samples."""
    batches: int = 1
    """How many batches of the loader are one."""
    script: str = ""
    given: tuple[str, ...] = ()
    origin: str = ""
    """The working folder of the command."""
    folder: str = ""
    """The folder of this job."""


class Workshop:
    """Runs jobs, each in its own process and folder, until a deadline.

    The processes are forked from a server that has imported torch and done nothing. On Windows each is a new
    interpreter.
    """

    def __init__(self, folder: Path, deadline: float, **common: Any) -> None:
        self.folder, self.deadline, self.common = folder, deadline, common
        self.count = 0
        methods = multiprocessing.get_all_start_methods()
        self.context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            self.context.set_forkserver_preload(_PRELOADED)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def new(self, **changes: Any) -> Job:
        """Return a job with a new folder."""
        self.count += 1
        folder = self.folder / f"{self.count:02d}"
        folder.mkdir()
        return Job(**{**self.common, **changes, "folder": str(folder)})

    def run(self, **changes: Any) -> Any:
        """Run a new job, and return its answer."""
        job = self.new(**changes)
        return self.answer(job, self.start(job))

    def start(self, job: Job) -> Any:
        """Start the process of a job."""
        from zae.certify import child

        if self.left <= 0:
            raise OutOfTime
        Path(job.folder, "answer").unlink(missing_ok=True)
        process = self.context.Process(target=child.work, args=(job,))
        process.start()
        return process

    def answer(self, job: Job, process: Any) -> Any:
        """Wait for a process, and return what it answers."""
        import torch

        try:
            process.join(max(self.left, 0))
            if process.is_alive():
                raise OutOfTime
        finally:
            kill(process)
        path = Path(job.folder, "answer")
        if not path.exists():
            raise JobFailed(f"the process ended with status {process.exitcode} and no answer; {_last_lines(job)}")
        answer = torch.load(path, weights_only=True)
        if "failed" in answer:
            raise JobFailed(answer["failed"])
        return answer

    def run_ranks(self, world: int, **changes: Any) -> Any:
        """Run a job on several ranks; return the answer of rank 0."""
        port = _free_port()
        jobs = [self.new(rank=rank, world=world, port=port, **changes) for rank in range(world)]
        processes: list[Any] = []
        try:
            processes += [self.start(job) for job in jobs]
            answers = [self.answer(job, process) for job, process in zip(jobs, processes)]
            return answers[0]
        finally:
            for process in processes:
                kill(process)

    def wait_until(self, process: Any, is_reached: Callable[[], bool]) -> bool:
        """Wait for something that a process does; return False where it ends before."""
        while process.is_alive():
            if is_reached():
                return True
            if self.left <= 0:
                raise OutOfTime
            time.sleep(_POLL)
        return False


def kill(process: Any) -> None:
    """Kill a process and those that it has started, by SIGKILL."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def same_but(job: Job, **changes: Any) -> Job:
    """Return a job in the same folder."""
    return dataclasses.replace(job, **changes)


def _last_lines(job: Job) -> str:
    path = Path(job.folder, "output.txt")
    text = path.read_text(errors="replace") if path.exists() else ""
    return "its last words: " + " | ".join(text.splitlines()[-5:])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
