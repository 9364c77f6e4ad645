"""docs/reference/fits.md, made from the tests in tests/fits."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from _generators import DOCS, ROOT

TESTS = ROOT / "tests" / "fits"
INTRODUCTION = """# Tested libraries

This page is generated from the tests in `tests/fits` by `python docs/_generators`; a test fails if it is out of date.
Each block is a part of the test that is named above it, and each test runs the real library, with a tiny configuration
and without a download. None of them needs an adapter class: a model, an optimizer, a schedule, a loader or a metric of
the library goes where one of PyTorch would.

The versions are those of `constraints.txt`, with which the tests were run. A library whose tests need the extra `fits`
is tried by `python -m pytest -m fits`, after `pip install -c constraints.txt -e ".[test,fits]"`, and in the same way
one of the extra `vision`; the others are tried by every run of the tests. timm needs torchvision, which has to be built
for the installed torch: the one on PyPI does not fit the CPU build of torch, and then `torchmetrics` and `transformers`
cannot be imported either.
"""


@dataclass(frozen=True)
class Fit:
    """One test, and the lines of it that show how the library is used."""

    library: str
    test: str
    file: str
    tried: str
    use: str
    extra: str


def read_fits() -> list[Fit]:
    """Return the fits in all test files, by library."""
    found = [fit for path in sorted(TESTS.glob("test_fit_*.py")) for fit in _fits_of(path)]
    return sorted(found, key=lambda fit: fit.library.lower())


def _fits_of(path: Path) -> list[Fit]:
    """Return the fits of one file: each test has one block between ``# begin: LIBRARY`` and ``# end``."""
    text, found = path.read_text(encoding="utf-8"), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            source = "\n".join(text.splitlines()[node.lineno : node.end_lineno])
            ((library, use),) = re.findall(r"^ +# begin: (\S+)\n(.*?)^ +# end$", source, re.M | re.S)
            use = re.sub(r"  # noqa: \w+", "", textwrap.dedent(use)).strip()
            marks = {ast.unparse(each).removeprefix("pytest.mark.") for each in node.decorator_list}
            extra = next((each for each in ("fits", "vision") if each in marks), "test")
            tried = " ".join((ast.get_docstring(node) or "").split())
            found.append(Fit(library, node.name, path.relative_to(ROOT).as_posix(), tried, use, extra))
    return found


def read_versions() -> dict[str, str]:
    """Return the versions in constraints.txt, by the name of the distribution in lower case."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}


def page() -> str:
    """Return the text of docs/reference/fits.md."""
    fits, versions = read_fits(), read_versions()
    parts = [INTRODUCTION, "| library | version | what was tried | extra |\n|---|---|---|---|"]
    for fit in fits:
        cells = (f"[{fit.library}](#{fit.library.lower()})", versions[fit.library.lower()], fit.tried, f"`{fit.extra}`")
        parts.append("| " + " | ".join(cells) + " |")
    for fit in fits:
        parts += [f"\n## {fit.library}\n", f"{fit.tried} (`{fit.test}` in `{fit.file}`)\n"]
        parts += [f"```python\n{fit.use}\n```"]
    return "\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    """Return the text of the page."""
    return {DOCS / "reference" / "fits.md": page()}
