"""Checks of an add-on on several ranks: which ranks write, and whether all call the same collectives."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from zae.composition.introspect import is_engine_slot
from zae.testing import watch
from zae.testing.kit import Kit, in_new_folder

__all__ = ["check_ranks"]

TIMEOUT = 10.0
"""Seconds that a rank waits for the other."""


def check_ranks(kit: Kit) -> Iterator[str]:
    """Find files that every rank writes, and collectives that only some ranks call."""
    if is_engine_slot(kit.add_on.slot):
        return
    faults = list(_simulate(kit))
    yield from faults
    if not faults and _can_fork():
        yield from _in_two_processes(kit)


def _simulate(kit: Kit) -> Iterator[str]:
    """Train as rank 0 of 2 and then as rank 1, each with its own values for those of the other."""
    task = kit.derive(_with_two_ranks(kit.probe))
    calls: list[list[str]] = []
    for rank in (0, 1):
        with in_new_folder(), watch.effects() as effects, watch.output() as text:
            trainer = kit.make(task, kit_rank=rank)
            kit.run(trainer)
        calls.append(trainer.notes.collectives)
        done = list(dict.fromkeys(effects))[:1] if rank else []
        if rank and text.getvalue():
            done.append(f"prints {text.getvalue()[:60]!r}")
        for each in done:
            yield f"logs on every rank: on rank 1 it {each}; ask self.is_main first"
    if calls[0] != calls[1]:
        pairs = zip([*calls[0], None], [*calls[1], None])
        first, second = next((a, b) for a, b in pairs if a != b)
        yield (
            f"calls a collective on some ranks only: rank 0 calls {first or 'nothing more'}, rank 1 calls "
            f"{second or 'nothing more'}, and one of them would wait forever; call reduce, gather and barrier on "
            "every rank, outside of `if self.is_main`"
        )


def _with_two_ranks(probe: Any) -> Any:
    """Derive a task that is one of two ranks; the other is taken to have the same values."""

    class Ranked(probe):
        def __init__(self, *args: Any, kit_rank: int = 0, **kwargs: Any) -> None:
            self.kit_rank = kit_rank
            super().__init__(*args, **kwargs)

        @property
        def rank(self) -> int:
            return self.kit_rank

        @property
        def world_size(self) -> int:
            return 2

        def reduce(self, value: Any) -> Any:
            self.notes.collectives.append("reduce")
            return super().reduce(value) * 2

        def gather(self, value: Any) -> list[Any]:
            self.notes.collectives.append("gather")
            return [value, *super().gather(value)]

        def barrier(self) -> None:
            self.notes.collectives.append("barrier")
            super().barrier()

    return Ranked


# --------------------------------------------------------------------------------------------- two real processes


def _can_fork() -> bool:
    """Return whether a fork of this process can train; autograd's threads for accelerators do not survive one."""
    return (
        sys.platform == "linux"
        and dist.is_available()
        and not (torch.accelerator.is_available() or dist.is_initialized())
        and threading.current_thread() is threading.main_thread()
    )


def _in_two_processes(kit: Kit) -> Iterator[str]:
    """Train in two processes that communicate over gloo."""
    context, store = multiprocessing.get_context("fork"), os.path.abspath("store")
    lines, processes = [], []
    try:
        for rank in (0, 1):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(kit, rank, store, writer), daemon=True)
            with warnings.catch_warnings():  # Python warns of threads that may hold a lock; a rank has a deadline.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            writer.close()
            lines.append(reader)
            processes.append(process)
        answers = [_answer(line) for line in lines]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, answer in enumerate(answers):
        if answer:
            yield (
                f"fails in two processes: rank {rank} {answer}; call reduce, gather, barrier and what "
                "torch.distributed has on every rank, equally often and in one order"
            )
            return


def _answer(line: Connection) -> str:
    """Return the fault that a rank reports; empty where there is none."""
    try:
        return str(line.recv()) if line.poll(2 * TIMEOUT) else f"did not end within {2 * TIMEOUT:g} seconds"
    except EOFError:
        return "ended without a report"


def _run_rank(kit: Kit, rank: int, store: str, line: Connection) -> None:
    """Train as one rank, report, and exit without the exit handlers of the parent."""
    with contextlib.suppress(BaseException):
        line.send(_outcome(kit, rank, store))
    os._exit(0)


def _outcome(kit: Kit, rank: int, store: str) -> str:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT)
        )
        with in_new_folder(), watch.output():
            kit.run(kit.make(kit.derive(_with_process_group(kit.probe))))
        dist.destroy_process_group()
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    return ""


def _with_process_group(probe: Any) -> Any:
    """Derive a task with the ranks of the process group."""

    class Distributed(probe):
        rank = property(lambda self: dist.get_rank())
        world_size = property(lambda self: dist.get_world_size())

        def reduce(self, value: Any) -> Any:
            summed = super().reduce(value).clone()
            dist.all_reduce(summed)
            return summed

        def gather(self, value: Any) -> list[Any]:
            values: list[Any] = [None, None]
            dist.all_gather_object(values, value)
            return values

        def barrier(self) -> None:
            super().barrier()
            dist.barrier()

    return Distributed
