"""What a save costs: zae's, with its hashes and its waits for the disk, and what of it training waits for.

Two questions, each asked in turns in one process, so that a disk which is slow for a while is slow for all:

1. A save of a state of 200 MB: `save_state()` in both formats, against `torch.save` of the same weights, which waits
   for no disk, and with a wait for the disk, as a checkpoint needs. zae hashes every byte as well.
2. The stall of a save of 400 MB: how long `save_state()` takes to return with `save_async=True`, against without.

The files are written in the working folder, on whatever disk that is, and removed.

    python benchmarks/saving.py            # writes its section of docs/explanation/performance.md
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zae import Every, Trainer
from zae.addons import StateManagerAddon

HERE = Path(__file__).parent
MARK = "<!-- saving -->"


class Task(Trainer):
    """It has weights; they are never trained here."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def model_of(megabytes: int) -> nn.Module:
    """Layers of 4 MB, as most of a network's parameters are."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(megabytes // 4)))


def trainer_of(model: nn.Module, folder: Path, **options: Any) -> Any:
    """A trainer that is ready to save, and keeps one checkpoint."""
    made = Task.add_on(StateManagerAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path=folder, log_bar=False,
        save_every=Every(epochs=99), **options,
    )  # fmt: skip
    made.setup()
    return made


def plain(model: nn.Module, path: Path, wait: bool) -> None:
    """Save as one does by hand."""
    with open(path, "wb") as file:
        torch.save(model.state_dict(), file)
        if wait:
            file.flush()
            os.fsync(file.fileno())


def in_turns(calls: dict[str, Callable[[], object]], after: dict[str, Callable[[], object]], count: int) -> Any:
    """Time each call in each turn, the first turn not; what comes after a call is not timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(count + 1):
        for name, call in calls.items():
            os.sync()  # What the one before has left to the disk is not this one's to wait for.
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            after.get(name, lambda: None)()
            if turn:
                times[name].append(took)
    return times


def saves(folder: Path, count: int) -> dict[str, list[float]]:
    """The first question."""
    model = model_of(200)
    calls: dict[str, Callable[[], object]] = {
        "torch.save": lambda: plain(model, folder / "plain.pt", wait=False),
        "torch.save, and a wait for the disk": lambda: plain(model, folder / "waited.pt", wait=True),
    }
    after: dict[str, Callable[[], object]] = {
        "torch.save": (folder / "plain.pt").unlink,
        "torch.save, and a wait for the disk": (folder / "waited.pt").unlink,
    }
    for kind in ("safetensors", "ckpt"):
        made = trainer_of(model, folder / kind, save_format=kind)
        calls[f"zae, {kind}"] = lambda made=made, kind=kind: made.save_state(folder / kind / "one")
        after[f"zae, {kind}"] = lambda kind=kind: shutil.rmtree(folder / kind / "one")
    kept = trainer_of(model, folder / "kept", keep_last=1, keep_best=0)
    calls["zae, safetensors, read back, and the one before removed"] = lambda: next_of(kept)
    return in_turns(calls, after, count)


def next_of(trainer: Any) -> None:
    """Save as in a run: the one before goes once the new one is read back."""
    trainer.progress_checker.step += 1
    trainer.save_state()


def stalls(folder: Path, count: int) -> dict[str, list[float]]:
    """The second question."""
    model = model_of(400)
    there = trainer_of(model, folder / "there")
    beside = trainer_of(model, folder / "beside", save_async=True)
    calls = {
        "save_async=False": lambda: there.save_state(folder / "there" / "one"),
        "save_async=True": lambda: beside.save_state(folder / "beside" / "one"),
    }

    def settle() -> None:
        assert beside.last_path is None  # It waits for the thread.
        shutil.rmtree(folder / "beside" / "one")

    return in_turns(
        calls, {"save_async=False": lambda: shutil.rmtree(folder / "there" / "one"), "save_async=True": settle}, count
    )


def rows(times: dict[str, list[float]], base: str) -> list[str]:
    """A table: medians with the smallest and the largest, and each against one of them."""
    text = ["| | median | smallest to largest | ratio of medians |", "|---|---|---|---|"]
    reference = statistics.median(times[base])
    for name, found in times.items():
        median = statistics.median(found)
        text.append(f"| {name} | {median:.3f} s | {min(found):.3f} to {max(found):.3f} s | {median / reference:.2f} |")
    return [*text, ""]


def page(count: int) -> str:
    """Measure, and write it down as Markdown."""
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix=".saving-", dir=HERE.parent))
    try:
        first, second = saves(folder, count), stalls(folder, count)
    finally:
        shutil.rmtree(folder)
    text = [
        "## Saves", "",
        f"`{' '.join(['python', 'benchmarks/saving.py', *sys.argv[1:]])}`, with Python "
        f"{platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, {count} turns, on the disk "
        f"of the working folder (not in memory), beside a load of {load:.1f}.", "",
        "A save of 200 MB. zae writes a model, a state and a manifest, hashes every byte, and waits for the disk; "
        "torch.save alone does neither.", "", *rows(first, "torch.save"),
        "How long `save_state()` keeps training waiting, for 400 MB:", "", *rows(second, "save_async=False"),
    ]  # fmt: skip
    return "\n".join(text)


def main() -> None:
    """Measure, and put the tables into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs" / "explanation" / "performance.md")
    arguments = parser.parse_args()
    found = page(arguments.turns)
    sys.stdout.write(found)
    before, *rest = arguments.output.read_text().split(MARK)
    after = rest[-1] if rest else "\n"
    arguments.output.write_text(f"{before.rstrip()}\n\n{MARK}\n\n{found}\n{MARK}{after}")


if __name__ == "__main__":
    main()
