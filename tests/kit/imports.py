"""Who imports whom in the source, and the table of who may: ``python tests/kit/imports.py`` draws architecture.md.

Imports inside functions count; those under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
from collections.abc import Container
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
HOUSE = "<!-- house: python tests/kit/imports.py -->"
BEGIN, END = "<!-- imports: python tests/kit/imports.py -->", "<!-- end of imports -->"

EVERYBODY = frozenset({"errors", "metrics", "optimizers", "schedulers"})
_BELOW = frozenset({"checkpoint", "common", "compose", "data", "display", "loop", "optim", "parts"})
RULES: dict[str, frozenset[str] | None] = {
    "errors": frozenset(),
    "metrics": frozenset(),
    "optimizers": frozenset(),
    "schedulers": frozenset(),
    "common": frozenset(),
    "display": frozenset(),
    "parts": frozenset({"common"}),
    "compose": frozenset(),
    "optim": frozenset({"common"}),
    "distributed": frozenset({"common", "optim"}),
    "checkpoint": frozenset({"common"}),
    "data": frozenset({"common"}),
    "loop": _BELOW - {"loop"},
    "preview": _BELOW - {"checkpoint"},
    "report": frozenset({"checkpoint", "common", "display"}),
    "trainer": _BELOW | {"preview"},
    "addon": _BELOW | {"preview", "trainer"},
    "testing": frozenset({"addon", "common", "compose", "trainer"}),
    "cli": None,
    "addons": _BELOW | {"addon", "distributed", "preview", "report", "trainer"},
    "search": _BELOW | {"addon", "distributed", "preview", "report", "trainer"},
    "tuning": _BELOW | {"addon", "distributed", "preview", "report", "trainer"},
}
"""What each package, or module beside them, may import: these, EVERYBODY and itself; None is anything."""

LAST = frozenset({"addons", "cli", "search", "testing", "tuning"})
"""What no other package may import."""

KNOWN: dict[tuple[str, str], str] = {
    ("zae.tuning.batch_size", "zae.addons.accumulation"): "find_batch_size returns the option of this add-on.",
    ("zae.addons.report", "zae.cli.doctor"): "The report examines the checkpoints that it lists.",
    ("zae.addons.huggingface.addon", "zae.search"): "hyperparameter_search() is a search.",
}
"""The edges that break the rules today, by the names of their modules, each with the reason."""

ENGINES = ("accelerate", "deepspeed", "fsdp", "mpu", "pipeline", "tensor_parallel")
"""The features that are engines: they share the modules `SHARED` of the ranks."""

SHARED = ("distributed", "replicated", "sharded")
"""Modules of addons/ that are no feature of their own: what engines have in common."""

BUILT_ON: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ENGINES, SHARED),
    "activation_offload": ("gradient_checkpointing",),
    "fairseq2": ("torch_metrics",),
    "lightning": ("torch_metrics",),
}
"""Which features of addons/ import others, and cannot be there without them."""

COMPOSES = ("fairseq2", "huggingface")
"""The features that make a trainer of the arguments of another library, with the add-ons that these ask for by name."""


@cache
def features() -> dict[str, list[str]]:
    """Map each feature, a file or a folder of addons/, to its modules."""
    found: dict[str, list[str]] = {}
    for module in sources():
        if module.startswith("zae.addons."):
            found.setdefault(module.split(".")[2], []).append(module)
    return {name: modules for name, modules in found.items() if name not in SHARED}


def feature_of(module: str) -> str | None:
    """Return the file or folder of addons/ that a module is of."""
    return module.split(".")[2] if module.startswith("zae.addons.") else None


def imports_among_features() -> dict[str, set[str]]:
    """Map each file or folder of addons/ to the others that it imports."""
    edges: dict[str, set[str]] = {}
    for module, others in graph().items():
        own = feature_of(module)
        if own is not None:
            edges.setdefault(own, set()).update(filter(None, map(feature_of, others)))
    return {own: others - {own} for own, others in edges.items() if others - {own}}


@cache
def sources() -> dict[str, Path]:
    """Map the import name of each module of the package to its file."""
    found = {}
    for folder in ("zae", "addons"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = ("zae", *parts) if folder == "addons" else parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    """List what a file imports, and whether that happens as it is itself imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped, late = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(each) for part in node.body for each in ast.walk(part))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            late.update(map(id, ast.walk(node)))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if id(node) not in skipped:
            found += [(name, id(node) not in late) for name in names]
    return found


