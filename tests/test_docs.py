"""The pages of docs/: their blocks run, their links lead somewhere, and what they claim is looked up (X-4)."""

from __future__ import annotations

import re

import pytest

import zae
import zae.addons
from kit.blocks import FIRST, ROOT, Blocks, read_setup, table_rows
from zae import AddOnBase, Trainer
from zae.composition.metaclass import options_of


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


PAGES = sorted((ROOT / "docs").glob("*.md"))
ELSEWHERE = {"addon_examples": "addons/test_addon_examples.py", "addons": "addons/test_addon_examples.py",
             "scale": "addons/test_scale.py"}  # fmt: skip
TEXTS = {path.relative_to(ROOT): path.read_text(encoding="utf-8")
         for path in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md")}  # fmt: skip


@pytest.mark.parametrize("path", [path for path in PAGES if path.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_every_block_of_a_page_runs(path, tmp_path, monkeypatch):
    """X-4: every block runs after the README's first one, or a comment says why not; no language is unknown."""
    monkeypatch.chdir(tmp_path)
    blocks = Blocks(path, FIRST.split("metrics = ")[0])
    fences = re.findall(r"^ *```(\w+)$", blocks.text, re.M)
    assert blocks.text.count("```") == 2 * len(fences)
    blocks.run()
    assert blocks.evaluated == [language for language in fences if language != "mermaid"]
    assert len(blocks.not_run) == blocks.text.count("<!-- not run: ")
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "report.html"}


def test_a_page_that_runs_elsewhere_does():
    """The blocks of these pages define add-ons, or need several ranks; the test that runs them names the page."""
    for name, test in ELSEWHERE.items():
        assert f"{name}.md" in (ROOT / "tests" / test).read_text(encoding="utf-8")


def anchors(text):
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS, ids=str)
def test_links_lead_to_a_file_and_a_heading(name):
    """Every relative link and picture of a page exists, and so does the heading that a link names."""
    text = TEXTS[name]
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", re.sub(r"```.*?```", "", text, flags=re.S))
    for link in map("".join, links):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        found = (ROOT / name.parent / path).resolve() if path else ROOT / name
        assert found.exists(), link
        assert not anchor or anchor in anchors(found.read_text(encoding="utf-8")), link


def test_every_page_is_listed_in_the_readme():
    """A reader finds each page from the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in PAGES if f"docs/{path.name}" not in text] == []


def test_table_of_add_ons_agrees_with_the_classes():
    """Every add-on has a row; its options, layer, slot, state and extra are what the class and setup.cfg say."""
    plain = set(options_of(Trainer))
    of_loggers = {"logger_required", "logger_fallback", "logger_timeout"}
    setup = read_setup()
    rows = table_rows(page("options"), "| add-on | what it does |")
    all_add_ons = {name: getattr(zae.addons, name) for name in zae.addons.__all__}
    bases = {base for add_on in all_add_ons.values() for base in add_on.__mro__[1:]}  # Not to be mixed in.
    assert [row[0].strip("`") for row in rows] == sorted(
        name for name, each in all_add_ons.items() if each not in bases
    )
    for name, does, options, layer, slot, saves, extra in rows:
        add_on = getattr(zae.addons, name.strip("`"))
        own = set(options_of(Trainer.add_on(add_on))) - plain
        assert set(re.findall(r"`(\w+)`", options)) == own - of_loggers, name
        assert (own & of_loggers == of_loggers) == ("Logger" in name), name
        assert layer == add_on.layer, name
        assert slot == (add_on.slot or "-"), name
        saving = [c for c in add_on.__mro__ if c is not AddOnBase and getattr(c, "_is_addon", False)
                  and ("state_dict" in c.__dict__ or c.__dict__.get("state_attributes"))]  # fmt: skip
        assert saves == ("yes" if saving else "no"), name
        assert extra == "-" or extra.strip("`") in setup["options.extras_require"], name
        assert len(does.split()) <= 6, name
        assert not add_on.requires, name


def test_sentences_that_quote_the_code():
    """What stands in the running text: the line of explain(), the layers, the files and the public names."""
    guide = page("guide")
    imported = re.search(r"from zae.addons import (.*)", guide)[1].split(", ")
    task = Trainer.add_on(*(getattr(zae.addons, name) for name in imported))
    beside = re.search(r"next to `unscale\(\)` it prints `([^`]+)`", guide)[1]
    assert re.search(rf"^ +unscale\(\) +# {re.escape(beside)}\.$", str(task.explain()), re.M)
    assert " < ".join(zae.addon.LAYERS) in " ".join(guide.split())
    add_ons = re.findall(r"^(\w+) =", read_setup()["options.entry_points"]["zae.addons"], re.M)
    for name, text in TEXTS.items():
        for path in re.findall(r"`((?:examples|zae|benchmarks|tests)/[\w/]+\.py|\.ci/run|constraints\.txt)`", text):
            assert (ROOT / path).is_file(), (name, path)
        if name.stem not in ELSEWHERE:
            known = {*zae.__all__, *zae.addons.__all__, *add_ons, *re.findall(r"class (\w+)", text)}
            assert set(re.findall(r"`(\w+(?:Addon|Error|Base|Dict))`", text)) <= known, name


def test_required_packages_are_those_of_the_comparison():
    """X-1: setup.cfg requires as many packages as the comparison says."""
    required = read_setup()["options"]["install_requires"].split()
    row = next(row for row in table_rows(page("comparison"), "| | zae | Lightning") if row[0] == "required packages")
    assert row[1] == str(len(required)) == "4"


def test_each_goal_has_a_row_with_tests_that_exist():
    """One row for each of the 26 goals: what is met names a test, and what is not says what is missing."""
    tests = {name for path in (ROOT / "tests").rglob("test_*.py")
             for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)}  # fmt: skip
    rows = table_rows(page("goals"), "| goal | what it means")
    assert [row[0] for row in rows] == [f"X-{number}" for number in range(1, 27)]
    for goal, _, state, shown in rows:
        named = set(re.findall(r"`(test_\w+)`", shown))
        assert named <= tests, (goal, named - tests)
        assert state in ("met", "in part", "not yet")
        assert state == "not yet" or named or "`.ci/versions`" in shown or "Not yet:" in shown, goal
        assert state != "met" or (named and "Not yet" not in shown), goal
