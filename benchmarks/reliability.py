"""Kill, flip and poison: what becomes of a run with zae, Lightning, Transformers, Accelerate and ignite.

Each contestant trains the same classifier for three epochs, saves after each, and goes on by the means of its own
library (see ``benchmarks/reliable``). It is

- killed before each operation on the files of the second and third save (what Python opens for writing, renames and
  removes, and the beginning, middle and end of what torch writes by itself), and started again, in a process with
  other random streams: does it go on by itself from a whole checkpoint, to bitwise the same end?
- given a newest checkpoint with one flipped bit in the weights: does it notice?
- given a NaN loss in step 7: does it say so, and are the weights on the disk finite?

    python benchmarks/reliability.py            # writes its section of docs/explanation/performance.md
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

CONTESTANTS = ("zae", "lightning", "transformers", "accelerate", "ignite")
FLIPS = 12
MARK = "<!-- measured -->"
"""What stands between two of these in the page is written by this script; the rest is left as it is."""


class Operations:
    """Counts what a process does to the files under a folder, and kills it before one of them."""

    def __init__(self, folder: Path, kill_at: int = -1) -> None:
        self.folder, self.kill_at, self.count = str(folder), kill_at, 0

    def watch(self) -> None:
        """Begin; there is no end but that of the process."""
        import torch

        sys.addaudithook(self._hear)
        writer = torch.serialization._open_zipfile_writer_file
        before, after = writer.__init__, writer.__exit__

        def began(self_: Any, name: Any, *args: Any, **kwargs: Any) -> None:
            self._note(str(name))
            before(self_, name, *args, **kwargs)
            self._note(str(name))  # The file is there, and empty.

        def ended(self_: Any, *args: Any) -> None:
            self._note(str(self_.name))  # Its records are there, its directory is not.
            after(self_, *args)

        writer.__init__, writer.__exit__ = began, ended

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
            self._note(str(args[0]))

    def _note(self, path: str) -> None:
        if self.folder in os.path.abspath(path):
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1


def apart(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Run a function in a process of its own; return its status and its result."""
    sys.stdout.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        status, result = 1, None
        try:
            result = function(*args)
            status = 0
        except BaseException as error:
            result = f"{type(error).__name__}: {str(error)[:200]}"
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, pickle.loads(data) if data else None


class Bench:
    """All cases of one contestant."""

    def __init__(self, name: str, base: Path) -> None:
        self.train = importlib.import_module(f"reliable.with_{name}").train
        self.base = base
        from reliable.common import EPOCHS, STEPS

        self.epochs, self.steps = EPOCHS, STEPS
        self.run(base / "warm", 1, 0)  # What is imported late is imported before the forks.

    def run(self, folder: Path, epochs: int, seed: int, kill_at: int | None = None, poison: int = 0) -> Any:
        """Train, or go on, in this process; with `kill_at`, return the number of operations on files."""
        import random

        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        operations = Operations(folder, -1 if kill_at is None else kill_at)
        if kill_at is not None:
            operations.watch()
        report = self.train(folder, epochs, poison)
        return operations.count if kill_at is not None else tuple(report)

    def kills(self) -> dict[str, Any]:
        """Kill before each operation of the second and third epoch's saves, and go on."""
        status, whole = apart(self.run, self.base / "whole", self.epochs, 1)
        assert status == 0, whole
        start = self.base / "start"
        apart(self.run, start, 1, 1)
        counted = self.base / "counted"
        shutil.copytree(start, counted)
        count = apart(self.run, counted, self.epochs, 2, -1)[1]
        went_on = same = 0
        errors: dict[str, int] = {}
        for at in range(count):
            place = self.base / "killed"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(start, place)
            apart(self.run, place, self.epochs, 3, at)
            status, report = apart(self.run, place, self.epochs, 4)
            good = status == 0 and report[0] >= self.steps and report[1] == self.epochs * self.steps
            went_on += good
            same += good and report[2] == whole[2]
            if not good:
                text = str(report).replace(str(place), "...") if status else f"began again at step {report[0]}"
                errors[text[:100]] = errors.get(text[:100], 0) + 1
        return {"points": count, "went on": went_on, "bitwise": same, "errors": errors}

    def flips(self) -> dict[str, Any]:
        """Flip one bit of the weights in the newest checkpoint, and go on for an epoch."""
        start = self.base / "flip-start"
        apart(self.run, start, 2, 1)
        expected = apart(self.run, _copied(start, self.base / "unflipped"), self.epochs, 1)[1]
        noticed = 0
        for number in range(FLIPS):
            place = _copied(start, self.base / "flipped")
            path = max((p for p in place.rglob("*") if _holds_weights(p)), key=lambda p: (p.stat().st_mtime, p.name))
            data = bytearray(path.read_bytes())
            at = int(len(data) * (0.1 + 0.05 * number)) if path.suffix != ".ckpt" else len(data) * (number + 1) // 14
            data[at] ^= 1 << (number % 8)
            path.write_bytes(data)
            status, report = apart(self.run, place, self.epochs, 1)
            # An error, or an older checkpoint; a silent run from other weights, or from a luckily unused byte, is not.
            noticed += status != 0 or report[0] < 2 * self.steps
        return {"flips": FLIPS, "noticed": noticed, "unflipped": expected[1]}

    def poisoned(self) -> dict[str, Any]:
        """A NaN loss in step 7 of 15."""
        place = self.base / "poisoned"
        status, report = apart(self.run, place, self.epochs, 1, None, 7)
        after, again = apart(self.run, place, self.epochs, 1)
        healthy = apart(self.run, self.base / "healthy", self.epochs, 1)[1]
        return {"said": str(report) if status else "", "recovers": after == 0 and again[2] == healthy[2]}


