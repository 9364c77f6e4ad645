"""What writes the generated pages of the documentation: ``python docs/_generators`` writes them all.

Each module has ``files()``, the text of each file that it makes. The pages of the gallery and the pictures are made of
stored runs; ``record(*names)`` of these modules runs their examples anew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent

GENERATORS = ("addons", "architecture", "composition", "fits", "gallery", "options", "pictures", "prelude", "scale")
"""The modules beside this one."""


WIDTH = 88
"""The longest line of a block."""


def block(code: str) -> str:
    """Return a block of Python, formatted so that no line is wider than a page."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(WIDTH), "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=True)
    return f"```python\n{done.stdout}```"


def title_of(page: Path) -> str:
    """Return the title of a page, by which every list names it."""
    return next(line.removeprefix("# ").strip() for line in page.open(encoding="utf-8") if line.startswith("# "))


def replace_between(text: str, begin: str, end: str, new: str) -> str:
    """Return the text of a page with another part between two marks."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{new}\n\n{end}{after}"
