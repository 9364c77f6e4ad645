"""Run a script once, start it again in what a kill would have left at each instant, and judge."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import Refused, Stopped
from .judge import FAILED, NOT_JUDGED, PASSED, Judgement, Resume, fail, first_difference, judge
from .runs import Run, Runner, end_processes
from .saves import (
    Instant,
    Save,
    choose_instants,
    find_saves,
    is_large,
    is_log,
    is_named_as_checkpoint,
    last_saved_row,
)
from .workspace import Tree, Workspace

__all__ = ["Options", "Result", "check"]

_FEW_STEPS = 3  # Within so many, most failures show.
_LEAST_BYTES_COMPARED = 200
_PATIENCE_S, _PATIENCE_FACTOR = 120, 5  # A run that takes so much longer than the reference is ended.
_EPOCH_FACTOR = 5  # An epoch that begins within so many horizons is waited for.


@dataclass
class Options:
    """What a check is asked for."""

    resume_with: str = ""
    horizon: int = 20
    steps: int | None = None
    to_the_end: bool = False
    all_instants: bool = False
    sigterm: bool = False
    minutes: float = 60.0
    gigabytes: int = 8
    without: Sequence[str] = ()
    allow: Sequence[str] = ()


@dataclass
class Result:
    """What was found of a script."""

    command: list[str]
    steps: int = 0
    ranks: int = 1
    saves: list[Save] = field(default_factory=list)
    instants: int = 0
    """How many there are to try."""
    tried: list[tuple[Instant, Judgement]] = field(default_factory=list)
    whole: Judgement | None = None
    """What was found without an instant: nothing is saved, or a signal to end is not handled."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    starts: int = 0
    forks: int = 0

    @property
    def judgements(self) -> list[Judgement]:
        """All judgements."""
        return [*([self.whole] if self.whole else []), *(judgement for _, judgement in self.tried)]

    def causes(self, kind: str) -> list[str]:
        """Return the causes at the instants of a kind, "step" or "save".

        What is a first cause at one instant and follows from another at a second one is not named; nor is, within a
        save, what is known from the instants after saves.
        """
        failed = [(instant.kind, judgement) for instant, judgement in self.tried if judgement.verdict == FAILED]
        known = {
            cause for other, judgement in failed if kind == "save" and other == "step" for cause in judgement.causes
        }
        own = [judgement for other, judgement in failed if other == kind]
        known |= {cause for judgement in own for cause in judgement.causes[1:] if cause != own[0].cause}
        if any(judgement.cause in ("repeated work", "skipped work") for judgement in own):
            known.add("samples")  # So it shows in a run that is stopped before its end.
        return list(dict.fromkeys(judgement.cause for judgement in own if judgement.cause not in known))

    @property
    def status(self) -> int:
        """0 if all that was tried is the same, 1 if something fails, 2 if nothing could be judged."""
        verdicts = {judgement.verdict for judgement in self.judgements}
        return 1 if FAILED in verdicts else 0 if PASSED in verdicts else 2

    def is_the_same(self) -> bool:
        """Return whether a resumed run is the same at each instant; raise AssertionError with the report if not."""
        from .report import as_text

        if self.status != 0:
            raise AssertionError(as_text(self))
        return True