def resolve(name: str, known: Container[str]) -> str | None:
    """Return the module that an import of a name loads: the name itself, or what it is a part of."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def graph(*, at_import: bool = False) -> dict[str, set[str]]:
    """Map each module to the modules that it imports, or only to those that are imported together with it."""
    known = sources()
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        found = {resolve(name, known) for name, now in imports_of(path) if now or not at_import}
        edges[module] = {each for each in found if each is not None} - {module}
    return edges


def package_of(module: str) -> str:
    """Return the package of a module, or the module's own name where it lies beside the packages."""
    return "zae" if module == "zae" else module.split(".")[1]


def package_edges() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Map each pair of packages to the imports of modules behind it; the package zae itself only lists names."""
    edges: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for module, others in graph().items():
        for other in sorted(others):
            pair = package_of(module), package_of(other)
            if pair[0] != pair[1] and "zae" not in pair and "__main__" not in pair and not is_bare_package(other):
                edges.setdefault(pair, []).append((module, other))
    return edges


@cache
def is_bare_package(module: str) -> bool:
    """Whether a module is the ``__init__`` of a package, with a docstring and nothing else."""
    path = sources()[module]
    return path.name == "__init__.py" and len(ast.parse(path.read_text(encoding="utf-8")).body) == 1


def is_allowed(module: str, other: str) -> bool:
    """Whether a module may import another one of another package."""
    package, target = package_of(module), package_of(other)
    allowed = RULES[package]
    if allowed is None:
        return True
    return target in allowed | EVERYBODY or other.removeprefix("zae.") in allowed


def broken() -> set[tuple[str, str]]:
    """Return the imports that the rules do not allow."""
    return {pair for pairs in package_edges().values() for pair in pairs if not is_allowed(*pair)}


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Return the names that can be reached from themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    return sorted(name for name in edges if name in reached(name))


def purpose_of(package: str) -> str:
    """Return the first sentence of a docstring."""
    text = ast.get_docstring(ast.parse(sources()[f"zae.{package}"].read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".")


def drawing() -> str:
    """Return the table of the page."""
    edges = package_edges()
    present = {package_of(name) for name in sources()} - {"zae", "__main__"}
    rows = ["| package | what it is for | imports | may also import |", "|---|---|---|---|"]
    for package in (name for name in RULES if name in present):
        used = {target for source, target in edges if source == package}
        allowed = RULES[package]
        more = {"anything"} if allowed is None else allowed - used
        if allowed and any("." in name for name in allowed):
            inner = {name for name in allowed if "." in name}
            used = {next((name for name in inner if name.split(".")[0] == each), each) for each in used}
            more = allowed - used
        shown = [", ".join(f"`{name}`" for name in sorted(names - EVERYBODY)) for names in (used, more)]
        rows.append(
            f"| `{package}` | {purpose_of(package)} | {shown[0]} | {shown[1].replace('`anything`', 'anything')} |"
        )
    return "\n".join(rows)


def house() -> str:
    """Return the drawing of the page: an arrow from each package to those it imports, but for what follows from others.

    The exceptions of KNOWN and what everybody may import are left out.
    """
    edges: dict[str, set[str]] = {}
    for (source, target), pairs in package_edges().items():
        if target not in EVERYBODY and not set(pairs) <= set(KNOWN):
            edges.setdefault(source, set()).add(target)

    def below(package: str) -> set[str]:
        return {each for direct in edges.get(package, ()) for each in (direct, *below(direct))}

    arrows = []
    for source in sorted(edges, key=list(RULES).index, reverse=True):
        implied = {each for direct in edges[source] for each in below(direct)}
        arrows += [f"    {source} --> {target}" for target in sorted(edges[source] - implied)]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"])


def with_drawing(text: str) -> str:
    """Return the text of the page with the present drawing and the present table."""
    for begin, drawn in ((HOUSE, house()), (BEGIN, drawing())):
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{drawn}\n\n{END}{rest.partition(END)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_drawing(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
