"""The table of engines and features in docs/features/scale.md, and why an engine refuses an option.

The page on compatibility has the reason for each pair of add-ons that is refused.
"""

from __future__ import annotations

from pathlib import Path

from _generators import DOCS, replace_between
from kit.engine_table import FEATURES, TABLE, refusal

PAGE = DOCS / "features" / "scale.md"
BEGIN = "<!-- engines, by python docs/_generators -->"
END = "<!-- end of engines -->"


def table() -> str:
    """Return the table and the reasons of what another page does not list."""
    lines = ["| | " + " | ".join(FEATURES) + " |", "|---|" + "---|" * len(FEATURES)]
    refusals: list[str] = []
    for row in TABLE.values():
        texts = []
        for name in FEATURES:
            cell = row.cells[name]
            if cell.is_refused:
                texts.append(_refused(refusal(row, cell), refusals))
            else:
                texts.append(cell.text)
        lines.append(f"| {row.title} | " + " | ".join(texts) + " |")
    return "\n".join([*lines, "", *(f"{index}. {why}" for index, why in enumerate(refusals, start=1))])


def _refused(why: str, refusals: list[str]) -> str:
    """Return a cell: no, with the number of its reason where the page on compatibility does not have it."""
    if " do not go together: " in why:
        return "no"
    if why not in refusals:
        refusals.append(why)
    return f"no ({refusals.index(why) + 1})"


def files() -> dict[Path, str]:
    """Return the text of the page with the present table."""
    return {PAGE: replace_between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table())}
