"""The generated pages of the documentation are what their generators in docs/_generators write now."""

from __future__ import annotations

from importlib import import_module

import pytest

from _generators import GENERATORS, ROOT


@pytest.mark.parametrize("name", GENERATORS)
def test_the_pages_are_up_to_date(name: str) -> None:
    stale = [
        path.relative_to(ROOT).as_posix()
        for path, text in import_module(f"_generators.{name}").files().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run python docs/_generators"
