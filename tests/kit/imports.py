"""Who imports whom in the source, and the table of who may.

Imports inside functions count; those under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Container
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OPTIONAL = (
    *("accelerate", "deepspeed", "matplotlib", "mlflow", "neptune", "optuna", "pandas", "peft", "sklearn"),
    *("tensorboard", "torch.utils.tensorboard", "torchmetrics", "trackio", "transformers", "wandb"),
)
"""The packages of the extras, which nothing imports before they are used."""

EVERYBODY = frozenset(
    {"arguments", "errors", "lazy", "metrics", "null_context", "random_state", "schedulers", "torch_private"}
)
_BELOW = frozenset(
    {"checkpoint", "compose", "data", "device", "display", "loop", "model", "optim", "parts", "record"}
    | {"user_state", "values"}
)
CORE = _BELOW | {"addon", "description", "distributed", "trainer"}
RULES: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "arguments": frozenset(),
    "lazy": frozenset(),
    "metrics": frozenset(),
    "null_context": frozenset(),
    "schedulers": frozenset(),
    "torch_private": frozenset(),
    "random_state": frozenset(),
    "values": frozenset(),
    "device": frozenset({"values"}),
    "model": frozenset({"values"}),
    "display": frozenset(),
    "compose": frozenset(),
    "optim": frozenset({"model", "values"}),
    "parts": frozenset({"model", "optim"}),
    "distributed": frozenset({"device", "model", "optim", "parts", "values"}),
    "checkpoint": frozenset({"values"}),
    "user_state": frozenset({"values"}),
    "data": frozenset({"user_state", "values"}),
    "record": frozenset({"compose", "data", "user_state", "values"}),
    "loop": _BELOW - {"loop"},
    "description": _BELOW,
    "trainer": _BELOW | {"description"},
    "addon": _BELOW | {"description", "trainer"},
    "addons": CORE,
    "explain": CORE,
    "plan": CORE,
    "report": CORE,
    "diff": CORE,
    "doctor": CORE,
    "testing": CORE,
    "search": CORE,
    "tuning": CORE,
    "cli": CORE,
}
"""What each package, or module beside them, may import: these, EVERYBODY and itself."""

TOOLS = frozenset(list(RULES)[list(RULES).index("explain") :])
"""What can be removed, as each add-on can: nothing else needs it to be imported."""

LAST = TOOLS | {"addons"}
"""What no other package may import, but for what BUILT_ON names."""

BUILT_ON: dict[str, frozenset[str]] = {
    "trainer": frozenset({"explain", "plan"}),
    "addons.accelerate": frozenset({"addons.ddp", "addons.distributed"}),
    "addons.deepspeed": frozenset({"addons.distributed"}),
    "addons.distributed": frozenset({"addons.data_shards"}),
    "addons.fsdp": frozenset({"addons.distributed"}),
    "addons.huggingface": frozenset({"search"}),
    "addons.mpu": frozenset({"addons.ddp", "addons.distributed"}),
    "addons.pipeline": frozenset({"addons.distributed"}),
    "addons.tensor_parallel": frozenset({"addons.distributed"}),
    "report": frozenset({"doctor"}),
    "doctor": frozenset({"addons.state_manager"}),
    "tuning.batch_size": frozenset({"addons.accumulation"}),
    "cli.consolidate": frozenset({"doctor"}),
    "cli.diff": frozenset({"diff"}),
    "cli.doctor": frozenset({"doctor"}),
    "cli.report": frozenset({"report"}),
}
"""What is built on a tool, or on another feature of addons/, without which it does not work.

The core and the add-ons import a tool where they call it, so that they can be imported without it.
"""

IN_ONE_METHOD = ("trainer", "addons.huggingface")
"""Of these only a method needs the tool, `explain`, `plan` or `hyperparameter_search`; all else works without it."""

COMPOSES = ("fairseq2", "huggingface")
"""The features that make a trainer of the arguments of another library, with the add-ons that these ask for by name."""


@cache
def features() -> set[str]:
    """Return the features, each a file or a folder of addons/."""
    return set(filter(None, map(feature_of, sources())))


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


NAMES_ADD_ONS = ("zae.compose.hints", "zae.tuning.batch_size")
"""Where zae/ itself names add-ons in its code: tools that add some to a script, hints on names of other libraries."""


@cache
def classes_of_features() -> dict[str, str]:
    """Map the name of each add-on of addons/ to its file or folder."""
    found = {}
    for module, path in sources().items():
        feature = feature_of(module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if feature is not None and isinstance(node, ast.ClassDef) and node.name.endswith("Addon"):
                found[node.name] = feature
    return found


def named_in(source: str) -> set[str]:
    """Return the add-ons that code names: classes, and texts that are the name of one and nothing else.

    A name within a message, a docstring or a comment is for its reader.
    """
    known, found = classes_of_features(), set[str]()
    for node in ast.walk(ast.parse(source)):
        text = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text in known:
            found.add(text)
    return found


@cache
def private_names(cls: type) -> set[str]:
    """Return the private names that the body of a class of zae defines, and those that its methods set of a trainer."""
    if not cls.__module__.startswith("zae"):
        return set()
    names = set(vars(cls))
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def felt_for(source: str) -> set[str]:
    """Return the attributes that code looks for in a trainer by ``getattr`` or ``hasattr``, as it may not have them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1
        if not is_call or node.func.id not in ("getattr", "hasattr"):
            continue
        owner, name = ast.unparse(node.args[0]), node.args[1]
        if owner.rpartition(".")[2] in ("self", "trainer", "_trainer", "_of") and isinstance(name, ast.Constant):
            found.add(name.value)
    return found


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


def ruled_edges() -> list[tuple[str, str]]:
    """List the pairs of packages of which the first imports the second, beside what BUILT_ON names."""
    return [edge for edge, pairs in package_edges().items() if not all(is_built_on(*pair) for pair in pairs)]


@cache
def is_bare_package(module: str) -> bool:
    """Whether a module is the ``__init__`` of a package, with a docstring and nothing else."""
    path = sources()[module]
    return path.name == "__init__.py" and len(ast.parse(path.read_text(encoding="utf-8")).body) == 1


def is_allowed(module: str, other: str) -> bool:
    """Whether a module may import another one of another package."""
    return package_of(other) in RULES[package_of(module)] | EVERYBODY or is_built_on(module, other)


def is_built_on(module: str, other: str) -> bool:
    """Whether BUILT_ON says that a module needs another one, of a tool or of an add-on."""
    needs = {need for feature, needed in BUILT_ON.items() if is_in(module, feature) for need in needed}
    return any(is_in(other, need) for need in needs)


def is_in(module: str, feature: str) -> bool:
    """Whether a module is a feature or a part of it."""
    return f"{module}.".startswith(f"zae.{feature}.")


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
