"""explain() says what a run does: its lines are compared, call by call, with a trace of real runs."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import zae
from kit import matrix
from kit.matrix import CONFIGURATION_FOR_TRACES, Task, add_ons
from kit.oracle import Options
from zae import AddOnBase, Trainer, replaces
from zae.compose.introspect import function_of, hooks_of, owners_of
from zae.explain import LOOP, Line, lines_of

STATE = {"load_model_state", "load_state_dict", "load_evaluation_state", "local_shards", "weights_to_save"}
NOT_IN_ORDER = STATE | {"changed_modules", "describe", "sinks"}
"""What add-ons call among themselves; explain() lists it below the loop, when it is overridden."""

STEPS = {"train_step", "test_step"}
OPTIONAL = {name for line in LOOP.splitlines() if "?" in line for name in re.findall(r"(\w+)\(", line)}
"""What is shown only where somebody overrides it, since it does nothing by itself."""

QUERIES = {"should_stop", "sample_weight", "stop", "request", "state_dict", "should_checkpoint", "steps_per_epoch",
           "changed_modules"}  # fmt: skip
"""What is asked from many places, and is not a part of the sequence; explain() lists those that are overridden."""


# --------------------------------------------------------------------------------------------------- the trace


class Trace:
    """Every call of a hook during a run, with the classes whose code ran for it, outermost first."""

    def __init__(self, cls: Any) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self._codes: dict[CodeType, tuple[str, str]] = {}
        self._first: dict[str, CodeType] = {}
        names = (hooks_of(cls).keys() | STEPS) - QUERIES
        for klass, name in itertools.product(cls.__mro__, sorted(names)):
            code = getattr(function_of(klass.__dict__.get(name)), "__code__", None)
            if code is not None:
                self._codes[code] = (name, klass.__name__)
                self._first.setdefault(name, code)
        self._begun: list[FrameType] = []

    def __enter__(self) -> Trace:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in self._codes or any(frame is known for known in self._begun):
            return
        if frame.f_code.co_flags & 0x20:  # A generator is entered often, and called once.
            self._begun.append(frame)
        name, owner = self._codes[frame.f_code]
        if frame.f_code is self._first[name]:
            self.calls.append((name, [owner]))
        else:
            open_call = next(call for call in reversed(self.calls) if call[0] == name)
            open_call[1].append(owner)


# ------------------------------------------------------------------------------------------- the text, unrolled


class Unrolled:
    """What the text says that a run of one epoch calls, with the loops of the text gone through."""

    def __init__(self, lines: list[Line], windows: list[int], valid_batches: int, validates: set[int]) -> None:
        at = next(index for index, line in enumerate(lines) if line.text == "validate():")
        self.main, self.validation = lines[:at], lines[at + 1 :]
        self.windows, self.valid_batches, self.validates = windows, valid_batches, validates
        self.step = self.count = 0

    def calls(self) -> Iterator[tuple[str, list[str]]]:
        yield from self._block(self.main)

    def _block(self, lines: list[Line]) -> Iterator[tuple[str, list[str]]]:
        index = 0
        while index < len(lines):
            line, inside = lines[index], []
            while index + 1 < len(lines) and lines[index + 1].depth > line.depth:
                index += 1
                inside.append(lines[index])
            index += 1
            yield from self._line(line, inside)

    def _line(self, line: Line, inside: list[Line]) -> Iterator[tuple[str, list[str]]]:
        if line.text.startswith("after a"):
            return
        for name in line.calls * (self.count if line.text.startswith("for out in outputs") else 1):
            owners = [note.split(":")[0].split(".")[0] for note in line.notes]
            yield name, owners if len(line.calls) == 1 else []
        if line.text == "metrics = validate()":
            yield from self._block(self.validation)
        elif re.match("for (window|batch) in batches", line.text):
            for count in self.windows:
                self.step += 1
                self.count = count
                yield from self._block(inside)
        elif "micro_batches" in line.text:
            for _ in range(self.count):
                yield from self._block(inside)
        elif line.text == "for batch in valid_loader:":
            for _ in range(self.valid_batches):
                yield from self._block(inside)
        elif line.text == "when valid_every is due:":
            yield from self._block(inside) if self.step in self.validates else ()
        elif line.text in ("when valid_every is due at the epoch:", "when log_every is due at the epoch:"):
            return
        else:
            yield from self._block(inside)


TRACED = [
    (),
    ("AMPAddon",),
    ("GradientAccumulationAddon",),
    ("EMAAddon", "EarlyStoppingAddon"),
    ("AMPAddon", "EMAAddon", "GradientAccumulationAddon", "StateManagerAddon"),
    tuple(sorted(add_ons())),
]


@pytest.mark.parametrize("chosen", TRACED, ids=lambda chosen: "+".join(chosen) or "none")
def test_explain_is_what_a_real_run_does(
    chosen: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call by call, in the same order, by the same classes; what is not in the text does nothing."""
    options = matrix.without(CONFIGURATION_FOR_TRACES, set(matrix.PIECES) - set(chosen))
    cls = Task.add_on(*(add_ons()[name] for name in chosen))
    trainer, loader, valid = matrix.build(cls, options, tmp_path, chosen)
    lines = lines_of(cls)
    with Trace(cls) as trace:
        trainer.run(1, loader, valid, valid_every=options.validate)
    window = options.accumulate or 1
    batches = len(loader)
    windows = [min(window, batches - start) for start in range(0, batches, window)]
    validates = {step for step in range(1, len(windows) + 1) if step % options.validate == 0}
    after = {name for line in lines if line.text.startswith("after a") for name in line.calls}
    shown = {name for line in lines for name in line.calls} - after
    quiet = {name for name in OPTIONAL if not owners_of(cls, name)} - ({"scale_loss", "normalize"} & shown)
    said = [call for call in Unrolled(lines, windows, len(valid), validates).calls() if call[0] not in quiet]
    took_place = [call for call in trace.calls if call[0] in shown - quiet]
    assert [name for name, _ in took_place] == [name for name, _ in said]
    for (name, owners), (_, told) in zip(took_place, said, strict=True):
        if told and name not in STEPS and set(told) <= {c.__name__ for c in cls.__mro__}:
            assert [owner for owner in owners if owner not in ("Trainer", "Processes")] == told, name
    assert {name for name, _ in trace.calls} - shown <= OPTIONAL | NOT_IN_ORDER | after
    missing = {name for name, owners in trace.calls if name not in shown and owners not in (["Trainer"], ["Processes"])}
    assert missing <= NOT_IN_ORDER | after


