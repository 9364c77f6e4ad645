"""The promises of a certificate: each is tried with runs of the script's trainer, and yields findings."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zae.certify.compare import first_difference, largest, update_difference
from zae.certify.jobs import JobFailed, OutOfTime, Workshop, kill, same_but

__all__ = ["BOUND", "PROMISES", "Certificate", "Finding"]

PASSED, FAILED, NOT_TRIED = "passed", "FAILED", "not applicable"
BOUND = 1e-9
"""The largest difference of the weights of several ranks from those of one process, in float64, as a share of each
tensor's largest entry."""
_OBSERVERS = ("observe", "state")
_PACE = 2.0  # Seconds that a run takes at least that is killed.
_WAIT = 0.25  # Seconds to wait after a step at most, for it.
_SAVES = 8  # Of a run that is killed.


class Finding(NamedTuple):
    """What was found of one promise."""

    status: str
    detail: str


@dataclass
class Certificate:
    """The runs that the promises share."""

    shop: Workshop
    steps: int
    kills: int
    seed: int
    base: dict[str, Any] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)
    """Parts that two equal runs do not have in common."""

    def train(self, **changes: Any) -> dict[str, Any]:
        """Run the trainer."""
        answer: dict[str, Any] = self.shop.run(steps=self.steps, **changes)
        return answer

    def measure(self, seconds: float) -> None:
        """Make the run that others are compared with: at most so many steps as take so many seconds."""
        self.base = self.train(seconds=seconds)
        made = self.base["parts"]["progress"]
        made = made["step"] + made["skipped_steps"]
        if self.base["seconds"] > seconds and made < self.steps:
            self.steps = max(made, 1)
            self.base = self.train()

    def named(self, *layers: str) -> list[str]:
        """Return the names of the script's add-ons in some layers."""
        return [name for name, layer in self.base["add_ons"].items() if layer in layers]


def repeatable(found: Certificate) -> Iterator[Finding]:
    """Two runs are equal: else nothing can be compared."""
    other, parts = found.train(), found.base["parts"]
    text = first_difference(found.base, other)
    if not text:
        count = len(found.base["steps"])
        yield Finding(
            PASSED,
            f"two runs of {count} steps are bitwise the same: losses, weights, optimizer, history, random streams",
        )
        return
    yield Finding(FAILED, f"two runs of the same script differ: {text}. {_REPEAT}")
    found.unsteady = [
        name
        for name in parts
        if first_difference({"steps": [], "parts": {name: parts[name]}}, {"steps": [], "parts": other["parts"]})
    ]


_REPEAT = "Look for time, threads, unordered sets and unseeded generators (docs/howto/reproducibility.md)"


def loop(found: Certificate) -> Iterator[Finding]:
    """The weights are those of the loop in plain PyTorch."""
    given: dict[str, Any] = {"kind": "plain", "steps": found.steps, "is_shortened": False}
    given["precision"] = found.base["precision"]
    plain = found.shop.run(**given)
    without = tuple(plain.get("without", ()))
    if without:  # The rest of the trainer is compared.
        plain = found.shop.run(**given, leave_out=("parallel", *without))
    if "uncovered" in plain:
        yield Finding(NOT_TRIED, f"the loop by hand does not do: {'; '.join(plain['uncovered'])}")
        return
    ours = found.base
    if without or found.base["is_shortened"]:
        ours = found.train(is_shortened=False, leave_out=("parallel", *without))
    both = f"both without {', '.join(without)}, which the loop by hand does not have" if without else ""
    text = update_difference(ours, plain)
    if text and found.base["has_own_stream"] and found.base["validates"]:
        yield Finding(
            NOT_TRIED,
            "the dataset draws from a generator of its own, also for a validation, which the loop by hand does not "
            "have; give run() no valid_loader",
        )
        return
    if text:
        yield Finding(FAILED, f"{text}{f' ({both})' if both else ''}. The loop is zae/certify/loop.py")
        return
    yield Finding(
        PASSED,
        f"{len(plain['updates'])} updates of the loop by hand, in plain PyTorch, leave bitwise the same weights"
        f"{f'; {both}' if both else ''}",
    )


def observers(found: Certificate) -> Iterator[Finding]:
    """Add-ons that observe and save change nothing."""
    names = found.named(*_OBSERVERS)
    if not names:
        yield Finding(NOT_TRIED, "the trainer has no logger and no other add-on of the layers observe and state")
        return
    bare = found.train(leave_out=("parallel", *_OBSERVERS))
    text = first_difference(bare, found.base, found.unsteady, may_add=True)
    if not text:
        yield Finding(PASSED, f"without {', '.join(names)} the run is bitwise the same")
        return
    guilty = []
    for name in names if len(names) > 1 else []:
        try:
            other = found.train(leave_out=("parallel", *(each for each in names if each != name)))
        except JobFailed:  # It needs one of the others.
            continue
        guilty += [name] if first_difference(bare, other, found.unsteady, may_add=True) else []
    yield Finding(
        FAILED,
        f"{', '.join(guilty or names)} changes training: {text}. Draw from "
        "self.generator(name), change neither gradients nor weights, or give it another layer",
    )


def resume(found: Certificate) -> Iterator[Finding]:
    """A run that is killed at random instants, and resumed, comes to the same end."""
    began, killed, answer = _killed_run(found)
    if not _is_resumed(began):  # It was faster than the first one, and ended before the kill.
        began, killed, answer = _killed_run(found, waits=False)
    yield _judge_resume(found, began, killed, answer)


