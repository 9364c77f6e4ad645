"""Run a test on several ranks: forks of this process that form one gloo group, which takes 0.05 s for two ranks.

    @on_ranks(2, 4)                            # runs on 2 ranks, on 4 with -m exhaustive; `world` is a parameter
    def test_sums_are_equal(world, tmp_path):  # fixtures are made before the fork: the ranks share tmp_path
        assert dist.get_world_size() == world
    each_rank(2, function, *arguments)         # the same inside of a test: a list of what each rank returned
    Crew(2).call(function, *arguments)         # ranks that stay for further calls, with what torch has cached in them

Arguments are not pickled, so that closures and classes of the test may be used; what is returned is pickled. Those of a
crew are pickled too. The world size is asserted before and after, warnings are errors, and the tracebacks of all ranks
that failed are shown.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kit.faults import Child, Outcome, ambient

TIMEOUT = 60.0
"""Seconds for one call of the process group. All ranks must have ended after twice as long, on a machine at rest."""

MOST_PATIENCE = 6.0
"""How many times as long the ranks may take on a machine that others use as well."""

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends, however that ends."""

GRACE = 1.0
"""Seconds for the other ranks to end after one has failed, on a machine at rest."""


def patience() -> float:
    """Return how many times as long ranks may take as on a machine at rest: the load of a processor, at least 1."""
    return min(max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))), MOST_PATIENCE)


def on_ranks(*worlds: int, timeout: float = TIMEOUT) -> Callable[[Callable[..., None]], Any]:
    """Run a test function on each of these numbers of ranks: on the first by default, on the others with exhaustive."""
    first, *others = worlds
    params = [first, *(pytest.param(world, marks=pytest.mark.exhaustive) for world in others)]

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            each_rank(kwargs["world"], functools.partial(test, *args, **kwargs), timeout=timeout)

        return pytest.mark.parametrize("world", params)(run)

    return decorate


def each_rank(world: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Call a function on every rank of a new process group, and return what each one returned."""
    importlib.import_module("torch._dynamo")  # The first optimizer of a process imports it, which takes seconds.
    seconds = 2 * timeout * patience()
    with tempfile.TemporaryDirectory(prefix="zae-ranks-") as folder:
        ranks = [
            Child(_be_rank, rank, world, Path(folder), timeout, seconds, functools.partial(function, *args))
            for rank in range(world)
        ]
        failed = _wait(ranks, outcomes := {}, seconds, Path(folder))
    assert not failed, "\n".join(failed)
    return [outcomes[rank].result for rank in range(world)]


def _wait(ranks: list[Child], outcomes: dict[int, Outcome], seconds: float, folder: Path) -> list[str]:
    """Collect how each rank ended, and describe those that failed, the first one first."""
    failed, late = [], []
    deadline = time.monotonic() + seconds + 1  # By then each has written where it is.
    while len(outcomes) < len(ranks) and time.monotonic() < deadline:
        for rank, child in enumerate(ranks):
            if rank in outcomes or (outcome := child.poll()) is None:
                continue
            outcomes[rank] = outcome
            if outcome.status:
                failed.append(f"rank {rank} of {len(ranks)}: {outcome.error or f'ended with {outcome.status}'}")
                deadline = min(deadline, time.monotonic() + GRACE * patience())
        time.sleep(0.001)
    for rank in {*range(len(ranks))} - {*outcomes}:
        ranks[rank].kill()
        late.append(f"rank {rank} of {len(ranks)} did not end within {seconds:g} s:\n{_stack(folder, rank)}")
    return failed or late


def _stack(folder: Path, rank: int) -> str:
    """Return where a rank was when its time was over."""
    stack, _, _ = (folder / f"stack-{rank}").read_text().partition(f'  File "{__file__}"')
    return stack


def _be_rank(
    rank: int, world: int, folder: Path, timeout: float, seconds: float | None, function: Callable[[], Any]
) -> Any:
    """Join the group, and call the function, which may take so long."""
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in env.items()}, GLOO_SOCKET_IFNAME="lo")
    ambient(rank)
    waiting = timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=waiting
    )
    assert dist.get_world_size() == world
    result = function() if seconds is None else _call(folder, seconds, function)
    assert dist.get_world_size() == world
    dist.barrier()  # Who ends first would break the others' last exchange.
    dist.destroy_process_group()
    return result


def _call(folder: Path, seconds: float, function: Callable[[], Any]) -> Any:
    """Call a function with warnings as errors, and write where it is when the time is over."""
    with warnings.catch_warnings(), open(folder / f"stack-{dist.get_rank()}", "w") as stack:
        faulthandler.dump_traceback_later(seconds, file=stack)
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("error", category)
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork")  # Of a loader.
        try:
            return function()
        finally:
            faulthandler.cancel_dump_traceback_later()


class Crew:
    """Ranks that stay for many calls: sharding propagation and imports of torch take a second in each new rank.

    After a call that failed the ranks are gone.
    """

    def __init__(self, world: int, timeout: float = TIMEOUT) -> None:
        importlib.import_module("torch._dynamo")
        self.timeout, self._ranks, self._pipes = timeout, [], []
        timeout *= patience()
        self._folder = tempfile.TemporaryDirectory(prefix="zae-ranks-")
        self._path = Path(self._folder.name)
        for rank in range(world):
            pipe, other = Pipe()
            serve = functools.partial(_serve, other, self._path)
            self._ranks.append(Child(_be_rank, rank, world, self._path, timeout, None, serve))
            self._pipes.append(pipe)
            other.close()

    @property
    def alive(self) -> bool:
        return bool(self._ranks)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a module, which is pickled by its name, on every rank; return what each one returned."""
        seconds = 2 * self.timeout * patience()
        for pipe in self._pipes:
            pipe.send((seconds, functools.partial(function, *args)))
        pending, failed, results = dict(zip(self._pipes, range(len(self._pipes)))), [], [None] * len(self._pipes)
        deadline = time.monotonic() + seconds + 1
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    results[rank], error = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    error = "it ended"
                if error:
                    failed.append(f"rank {rank} of {len(self._ranks)}: {error}")
                    deadline = min(deadline, time.monotonic() + GRACE * patience())
        if pending or failed:
            late = [f"rank {rank} did not end:\n{_stack(self._path, rank)}" for rank in pending.values()]
            self.end()
            raise AssertionError("\n".join(failed or late))
        return results

    def end(self) -> None:
        """Kill the ranks."""
        for child, pipe in zip(self._ranks, self._pipes):
            child.kill()
            pipe.close()
        self._ranks, self._pipes = [], []
        self._folder.cleanup()


def _serve(pipe: Connection, folder: Path) -> None:
    """Be a rank of a crew, until it is killed, or the tests are."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        seconds, function = pipe.recv()
        world, error, result = dist.get_world_size(), "", None
        try:
            result = _call(folder, seconds, function)
            assert dist.get_world_size() == world
        except BaseException:
            error = traceback.format_exc()
        gc.collect()
        pipe.send_bytes(pickle.dumps((result, error)))  # Tensors that are sent as such stay in shared memory.
