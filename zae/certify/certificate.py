"""Certify a training script: run it, kill it, compare, and show what was found as text and as a page."""

from __future__ import annotations

import random
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from zae.certify.judge import (
    FAILED,
    NOT_TRIED,
    PASSED,
    Judgement,
    compare_whole,
    failure,
    forget_unseeded,
    judge_kill,
    last_words,
)
from zae.certify.page import write
from zae.certify.runs import Attempt, OutOfTime, Run, Script
from zae.display.answer import Answer
from zae.errors import ConfigError

__all__ = ["PROMISES", "certify"]

_UNSTEADY = "two runs without a kill are not the same: nothing can be compared"
_KINDS = ("step", "save", "term", "worker", "step", "save")
"""The kind of each kill, in turn; the third and fourth come again after the others."""
_PROMISE_OF = {
    "step": "resume is exact",
    "save": "saves survive a kill",
    "term": "signal to end",
    "worker": "error in a worker",
}
PROMISES = ("repeatable", *_PROMISE_OF.values())
"""What is tried with any script."""


@dataclass
class Promise:
    """What was found of one promise."""

    name: str
    verdict: str
    message: str = ""
    cause: str | None = None
    step: int | None = None
    causes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return dict(vars(self))


@dataclass
class Options:
    """What the command was asked for."""

    kills: int = 4
    minutes: float = 60.0
    seed: int = 0
    only: Sequence[str] = ()
    signal: str = "SIGTERM"


def certify(
    command: Sequence[str],
    *,
    kills: int = 4,
    minutes: float = 60.0,
    resume_with: Sequence[str] = (),
    checkpoints: str | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    signal: str = "SIGTERM",
    out: str | None = None,
) -> Answer:
    """Run a script several times, and judge; the status is 1 if something fails, 2 if it could not be tried."""
    if kills < 0 or minutes <= 0:
        raise ConfigError(f"--kills {kills} --minutes {minutes:g}: give no negative kills, and some minutes")
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="zae-certify-"))
    try:
        script = Script(
            command, folder, resume_with=resume_with, checkpoints=checkpoints, deadline=began + 60 * minutes
        )
        certificate = Certificate(script, Options(kills, minutes, seed, only, signal))
        certificate.choose()
        certificate.make()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _answer(certificate, command, out, time.monotonic() - began)


class Certificate:
    """The runs of a script, and what was found of each promise."""

    def __init__(self, script: Script, options: Options) -> None:
        self.script, self.options = script, options
        self.runs: list[tuple[Run, Judgement | None]] = []
        self.found: dict[str, Promise] = {}

    def choose(self) -> None:
        """Refuse names of promises that there are not."""
        if self.options.signal not in Signals.__members__:
            raise ConfigError(f"--signal {self.options.signal!r} is no signal; write SIGTERM or SIGUSR1")
        for each in self.options.only:
            if not any(each in name for name in PROMISES):
                raise ConfigError(f"--only {each!r} is part of no promise; there are {', '.join(PROMISES)}")

    def is_chosen(self, name: str) -> bool:
        """Whether a promise is to be tried."""
        return not self.options.only or any(each in name for each in self.options.only)

    @property
    def reference(self) -> Run:
        """The run that others are compared with."""
        return self.runs[0][0]

    @property
    def base(self) -> Attempt:
        """Its only attempt."""
        return self.reference.attempts[0]

    def make(self) -> None:
        """Run the script as it is, twice; then kill it."""
        self.runs.append((self.script.run("reference"), None))
        _check(self.base)
        self.attempt("repeatable", self._repeat)
        if self.found["repeatable"].verdict == PASSED:
            self._kill_all()
        else:
            for name in _PROMISE_OF.values():
                self._note(Promise(name, NOT_TRIED, _UNSTEADY))

    def attempt(self, name: str, function: Callable[[], None]) -> None:
        """Try a promise; where the time is over, say so."""
        try:
            function()
        except OutOfTime:
            self._note(Promise(name, NOT_TRIED, "the time was over; give more --minutes, or fewer --kills"))

    def _note(self, promise: Promise) -> None:
        if self.is_chosen(promise.name) or promise.name == "repeatable":
            self.found[promise.name] = promise

    def _repeat(self) -> None:
        """Run the script again: what differs between equal runs cannot be asked of a resume."""
        other = self.script.run("second")
        if other.attempts[0].status != 0 or not other.attempts[0].rows():
            raise ConfigError(
                f"the script runs once, and not a second time in a fresh copy of its folder: "
                f"{last_words(other.attempts[0])}. If it found what the first run left, name it: --checkpoints FOLDER"
            )
        judgement = compare_whole(self.reference, other)
        self.runs.append((other, judgement))
        self._note(_promise("repeatable", judgement))
        if judgement.verdict == PASSED:
            forget_unseeded(self.reference, other)

    # --- kills

    def _kill_all(self) -> None:
        """Kill the script in the chosen ways, and judge each promise by its runs."""
        kinds = [each for each in _KINDS if self.is_chosen(_PROMISE_OF[each])] or []
        plans = Kills(self.base, self.options.seed)
        judged: dict[str, list[Judgement]] = {}
        for number in range(self.options.kills if kinds else 0):
            kind = kinds[number % len(kinds)]
            name, kill = _PROMISE_OF[kind], plans.next(kind)
            if kind == "term" and isinstance(kill, dict):
                kill["signal"] = self.options.signal
            if isinstance(kill, str):
                judged.setdefault(name, []).append(Judgement(NOT_TRIED, message=kill))
                continue
            try:
                run = self.script.run(f"kill {number + 1}", kill)
            except OutOfTime:
                judged.setdefault(name, []).append(
                    Judgement(NOT_TRIED, message="the time was over; give more --minutes")
                )
                break
            judgement = judge_kill(self.reference, run)
            begins_anew = judgement.verdict != FAILED and judgement.resumed == 0
            if kind == "step" and begins_anew and not plans.rows:
                judgement = _judge_without_saves(judgement)
            if kind == "term":
                judgement = _judge_term(judgement, run)
            self.runs.append((run, judgement))
            judged.setdefault(name, []).append(judgement)
        for name in _PROMISE_OF.values():
            if name in judged:
                self._note(_summary(name, judged[name]))
            else:
                self._note(Promise(name, NOT_TRIED, "give more --kills"))


