"""Each feature and each tool can be deleted, with what is built on it: the rest imports, and the core works."""

from __future__ import annotations

from pathlib import Path

import pytest

import zae.addons
from kit import removal
from zae.common.lazy import names_in_stub

EVERY_RUN = ("addons.ema", "addons.loggers", "search")
"""A file of addons/, a folder of it, and a tool."""


def cases() -> list[object]:
    """Each feature and tool, and nothing; most of them are exhaustive."""
    marks = {name: () if name in EVERY_RUN else (pytest.mark.exhaustive,) for name in removal.removable()}
    return [pytest.param(name, marks=mark, id=name) for name, mark in marks.items()]


@pytest.mark.parametrize("name", cases())
def test_the_rest_works_without(name: str, tmp_path: Path) -> None:
    """Every module that is left imports; `zae.addons` lists what is left; a run, an add-on and weights are right."""
    removal.copy_package(tmp_path)
    removal.remove(tmp_path, [name, *removal.built_on(name)])
    answer = removal.run_core_sample(tmp_path)
    left = [
        each for each, module in names_in_stub("zae.addons", zae.addons.__file__).items() if is_left(tmp_path, module)
    ]
    assert answer["add_ons"] == sorted(left)


def is_left(folder: Path, module: str) -> bool:
    return folder.joinpath(*module.split(".")).with_suffix(".py").is_file()


def test_what_is_removed_is_there() -> None:
    """Each name is that of a file or folder, and what each is built on can be removed too."""
    known = removal.removable()
    assert set(EVERY_RUN) <= set(known)
    assert set().union(*map(removal.needs, known)) <= set(known)
    places = [removal.ROOT.joinpath("zae", *name.split(".")) for name in known]
    assert [path for path in places if not path.is_dir() and not path.with_suffix(".py").is_file()] == []
