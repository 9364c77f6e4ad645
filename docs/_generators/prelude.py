"""The folded block at the top of pages: what the blocks below it need of docs/_prelude.py (data, model and task)."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from _generators import DOCS

SUMMARY = "<details><summary>Data, model and task</summary>"
"""A page with this line has the block; the block ends with ``</details>``."""


def names(code: str) -> set[str]:
    """Return the names that code reads."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def needed(code: str, used: set[str]) -> str:
    """Return those statements of the block that give a page the names it uses."""
    lines, kept, end = code.splitlines(keepends=True), [], {}
    statements = ast.parse(code).body
    for before, statement in zip([None, *statements], statements):
        end[statement] = before.end_lineno if before else 0
    for statement in reversed(statements):
        text = "".join(lines[end[statement] : statement.end_lineno])
        if isinstance(statement, ast.Expr) or bound(statement) & used:
            kept.append(text)
            used = used | names(text)
    return "".join(reversed(kept))


def bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement gives a value."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return {statement.name}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def blocks(text: str) -> Iterator[str]:
    """Yield the code of a page, that of sessions without prompts."""
    for language, code in re.findall(r"^ *```(python|pycon)\n(.*?)^ *```$", text, flags=re.M | re.S):
        code = textwrap.dedent(code)
        if language == "pycon":
            code = "\n".join(line[4:] for line in code.splitlines() if line.startswith((">>> ", "... ")))
        yield code


def with_prelude(text: str) -> str:
    """Return the text of a page with what it needs of the block as it is now."""
    code = (DOCS / "_prelude.py").read_text(encoding="utf-8")
    folded = re.compile(f"^{re.escape(SUMMARY)}.*?</details>", flags=re.M | re.S)
    used = set().union(*map(names, blocks(folded.sub("", text))))
    prelude = f"{SUMMARY}\n\n```python\n{needed(code, used)}```\n\n</details>"
    return folded.sub(lambda _: prelude, text)


def files() -> dict[Path, str]:
    """Return the text of each page that has the block."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    return {path: with_prelude(text) for path, text in pages.items() if SUMMARY in text}
