"""What a removal may leave behind: names that nobody reads, options that nobody takes, texts that name what is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from kit.blocks import DOCS, ROOT, list_pages
from kit.source_names import Source, read_sources
from zae.cli import COMMANDS

CORE = {
    "zae/trainer.py": ("Trainer",),
    "zae/parts.py": (),
    "zae/loop/processes.py": ("Processes",),
    "zae/loop/run.py": ("Run",),
    "zae/loop/run_view.py": (),
    "zae/loop/progress.py": (),
    "zae/loop/limits.py": (),
    "zae/loop/history.py": (),
    "zae/loop/nonfinite.py": (),
    "zae/loop/continuation.py": (),
    "zae/optim/optimization.py": (),
    "zae/data/position.py": (),
    "zae/distributed/ranks.py": (),
}
"""The trainer, its parts, its run and its engines, with the classes that are looked at; all where none is named."""

FOREIGN = """bias bf16 ckpt_path config_kwargs cpu create_graph fp16 fsdp fused group_by_length in_order inplace keepdim
    max_norm mixed_precision multiprocessing_context num_classes output_layouts persistent ppid probabilities r
    pretrained rank_pattern reduction s save_last scope sequence_dim shuffle target_modules train_loss use_local_output
    use_seedable_sampler validation"""
"""The arguments of torch and of other libraries that texts name."""

_WORD = re.compile(r"\w+")
_ARGUMENT = re.compile(r"(?<![\w./<-])([a-z_]\w*)=(?![=\s])")


@cache
def sources() -> list[Source]:
    """Read every module of the package once."""
    return read_sources()


def pages() -> dict[str, str]:
    """Return the texts that a user reads, by their paths: what moved from where is told in docs/moving."""
    found = [each for each in list_pages() if each.parent != DOCS / "moving"]
    found += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("zae/**/*.md"), *ROOT.glob("examples/**/*.py")]
    return {str(each.relative_to(ROOT)): each.read_text(encoding="utf-8") for each in found}


# ------------------------------------------------------------------------------------------- names and options


def words_read(trees: Iterable[ast.AST]) -> set[str]:
    """Return the attributes that code reads, and the words of short texts, as of getattr."""
    words: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            words.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
            words.update(_WORD.findall(node.value))
    return words


def public_names(tree: ast.Module, classes: tuple[str, ...]) -> Iterator[str]:
    """Yield the public names of classes: methods, annotated attributes, and what ``self`` is given."""
    for klass in tree.body:
        if not isinstance(klass, ast.ClassDef) or (classes and klass.name not in classes):
            continue
        names = [node.name for node in klass.body if isinstance(node, ast.FunctionDef)]
        names += [node.target.id for node in klass.body if _is_annotation(node)]
        for node in ast.walk(klass):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                names.append(node.attr)
        yield from (f"{klass.name}.{name}" for name in dict.fromkeys(names) if not name.startswith("_"))


def _is_annotation(node: Any) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_self(node: Any) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def unread_names(trees: Mapping[str, ast.Module], texts: Iterable[str]) -> list[str]:
    """List the public names of `CORE` that no code and none of these texts reads."""
    read = words_read(trees.values())
    for text in texts:
        read.update(_WORD.findall(text))
    names = (name for path, classes in CORE.items() if path in trees for name in public_names(trees[path], classes))
    return [name for name in names if name.partition(".")[2] not in read]


def untaken_options(trees: Mapping[str, ast.Module]) -> list[str]:
    """List the options of constructors that neither these nor a text of their folder reads."""
    found, folders = [], {path.rpartition("/")[0] for path in trees}
    words_of = {
        folder: words_read(tree for path, tree in trees.items() if path.rpartition("/")[0] == folder)
        for folder in folders
    }
    for path, tree in trees.items():
        words = words_of[path.rpartition("/")[0]]
        for klass in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for init in (node for node in klass.body if getattr(node, "name", "") == "__init__"):
                read = {node.id for node in ast.walk(init) if isinstance(node, ast.Name)}
                options = [each.arg for each in init.args.kwonlyargs]  # type: ignore[attr-defined]
                found += [f"{klass.name}({name})" for name in options if name not in read | words]
    return found


# ------------------------------------------------------------------------------------------------------- texts


def texts_of_code(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield the texts in the code, with their paths and lines."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path}:{node.lineno}", node.value


def absent_names(texts: Iterable[tuple[str, str]]) -> list[str]:
    """List the add-ons, commands and pages that texts name and that are not there."""
    add_ons = {*class_names(), "MyAddon", "SomeAddon"}
    found = []
    for path, text in texts:
        defined = re.findall(r"class (\w+)", text)
        names = [each for each in re.findall(r"\b[A-Z]\w+Addon\b", text) if each not in (*add_ons, *defined)]
        commands = re.findall(r"python -m zae ([a-z]\w*)", text)
        names += [f"python -m zae {each}" for each in commands if each not in COMMANDS]
        names += [each for each in re.findall(r"\bdocs/[\w/.]+\.md\b", text) if not (ROOT / each).exists()]
        found += [f"{path}: {each}" for each in names]
    return found


def class_names() -> set[str]:
    """Return the names of all classes of the package."""
    nodes = (node for each in sources() for node in ast.walk(each.tree))
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def arguments_of(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names of all arguments that functions take, calls give, and classes declare as fields."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def absent_arguments(texts: Iterable[tuple[str, str]], known: set[str]) -> list[str]:
    """List the arguments, as ``name=value``, that texts name and that nothing takes."""
    found = []
    for path, text in texts:
        names = dict.fromkeys(_ARGUMENT.findall(text))
        found += [f"{path}: {name}=" for name in names if name not in known and name not in FOREIGN.split()]
    return found


def inline_code(text: str) -> str:
    """Return what stands between backticks in a page, outside of its blocks, which are run."""
    running = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"`([^`\n]+)`", running))
