"""The programs of examples/moved: the weights of the loop by hand, also after a kill, and the lines on their page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kit.blocks import ROOT, find_page, table_rows


def load_benchmark() -> ModuleType:
    """Return benchmarks/moved.py as a module."""
    spec = importlib.util.spec_from_file_location("moved", ROOT / "benchmarks" / "moved.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


moved = load_benchmark()


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("name", moved.PROGRAMS)
def test_a_killed_program_ends_with_the_weights_of_the_loop_by_hand(name: str, tmp_path: Path) -> None:
    resumed, killed = moved.train_with_zae(name, tmp_path, kills=1)
    assert killed == 1
    assert moved.are_equal(moved.train_by_hand(name, tmp_path), resumed)


def test_the_lines_of_the_page_are_those_of_the_programs() -> None:
    rows = table_rows(find_page("programs").read_text(encoding="utf-8"), "| program | lines by hand")
    assert {path.stem for path in moved.FOLDER.glob("*.py")} == {*moved.PROGRAMS}
    counted = [[str(count) for count in moved.lines_of(name)] for name in moved.PROGRAMS]
    assert [row[1:3] for row in rows] == counted
    assert all(row[3:] == ["equal", "equal"] for row in rows)
