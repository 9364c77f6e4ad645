"""The reference: what autodoc is told of our docstrings and names."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def shorten(app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    """Leave out of a class what the page of the add-on says above it: the text, the options and the example."""
    if what != "class" or app.env.docname.rpartition("/")[0] != "reference/addons":
        return
    titles = [at - 1 for at, line in enumerate(lines) if at and line and set(line) == {"-"}]
    kept = [
        lines[at:end]
        for at, end in zip(titles, [*titles[1:], len(lines)])
        if lines[at] not in ("Parameters", "Examples")
    ]
    lines[:] = [line for section in kept for line in section]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", shorten, priority=100)  # Before napoleon.
    return {"parallel_read_safe": True, "parallel_write_safe": True}
