"""The pages of docs/: their blocks run, their links lead somewhere, and what they claim is looked up."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from pathlib import Path

import pytest

import zae
import zae.addons
import zae.search
from kit.blocks import DOCS, ROOT, Blocks, find_page, list_pages, paste, read_setup, table_rows
from kit.scripts import Script
from zae import Trainer
from zae.cli import COMMANDS


def name_of(path):
    """The name of a page: the path in docs/ without its suffix."""
    return path.relative_to(DOCS).with_suffix("").as_posix()


def page(name):
    return find_page(name).read_text(encoding="utf-8")


PAGES = list_pages()
ELSEWHERE = {"addon_examples": "addons/test_addon_examples.py", "addons": "addons/test_addon_examples.py",
             "fits": "fits/test_fits_page.py",
             "scale": "addons/test_scale.py", "tuning": "tuning/test_tuning_page.py"}  # fmt: skip
ELSEWHERE |= {path.stem: "addons/test_scale.py" for path in PAGES if path.parent.name == "engines"}
TEXTS = {path.relative_to(ROOT): path.read_text(encoding="utf-8")
         for path in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md")}  # fmt: skip


RUN_HERE = [path for path in PAGES if path.stem not in ELSEWHERE]


@pytest.mark.sample(count=20)
@pytest.mark.parametrize("path", RUN_HERE, ids=name_of)
def test_every_block_of_a_page_runs(path, tmp_path, monkeypatch):
    """Every block runs after the first one of its page, or a comment says why not; no language is unknown."""
    monkeypatch.chdir(tmp_path)
    blocks = Blocks(path)
    fences = re.findall(r"^ *```(\w+)$", blocks.text, re.M)
    assert blocks.text.count("```") == 2 * len(fences)
    blocks.run()
    assert blocks.evaluated == [language for language in fences if language != "mermaid"]
    assert len(blocks.not_run) == blocks.text.count("<!-- not run: ")
    made = {"runs", "report.html", "my-digits", "zae-my-noise"}
    made |= {".neptune", "wandb", "zae-offline"}  # By the clients of loggers, and in place of one that does not answer.
    assert {path.name for path in tmp_path.iterdir()} <= made


PASTED = [path for path in RUN_HERE if paste(path.read_text(encoding="utf-8"))]


@pytest.mark.sample(count=6)
@pytest.mark.parametrize("path", PASTED, ids=name_of)
def test_a_page_pasted_into_an_empty_file_runs(path, tmp_path):
    """All blocks below each other are a script: it needs no other page, and no block disturbs a later one."""
    (tmp_path / "page.py").write_text(paste(path.read_text(encoding="utf-8")), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    with contextlib.chdir(tmp_path / "empty"):
        status, shown, said = Script(tmp_path / "page.py").end()
    assert status == 0, shown + said


def test_no_page_continues_another():
    """No page says that its blocks need those of the README."""
    speaks = re.compile(r"(?:continues?|After)\s\[the\sREADME's\sfirst\s")
    assert [str(name) for name, text in TEXTS.items() if speaks.search(text)] == []


def test_a_page_that_runs_elsewhere_does():
    """The blocks of these pages define add-ons, or need several ranks; the test that runs them names the page."""
    for name, test in ELSEWHERE.items():
        assert f"{name}.md" in (ROOT / "tests" / test).read_text(encoding="utf-8")


def linked(text):
    """The targets of the links and pictures of a page."""
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", re.sub(r"```.*?```", "", text, flags=re.S))
    return ["".join(link) for link in links]


def anchors(text):
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS, ids=str)
def test_links_lead_to_a_file_and_a_heading(name):
    """Every relative link and picture of a page exists, and so does the heading that a link names."""
    text = TEXTS[name]
    for link in linked(text):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        found = (ROOT / name.parent / path).resolve() if path else ROOT / name
        assert found.exists(), link
        assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), link


def test_every_page_is_found_from_the_readme():
    """A reader of the README comes to each page by the links of the pages."""
    found, left = set(), [Path("README.md")]
    while left:
        name = left.pop()
        found.add(name)
        paths = [Path(os.path.normpath(name.parent / link.partition("#")[0])) for link in linked(TEXTS[name])]
        left += [path for path in paths if path in TEXTS and path not in found]
    assert TEXTS.keys() - found == set()


def test_sentences_that_quote_the_code():
    """What stands in the running text: the line of explain(), the layers, the files and the public names."""
    guide = page("guide")
    imported = re.findall(r"\w+", re.search(r"from zae.addons import (\([^)]*\)|.*)", guide)[1])
    task = Trainer.add_on(*(getattr(zae.addons, name) for name in imported))
    beside = re.search(r"next to `unscale\(\)` it prints `([^`]+)`", guide)[1]
    assert re.search(rf"^ +unscale\(\) +# {re.escape(beside)}\.$", str(task.explain()), re.M)
    for name in ("addons", "composing"):
        assert " < ".join(zae.addon.LAYERS) in " ".join(page(name).split()), name
    drawn = re.findall(r"(\w+)\(", page("loop").partition("```text")[2].partition("```")[0])
    called = re.findall(r"self\.(\w+)\(", inspect.getsource(Trainer.run_batch))
    assert [name for name in drawn if not hasattr(Trainer, name)] == []
    drawn = drawn[drawn.index("run_batch") : drawn.index("checkpoint")]
    assert [name for name in drawn if name in called] == [name for name in called if name in drawn]
    for name, text in TEXTS.items():
        named = r"`((?:examples|zae|benchmarks|tests)/[\w/]+\.py|\.ci/(?:run|gpu)|constraints\.txt)`"
        for path in re.findall(named, text):
            assert (ROOT / path).is_file(), (name, path)
        if name.stem not in ELSEWHERE:
            known = {*zae.__all__, *zae.addons.__all__, *zae.search.__all__, *re.findall(r"class (\w+)", text)}
            assert set(re.findall(r"`(\w+(?:Addon|Error|Base))`", text)) <= known, name


def test_the_commands_are_those_of_the_help():
    """The page of the commands lists each with its line in the help."""
    assert table_rows(page("commands"), "| command | what") == [[f"`{name}`", line] for name, line in COMMANDS.items()]


def test_required_packages_are_those_of_the_comparison():
    """Setup.cfg requires as many packages as the comparison says."""
    required = read_setup()["options"]["install_requires"].split()
    row = next(row for row in table_rows(page("comparison"), "| | zae | Lightning") if row[0] == "required packages")
    assert row[1] == str(len(required)) == "4"
