"""Each feature and each tool can be deleted, with what is built on it: the rest imports, and the core works."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zae.addons
from kit import leftovers, removal
from zae.lazy import names_in_stub

EVERY_RUN = ("addons.ema", "addons.loggers", "search")
"""A file of addons/, a folder of it, and a tool."""


def cases() -> list[object]:
    """Each feature and tool; most of them are exhaustive."""
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


# ------------------------------------------------------------------------------------------ what a removal leaves


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The code of each module, by its path."""
    return {str(each.path): each.tree for each in leftovers.sources()}


def test_a_public_name_of_the_core_is_read(trees: dict[str, ast.Module]) -> None:
    """By other code, the pages or the test of zae-engine's names; of the trainer, its parts, run and engines."""
    names_of_zae_engine = Path(__file__).with_name("test_zae_engine.py").read_text(encoding="utf-8")
    readers = (*leftovers.pages().values(), names_of_zae_engine)
    assert leftovers.CORE.keys() <= trees.keys()
    assert leftovers.unread_names(trees, readers) == []
    unread = ast.parse(
        "class Run:\n    def __init__(self):\n        self.answered_by_nobody = 1\n    def asks(self): ..."
    )
    found = leftovers.unread_names({**trees, "zae/loop/run.py": unread}, readers)
    assert "Run.answered_by_nobody" in found


def test_an_option_is_taken(trees: dict[str, ast.Module]) -> None:
    assert leftovers.untaken_options(trees) == []
    untaken = ast.parse("class IdleAddon:\n    def __init__(self, *args, idle_rate=1, **kwargs): ...")
    assert leftovers.untaken_options({"addons/idle.py": untaken}) == ["IdleAddon(idle_rate)"]


def test_messages_and_pages_name_what_is_there(trees: dict[str, ast.Module]) -> None:
    """Add-ons, commands, pages and arguments. One that a page or a docstring defines is there."""
    code = [*leftovers.texts_of_code(trees)]
    pages = leftovers.pages()
    known = leftovers.arguments_of(trees.values())
    others = [
        each for each in code if not each[0].startswith("zae/loop/trainer_state.py")
    ]  # It lists what older states have.
    assert leftovers.absent_names([*others, *pages.items()]) == []
    messages = [(path, text) for path, text in code if not path.startswith(OF_OTHERS)]
    assert leftovers.absent_arguments(messages, known) == []
    inline = [(path, leftovers.inline_code(text)) for path, text in pages.items()]
    assert leftovers.absent_arguments(inline, known) == []
    gone = [("x", "write GoneAddon, python -m zae vanish, docs/gone.md or gone_rate=1")]
    assert leftovers.absent_names(gone) == ["x: GoneAddon", "x: python -m zae vanish", "x: docs/gone.md"]
    assert leftovers.absent_arguments(gone, known) == ["x: gone_rate="]


OF_OTHERS = (
    "addons/huggingface",
    "addons/fairseq2",
    "addons/peft",
    "addons/accelerate",
    "zae/display/html.py",
    "zae/report",
    "zae/compose/foreign",
)
"""Code whose texts name the arguments of other libraries, or are HTML."""
