"""Ranks: processes that are started, watched and ended together.

`spawn` is the whole of it for the caller: it starts one process for each device, calls a function there, returns what
rank 0 returned, and raises what went wrong. No process outlives it; on Linux not even where it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import torch
import torch.distributed as dist

from zae.distributed import transfer
from zae.distributed.rank_process import SIGNALS, Report, Task, main_of_rank
from zae.errors import ConfigError, DistributedError, exit_status

__all__ = ["parse_address", "spawn"]

GRACE_TIMEOUT_S = 5.0
"""Seconds in which the other ranks may end by themselves after one has failed."""

UNWIND_TIMEOUT_S = 9.0
"""Seconds from a rank's error to its end, in which it may save."""


def spawn(
    function: Callable[..., Any],
    args: dict[str, Any],
    devices: Sequence[torch.device],
    *,
    backend: str = "gloo",
    timeout: float = 600.0,
    init_method: str | None = None,
    show: Callable[..., Any] | None = None,
) -> Any:
    """Call a function in one new process for each device, as the ranks of one process group.

    ``show`` is called here with what a rank gives to `zae.distributed.rank_process.show`.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a run on several devices was started while a new process was importing the main script, which would start "
            'processes without end; call run() under: if __name__ == "__main__":'
        )
    with tempfile.TemporaryDirectory(prefix="zae-ranks-") as folder:
        transfer.pack({**args, "function": function}, Path(folder, "begin"))
        store, rendezvous_address = _rendezvous_point(init_method, timeout)
        tasks = [
            Task(rank, tuple(map(str, devices)), rendezvous_address, backend, timeout, folder, os.getpid())
            for rank in range(len(devices))
        ]
        with _Ranks(tasks, show) as ranks:
            ranks.watch()
        del store  # It was served by this process until here.
        # This process computes nothing: the devices are the ranks', and it leaves them alone.
        return transfer.unpack(Path(folder, "end"), "cpu")


def _rendezvous_point(init_method: str | None, timeout: float) -> tuple[Any, str]:
    """Start a store for the process group, on one address; return it, and its address for a rank."""
    address = parse_address("tcp://127.0.0.1:0" if init_method is None else init_method)
    if address.scheme == "env":
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = os.environ.get("MASTER_PORT", "")
        if not port.isdigit():
            raise ConfigError(
                f"init_method='env://' and MASTER_PORT={port!r}; set it to a port, or leave init_method out: a free "
                "port is found then"
            )
        address = parse_address(f"tcp://{host}:{port}")
    if address.scheme == "file":
        if not os.path.isdir(folder := os.path.dirname(address.path)):  # The ranks would wait for it until the timeout.
            raise ConfigError(f"init_method={init_method!r}: the folder {folder} does not exist; leave init_method out")
        return None, f"file://{address.path}#{os.getpid()}-{time.time_ns()}"
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.hostname or "", address.port or 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise DistributedError(
            f"init_method={init_method!r}: port {address.port} of {address.hostname} cannot be used "
            f"({error.strerror}); leave init_method out, a free port is found then, or name another"
        ) from error
    host, port_number = listener.getsockname()
    store = dist.TCPStore(
        host,
        port_number,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=torch.__version__ >= "2.8",  # The one of torch 2.6 takes no socket.
    )
    return store, f"tcp://{host}:{port_number}"


def parse_address(text: Any) -> SplitResult:
    """Return the parts of an ``init_method``; refuse one of which torch could make nothing."""
    address = urlsplit(text if isinstance(text, str) else "")
    why = ""
    needed = {"tcp": address.hostname, "env": "env", "file": address.path}.get(address.scheme)
    try:
        _ = address.port
    except ValueError as error:
        why = f" ({error})"
    if why or not needed:
        raise ConfigError(
            f"init_method={text!r}{why}; it must be 'tcp://localhost:12355', 'env://' or 'file:///path'; left out, a "
            "free port is found"
        )
    return address


@contextmanager
def _importable_main() -> Iterator[None]:
    """Hide the file of a main module that is none: of standard input it is "<stdin>", which no process can import."""
    main = vars(sys.modules["__main__"])
    file = None if transfer.main_is_a_file() else main.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main["__file__"] = file


class _Rank:
    """The process of a rank, and what it has reported."""

    def __init__(self, number: int, process: Any, connection: Any) -> None:
        self.number = number
        self.process = process
        self.connection = connection  # Its end of a pipe: a Connection, or on Windows a PipeConnection.
        self.is_open = True  # Whether more reports may come.
        self.report: Report | None = None  # The last one.
        self.done_at: float | None = None  # When it has reported that its work is done.
        self.died_at: float | None = None  # When it was found dead without having reported its end.
        self.was_killed = False  # By this process.

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"

    @property
    def failure(self) -> Report | None:
        """Its report of an error."""
        return self.report if self.report is not None and self.report.kind in ("failing", "failed") else None


class _Ranks:
    """The processes of one run."""

    def __init__(self, tasks: list[Task], show: Callable[..., Any] | None) -> None:
        self._tasks = tasks
        self._timeout = tasks[0].timeout
        self._show = show
        self._ranks: list[_Rank] = []
        self._deadline: float | None = None  # After a failure.

    def __enter__(self) -> _Ranks:
        context = multiprocessing.get_context("spawn")
        try:
            for task in self._tasks:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=main_of_rank, args=(task, theirs), name=f"zae-rank-{task.rank}")
                with _importable_main():
                    process.start()
                theirs.close()
                self._ranks.append(_Rank(task.rank, process, ours))
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for rank in self._ranks:
            rank.connection.close()

    def watch(self) -> None:
        """Wait until every rank has ended, and raise the first failure."""
        with self._pass_signals_on():
            try:
                self._wait()
            except KeyboardInterrupt:
                # The ranks are in their own process groups: Ctrl-C in a terminal has not reached them.
                self._signal(signal.SIGINT)
                with suppress(KeyboardInterrupt):
                    self._wait()
                raise
            finally:
                self._kill()
        self._raise_failure()

    def _wait(self) -> None:
        """Receive reports until every rank has ended, or one has not by its deadline: after a failure, or its work."""
        while alive := [rank for rank in self._ranks if rank.process.is_alive()]:
            deadlines = [rank.done_at + self._timeout for rank in alive if rank.done_at is not None]
            if self._deadline is not None:
                deadlines.append(self._deadline)
            seconds = min(deadlines) - time.monotonic() if deadlines else None
            if seconds is not None and seconds <= 0:
                return
            pipes = {rank.connection: rank for rank in self._ranks if rank.is_open}
            for ready in wait([*pipes, *(rank.process.sentinel for rank in alive)], seconds):
                if ready in pipes:
                    self._receive(pipes[ready])
            self._note_deaths()
        self._note_deaths()  # Of all ranks that ended after the last look.

    def _receive(self, rank: _Rank) -> bool:
        """Receive one report; return False when there will be no more."""
        try:
            report: Report = rank.connection.recv()
        except (EOFError, OSError):
            rank.is_open = False
            return False
        if report.kind == "shows":
            if self._show is not None:
                self._show(*report.shown)
            return True
        rank.report = report
        if report.kind == "done":
            rank.done_at = time.monotonic()
        elif report.kind == "failing":
            self._hurry(UNWIND_TIMEOUT_S)
        elif report.kind == "failed":
            self._hurry(GRACE_TIMEOUT_S)
        return True

    def _note_deaths(self) -> None:
        """Record ranks that have ended without a report."""
        for rank in self._ranks:
            if rank.process.is_alive() or rank.died_at is not None:
                continue
            with suppress(EOFError, OSError):
                while rank.connection.poll() and self._receive(rank):
                    pass
            if rank.report is None or rank.report.kind == "began":
                rank.died_at = time.monotonic()
                self._hurry(GRACE_TIMEOUT_S)

    def _hurry(self, seconds: float) -> None:
        latest = time.monotonic() + seconds
        self._deadline = latest if self._deadline is None else min(self._deadline, latest)

    def _kill(self) -> None:
        """Kill the remaining processes."""
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.was_killed = True
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join()

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            if rank.process.is_alive() and rank.process.pid:
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    @contextmanager
    def _pass_signals_on(self) -> Iterator[None]:
        """Pass signals that ask this process to end on to the ranks, and obey them when these have ended."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        received: list[int] = []

        def pass_on(number: int, _: object) -> None:
            if number in received and number == getattr(signal, "SIGHUP", None):
                return  # A terminal that is closed and the shell in it send one each.
            received.append(number)
            self._signal(number if len(received) == 1 else signal.SIGKILL)

        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
        numbers = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        before = {number: signal.signal(number, pass_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if received:
            if before[received[0]] == signal.SIG_DFL:
                raise SystemExit(exit_status(received[0]))
            signal.raise_signal(received[0])

    # ------------------------------------------------------------------------------------------ what went wrong

    def _raise_failure(self) -> None:
        """Raise the first failure; failures that followed from it are in its notes."""
        world = len(self._ranks)
        failures = {rank: rank.failure for rank in self._ranks if rank.failure is not None}
        summaries = "".join(f"\n  rank {rank.number}: {failure.summary}" for rank, failure in failures.items())
        in_order = sorted(failures, key=lambda rank: failures[rank].when)
        first = next((rank for rank in in_order if not failures[rank].lost_peer), None)
        deaths = sorted((rank.died_at, rank.number) for rank in self._ranks if rank.died_at is not None)
        for died_at, number in deaths:
            rank = self._ranks[number]
            # A rank that is killed makes the others fail, an aborted one may have followed from their failure.
            was_aborted = rank.process.exitcode == -signal.SIGABRT
            if first is None or (died_at < failures[first].when + 1.0 and not was_aborted):
                raise DistributedError(self._describe_death(rank) + summaries)
        if first is not None:
            raise failures[first].rebuild(first.number, world)
        silent = [rank for rank in self._ranks if rank.was_killed and rank not in failures]
        if silent and failures:
            raise DistributedError(self._describe_silence(silent) + summaries)
        if failures:
            rank = in_order[0]
            raise failures[rank].rebuild(rank.number, world)
        if silent:
            rank = next((candidate for candidate in silent if candidate.done_at is not None), silent[0])
            raise DistributedError(
                f"rank {rank.number} of {world} (process {rank.process.pid}) had done its work and did not end "
                f"within timeout={self._timeout:g} s, and was ended; look for a thread that it waits for: "
                "Thread(daemon=True), or one that is joined before run() returns"
            )

    def _describe_silence(self, silent: Sequence[_Rank]) -> str:
        """Name the ranks that have not answered, and what to look for."""
        return (
            f"{' and '.join(map(str, silent))} of {len(self._ranks)} did not answer within "
            f"timeout={self._timeout:g} s, and {'were' if silent[1:] else 'was'} ended; look for what only that rank "
            "does: an endless loop, a read that does not return, a collective that the others do not call. If a signal "
            "has stopped it, SIGSTOP for instance, start the script again: with resume='auto' it continues from the "
            "newest checkpoint. If the work takes that long, write a longer timeout=..."
        )

    def _describe_death(self, rank: _Rank) -> str:
        code = rank.process.exitcode
        who = f"rank {rank.number} of {len(self._ranks)} (process {rank.process.pid})"
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "?"
            why = f"; {SIGNALS[-code]}" if -code in SIGNALS else ""
            return f"{who} was killed by signal {-code} ({name}){why}; the others were ended"
        if rank.report is None:
            return (
                f"{who} ended with exit code {code} before it began; what it says is printed above. A script that runs "
                'on several devices begins its run under: if __name__ == "__main__":'
            )
        return f"{who} ended with exit code {code} in the middle of the run; the others were ended"
