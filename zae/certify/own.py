"""What zae promises of its own trainers beyond a resume, tried with the trainer and the run of the script itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zae.certify.child import ANSWER, Job
from zae.certify.compare import first_difference, largest, update_difference
from zae.certify.judge import FAILED, NOT_TRIED, PASSED, last_words
from zae.certify.runs import Script
from zae.errors import ZaeError

__all__ = ["BOUND", "PROMISES", "Own", "find"]

BOUND = 1e-9
"""The largest difference of the weights of several ranks from those of one process, in float64, as a share of each
tensor's largest entry."""
_OBSERVERS = ("observe", "state")

Finding = tuple[str, str]
"""A verdict, and what was found."""


class JobFailed(ZaeError):
    """A job raised; the message is its error."""


class Own:
    """The jobs that the promises share: short runs of the script's trainer, each in a fresh copy of the folder."""

    def __init__(self, script: Script) -> None:
        self.script, self._base = script, dict[str, Any]()

    @property
    def base(self) -> dict[str, Any]:
        """The run that others are compared with."""
        if not self._base:
            self._base = self.do()
        return self._base

    def do(self, world: int = 1, **changes: Any) -> dict[str, Any]:
        """Do a job, and return its answer."""
        job = Job(**changes)
        attempt, folder = self.script.do(vars(job), world)
        path = folder / ANSWER
        if not path.exists():
            raise JobFailed(f"the script ends without a run of its trainer: {last_words(attempt)}")
        answer: dict[str, Any] = torch.load(path, weights_only=True)
        if "failed" in answer:
            raise JobFailed(answer["failed"])
        return answer

    def named(self, *layers: str) -> list[str]:
        """Return the names of the script's add-ons in some layers."""
        return [name for name, layer in self.base["add_ons"].items() if layer in layers]


def loop(own: Own) -> Finding:
    """Compare the weights with those of the loop in plain PyTorch."""
    given: dict[str, Any] = {"kind": "plain", "is_shortened": False, "precision": own.base["precision"]}
    plain = own.do(**given)
    without = tuple(plain.get("without", ()))
    if without:  # The rest of the trainer is compared.
        plain = own.do(**given, leave_out=("parallel", *without))
    if "uncovered" in plain:
        return NOT_TRIED, f"the loop by hand does not do: {'; '.join(plain['uncovered'])}"
    ours = own.base
    if without or ours["is_shortened"]:
        ours = own.do(is_shortened=False, leave_out=("parallel", *without))
    both = f"both without {', '.join(without)}, which the loop by hand does not have" if without else ""
    text = update_difference(ours, plain)
    if text and own.base["has_own_stream"] and own.base["validates"]:
        return NOT_TRIED, (
            "the dataset draws from a generator of its own, also for a validation, which the loop by hand does not "
            "have; give run() no valid_loader"
        )
    if text:
        return FAILED, f"{text}{f' ({both})' if both else ''}. The loop is zae/certify/loop.py"
    return PASSED, (
        f"{len(plain['updates'])} updates of the loop by hand, in plain PyTorch, leave bitwise the same weights"
        f"{f'; {both}' if both else ''}"
    )


def observers(own: Own) -> Finding:
    """Find out whether add-ons that observe and save change anything."""
    names = own.named(*_OBSERVERS)
    if not names:
        return NOT_TRIED, "the trainer has no logger and no other add-on of the layers observe and state"
    bare = own.do(leave_out=("parallel", *_OBSERVERS))
    text = first_difference(bare, own.base, may_add=True)
    if not text:
        return PASSED, f"without {', '.join(names)} the run is bitwise the same"
    guilty = []
    for name in names if len(names) > 1 else []:
        try:
            other = own.do(leave_out=("parallel", *(each for each in names if each != name)))
        except JobFailed:  # It needs one of the others.
            continue
        guilty += [name] if first_difference(bare, other, may_add=True) else []
    return FAILED, (
        f"{', '.join(guilty or names)} changes training: {text}. Draw from "
        "self.generator(name), change neither gradients nor weights, or give it another layer"
    )


def ranks(own: Own) -> Finding:
    """Compare the weights that two ranks leave with those of one process."""
    if own.base["varies"]:
        return NOT_TRIED, "the dataset draws random numbers, and each rank draws its own for its samples"
    if not own.base["can_merge"]:
        return NOT_TRIED, (
            "one process needs batches of twice the size, and the loader is no DataLoader with a batch_size"
        )
    without = (*_OBSERVERS, "precision")
    engine = () if own.base["engine"] else ("MultiGPUAddon",)
    try:
        two = own.do(2, leave_out=without, add=engine, is_exact=True)
    except JobFailed as failure:
        return FAILED, f"two ranks: {failure}"
    one = own.do(leave_out=("parallel", *without), is_exact=True, batches=two["dp_world_size"])
    if one["random"]:
        return NOT_TRIED, "steps draw random numbers, and each rank draws its own for its samples"
    share, name = largest(one["parts"]["model"], two["parts"]["model"])
    counts = [each["parts"]["progress"]["step"] for each in (one, two)]
    changed = "".join(f", {each}" for each in one.get("changed", []))
    whose = "its own engine" if own.base["engine"] else "MultiGPUAddon added"
    told = f"2 ranks on the CPU ({whose}; float64{changed})"
    if counts[0] != counts[1]:
        return FAILED, f"{told}: {counts[1]} steps, and one process makes {counts[0]}"
    if share > BOUND:
        return FAILED, (
            f"{told}: {name} differs by {share:.2g} of its largest entry, more than {BOUND:g}. A "
            "loss that is no mean over the batch needs num_targets; an add-on may act on one rank"
        )
    return PASSED, (
        f"{told}: {counts[1]} steps, the weights are within {share:.2g} of those of one process (bound {BOUND:g})"
    )


PROMISES: dict[str, Callable[[Own], Finding]] = {
    "your loop": loop,
    "observers are neutral": observers,
    "ranks equal one process": ranks,
}
"""Each promise, in the order in which they are tried."""


def find(own: Own, name: str) -> Finding:
    """Try a promise; a job that fails is a finding too."""
    try:
        return PROMISES[name](own)
    except JobFailed as failure:
        return NOT_TRIED, f"a run for it fails: {failure}"
