"""CONTRIBUTING.md, the architecture and the drawing of the loop: names exist, a step and a save go the way drawn."""

from __future__ import annotations

import builtins
import inspect
import re
import shlex
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import zae.addons
import zae.parts
import zae.testing
from kit import imports, ranks
from kit.lines import Task, batches, make
from zae import AddOnBase, Trainer
from zae.addons import AMPAddon, StateManagerAddon

TEXT = (imports.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ARCHITECTURE = (imports.ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
LAYOUT, SAVE = re.findall(r"```text\n(.*?)```", ARCHITECTURE, re.DOTALL)
LOOP = (imports.ROOT / "docs" / "explanation" / "loop.md").read_text(encoding="utf-8")
STEP = re.search(r"^ +run_batch\(.*?(?=^ +checkpoint\()", LOOP, re.MULTILINE | re.DOTALL)[0]  # type: ignore[index]
STEP_FILES = re.findall(r"`(zae/\S+\.py)`", ARCHITECTURE.partition("## One step")[2].partition("## ")[0])
QUOTED = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))


def test_the_layout_has_every_folder_and_module() -> None:
    source = imports.ROOT / "zae"
    present = {
        f"{path.name}/" for path in source.iterdir() if (path / "__init__.py").exists() and path.name != "addons"
    }
    present |= {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    rows = [line.split()[0] for line in LAYOUT.splitlines() if line]
    assert rows[0] == "zae/"
    assert rows[-1] == "addons/"
    assert set(rows[1:-1]) == present


PATHS = {each for each in [*QUOTED, *re.findall(r"`([^`\n]+)`", ARCHITECTURE)] if "/" in each and " " not in each}


@pytest.mark.parametrize("path", sorted(PATHS))
def test_the_paths_exist(path: str) -> None:
    assert (imports.ROOT / path).exists()


def test_the_parts_are_those_of_a_trainer_and_replaced_by_who_is_named() -> None:
    """An add-on replaces a part where it, or a base of it, assigns one of its own."""
    trainer = make(Task)
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .*? \| (.*?) ?\|$", ARCHITECTURE, re.MULTILINE)
    assert len(rows) > 8
    for part, kind, names in rows:
        assert type(getattr(trainer, part)).__name__ == kind
        if part in ("engine", "precision_part", "step_window"):
            assert set(re.findall(r"\w+", names)) == {name for name in zae.addons.__all__ if replaces_part(name, part)}
        else:
            assert names == ""


def replaces_part(add_on: str, part: str) -> bool:
    kinds = [kind for kind in getattr(zae.addons, add_on).__mro__ if kind.__module__.startswith("zae.addons.")]
    return any(f"self.{part} = " in inspect.getsource(kind) for kind in kinds)


def test_the_commands_exist() -> None:
    commands = [shlex.split(each) for each in [*QUOTED, *re.findall(r"```bash\n(.*?)\n```", TEXT)]]
    scripts = [words[1] for words in commands if words[0] == "python" and words[1] != "-m"]
    assert len(scripts) >= 2
    assert ["python", "-m", "pytest", "tests/loop"] in commands
    assert [".ci/run"] in commands
    assert [each for each in scripts if not (imports.ROOT / each).exists()] == []


def test_the_names_exist() -> None:
    """Names of a trainer and its parts, of AddOnBase, of the package, of these tests' tools, and of markers."""
    quoted = [*QUOTED, *re.findall(r"`([^`\n]+)`", ARCHITECTURE)]
    names = {each.strip("@").removesuffix("()").removeprefix("self.").split("(")[0] for each in quoted}
    names = {re.sub(r"^(trainer|zae|Task|Trainer)\.", "", each) for each in names if re.fullmatch(r"[\w.]+", each)}
    trainer = make(Task)
    places = (trainer, AddOnBase, zae.testing, zae.parts, ranks, imports, builtins)
    paths = {each for each in names if (imports.ROOT / each).exists()}
    known = {each for each in names if any(hasattr(place, each.removeprefix("testing.")) for place in places)}
    known |= names & {*zae.__all__, *zae.addons.__all__}
    kinds = {type(part).__name__ for part in vars(trainer).values()}
    packages = {*imports.RULES}
    markers = set(re.findall(r'^ +"(\w+): ', Path(imports.ROOT, "pyproject.toml").read_text(), re.MULTILINE))
    assert len(known) > 25
    assert names - paths - known - kinds - packages - markers == set()


class Observed(Task):
    """Overrides the events."""

    def on_step_begin(self, batch: Any) -> None:
        super().on_step_begin(batch)

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)


def test_a_step_flows_as_it_is_drawn() -> None:
    """The methods of the drawing are called, and for the first time in its order; its files are passed through."""
    drawn = re.findall(r"\b([a-z_]+)\(", STEP)
    called: list[str] = []
    crossed = set[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        if event == "call":
            crossed.add(frame.f_code.co_filename)
            if name in drawn:
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
    assert len(STEP_FILES) > 6
    assert {imports.ROOT / path for path in STEP_FILES} <= {*map(Path, crossed)}


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
    assert others <= {"locks.py", "resume.py", "tensor_bytes.py"}


def test_ci_says_when_the_tests_that_it_leaves_out_last_passed() -> None:
    """Each marker that the default run leaves out has a line, and a file may: a number, a date and a commit."""
    options = Path(imports.ROOT, "pyproject.toml").read_text()
    lines = Path(imports.ROOT, ".ci", "last_passed").read_text().splitlines()
    assert {line.split(":")[0] for line in lines} >= set(re.findall(r"not ([a-z_]+)", options)) != set()
    form = r"\w+(?: (\S+))?: [1-9]\d* tests, last passed on \d{4}(?:-\d\d){2} at [0-9a-f]+"
    files = [re.fullmatch(form, line)[1] for line in lines]
    assert [name for name in files if name and not Path(imports.ROOT, name).is_file()] == []
    assert "cat .ci/last_passed" in Path(imports.ROOT, ".ci", "run").read_text()
