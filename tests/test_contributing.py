"""CONTRIBUTING.md is true: what it names exists, and a step takes the way that it draws."""

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
from kit import imports, ranks
from kit.lines import Task, batches, make
from zae import AddOnBase, Trainer
from zae.addons import AMPAddon, StateManagerAddon

TEXT = (imports.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LAYOUT, STEP, SAVE = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
QUOTED = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))


def test_the_layout_has_every_folder_and_module() -> None:
    source = imports.ROOT / "zae"
    present = {
        f"{path.name}/" for path in source.iterdir() if (path / "__init__.py").exists() and path.name != "addons"
    }
    present |= {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    rows = [line.split()[0] for line in LAYOUT.splitlines() if line]
    assert rows[0] == "zae/"
    assert rows[-2:] == ["addons/", "tests/"]
    assert set(rows[1:-2]) == present


@pytest.mark.parametrize("path", sorted({each for each in QUOTED if "/" in each and " " not in each}))
def test_the_paths_exist(path: str) -> None:
    assert (imports.ROOT / path).exists()


def test_the_commands_exist() -> None:
    commands = [shlex.split(each) for each in [*QUOTED, *re.findall(r"```bash\n(.*?)\n```", TEXT)]]
    scripts = [words[1] for words in commands if words[0] == "python" and words[1] != "-m"]
    assert len(scripts) >= 2
    assert ["python", "-m", "pytest", "tests/loop"] in commands
    assert [".ci/run"] in commands
    assert [each for each in scripts if not (imports.ROOT / each).exists()] == []


def test_the_names_exist() -> None:
    """Names of Trainer and AddOnBase, of the package, and decorators."""
    names = {each.strip("@").removesuffix("()").removeprefix("self.").split("(")[0] for each in QUOTED}
    names = {re.sub(r"^(trainer|zae)\.", "", each) for each in names if re.fullmatch(r"[\w.]+", each)}
    places = (Trainer, AddOnBase, zae, zae.testing, ranks)
    others = {"super", "__init__", "DeprecationWarning"}
    paths = {each for each in names if (imports.ROOT / each).exists()}
    known = {each for each in names if any(hasattr(place, each.removeprefix("testing.")) for place in places)}
    assert len(known) > 8
    assert names - others - paths - known == set()


class Observed(Task):
    """Overrides the events."""

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


def test_a_save_goes_through_the_files_that_are_drawn(tmp_path: Path) -> None:
    """Each of them has a part in it, and in their folders only a few others have a small one."""
    crossed = set[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            crossed.add(frame.f_code.co_filename)

    trainer = make(Task.add_on(StateManagerAddon), save_path=tmp_path)
    trainer.run(1, batches(1))
    sys.setprofile(note)
    try:
        trainer.save_state()
    finally:
        sys.setprofile(None)
    files = {Path(each).resolve() for each in crossed}  # The package zae.addons is a link.
    drawn = {imports.ROOT / line.split()[0] for line in SAVE.splitlines()}
    assert drawn <= files
    rooms = (imports.ROOT / "addons" / "state_manager", imports.ROOT / "zae" / "checkpoint")
    others = {each.name for each in files - drawn if each.parent in rooms}
    assert others <= {"locks.py", "resume.py", "tensor_bytes.py", "untracked.py"}


def test_ci_says_when_the_tests_that_it_leaves_out_last_passed() -> None:
    """Each marker that the default run leaves out has a line, and a file may: a number, a date and a commit."""
    options = Path(imports.ROOT, "pyproject.toml").read_text()
    lines = Path(imports.ROOT, ".ci", "last_passed").read_text().splitlines()
    assert {line.split(":")[0] for line in lines} >= set(re.findall(r"not ([a-z_]+)", options)) != set()
    form = r"\w+(?: (\S+))?: [1-9]\d* tests, last passed on \d{4}(?:-\d\d){2} at [0-9a-f]+"
    files = [re.fullmatch(form, line)[1] for line in lines]
    assert [name for name in files if name and not Path(imports.ROOT, name).is_file()] == []
    assert "cat .ci/last_passed" in Path(imports.ROOT, ".ci", "run").read_text()
