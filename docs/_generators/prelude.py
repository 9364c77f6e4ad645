"""The folded block at the top of pages, of docs/_prelude.py: data, model and task for the blocks below it."""

from __future__ import annotations

import re
from pathlib import Path

from _generators import DOCS

SUMMARY = "<details><summary>Data, model and task</summary>"
"""A page with this line has the block; the block ends with ``</details>``."""


def prelude() -> str:
    """Return the folded block, which the site and GitHub show as one line."""
    code = (DOCS / "_prelude.py").read_text(encoding="utf-8")
    return f"{SUMMARY}\n\n```python\n{code}```\n\n</details>"


def with_prelude(text: str) -> str:
    """Return the text of a page with the block as it is now."""
    return re.sub(f"^{re.escape(SUMMARY)}.*?</details>", lambda _: prelude(), text, flags=re.M | re.S)


def files() -> dict[Path, str]:
    """Return the text of each page that has the block."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    return {path: with_prelude(text) for path, text in pages.items() if SUMMARY in text}
