"""Every promise of reliability.md has a test in what `pytest -k "crash or resume or fault or security"` runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
WORDS = ("crash", "resume", "fault", "security")
ROWS = {
    "F-A": range(1, 11),
    "F-B": range(1, 7),
    "F-C": (*range(1, 8), 9, 10, 11),
    "F-D": (1, 2, 3, 4, *range(7, 14)),
    "E": (12, 13, 16),
    "P-": (*range(12, 25), 26, 34),
}


def selected() -> Iterator[str]:
    """The rows in the marker and the docstring of each test that one of the words selects, by file or name."""
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if any(word in f"{path.name} {node.name}" for word in WORDS):
                covers = [each for each in node.decorator_list if "mark.covers" in ast.unparse(each)]
                yield " ".join([*map(ast.unparse, covers), ast.get_docstring(node) or ""])


def proves(row: str, text: str) -> bool:
    """Whether a marker or a docstring names a row."""
    return bool(re.search(rf"(?<![\w-]){row}(?!\d)", text))


def test_resume_crash_fault_and_security_prove_every_row() -> None:
    """The words select a test for each row; and one for a row that does not exist would be missed."""
    tests = list(selected())
    rows = [f"{group}{number}" for group, numbers in ROWS.items() for number in numbers]
    assert [row for row in rows if not any(proves(row, test) for test in tests)] == []
    assert not any(proves("F-A99", test) for test in tests)
    assert len(tests) > 100
