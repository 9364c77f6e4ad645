"""The tree of runs of a report: which run started from which, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zae.report.sections import section_html, swatch, text_of

__all__ = ["Branch", "tree_section"]


@dataclass
class Branch:
    """A run in the tree.

    Attributes
    ----------
    depth : int
        0 for a run that started from none of the others.
    name : str
        Its folder.
    facts, lines : list of str
        What stands beside the name, and below it.
    at : int or None
        The place of the run among those whose curves are on the page.
    """

    depth: int
    name: str
    facts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    at: int | None = None


def tree_section(branches: Sequence[Branch]) -> str:
    """Return the tree as nested lists; nothing where there are no branches."""
    if not branches:
        return ""
    parts, depth = list[str](), -1
    for each in branches:
        parts.append("<ul class='tree'>" if each.depth > depth else "</li></ul>" * (depth - each.depth) + "</li>")
        depth = each.depth
        facts = "".join(f" <small>{text_of(fact)}</small>" for fact in each.facts)
        lines = "".join(f"<p class='quiet'>{text_of(line)}</p>" for line in each.lines)
        mark = "" if each.at is None else swatch(each.at)
        parts.append(f"<li><div>{mark}<b>{text_of(each.name)}</b>{facts}</div>{lines}")
    parts.append("</li></ul>" * (depth + 1))
    return section_html("tree", "Tree of the runs", "".join(parts))