def check(command: Sequence[str], options: Options | None = None) -> Result:
    """Return what becomes of a script that is killed and started again.

    Parameters
    ----------
    command : sequence of str
        The words that start the script, in the working folder.
    options : Options, optional
        How to resume, what to compare, and how long it may take.

    Raises
    ------
    Refused
        If it cannot be checked; the message says what to do.
    """
    if not command:
        raise Refused("there is no command; write: resumecheck -- python train.py")
    if not sys.platform.startswith("linux"):
        raise Refused("resumecheck stops processes and lists them as Linux does; use a container, or WSL on Windows")
    with _home() as home, _signals():
        return _Check(list(command), options or Options(), home).run()


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """Give a folder, which is removed with all processes in it: by another process, should this one be killed."""
    home = Path(os.path.realpath(tempfile.mkdtemp(prefix="resumecheck-")))
    source = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    reaper = subprocess.Popen(
        [sys.executable, "-m", "resumecheck.reaper", str(home)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
        start_new_session=True,
    )
    try:
        yield home
    finally:
        end_processes(str(home))
        shutil.rmtree(home, ignore_errors=True)
        assert reaper.stdin is not None
        reaper.stdin.close()
        reaper.wait()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and SIGINT end the check, with what was found until then."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {}
    with contextlib.suppress(ValueError):  # Not in the main thread.
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Check:
    """The runs of a script, and what was found."""

    def __init__(self, command: list[str], options: Options, home: Path) -> None:
        self.options, self.began = options, time.monotonic()
        self.cpu_began = _cpu_seconds()
        self.result = Result(command)
        origin = Path.cwd().resolve()
        self.workspace = Workspace(origin, home, options.without, options.gigabytes << 30)
        allow = [os.path.realpath(folder) for folder in options.allow]
        deadline = self.began + 60 * options.minutes
        self.runner = Runner(command, home, self.workspace, allow=allow, deadline=deadline)

    def run(self) -> Result:
        """Run the reference, then each instant, then what helps to judge."""
        try:
            self._take_reference()
            if self.result.saves:
                self._try_instants()
            else:
                self._judge_without_saves()
        except Stopped as stop:
            if not self.result.steps:
                raise Refused(f"stopped before the first run of the script ended ({stop})") from None
            self.result.notes.append(
                f"stopped ({stop}): {len(self.result.tried)} of {self.result.instants} instants were tried"
            )
        finally:
            self.runner.close()
        result = self.result
        result.seconds, result.cpu_seconds = time.monotonic() - self.began, _cpu_seconds() - self.cpu_began
        result.starts, result.forks = self.runner.starts, self.runner.forks
        return result

    # --- the reference

    def _take_reference(self) -> None:
        """Run the script to its end, with a snapshot at each change of a file."""
        _say(f"the reference: {shlex.join(self.result.command)}")
        self._run_reference()
        if not self.reference.rows and self.reference.saw_backward:
            _say("no step of torch.optim is seen: once more, with a row for each backward")
            self.runner.close()
            self.runner.by = "backward"
            self._run_reference()
        if not self.reference.rows:
            raise Refused(
                "no step of an optimizer of torch.optim and no backward was seen. Does the folder hold the checkpoint "
                "of a finished run? Leave it out: --without 'out/*'. Was Python started with -I, -E or -S?"
            )
        self.end = self.workspace.snapshot()
        self.runner.patience_s = _PATIENCE_S + _PATIENCE_FACTOR * self.reference.seconds
        result = self.result
        result.steps, result.ranks = self.reference.count(), len(self.reference.rows)
        result.saves = [save for save in find_saves(self.reference, self.end) if save.events[0]["row"] < result.steps]
        self.runner.same = [name for name, entry in self.workspace.base.items() if self.end.get(name) == entry]
        if self.reference.is_limited:
            result.notes.append(f"only the first {result.steps} steps were tried")
        snapshots = sum("tree" in event for event in self.reference.events)
        _say(
            f"  {result.steps} steps, {len(result.saves)} saves, {snapshots} snapshots "
            f"({self.workspace.stored_bytes >> 20} MB), {self.reference.seconds:.1f} s, {result.ranks} rank(s)"
        )

    def _run_reference(self) -> None:
        start = functools.partial(self.runner.start, self.workspace.base, snapshots=True, limit=self.options.steps)
        self.reference = start()
        if self.runner.forks and (self.reference.has_failed or self.reference.is_stuck):
            _say("a fork of the script does not go on: once more, with a start of its own for each run")
            self.runner.close(can_wait=False)
            self.reference = start()
        if self.reference.has_failed:
            raise Refused(f"the script fails without any kill: {_last_words(self.reference)}")

    def _judge_without_saves(self) -> None:
        """Say what is there instead of a save before the last step."""
        new = [name for name in self.end if self.workspace.is_new(self.end, name) and self.end[name].kind == "file"]
        files = [name for name in new if not is_log(name)]
        large = [name for name in files if is_large(self.end[name], self.reference)]
        at_end = find_saves(self.reference, self.end)
        if self.reference.is_limited:
            message = (
                f"nothing is saved in the first {self.result.steps} steps, which alone were run: give more --steps"
            )
            self.result.whole = Judgement(NOT_JUDGED, message, ["not seen"])
        elif at_end:
            line = at_end[-1].events[0].get("line", "")
            message = f"it saves only after the last step ({line}): a kill loses all work"
            self.result.whole = fail("does not resume", message)
        elif large:
            self.result.whole = Judgement(
                NOT_JUDGED,
                f"no save was seen before the last step, and there are new files at the end ({', '.join(large[:4])}): "
                "what has written them is not seen from Python",
                ["not seen"],
            )
        else:
            written = ", ".join(files[:4]) or "no new file"
            self.result.whole = fail("saves nothing", f"no file of the size of the model is written ({written})")

    # --- instants

    def _try_instants(self) -> None:
        chosen = choose_instants(self.result.saves, self.reference, self.options.all_instants)
        instants = [instant for instant in chosen if instant.done < self.result.steps or not self.reference.is_limited]
        self.result.instants = len(instants)
        confirmed: set[str] = set()
        for number, instant in enumerate(instants, 1):
            began = time.monotonic()
            judgement = self._try_instant(instant, confirmed)
            self.result.tried.append((instant, judgement))
            cause = f": {judgement.cause}" if judgement.cause else ""
            left = self.runner.deadline - time.monotonic()
            _say(
                f"  [{number}/{len(instants)}] {instant.text}: {judgement.verdict}{cause} "
                f"({time.monotonic() - began:.1f} s, {left / 60:.0f} min left)"
            )
        if self.options.sigterm:
            self._try_sigterm()
        self._repeat_reference()
        self._judge_unchanged_weights()

    def _try_instant(self, instant: Instant, confirmed: set[str]) -> Judgement:
        """Start the script in an instant; a failure of a late fork is confirmed by an early one, once for a cause."""
        more = self._resume_words(instant.tree)
        is_to_end = (instant.runs_to_end or self.options.to_the_end) and not self.reference.is_limited
        limit = None if is_to_end else self._limit(instant)
        if limit is not None and self.reference.is_limited:
            limit = min(limit, self.result.steps - instant.done)  # There is nothing to compare with what comes after.
        is_late = self.result.ranks == 1
        run = self.runner.start(instant.tree, limit=limit, more=more, is_late=is_late)
        judgement = self._judge(instant, run)
        if is_late and judgement.verdict == FAILED and judgement.cause not in confirmed:
            run = self.runner.start(instant.tree, limit=limit, more=more)
            judgement = self._judge(instant, run)
        confirmed.add(judgement.cause)
        return judgement

    def _limit(self, instant: Instant) -> int:
        """Return how many steps are compared: to the next epoch or the horizon; few, if failures show at once."""
        repeated = instant.done - instant.lowest
        failed = [judgement for _, judgement in self.result.tried if judgement.verdict == FAILED]
        distances = [judgement.step - (judgement.resumed or 0) for judgement in failed if judgement.step is not None]
        shows_at_once = max(distances, default=0) <= _FEW_STEPS
        if shows_at_once and (failed or instant.kind == "save"):
            return repeated + _FEW_STEPS
        rows = self.reference.rows[0]
        epoch = next((index for index, row in enumerate(rows) if row["new_epoch"] and index > instant.done), None)
        if epoch is not None and epoch - instant.done <= _EPOCH_FACTOR * self.options.horizon:
            return repeated + max(self.options.horizon, epoch + 2 - instant.done)
        return repeated + self.options.horizon

    def _resume_words(self, tree: Tree) -> list[str]:
        """Return the words that are added where there is something to resume from, with {newest} filled in."""
        new = {name for name in tree if self.workspace.is_new(tree, name)}
        if not self.options.resume_with or not new:
            return []
        text = self.options.resume_with
        for match in list(re.finditer(r"\{newest(?::([^}]*))?\}", text)):
            name = _newest(tree, new, match.group(1))
            if name is None:
                return []
            text = text.replace(match.group(0), shlex.quote(name))
        has_checkpoint = any(not is_log(entry) for entry in new if tree[entry].kind != "dir")
        return shlex.split(text) if has_checkpoint else []

    def _judge(self, instant: Instant, run: Run) -> Judgement:
        """Judge a run that was started again in an instant."""
        if run.is_stuck:
            message = f"started again it makes {run.count()} steps, and then nothing for a long time: it was ended"
            return fail("cannot start", message, run.count())
        if run.has_failed:
            return _judge_failure(instant, run)
        is_first_fault = instant.kind == "save" and not self.result.causes("step")
        saved = {save.row for save in self.result.saves} if is_first_fault else set[int]()
        resume = Resume(run.rows, instant.lowest, instant.done, not run.is_limited, instant.has_whole_save, saved)
        judgement = judge(self.reference.rows, resume, self.reference.names)
        if judgement.cause == "does not resume" and instant.kind == "save":
            judgement.causes = ["lost work"]
            judgement.message = f"it begins with the first step: the work of {instant.lowest} steps is lost"
        if not run.is_limited and judgement.verdict == PASSED:
            self._compare_files(judgement, run)
        return judgement

    def _compare_files(self, judgement: Judgement, run: Run) -> None:
        """Compare the files that both runs leave at their end: averaged, best and exported models."""
        models, others, missing = self._differing_files()
        last, expected = (last_saved_row(either.events, self.reference) for either in (run, self.reference))
        if models and last != expected:  # It saves by the clock, or counts the steps of its own process.
            judgement.notes.append(
                f"at the end {', '.join(models[:3])} has the weights after another step ({last}, and {expected} "
                "without a kill), and is not compared"
            )
        elif models:
            judgement.verdict, judgement.causes, judgement.files = FAILED, ["other state"], models
            judgement.message += f", but the tensors of {', '.join(models[:3])} at the end differ"
        for names, words in ((others, "differ"), (missing, "are missing")):
            if names:
                judgement.notes.append(f"at the end {', '.join(names[:4])} {words}")

    def _differing_files(self) -> tuple[list[str], list[str], list[str]]:
        """Return what differs at the end: files of tensors, other files, and those that are missing."""
        now = self.workspace.snapshot()
        new = [name for name in self.end if self.end[name].kind == "file" and self.workspace.is_new(self.end, name)]
        files = [name for name in new if os.path.getsize(self.end[name].source) > _LEAST_BYTES_COMPARED]
        missing = [name for name in files if name not in now and not is_log(name)]
        both = [name for name in files if name in now and now[name].kind == "file" and not is_log(name)]
        differing = [name for name in both if not _has_same_tensors(self.end[name].source, now[name].source)]
        models = [name for name in differing if _has_tensors(self.end[name].source)]
        return models, [name for name in differing if name not in models], missing

    # --- what helps to judge

    def _try_sigterm(self) -> None:
        """Ask the script to end, in the middle of the run, and look what that costs."""
        at = max(2, self.result.steps // 2)
        run = self.runner.start(self.workspace.base, limit=at, sigterm=True)
        done = run.count()
        if done >= self.result.steps:
            self.result.notes.append("at SIGTERM the script goes on to its end")
            return
        tree = self.workspace.snapshot()
        limit = min(self.options.horizon, self.result.steps - done)
        again = self.runner.start(tree, more=self._resume_words(tree), limit=limit)
        resume = Resume(again.rows, 0, done, not again.is_limited, False, set())
        judgement = judge(self.reference.rows, resume, self.reference.names)
        resumed = judgement.resumed or 0
        if resumed >= done:
            self.result.notes.append(f"at SIGTERM after step {done} it saves and ends: {judgement.message}")
        elif run.handles_sigterm:
            message = f"it handles the signal, ends after step {done}, and resumes after step {resumed}"
            self.result.whole = fail("not saved at SIGTERM", message, done, resumed)
        else:
            self.result.notes.append(f"at SIGTERM {done - resumed} steps are lost, as by SIGKILL: it is not handled")

    def _repeat_reference(self) -> None:
        """Where something differs, run the reference again: what differs between equal runs cannot be judged."""
        parted = [
            judgement
            for judgement in self.result.judgements
            if judgement.verdict == FAILED and judgement.cause != "lost work"
        ]
        steps = [judgement.step for judgement in parted if judgement.step]
        if not any(judgement.cause not in ("cannot load", "saves nothing", "does not resume") for judgement in parted):
            return
        _say("something differs: the reference again, to see whether it is repeatable")
        is_to_end = any(judgement.files for judgement in parted)
        limit = None if is_to_end else min(max(steps, default=self.result.steps) + 1, self.result.steps)
        again = self.runner.start(self.workspace.base, limit=limit)
        if is_to_end:
            self._judge_files_that_differ_anyway()
        for rank, rows in self.reference.rows.items():
            difference = first_difference(rows, again.rows.get(rank, []))
            if difference is None:
                continue
            step, cause = difference[0] + 1, difference[1]
            where = f" of rank {rank}" if self.result.ranks > 1 else ""
            self.result.notes.append(
                f"not repeatable: two runs without a kill differ from step {step}{where} on ({cause}). Set a seed, "
                "torch.use_deterministic_algorithms(True) and PYTHONHASHSEED"
            )
            for judgement in self.result.judgements:
                if (
                    judgement.verdict == FAILED
                    and (judgement.step is None or judgement.step >= step)
                    and judgement.cause != "cannot load"
                ):
                    judgement.verdict, judgement.causes = NOT_JUDGED, ["not repeatable"]

    def _judge_files_that_differ_anyway(self) -> None:
        """Take back what was found of files that differ between two runs without a kill: what is saved by the clock."""
        models = self._differing_files()[0]
        for _, judgement in self.result.tried:
            if judgement.files and set(judgement.files) <= set(models):
                judgement.verdict, judgement.causes = PASSED, []
                judgement.notes.append(f"{', '.join(judgement.files[:3])} differ between two runs without a kill, too")

    def _judge_unchanged_weights(self) -> None:
        """Where no step changes a weight, a resume cannot be told from another one."""
        if self.runner.by != "optimizer":
            return
        unchanged = sum(row["unchanged"] and not row["skipped"] for row in self.reference.rows[0])
        if unchanged <= self.result.steps // 2:
            return
        self.result.notes.append(f"{unchanged} of {self.result.steps} steps change no weight: nothing is learned")
        for _, judgement in self.result.tried:
            if judgement.verdict == PASSED:
                judgement.verdict, judgement.causes = NOT_JUDGED, ["weights that do not change"]


def _judge_failure(instant: Instant, run: Run) -> Judgement:
    """Judge a script that failed when it was started again."""
    if run.count():
        message = f"started again it fails after {run.count()} steps: {_last_words(run)}"
        return fail("fails after the resume", message, run.count())
    if "FileExistsError" in run.output:
        return fail("cannot start", f"started again it fails: {_last_words(run)}")
    whole = "" if instant.has_whole_save else "no whole checkpoint was there yet; "
    return fail("cannot load", f"{whole}started again it fails: {_last_words(run)}")


def _newest(tree: Tree, new: set[str], pattern: str | None) -> str | None:
    """Return the newest file or folder that fits a pattern, or the newest checkpoint."""

    def modified(name: str) -> float:
        inside = [entry for entry in new if entry == name or entry.startswith(name + "/")]
        sources = [tree[path].source for path in inside if tree[path].kind in ("file", "torn")]
        return max((os.path.getmtime(source) for source in sources), default=0.0)

    if pattern is None:
        names = [name for name in new if is_named_as_checkpoint(name) and tree[name].kind != "dir"]
    else:
        names = [name for name in new if fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/")]
    return max(
        names, key=lambda name: (modified(name), [int(digits) for digits in re.findall(r"\d+", name)]), default=None
    )


def _has_same_tensors(one: str, other: str) -> bool:
    """Compare two files by their bytes, or two with tensors by the data of these."""
    if Path(one).read_bytes() == Path(other).read_bytes():
        return True
    return _has_tensors(one) and _has_tensors(other) and _data_in(one) == _data_in(other)


def _has_tensors(path: str) -> bool:
    """Return whether a file is one of torch.save or safetensors: equal objects may have other bytes in a pickle."""
    return zipfile.is_zipfile(path) or Path(path).read_bytes()[8:9] == b"{"


def _data_in(path: str) -> dict[str, bytes]:
    if not zipfile.is_zipfile(path):
        content = Path(path).read_bytes()
        return {"": content[8 + int.from_bytes(content[:8], "little") :]}
    with zipfile.ZipFile(path) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist() if "/data/" in name}


def _last_words(run: Run) -> str:
    """Return the last error that a failed script printed, and its status."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in run.output.splitlines() if line.strip()]
    is_error: Callable[[str], Any] = re.compile(r"[\w.\[\]: ]*(Error|Exception|Interrupt)\b").match
    errors = [line for line in lines if is_error(line) and "ChildFailed" not in line]
    return f"{(errors or lines or [''])[-1][:240]} (status {run.status})"


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
