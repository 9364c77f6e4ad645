"""The drawing of the packages in docs/explanation/architecture.md, and the table of what each may import."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from _generators import DOCS, replace_between
from kit import imports

PAGE = DOCS / "explanation" / "architecture.md"
DRAWING = "<!-- drawing, by python docs/_generators -->"
TABLE = "<!-- table, by python docs/_generators -->"
END = "<!-- end of imports -->"


def purpose_of(package: str) -> str:
    """Return the first sentence of a docstring."""
    text = ast.get_docstring(ast.parse(imports.sources()[f"zae.{package}"].read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".")


def table() -> str:
    """Return the table of the page."""
    present = {imports.package_of(name) for name in imports.sources()} - {"zae", "__main__"}
    rows = ["| package | what it is for | may import | is built on |", "|---|---|---|---|"]
    for package in (name for name in imports.RULES if name in present):
        is_free = imports.RULES[package] == imports.CORE
        may_import = "the core" if is_free else _names(imports.RULES[package])
        rows.append(f"| `{package}` | {purpose_of(package)} | {may_import} | {_built_on(package)} |")
    return "\n".join(rows)


def _built_on(package: str) -> str:
    """Return the cell for what BUILT_ON says of a package, or of features in it, but for what is within the package."""
    if package == "cli":
        return "the tools"
    own = _names(imports.BUILT_ON.get(package, frozenset()))
    inside = []
    for feature, needs in imports.BUILT_ON.items():
        others = [need for need in needs if not need.startswith(f"{package}.")]
        if feature.startswith(f"{package}.") and others:
            inside.append(f"`{feature}` on {_names(others)}")
    return "; ".join([own] * bool(own) + inside)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


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
    """Return the text of the page with the present drawing and the present table."""
    text = PAGE.read_text(encoding="utf-8")
    text = replace_between(text, DRAWING, END, drawing())
    return {PAGE: replace_between(text, TABLE, END, table())}
