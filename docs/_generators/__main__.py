"""Write the generated pages: ``python docs/_generators [NAME [EXAMPLE...]]``.

Without arguments all pages are written. NAME is one of the modules beside this one; ``gallery`` and ``pictures`` then
run their examples first, those that are named or all.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DOCS), str(DOCS.parent / "tests")]

import torch  # noqa: E402

from _generators import GENERATORS  # noqa: E402


def main(chosen: list[str], examples: list[str]) -> None:
    """Write the pages of the chosen generators, or of all."""
    torch.set_num_threads(1)
    for name in chosen or GENERATORS:
        generator = import_module(f"_generators.{name}")
        if chosen and hasattr(generator, "record"):
            generator.record(*examples)
        for path, text in generator.files().items():
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:2], sys.argv[2:])