class Kills:
    """Choose where to kill, from what the reference run has done."""

    def __init__(self, base: Attempt, seed: int) -> None:
        self.base, self.draw = base, random.Random(seed)
        self.steps = len(base.rows())
        self.saves = _saves(base)
        self.rows = [save[0]["row"] for save in self.saves if save[0]["row"] < self.steps]
        self.numbers: dict[str, int] = {}

    def next(self, kind: str) -> dict[str, Any] | str:
        """Return the next kill of a kind, or why there is none."""
        number = self.numbers[kind] = self.numbers.get(kind, -1) + 1
        if self.steps < 2:
            return "the run has one step; give it more"
        return self._at_save(number) if kind == "save" else self._at_step(kind, number)

    def _at_step(self, kind: str, number: int) -> dict[str, Any] | str:
        """Kill after a step after the first checkpoint, away from a save if there is room."""
        rows = self.rows
        after = range(min(rows) + 1 if rows else 1, self.steps)
        if not after:
            return "no checkpoint is written before the last step; let the script save earlier"
        if not rows and number == 0 and kind != "step":
            after = range(max(1, self.steps // 2), self.steps)
        away = [each for each in after if each not in rows and each - 1 not in rows] or list(after)
        part = len(away) / 3  # The middle first, then the end and the beginning.
        chosen = (1, 2, 0)[number % 3]
        low, high = int(part * chosen), max(int(part * (chosen + 1)), int(part * chosen) + 1)
        return {"kind": kind, "at": self.draw.choice(away[low:high] or away), "rank": 0}

    def _at_save(self, number: int) -> dict[str, Any] | str:
        """Kill in a save, in the middle of writing the largest file first; then before any change of a file."""
        saves = [each for each in self.saves if each[-1]["row"] < self.steps] or self.saves
        if not saves:
            return "no file of the size of a checkpoint was seen to be written"
        save = saves[1:][self.draw.randrange(len(saves) - 1)] if len(saves) > 1 else saves[0]
        held = [each for each in save if each["size"] and _holds_a_model(self.base, each)]
        writes = [each for each in held if each["op"] in ("open", "torch.save")]
        is_torn = number % 2 == 0 and bool(writes)
        event = max(writes, key=lambda each: each["size"]) if is_torn else self.draw.choice(save)
        return {
            "kind": "save",
            "at": event["i"],
            "torn": is_torn,
            "rank": 0,
            "op": event["op"],
            "name": Path(event["path"]).name,
        }


def _saves(base: Attempt) -> list[list[dict[str, Any]]]:
    """Return the changes of files of each save: those between two steps, if one of them is a checkpoint."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for each in base.all("file"):
        groups.setdefault(each["row"], []).append(each)
    return [group for group in groups.values() if any(_holds_a_model(base, each) for each in group)]


def _holds_a_model(base: Attempt, change: Mapping[str, Any]) -> bool:
    """Whether a change of a file is that of a checkpoint."""
    if change["op"] == "torch.save":
        return True
    return change["op"] in ("open", "rename") and base.is_checkpoint(change["path"], change["size"])


def _judge_without_saves(judgement: Judgement) -> Judgement:
    """Judge a run that began anew, of a script that saves nothing before its last step."""
    return failure(
        "does not resume",
        f"{judgement.message}, but nothing is saved before the last step: a kill loses all work",
        step=1,
        resumed=0,
    )


def _judge_term(judgement: Judgement, run: Run) -> Judgement:
    """Say what a signal to end costs: a script that handles it and saves nothing fails."""
    stop = run.attempts[0].first("kill", 0)
    done = len(run.attempts[0].rows())
    if judgement.verdict != PASSED or judgement.resumed is None or judgement.resumed >= done or stop is None:
        return judgement
    lost = f"{done - judgement.resumed} steps are lost"
    signal = run.kill["signal"]
    if stop["handled"]:
        return failure(
            f"not saved at {signal}",
            f"{judgement.message}, but {lost}: the script handles {signal} and saves nothing",
            step=done,
            resumed=judgement.resumed,
        )
    return Judgement(
        NOT_TRIED,
        cause=f"not saved at {signal}",
        causes=[f"not saved at {signal}"],
        step=done,
        message=f"{judgement.message}; {lost}, as by SIGKILL: the script does not handle {signal}",
        resumed=judgement.resumed,
    )


def _summary(name: str, judged: Sequence[Judgement]) -> Promise:
    """Return what several kills say of a promise: the first that fails, else the first that was tried."""
    failed = [each for each in judged if each.verdict == FAILED]
    passed = [each for each in judged if each.verdict == PASSED]
    chosen = (failed or passed or judged)[0]
    found = _promise(name, chosen)
    tried = len(failed) + len(passed)
    if tried > 1:
        said = f"{len(failed)} of {tried} kills fail" if failed else f"{tried} kills"
        found.message = f"{said}: {found.message}"
        if failed:
            found.causes = list(dict.fromkeys(cause for each in failed for cause in each.causes))
    return found


def _promise(name: str, judged: Judgement) -> Promise:
    return Promise(name, judged.verdict, judged.message, judged.cause, judged.step, judged.causes)


def _check(base: Attempt) -> None:
    """Refuse a reference run that nothing can be compared with."""
    if base.status != 0:
        raise ConfigError(f"the script fails without any kill: {last_words(base)}")
    if not base.rows():
        raise ConfigError(
            "no step of an optimizer of torch.optim was seen: the script takes none (it may have found the checkpoints "
            "of a finished run: name their folder, --checkpoints FOLDER), its optimizer is not derived from "
            "torch.optim.Optimizer, or Python was started with -I, -E or -S"
        )


# --- the answer


def _answer(found: Certificate, command: Sequence[str], out: str | None, seconds: float) -> Answer:
    """Return the certificate, and write its page."""
    promises = list(found.found.values())
    start = found.base.first("start") or {}
    failed = [each for each in promises if each.verdict == FAILED]
    tried = [each for each in promises if each.verdict in (PASSED, FAILED)]
    status = 1 if failed else 0 if len(tried) > 1 or (tried and len(promises) == 1) else 2
    rows = [_row_of(run, judgement) for run, judgement in found.runs]
    data = {
        "command": list(command),
        "versions": start["versions"],
        "parameters": found.base.trained("parameters"),
        "device": start["device"],
        "steps": len(found.base.rows()),
        "ranks": len(found.base.events),
        "seconds": round(seconds, 1),
        "runs": rows,
        "promises": [each.as_dict() for each in promises],
    }
    end = f"{len(failed)} of {len(tried)} fail" if failed else "all that was tried holds" if not status else "not tried"
    text = _text(data, promises, end)
    if out is not None:
        write(Path(out), data, [run for run, _ in found.runs], text, end)
    return Answer(data, text, status)


def _row_of(run: Run, judgement: Judgement | None) -> dict[str, Any]:
    """Return a run as a row of the page."""
    steps = [len(each.rows()) for each in run.attempts]
    row: dict[str, Any] = {"name": run.name, "kill": run.kill or None, "steps": steps}
    row["seconds"] = round(sum(each.seconds for each in run.attempts), 2)
    if judgement is not None:
        row |= {"resumed": judgement.resumed, "parted": judgement.step if judgement.verdict == FAILED else None}
        row |= {"verdict": judgement.verdict, "cause": judgement.cause, "message": judgement.message}
    return row


def _text(data: dict[str, Any], promises: Sequence[Promise], end: str) -> str:
    """Return the certificate as text."""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    ranks = f", {data['ranks']} ranks" if data["ranks"] > 1 else ""
    lines = [
        f"command   {' '.join(data['command'])}",
        f"model     {data['parameters']:,} parameters on {data['device']}{ranks}, {data['steps']} optimizer steps",
        f"versions  {versions}",
        "",
    ]
    width = max(len(each.name) for each in promises)
    for each in promises:
        cause = f"{each.cause}: " if each.cause and each.verdict == FAILED else ""
        head = f"{each.verdict.upper() if each.verdict == FAILED else each.verdict:<9}  {each.name:<{width}}  "
        parts = textwrap.wrap(f"{cause}{each.message}", 118 - len(head)) or [""]
        lines += [head + parts[0], *(" " * len(head) + part for part in parts[1:])]
    lines += ["", f"{'run':<12}{'steps':>12}{'resumed':>9}{'parted':>8}  cause"]
    for row in data["runs"]:
        steps = " + ".join(map(str, row["steps"]))
        shown = ["-" if row.get(key) is None else str(row[key]) for key in ("resumed", "parted")]
        lines.append(f"{row['name']:<12}{steps:>12}{shown[0]:>9}{shown[1]:>8}  {row.get('cause') or ''}".rstrip())
    return "\n".join([*lines, "", f"{end}; {len(data['runs'])} runs in {data['seconds']:.0f} s"])
