"""The documentation site: its pages are made from the classes, and every public name has an entry.

``.ci/run`` builds the site, where a reference or link that leads nowhere is an error; tests/test_site_browser.py reads
it in a browser.
"""

from __future__ import annotations

import importlib
import re
from functools import reduce

import zae.addons
import zae.search
from _generators import addons, title_of
from kit.blocks import DOCS, FIRST, README, ROOT, list_pages
from zae import schedulers, testing
from zae.addons.huggingface import transformers
from zae.tuning import batch_size, learning_rate

MODULES = (zae, zae.addons, zae.errors, zae.search, schedulers, testing, transformers, batch_size,
           learning_rate)  # fmt: skip


def documented():
    """Return the objects that the reference has a directive for, and their names."""
    texts = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").rglob("*.md")]
    names = re.findall(r"^\.\. auto(?:class|function|exception|data):: (\S+)$", "\n".join(texts), re.M)
    assert len(names) == len(set(names))
    found = {}
    for name in names:
        module, *rest = name.split(".")
        value = importlib.import_module(module)
        for at, each in enumerate(rest):
            if not hasattr(value, each):
                importlib.import_module(".".join([module, *rest[: at + 1]]))
            value = getattr(value, each)
        found[name] = value
    return found


def test_every_public_name_is_in_the_reference():
    """Every name in the `__all__` of a public module has an entry, under this name or another of the same object."""
    known = [id(value) for value in documented().values()]
    missing = [f"{module.__name__}.{name}" for module in MODULES for name in module.__all__
               if name not in ("__version__", "schedulers") and id(getattr(module, name)) not in known]  # fmt: skip
    assert missing == [], "add them to a page in docs/reference/api"


def test_the_pages_of_the_add_ons_are_made_from_the_classes():
    """One page for each add-on, one row in the table for authors, and none for another one."""
    pages = {path.name: text for path, text in addons.files().items() if path.parent == addons.FOLDER}
    table = (DOCS / "extending" / "addon_table.md").read_text(encoding="utf-8")
    assert {path.name for path in addons.FOLDER.iterdir()} == pages.keys(), "delete the page of what is no add-on"
    listed = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    for name in pages:
        cls = getattr(zae.addons, name.removesuffix(".md"))
        (row,) = [line for line in table.splitlines() if line.startswith(f"| [{cls.__name__}](")]
        assert row.split(" | ")[1].startswith(f"`{cls.layer}`")
        assert f"(addons/{name})" in listed


def test_the_landing_page_has_the_first_block_of_the_readme():
    """The quick start is included from the README, between headings that are there, and not copied."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    parts = re.findall(r":::\{include\} \.\./README\.md\n:start-after: \"?(.+?)\"?\n:end-before: \"?(.+?)\"?\n", text)
    assert len(parts) == 3
    assert all(README.count(f"\n{mark}\n") + README.startswith(f"{mark}\n") == 1 for pair in parts for mark in pair)
    shown = reduce(str.__add__, (README.partition(start)[2].partition(end)[0] for start, end in parts))
    assert FIRST in shown
    assert FIRST not in text


BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.M | re.S)
SHOWN = re.compile(r"^ *(?:>>>|\.\.\.) .*$", re.M)
"""A line of code with its prompt."""


def test_lines_of_code_are_not_too_long_for_a_page():
    """88 characters fit into a window of 1280 pixels; what a program prints may be longer, and wraps."""
    found = []
    for page in [*list_pages(), ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            indent, language, code = block.groups()
            if language in ("text", "mermaid"):
                continue
            for line in SHOWN.findall(code) if language == "pycon" else code.splitlines():
                length = len(line.removeprefix(indent))
                number = text.count("\n", 0, text.index(line, block.start())) + 1
                found.append((f"{page.relative_to(ROOT)}:{number}", length))
    assert len(found) > 1000
    assert [each for each in found if each[1] > 88] == []


LISTED = re.compile(r"^(?:\| |- )\[([^\]`]+)\]\(([^)#]+\.md)(?:#[^)]*)?\)(?= \||$)", re.M)
"""A link that is a whole first cell of a table, or a whole item of a list."""


def test_a_page_has_one_title_which_every_list_shows():
    """The sidebar shows the title, so a reader finds under the same words what a table or a list has named."""
    pages = [page for page in DOCS.rglob("*.md") if page != DOCS / "contributing.md" and "_build" not in page.parts]
    titles = [title_of(page) for page in pages]
    assert sorted(titles) == sorted(set(titles))
    listed = [
        (str(page.relative_to(DOCS)), text, title_of((page.parent / target).resolve()))
        for page in pages
        for text, target in LISTED.findall(page.read_text(encoding="utf-8"))
    ]
    assert len(listed) > 50
    for table in (ROOT / "README.md", DOCS / "index.md"):  # What you want to do, and first the page that is for it.
        links = re.findall(r"^\| .+? \| \[([^\]`]+)\]\(([^)#]+\.md)", table.read_text(encoding="utf-8"), re.M)
        assert len(links) > 10
        listed += [(table.name, text, title_of(table.parent / target)) for text, target in links]
    assert [found for found in listed if found[1] != found[2]] == []
