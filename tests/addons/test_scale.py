"""docs/features/scale.md and the pages of the engines run, on as many ranks as they say, and print what they show.

They are accelerate.md, data_parallel.md, deepspeed.md, fsdp.md, launching.md, pipeline.md and
tensor_parallel.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kit.rank_tasks import forks
from kit.scripts import Script
from zae import addons
from zae.checkpoint.folder import newest_valid
from zae.checkpoint.reader import load_checkpoint
from zae.diff import compare, read_ledger

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "features" / "scale.md"
ENGINES = sorted((DOCS / "engines").glob("*.md"))


def read_blocks(path, language):
    """Return the blocks of a page in a language, without those of which the page says that they are not run."""
    text = re.sub(r"^<!-- not run: .*? -->\n```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def run_blocks(blocks):
    """Run blocks as one script, and return what it has printed."""
    Path("page.py").write_text("\n".join(blocks))
    with forks():
        status, shown, said = Script(Path("page.py").absolute()).end()
    assert (status, said) == (0, "")
    return shown


def test_the_scripts_of_the_pages_run_on_two_ranks(tmp_path):
    """All pages, one after the other; the run ends with two ranks, whose ledgers agree."""
    pages = (PAGE, *ENGINES)
    shown = run_blocks(block for path in pages for block in read_blocks(path, "python"))
    assert shown == "".join(text for path in pages for text in read_blocks(path, "text"))
    for folder in ("run",):
        manifest = newest_valid(Path(folder), load_checkpoint)[1][0]
        assert (manifest["world_size"], manifest["step"]) == (2, 8)
        first, second = (read_ledger(f"{folder}/ledger-{rank}.jsonl") for rank in (0, 1))
        assert len(first) == len(second) == 8
        assert compare(first, second) is None
        assert first[1]["stages"]["forward"]["loss"] != second[1]["stages"]["forward"]["loss"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.stem)
def test_the_script_of_an_engine_needs_no_other_page(path):
    """Its blocks are whole: the class, the imports and the calls."""
    assert run_blocks(read_blocks(path, "python")) == "".join(read_blocks(path, "text"))


def test_every_engine_is_on_the_page():
    """An add-on that trains on several ranks has its line in the table, and no other name has."""
    engines = {name for name in addons.__all__ if "parallel" in getattr(getattr(addons, name), "layer", "")}
    table = PAGE.read_text(encoding="utf-8").split("## Which engine")[1].split("##")[0]
    linked = dict(re.findall(r"^\| \[`(\w+)`\]\(\.\./engines/(\w+)\.md\) \|", table, re.MULTILINE))
    assert linked.keys() == engines
    assert {path.stem for path in ENGINES} == {*linked.values(), "launching"}