def _killed_run(found: Certificate, waits: bool = True) -> tuple[list[str], int, dict[str, Any]]:
    """Kill and resume a run; return the steps that it was resumed from, the number of kills, and its end.

    Where ``waits`` is false, a process is killed as soon as it has saved, or begun.
    """
    shop, draw, count = found.shop, random.Random(found.seed), len(found.base["steps"])
    pause = min(_WAIT, max(0.0, _PACE - found.base["seconds"]) / max(count, 1))
    options = {"save_every": max(1, count // _SAVES)}
    job = shop.new(add=("StateManagerAddon",), options=options, steps=found.steps, pause=pause)
    length = found.base["seconds"] + pause * count
    checkpoints = Path(job.folder, "out")
    killed = 0
    process = None
    for number in range(found.kills):
        begun, saved = len(_lines(job.folder)), _saved(checkpoints)
        process = shop.start(job)
        try:
            is_running = shop.wait_until(process, lambda begun=begun: len(_lines(job.folder)) > begun)  # type: ignore[misc]
            if is_running and number % 2 == 0:  # So that the next attempt resumes from a checkpoint of this one.
                is_running = shop.wait_until(process, lambda saved=saved: bool(_saved(checkpoints) - saved))  # type: ignore[misc]
            if is_running and waits:
                left = length * (1 - int(_lines(job.folder)[-1]) / count)
                process.join(min(draw.random() * left * 2 / (found.kills - number + 1), max(shop.left, 0)))
            is_killed = process.is_alive()
        finally:
            kill(process)
        killed += is_killed
        if not is_killed:  # It has come to the end, or failed.
            break
    else:
        process = shop.start(same_but(job, pause=0.0))
    answer = shop.answer(job, process)
    return _lines(job.folder)[1:], killed, answer


def _is_resumed(began: list[str]) -> bool:
    """Return whether a process has begun at a step of a checkpoint."""
    return any(map(int, began))


def _judge_resume(found: Certificate, began: list[str], killed: int, answer: dict[str, Any]) -> Finding:
    """Return what was found of a run that was killed so often, and resumed from these steps."""
    where = ", ".join(began) or "none"
    if not _is_resumed(began):
        return Finding(
            NOT_TRIED, f"{killed} kill(s), and no resume from a checkpoint: the run ended before; give --steps"
        )
    told = f"{killed} kill{'s' * (killed > 1)} by SIGKILL, resumed from steps {where}"
    if text := first_difference(found.base, answer, found.unsteady):
        return Finding(
            FAILED,
            f"{told}: {text}. State that is not saved is the first cause: "
            "state_attributes of an add-on, state_dict of a sampler or a dataset",
        )
    added = "" if found.named("state") else " (StateManagerAddon added)"
    return Finding(PASSED, f"{told}, the end is bitwise that of the run that was not killed{added}")


def _lines(folder: str) -> list[str]:
    path = Path(folder, "begun")
    return path.read_text().splitlines() if path.exists() else []


def _saved(folder: Path) -> set[str]:
    return {str(each) for each in folder.glob("*/step-*")}


def ranks(found: Certificate) -> Iterator[Finding]:
    """Two ranks leave the weights of one process."""
    if found.base["varies"]:
        yield Finding(NOT_TRIED, "the dataset draws random numbers, and each rank draws its own for its samples")
        return
    if not found.base["can_merge"]:
        yield Finding(
            NOT_TRIED, "one process needs batches of twice the size, and the loader is no DataLoader with a batch_size"
        )
        return
    without = (*_OBSERVERS, "precision")
    engine = () if found.base["engine"] else ("MultiGPUAddon",)
    try:
        two = found.shop.run_ranks(2, steps=found.steps, leave_out=without, add=engine, is_exact=True)
    except JobFailed as failure:
        yield Finding(FAILED, f"two ranks: {failure}")
        return
    one = found.train(leave_out=("parallel", *without), is_exact=True, batches=two["dp_world_size"])
    if one["random"]:
        yield Finding(NOT_TRIED, "steps draw random numbers, and each rank draws its own for its samples")
        return
    share, name = largest(one["parts"]["model"], two["parts"]["model"])
    counts = [each["parts"]["progress"]["step"] for each in (one, two)]
    changed = "".join(f", {each}" for each in one.get("changed", []))
    told = (
        f"2 ranks on the CPU ({'its own engine' if found.base['engine'] else 'MultiGPUAddon added'}; float64{changed})"
    )
    if counts[0] != counts[1]:
        yield Finding(FAILED, f"{told}: {counts[1]} steps, and one process makes {counts[0]}")
    elif share > BOUND:
        yield Finding(
            FAILED,
            f"{told}: {name} differs by {share:.2g} of its largest entry, more than {BOUND:g}. A "
            "loss that is no mean over the batch needs num_targets; an add-on may act on one rank",
        )
    else:
        yield Finding(
            PASSED,
            f"{told}: {counts[1]} steps, the weights are within {share:.2g} of those of one process (bound {BOUND:g})",
        )


PROMISES: dict[str, Callable[[Certificate], Iterator[Finding]]] = {
    "repeatable": repeatable,
    "your loop": loop,
    "observers are neutral": observers,
    "ranks equal one process": ranks,
    "resume is exact": resume,
}
"""Each promise, in the order in which they are tried: the cheap ones first."""


def findings(found: Certificate, name: str) -> Iterator[Finding]:
    """Try a promise; a run that fails, or for which there is no time, is a finding too."""
    try:
        for status, detail in PROMISES[name](found):
            yield Finding(status, re.sub(rf"{re.escape(str(found.shop.folder))}(/\d+/(out|work))?/", "", detail))
    except JobFailed as failure:
        yield Finding(FAILED if name == "resume is exact" else NOT_TRIED, f"a run for it fails: {failure}")
    except OutOfTime:
        yield Finding(NOT_TRIED, "the time was over; give more --minutes, or fewer --steps")
