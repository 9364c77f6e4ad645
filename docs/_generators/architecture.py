"""The drawing of the packages in docs/explanation/architecture.md."""

from __future__ import annotations

from pathlib import Path

from _generators import DOCS, replace_between
from kit import imports

PAGE = DOCS / "explanation" / "architecture.md"
START = "<!-- drawing, by python docs/_generators -->"
END = "<!-- end of imports -->"


def drawing() -> str:
    """Return the drawing of the page: an arrow from each package to those it imports, but for what follows from others.

    The tools are one node. What BUILT_ON names, and what everybody may import, is left out.
    """
    edges: dict[str, set[str]] = {}
    for source, target in imports.ruled_edges():
        if target not in imports.EVERYBODY:
            edges.setdefault("tools" if source in imports.TOOLS else source, set()).add(target)

    def below(package: str) -> set[str]:
        return {each for direct in edges.get(package, ()) for each in (direct, *below(direct))}

    arrows = []
    for source in sorted(edges, key=["tools", *reversed(imports.RULES)].index):
        implied = {each for direct in edges[source] for each in below(direct)}
        arrows += [f"    {source} --> {target}" for target in sorted(edges[source] - implied)]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"])


def files() -> dict[Path, str]:
    """Return the text of the page with the present drawing."""
    return {PAGE: replace_between(PAGE.read_text(encoding="utf-8"), START, END, drawing())}
