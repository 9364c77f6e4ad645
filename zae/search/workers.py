"""Train trials side by side, each process one at a time; this process gives them out and records what died."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from zae.errors import ConfigError, DistributedError
from zae.launch.transfer import main_is_a_file

__all__ = ["conduct_all"]

_GRACE = 30.0  # Seconds in which an interrupted trial may save.
_SENT = ("make_trainer", "run", "space", "objective", "sampler", "pruner", "name")


def conduct_all(made: Any, tasks: list[int | None], count: int, deadline: float, report: Any) -> None:
    """Train trials in so many processes; a task is the number of an interrupted trial, or None for a new one.

    ``report`` is called with the number of each trial that has ended.
    """
    _check_sendable(made)
    threads = max(1, torch.get_num_threads() // count)
    waiting, crew = list(tasks), list[_Worker]()
    try:
        while waiting or any(worker.is_busy for worker in crew):
            if time.monotonic() > deadline:
                waiting.clear()
            while waiting and len(crew) < count:
                crew.append(_Worker(made, threads, made.folder / "processes.txt"))
            for worker in crew:
                if waiting and not worker.is_busy:
                    worker.give(waiting.pop(0))
            wait([each for worker in crew if worker.is_busy for each in (worker.pipe, worker.process.sentinel)])
            for worker in [each for each in crew if each.is_busy]:
                ended = worker.listen(made)
                if worker.has_died:
                    crew.remove(worker)
                if ended is not None:
                    report(ended)
    except BaseException:
        for worker in crew:
            worker.interrupt()
        raise
    finally:
        for worker in crew:
            worker.end()


class _Worker:
    """A process that trains one trial at a time."""

    def __init__(self, made: Any, threads: int, output: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, made, threads, str(output)), name="zae-search")
        self.process.start()
        theirs.close()
        self.output, self.is_busy, self.has_died = output, False, False
        self._number: int | None = None

    def give(self, task: int | None) -> None:
        with contextlib.suppress(OSError):  # It has died: `listen` finds that.
            self.pipe.send(("train", task))
        self._number, self.is_busy = None, True

    def listen(self, made: Any) -> int | None:
        """Read what the process has sent; return the number of a trial that has ended."""
        while self.pipe.poll():
            try:
                kind, content = self.pipe.recv()
            except (EOFError, OSError):
                break
            if kind == "begin":
                self._number = content
            elif kind == "error":
                raise content
            else:
                self.is_busy = False
                return int(content)
        if self.process.is_alive() or not self.is_busy:
            return None
        return self._bury(made)

    def _bury(self, made: Any) -> int:
        """Record that the process has died, and with it its trial."""
        self.process.join()
        self.is_busy, self.has_died = False, True
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        if self._number is None:
            raise DistributedError(
                f"a process of the search {how} before its trial began; its output is above, and in {self.output}. A "
                "script that calls search(n_jobs=...) does so below if __name__ == '__main__':"
            )
        made.fail(self._number, f"its process {how}")
        return self._number

    def interrupt(self) -> None:
        """Ask the process to end its trial, as Ctrl-C does; the trial is continued by the next search."""
        if self.is_busy and self.process.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(_GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _check_sendable(made: Any) -> None:
    """Raise ConfigError, which names what cannot be sent to another process."""
    for name in _SENT:
        value = getattr(made, name)
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ConfigError(
                f"n_jobs above 1 sends {name} to other processes, and it cannot be pickled ({error}); define it at the "
                "top level of a file: not a lambda, and not a function in a function"
            ) from error
        if getattr(value, "__module__", "") == "__main__" and not main_is_a_file():
            raise ConfigError(
                f"n_jobs above 1 sends {name} to other processes, which cannot read it in a notebook or from standard "
                f"input; put it into a file, for instance task.py, and write from task import {name}"
            )


# ------------------------------------------------------------------------------------------------- in the process


def _work(pipe: Connection, made: Any, threads: int, output: str) -> None:
    """Train trials until there are no more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with open(output, "a", encoding="utf-8", errors="backslashreplace", buffering=1) as file:
        sys.stdout = sys.stderr = file  # The bars of several trials would overwrite each other.
        made.open()
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while (task := pipe.recv()) is not None:
                asked = made.ask(task[1])
                pipe.send(("begin", asked.number))
                try:
                    made.conduct(asked)
                except Exception as error:
                    traceback.print_exc()
                    pipe.send(("error", _as_sent(error, asked.number)))
                else:
                    pipe.send(("end", asked.number))


def _as_sent(error: Exception, number: int) -> Exception:
    """Return an exception that another process can raise."""
    said = "".join(traceback.format_exception(error)).rstrip()
    found = error
    try:
        pickle.dumps(copy.copy(error))  # Both make it of its arguments, as the other process does.
    except Exception:
        found = DistributedError(f"trial {number} failed in its process: {type(error).__name__}: {error}")
    found.add_note(f"zae: in the process of trial {number}:\n{said}")
    return found


def _end_with_parent() -> None:
    """End this process when the one that started it has died."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
