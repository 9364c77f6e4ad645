"""The source of the package as syntax trees, and the private names of other packages in it."""

from __future__ import annotations

import ast
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("zae", "addons")


class Source:
    """One module: its name, its text and its tree."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT)
        parts = self.path.with_suffix("").parts
        parts = ("zae", *parts) if parts[0] == "addons" else parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @cached_property
    def type_only(self) -> set[ast.AST]:
        """The nodes under ``if TYPE_CHECKING``."""
        blocks = [n for n in ast.walk(self.tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        return {node for block in blocks for part in block.body for node in ast.walk(part)}


def read_sources() -> list[Source]:
    """Read every module of the package."""
    return [Source(path) for path in source_paths()]


def source_paths() -> list[Path]:
    """List the files of the package."""
    return [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py")) if not is_linked(path)]


def is_linked(path: Path) -> bool:
    """Whether a path leads through a symbolic link, so that its file is listed elsewhere too."""
    return any(each.is_symlink() for each in path.parents if ROOT in each.parents)


def own_private_names(sources: list[Source]) -> set[str]:
    """Return the private names that our own code defines: functions, classes, variables and attributes."""
    names: set[str] = set()
    for node in (n for each in sources for n in ast.walk(each.tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if is_private(name)}


def foreign_private_names(source: Source, own: set[str]) -> tuple[int, int]:
    """Count the private names of other packages in a module, and those that are looked up as it is imported."""
    hits: list[ast.AST] = []
    imported = _foreign_imports(source)
    for node in (n for n in ast.walk(source.tree) if n not in source.type_only):
        if isinstance(node, ast.ImportFrom) and not (node.module or "zae").startswith(("zae", "__future__")):
            hits += [node for a in node.names if is_private(a.name) or "._" in f".{node.module}"]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            hits += [node] * (node.attr not in own or _root_of(node) in imported)
    inside = {n for f in ast.walk(source.tree) if isinstance(f, ast.FunctionDef) for s in f.body for n in ast.walk(s)}
    return len(hits), sum(1 for each in hits if each not in inside)


def _foreign_imports(source: Source) -> set[str]:
    """Return the names under which a module has imported other packages, and what is in them."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).partition(".")[0] for a in node.names if not a.name.startswith("zae")}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "zae").startswith(("zae", "__future__")):
            found |= {a.asname or a.name for a in node.names}
    return found


def _root_of(node: ast.AST) -> str | None:
    """Return the name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def is_private(name: str) -> bool:
    """Whether a name is private: the documented ones of Python that begin with an underscore are not."""
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name not in ("_replace", "_asdict", "_exit", "_SimpleCData")
    )
