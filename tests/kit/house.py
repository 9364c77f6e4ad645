"""Measure the layout of the source: python tests/kit/house.py prints the figures, --write puts them on the page.

Everything is read from the syntax trees, but for the bytes that a resume reads, which are counted while one runs.
Imports inside functions count; those under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
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

    @property
    def is_add_on(self) -> bool:
        return self.path.parts[0] == "addons"

    @cached_property
    def type_only(self) -> set[ast.AST]:
        """The nodes under ``if TYPE_CHECKING``."""
        blocks = [n for n in ast.walk(self.tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        return {node for block in blocks for part in block.body for node in ast.walk(part)}

    @property
    def limit(self) -> int:
        """The most lines of code that this file may have."""
        return 250 if self.is_add_on else 400

    @cached_property
    def code_lines(self) -> int:
        """Lines that are neither blank, nor a comment, nor part of a docstring; imports count."""
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [n for n in ast.walk(self.tree) if isinstance(n, documented)]
        docs = [n.body[0] for n in nodes if ast.get_docstring(n) is not None]
        held = {line for doc in docs for line in range(doc.lineno, (doc.end_lineno or doc.lineno) + 1)}
        lines = enumerate(self.text.splitlines(), start=1)
        return sum(1 for n, line in lines if line.strip() and not line.lstrip().startswith("#") and n not in held)

    def imports(self) -> Iterator[str]:
        """Yield the modules of ours that this one imports."""
        for node in ast.walk(self.tree):
            if node in self.type_only:
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_sources() -> list[Source]:
    """Read every module of the package."""
    return [Source(path) for path in source_paths()]


def source_paths() -> list[Path]:
    """List the files of the package."""
    return [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py")) if not is_linked(path)]


def is_linked(path: Path) -> bool:
    """Whether a path leads through a symbolic link, so that its file is listed elsewhere too."""
    return any(each.is_symlink() for each in path.parents if ROOT in each.parents)


def graph_of(sources: list[Source]) -> dict[str, set[str]]:
    """Map each module to those that it imports; a package itself only lists names, and is left out."""
    names = {each.name for each in sources if each.path.name != "__init__.py"}
    modules = [each for each in sources if each.name in names]
    return {each.name: names.intersection(each.imports()) - {each.name} for each in modules}


def depth_of(graph: dict[str, set[str]]) -> int:
    """Return the number of modules in the longest chain of imports; modules of one circle count once."""
    known: dict[str, int] = {}

    def visit(name: str, above: frozenset[str]) -> int:
        if name not in known:
            below = [visit(each, above | {name}) for each in graph[name] if each not in above]
            known[name] = 1 + max(below, default=0)
        return known[name]

    return max(visit(name, frozenset()) for name in graph)


def circles_of(graph: dict[str, set[str]]) -> list[str]:
    """List the packages (folders of zae) that import each other, directly or not."""

    def package(name: str) -> str:
        parts = name.split(".")
        return parts[1] if len(parts) > 2 else name

    edges: dict[str, set[str]] = {}
    for name, imported in graph.items():
        edges.setdefault(package(name), set()).update(package(each) for each in imported)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for each in edges.get(waiting.pop(), set()) - seen - {start if not seen else ""}:
                seen.add(each)
                waiting.append(each)
        return seen

    others = {name: {each for each in reached(name) if each != name} for name in edges}
    return sorted(name for name in edges if any(name in others.get(each, ()) for each in others[name]))


def class_named(sources: list[Source], name: str) -> ast.ClassDef:
    """Return the tree of a class."""
    found = [n for each in sources for n in each.tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return found[0]


def attributes_of(kind: ast.ClassDef) -> set[str]:
    """Return the names that the methods of a class assign on ``self``."""
    stores = [n for n in ast.walk(kind) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}


def outside_uses(sources: list[Source]) -> tuple[Counter[str], Counter[str]]:
    """Count where a private name of Trainer is read, and written, outside of the file that defines it."""
    trainer = class_named(sources, "Trainer")
    methods = {n.name for n in trainer.body if isinstance(n, ast.FunctionDef)}
    private = {n for n in attributes_of(trainer) | methods if n.startswith("_") and not n.startswith("__")}
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for source in sources:
        if source.name == "zae.trainer":
            continue
        own = {n.attr for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Attribute) and node.attr in private):
                continue
            by_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if by_self and (not source.is_add_on and node.attr in own):
                continue  # The name is that of a class of this file.
            (read if isinstance(node.ctx, ast.Load) else written)[str(source.path)] += 1
    return read, written


def takes_trainer(sources: list[Source]) -> int:
    """Count the functions with a parameter called ``trainer``."""
    functions = [n for each in sources for n in ast.walk(each.tree) if isinstance(n, ast.FunctionDef)]
    return sum("trainer" in {a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)} for f in functions)


def step_copies(sources: list[Source]) -> list[str]:
    """List the functions that call ``train_step`` and then ``backward``.

    An override of ``train_step`` that calls that of its base is not one. Nor is the step that CompileAddon traces: the
    only copy calls it in the place of both.
    """
    found = []
    for source in sources:
        for function in (n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef)):
            calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
            if {"train_step", "backward"} <= {f.attr for f in calls if isinstance(f, ast.Attribute)}:
                found.append(f"{source.path}:{function.name}")
    return found


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
    return name.startswith("_") and not name.startswith("__") and name not in ("_replace", "_asdict", "_exit")


def bytes_read_by_resume() -> float:
    """Return the bytes that a resume reads from its checkpoint, as a multiple of the checkpoint's size."""
    import torch

    from zae import Trainer
    from zae.addons import StateManagerAddon

    class Task(Trainer):
        def train_step(self, batch):  # type: ignore[no-untyped-def]
            return {"loss": self.model(batch).square().mean()}

        test_step = train_step

    def make(folder: str) -> Trainer:
        model = torch.nn.Linear(1024, 4096)
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"save_path": folder, "resume": "auto", "log_bar": False}
        return Task.add_on(StateManagerAddon)(model, "cpu", optimizer=optimizer, **options)

    with tempfile.TemporaryDirectory() as folder:
        first = make(folder)
        first.run(1, [torch.ones(2, 1024)] * 2)
        size = sum(each.stat().st_size for each in Path(folder).glob("step-*/*"))
        second = make(folder)
        before = characters_read()
        second.setup()
        read = characters_read() - before
        second.teardown()
    return read / size