def test_explain_shows_a_bare_task_on_one_screen() -> None:
    """Forty lines at most, and the names of the steps in the order of a loop written by hand."""
    text = Task.explain()
    assert len(text.splitlines()) <= 40
    order = ["setup()", "for batch in batches(loader)", "train_step", "backward", "clip()", "optimizer_step()",
             "scheduler_step", "zero_grad()\n        logging", "teardown()", "test_step"]  # fmt: skip
    places = [text.index(name) for name in order]
    assert places == sorted(places)
    assert repr(text) == text


def test_explain_of_an_instance_shows_its_options(tmp_path: Path) -> None:
    names = ("AMPAddon", "EMAAddon", "GradientAccumulationAddon")
    cls = Task.add_on(*(add_ons()[name] for name in names))
    options = Options(precision="fp16", decay=0.75, accumulate=3, clip=0.5, scheduler="batch")
    text = matrix.build(cls, options, tmp_path, names)[0].explain()
    shown = ["gradient_clip=0.5", "decay=0.75", "precision='fp16'", "gradient_accumulation_steps=3"]
    for told in [*shown, "scheduler_step_on_batch=True", "log_every=Every(steps=1)"]:
        assert told in text
    assert "``" not in Task.add_on(add_ons()["EarlyStoppingAddon"]).explain()
    plain = matrix.build(Task, Options(), tmp_path, ())[0].explain()
    assert "clip()" not in plain
    assert "scheduler_step" not in plain


@pytest.mark.parametrize("name", sorted(add_ons()))
def test_explain_shows_what_an_add_on_tells(name: str, tmp_path: Path) -> None:
    """What an add-on tells of a hook stands beside that hook, but for what only a plan of a run knows."""
    cls = Task.add_on(add_ons()[name])
    options = matrix.without(CONFIGURATION_FOR_TRACES, {*matrix.PIECES} - {name})
    trainer, _, _ = matrix.build(cls, options, tmp_path, [name])
    known = [fact for fact in trainer.describe() if fact.value is not None and not callable(fact.value)]
    told = {(fact.where, str(fact)) for fact in known if fact.where in hooks_of(cls)}
    beside = {(hook, note) for line in lines_of(cls, trainer) for hook in line.calls for note in line.notes}
    assert told <= beside
    assert told or name not in ("AnomalyAddon", "EarlyStoppingAddon", "SpikeGuardAddon", "TorchMetricsAddon")


