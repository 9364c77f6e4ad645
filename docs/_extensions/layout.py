"""Mark what does not fit into a page as it is, so that _static/site.css can lay it out in another way."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LONG, SEVERAL, MANY = 88, 7, 12  # Columns of text, and of tables.
OPTIONS = ["option", "values", "default", "meaning"]
RANGE = re.compile(r"(?<=\d)-(?=\d)")
UNBROKEN_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def mark(app: Sphinx, tree: nodes.document) -> None:
    """Give classes to tables of options or with many columns, and to text with long lines; keep ranges on one line."""
    for block in tree.findall(nodes.literal_block):
        if block.get("language") == "text" and max(map(len, block.astext().splitlines()), default=0) > LONG:
            block["classes"].append("has-long-lines")
    for table in tree.findall(nodes.table):
        columns = len(list(table.findall(nodes.colspec)))
        if columns > SEVERAL:
            table["classes"].append("has-many-columns" if columns > MANY else "has-several-columns")
        heads = [entry.astext() for entry in table.findall(nodes.entry)][: len(OPTIONS)]
        if heads == OPTIONS:
            table["classes"].append("of-options")
        for text in [*table.findall(nodes.Text)]:
            if RANGE.search(text) and not isinstance(text.parent, nodes.literal):
                text.parent.replace(text, nodes.Text(RANGE.sub(UNBROKEN_HYPHEN, text)))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