def characters_read() -> int:
    """Return what this process has read so far, as the kernel counts it."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def measure() -> list[tuple[str, str]]:
    """Return the rows of the table."""
    sources = read_sources()
    files = [each.path for each in sources if not each.is_add_on]
    folders = Counter(path.parent for path in files)
    folder, most = folders.most_common(1)[0]
    graph = graph_of(sources)
    read, written = outside_uses(sources)
    copies = step_copies(sources)
    own = own_private_names(sources)
    private = {each.path: foreign_private_names(each, own) for each in sources}
    lengths = {each.path: len(each.text.splitlines()) for each in sources}
    long = [p for p, count in lengths.items() if count > 500]
    dense = [e.path for e in sources if e.code_lines > e.limit]
    by_add_on = sum(count for path, count in (read + written).items() if path.startswith("addons"))
    return [
        ("source files in one folder, at most", f"{most} ({folder})"),
        ("import depth; packages in circles", f"{depth_of(graph)}; {len(circles_of(graph))}"),
        ("attributes of Trainer; of StateManagerAddon", "; ".join(
            str(len(attributes_of(class_named(sources, name)))) for name in ("Trainer", "StateManagerAddon"))),
        ("private names of Trainer read from outside; written; by add-ons",
         f"{read.total()}; {written.total()}; {by_add_on}"),
        ("functions that take `trainer`", str(takes_trainer(sources))),
        ("copies of a step", f"{len(copies)} ({', '.join(copies)})"),
        ("files with private names of other packages; at import time",
         f"{sum(1 for n, _ in private.values() if n)}; {sum(1 for _, n in private.values() if n)}"),
        ("files over 500 lines; over 400 (add-ons: 250) of code", f"{len(long)}; {len(dense)}"),
        ("bytes read by a resume, of the checkpoint's", f"{bytes_read_by_resume():.2f}"),
        ("lines of zae/ and addons/", f"{sum(lengths.values()):,}"),
    ]  # fmt: skip


def with_figures(text: str, rows: list[tuple[str, str]]) -> str:
    """Return the text of docs/explanation/architecture.md with these rows as its table of figures."""
    begin, end = "<!-- figures -->", "<!-- end of figures -->"
    table = "\n".join(["| measure | now |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"


def main() -> None:
    rows = measure()
    width = max(len(name) for name, _ in rows)
    sys.stdout.write("\n".join(f"{name:<{width}}  {value}" for name, value in rows) + "\n")
    if "--write" in sys.argv:
        page = ROOT / "docs" / "explanation" / "architecture.md"
        page.write_text(with_figures(page.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
