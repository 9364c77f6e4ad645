"""CONTRIBUTING.md is true: what it names exists, and steps and checkpoints take the ways that it draws."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import zae.testing
from kit import house, imports, ranks
from kit.lines import Task, batches, make
from zae import AddOnBase, Trainer
from zae.addons import AMPAddon, StateManagerAddon
from zae.saving.checkpointer import Checkpointer

TEXT = (imports.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LAYOUT, STEP, SAVE, LOAD = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
QUOTED = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))


def test_the_layout_has_every_folder_and_module() -> None:
    source = imports.ROOT / "zae"
    present = {
        f"{path.name}/" for path in source.iterdir() if (path / "__init__.py").exists() and path.name != "addons"
    }
    present |= {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    rows = [line.split()[0] for line in LAYOUT.splitlines()]
    assert rows[0] == "zae/"
    assert rows[-2:] == ["addons/", "tests/"]
    assert set(rows[1:-2]) == present
    assert len(rows) <= 26


@pytest.mark.parametrize("path", sorted({each for each in QUOTED if "/" in each and " " not in each}))
def test_the_paths_exist(path: str) -> None:
    assert (imports.ROOT / path).exists()


def test_the_commands_exist() -> None:
    commands = [shlex.split(each) for each in [*QUOTED, *re.findall(r"```bash\n(.*?)\n```", TEXT)]]
    scripts = [words[1] for words in commands if words[0] == "python" and words[1] != "-m"]
    assert len(scripts) >= 2
    assert ["python", "-m", "pytest", "tests/loop"] in commands
    assert [".ci/run"] in commands
    assert [each for each in scripts if not (imports.ROOT / each).is_file()] == []


def test_the_names_exist() -> None:
    """Names of Trainer and AddOnBase, of the package, and decorators."""
    names = {each.strip("@").removesuffix("()").removeprefix("self.").split("(")[0] for each in QUOTED}
    names = {re.sub(r"^(trainer|zae|Checkpointer)\.", "", each) for each in names if re.fullmatch(r"[\w.]+", each)}
    places = (Trainer, AddOnBase, Checkpointer, zae, zae.testing, ranks)
    others = {"super", "__init__", "DeprecationWarning"}
    paths = {each for each in names if (imports.ROOT / each).exists()}
    known = {each for each in names if any(hasattr(place, each.removeprefix("testing.")) for place in places)}
    assert len(known) > 8
    assert names - others - paths - known == set()


class Observed(Task):
    """Overrides the events, which idle trainers do not call."""

    def on_step_begin(self, batch: Any) -> None:
        super().on_step_begin(batch)

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)


def test_a_step_flows_as_it_is_drawn() -> None:
    """The methods of the drawing are called, and for the first time in its order."""
    drawn = re.findall(r"^ *(\w+)\(", STEP, re.MULTILINE)
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and name in drawn:
            called.append(name)

    trainer = make(Observed.add_on(AMPAddon), gradient_clip=1.0, precision="fp16", loss_scale=(1.0, 1.0))
    sys.setprofile(note)
    try:
        trainer.run(1, batches(1))
    finally:
        sys.setprofile(None)
    assert torch.isfinite(trainer.grad_norm)
    begin = called.index("run_batch")  # What is left of an earlier step is cleared before.
    assert [*dict.fromkeys([*(name for name in called[:begin] if name != "zero_grad"), *called[begin:]])] == drawn
    assert [name for name in drawn if not hasattr(Trainer, name)] == []


@pytest.mark.parametrize("drawing", [SAVE, LOAD], ids=["save", "load"])
def test_a_checkpoint_takes_the_way_that_is_drawn(drawing: str, tmp_path: Path) -> None:
    """Each function is in its file and is called within the one above it, for the first time in this order."""
    drawn: list[tuple[str, ...]] = []
    for line in drawing.splitlines():
        indent, name, file = re.fullmatch(r"( *)([\w.]+)\(.*?\) +(\S+\.py)(?:  .*)?", line).groups()
        drawn.append((*(drawn[-1] if drawn else ())[: len(indent) // 2], f"{file}:{name}"))
    known, called = {path[-1] for path in drawn}, dict[tuple[str, ...], None]()

    def note(frame: FrameType | None, event: str, argument: Any) -> None:
        path: list[str] = []
        while event == "call" and frame is not None:
            file = Path(frame.f_code.co_filename.replace("zae/addons", "addons"))
            if file.is_relative_to(imports.ROOT):
                path.append(f"{file.relative_to(imports.ROOT)}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        if path and path[0] in known:
            called[tuple(each for each in reversed(path) if each in known)] = None

    trainer = make(Task.add_on(StateManagerAddon), save_path=tmp_path, keep_last=1, keep_best=0)
    trainer.run(1, batches(1))
    sys.setprofile(note)
    try:
        trainer.run(1, batches(1)) if drawing is SAVE else trainer.load_state()
    finally:
        sys.setprofile(None)
    assert [path for path in called if path in drawn] == drawn


def test_the_size_of_what_the_rules_limit() -> None:
    """The limits of the page are those that are asserted."""
    assert "at most 40 lines of code, a file 400 (an add-on 250), and a folder 12 files" in TEXT
    assert {source.limit for source in house.read_sources()} == {400, 250}
    assert Path(house.__file__) == Path(imports.ROOT, "tests", "kit", "house.py")


def test_ci_says_when_the_tests_that_it_leaves_out_last_passed() -> None:
    """Each marker that the default run leaves out has a line, and a file may: a number, a date and a commit."""
    options = Path(imports.ROOT, "pyproject.toml").read_text()
    lines = Path(imports.ROOT, ".ci", "last_passed").read_text().splitlines()
    assert {line.split(":")[0] for line in lines} >= set(re.findall(r"not ([a-z_]+)", options)) != set()
    form = r"\w+(?: (\S+))?: [1-9]\d* tests, last passed on \d{4}(?:-\d\d){2} at [0-9a-f]+"
    files = [re.fullmatch(form, line)[1] for line in lines]
    assert [name for name in files if name and not Path(imports.ROOT, name).is_file()] == []
    assert "cat .ci/last_passed" in Path(imports.ROOT, ".ci", "run").read_text()
