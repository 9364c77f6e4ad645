"""Every promise of docs/reliability.md has a test in what `pytest -k "crash or resume or fault or security"` runs."""

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


def selected() -> Iterator[tuple[str, str]]:
    """Name and docstring of each test that one of the words selects, by the name of its file or its own."""
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if any(word in f"{path.name} {node.name}" for word in WORDS):
                yield node.name, ast.get_docstring(node) or ""


def proves(row: str, name: str, docstring: str) -> bool:
    """Whether a test names a row: F-A1 in its docstring, or fa1 or a1 in its name."""
    short = row.replace("-", "").lower()
    in_name = set(name.split("_")) & {short, short.removeprefix("f")}
    return bool(in_name or re.search(rf"(?<![\w-]){row}(?!\d)", docstring))


def test_resume_crash_fault_and_security_prove_every_row() -> None:
    """The words select a test for each row; and one for a row that does not exist would be missed."""
    tests = list(selected())
    rows = [f"{group}{number}" for group, numbers in ROWS.items() for number in numbers]
    assert [row for row in rows if not any(proves(row, *test) for test in tests)] == []
    assert not any(proves("F-A99", *test) for test in tests)
    assert len(tests) > 100
