"""Mark what does not fit into a page as it is, so that _static/site.css can lay it out in another way."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LONG, MANY = 88, 12  # Columns of text, and of a table.


def mark(app: Sphinx, tree: nodes.document) -> None:
    """Give classes to tables with many columns, and to text with long lines."""
    for block in tree.findall(nodes.literal_block):
        if block.get("language") == "text" and max(map(len, block.astext().splitlines()), default=0) > LONG:
            block["classes"].append("has-long-lines")
    for table in tree.findall(nodes.table):
        if len(list(table.findall(nodes.colspec))) > MANY:
            table["classes"].append("has-many-columns")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
