"""What a page in a checkout has and a site has not: links to files outside of docs/, HTML, mermaid."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

LINK = re.compile(r"\[([^\]\[]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img src="([^"]+)" width="(\d+)"\s+alt="([^"]+)">\s*</picture>'
)
SIDES = re.compile(
    r"<table><tr><th>([^<]+)</th><th>([^<]+)</th></tr><tr><td>\n(.*?)\n</td><td>\n(.*?)\n</td></tr></table>", re.S
)
RST = re.compile(r"^:::(\{eval-rst\}\n.*?\n):::$", re.S | re.M)
PAGES = {"README.md": "/index.md", "CONTRIBUTING.md": "/contributing.md"}
"""Files at the root of the repository that are pages of the site, under other names."""


def rewrite(app: Sphinx, docname: str, source: list[str]) -> None:
    """Rewrite the text of one page for the site."""
    root, folder = Path(app.srcdir).parent, Path(app.srcdir, docname).parent

    def link(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / found[2]))
        if target.is_relative_to(app.srcdir):
            return found[0]
        if target.is_dir() or (target.suffix == ".md" and str(target.relative_to(root)) not in PAGES):
            path = str(target.relative_to(root))
            return f"`{path}`" if found[1].strip("`") == path else f"{found[1]} (`{path}`)"
        page = PAGES.get(str(target.relative_to(root)))
        return f"[{found[1]}]({page}{found[3] or ''})" if page else found[0]  # A file is offered as a download.

    text = PICTURE.sub(lambda found: picture(*found.groups()), source[0])
    text = SIDES.sub(r"**\1**\n\3\n**\2**\n\4", text)  # Code beside code is wider than a page: one below the other.
    text = RST.sub(r"```\1```", text)  # MyST takes this directive between backquotes alone.
    source[0] = LINK.sub(link, text)


def picture(dark: str, light: str, width: str, alternative: str) -> str:
    """Return two images, of which the theme shows the one that fits."""
    alternative = " ".join(alternative.split())
    shown = {"only-light": light, "only-dark": dark}
    return "\n".join(
        f":::{{image}} {path}\n:class: {name}\n:width: {width}px\n:alt: {alternative}\n:::\n"
        for name, path in shown.items()
    )


class Mermaid(SphinxDirective):
    """Show a graph as lines: a drawing would need scripts of another site."""

    has_content: ClassVar[bool] = True

    def run(self) -> Sequence[nodes.Node]:
        below: dict[str, list[str]] = {}
        for line in self.content:
            start, arrow, end = line.partition(" --> ")
            if arrow:
                below.setdefault(start.strip(), []).append(end.strip())
        width = max(map(len, below))
        text = "\n".join(f"{start:<{width}} → {', '.join(ends)}" for start, ends in below.items())
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", rewrite)
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