@pytest.mark.parametrize("columns", [80, 120])
def test_pages_fit_into_a_terminal(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What explain and plan return is as wide as the terminal, and says the same as in a pipe."""
    names = ("AMPAddon", "EMAAddon", "EarlyStoppingAddon", "GradientAccumulationAddon", "StateManagerAddon")
    cls = Task.add_on(*(add_ons()[name] for name in names))
    trainer, loader, valid = matrix.build(
        cls, Options(precision="bf16", decay=0.8, accumulate=3, patience=9), tmp_path, names
    )
    wide = [str(trainer.explain()), str(trainer.plan(2, loader, valid))]
    host, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        narrow = [str(trainer.explain()), str(trainer.plan(2, loader, valid))]
    os.close(host)
    for whole, fitted in zip(wide, narrow, strict=True):
        assert max(map(len, fitted.splitlines())) < columns
        assert "".join(fitted.replace("#", "").split()) == "".join(whole.replace("#", "").split())


def test_explain_tags_each_line_with_what_its_add_on_does() -> None:
    text = Task.add_on(add_ons()["AMPAddon"]).explain()
    line = next(line for line in text.splitlines() if line.strip().startswith("unscale()"))
    assert "# AMPAddon: Divide the gradients by the loss scale" in line


class WholeAddon(AddOnBase):
    """Do forward and backward in one."""

    layer = "parallel"

    @replaces
    def gradients(self, batch: Any) -> Any:
        """Let the engine do it."""
        return []


class SecretAddon(AddOnBase):
    """Take what is not to be shown."""

    def __init__(self, *args: Any, api_key: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.api_key = api_key


def test_explain_leaves_out_what_a_replacement_does_itself() -> None:
    text = Task.add_on(WholeAddon).explain()
    assert "outputs = gradients(batch)" in text
    assert "# WholeAddon: Let the engine do it." in text
    assert "train_step" not in text
    assert "backward(" not in text


class MicroAddon(AddOnBase):
    """Compute a micro-batch in another way."""

    layer = "model"

    @replaces
    def micro_step(self, batch: Any, count: int) -> Any:
        """Ask an engine."""
        return super().micro_step(batch, count)


def test_explain_shows_who_computes_a_micro_batch() -> None:
    lines = Task.add_on(MicroAddon, add_ons()["GradientAccumulationAddon"]).explain().splitlines()
    at = next(index for index, line in enumerate(lines) if "out = micro_step(batch)" in line)
    assert lines[at].endswith("# MicroAddon: Ask an engine.")
    assert lines[at - 1].strip() == "batch = to_device(batch)"
    assert lines[at + 1].strip().startswith("normalize(num_targets)")


def test_explain_shows_no_secret_and_escapes_html() -> None:
    model = torch.nn.Linear(1, 1)
    trainer = Task.add_on(SecretAddon)(model, "cpu", mode="test", api_key="abc<123>")
    assert "abc" not in trainer.explain()
    assert Trainer.explain()._repr_html_().startswith("<pre>Trainer, the effective loop")
    assert "&quot;loss&quot;" in Trainer.explain()._repr_html_()


def test_explain_knows_every_hook_of_the_loop() -> None:
    """A hook that is added to the loop is added to the text, or said to be none of its sequence."""
    named = set(re.findall(r"(\w+)\(", LOOP))
    elsewhere = QUERIES | NOT_IN_ORDER
    unknown = {name for name, owner in hooks_of(zae.Trainer).items() if name not in named | elsewhere}
    assert not unknown


class LongAddon(AddOnBase):
    """Count the steps, and say how many of them were made in all of the epochs, in each of the epochs, and since the
    last validation of the run. This is not shown.
    """

    layer = "observe"

    def on_step_end(self, outputs: Any) -> None:
        """Count a step of the epoch that is open, of those that were made since the last one was saved,
        and of all of them. Another sentence.
        """
        super().on_step_end(outputs)


def test_explain_ends_no_sentence_before_its_end() -> None:
    text = str(Task.add_on(LongAddon).explain())
    said = " ".join(text.replace("#", " ").split())
    assert (
        "Count a step of the epoch that is open, of those that were made since the last one was saved, and of all"
        in said
    )
    assert "and of all of them." in said
    assert "in each of the epochs, and since the last validation of the run." in said
    assert "Another sentence" not in text
    assert "This is not shown" not in text
    assert "..." not in said