def _copied(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def _holds_weights(path: Path) -> bool:
    named = path.name in ("model.safetensors", "pytorch_model.bin", "last.ckpt") or path.suffix == ".pt"
    return path.is_file() and named and "scheduler" not in path.name and "optimizer" not in path.name


def measure(name: str) -> dict[str, Any]:
    """Run all cases of one contestant in this process, and forks of it."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        began = time.monotonic()
        bench = Bench(name, Path(folder))
        result = {"kills": bench.kills(), "flips": bench.flips(), "poisoned": bench.poisoned()}
    return {**result, "seconds": round(time.monotonic() - began)}


def page(results: dict[str, dict[str, Any]]) -> str:
    """The table, as Markdown."""
    import torch

    text = ["## Kills, flipped bits and NaN", "",
            f"`{' '.join(['python', 'benchmarks/reliability.py', *sys.argv[1:]])}`, with Python "
            f"{platform.python_version()}, torch {torch.__version__}, {platform.system()}, on the CPU. Each library is "
            "used as its manual shows, with its own way to resume; the top of that file says how. A flipped bit that "
            "is not noticed counts even if the byte has no meaning (padding, a name).", ""]  # fmt: skip
    heads = ["", "killed before a file operation: resumes by itself", "to bitwise the same end", "flipped bits noticed",
             "a NaN loss", "then started again"]  # fmt: skip
    text += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, result in results.items():
        kills, flips, poisoned = result["kills"], result["flips"], result["poisoned"]
        said = f"stops: {poisoned['said'].partition(':')[0]}" if poisoned["said"] else "silent"
        end = "the same end as a healthy run" if poisoned["recovers"] else "another end, or none"
        text.append(
            f"| {name} {result['version']} | {kills['went on']} of {kills['points']} | {kills['bitwise']} of "
            f"{kills['points']} | {flips['noticed']} of {flips['flips']} | {said} | {end} |"
        )
    absent = [name for name in CONTESTANTS if name not in results]
    text += ["", f"Not installed, and so not measured: {', '.join(absent)}."] if absent else []
    return "\n".join(text) + "\n"


def main() -> None:
    """Measure those that are installed, each in a process of its own, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs" / "explanation" / "performance.md")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.only:
        if importlib.util.find_spec(name) is None:
            continue
        status, result = apart(measure, name)
        if status:
            sys.stderr.write(f"{name}: {result}\n")
            continue
        version = importlib.metadata.version("pytorch-ignite" if name == "ignite" else name)
        results[name] = {"version": version, **result}
        sys.stdout.write(json.dumps({name: results[name]}) + "\n")
    arguments.output.parent.mkdir(exist_ok=True)
    parts = arguments.output.read_text().split(MARK) if arguments.output.exists() else ["# Performance\n\n", "", "\n"]
    arguments.output.write_text(f"{parts[0]}{MARK}\n\n{page(results)}\n{MARK}{parts[-1]}")


if __name__ == "__main__":
    main()
