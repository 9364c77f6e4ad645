"""Carry the user's own source into a script without zae: imports of zae go, and trainer classes become plain ones."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from zae.errors import ConfigError

__all__ = ["Carried", "carry", "returned_keys"]


_WIDTH = 120
_METHODS = ("train_step", "test_step", "predict_step")


class Carried(NamedTuple):
    """Source without zae: the imports, the rest in its order, and what of zae it uses: line, name, name in zae.

    The name in zae of an add-on of the user is empty.

    ``passes_dict`` says that a trainer is made with ``**options``, which the source does not show.
    """

    imports: list[str]
    body: str
    left: list[tuple[int, str, str]]
    passes_dict: bool = False


class _Edits:
    """Replacements of pieces of a source; those inside of a piece that is replaced are left out."""

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self._starts = [0]
        for line in self.source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[tuple[int, int, str]] = []

    def span(self, node: Any) -> tuple[int, int]:
        """Return where a node begins and ends, in bytes; a definition begins with its decorators."""
        first: Any = min([node, *getattr(node, "decorator_list", [])], key=lambda each: each.lineno)
        begin = self._starts[first.lineno - 1] + first.col_offset
        if getattr(node, "decorator_list", None):
            begin -= 1  # The sign before a decorator.
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        return begin, end

    def text(self, node: ast.AST) -> str:
        """Return a node with the replacements inside of it."""
        begin, end = self.span(node)
        inside = [each for each in self._found if begin <= each[0] and each[1] <= end]
        pieces, at = [], begin
        for first, last, text in sorted(inside):
            if first >= at:
                pieces += [self.source[at:first].decode(), text]
                at = last
        return "".join([*pieces, self.source[at:end].decode()])

    def laid_out(self, node: ast.expr, around: str, items: list[str]) -> str:
        """Return items between brackets: in a line, in one line of their own, or each in its own."""
        line = self.source.splitlines()[node.lineno - 1].decode()
        indent = line[: len(line) - len(line.lstrip())] + "    "
        flat = ", ".join(items)
        if "\n" not in flat and node.col_offset + len(flat) < _WIDTH - 20:
            return f"{around[0]}{flat}{around[1]}"
        flat = flat if "\n" not in flat and len(indent + flat) < _WIDTH else f",\n{indent}".join(items) + ","
        return f"{around[0]}\n{indent}{flat}\n{indent[4:]}{around[1]}"

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace a node, and with it what was replaced inside."""
        begin, end = self.span(node)
        self._found = [each for each in self._found if not (begin <= each[0] and each[1] <= end)]
        self._found.append((begin, end, text))


def carry(
    source: str,
    trainers: Collection[str],
    dropped: Collection[str],
    options: Collection[str],
    helpers: Collection[str] = (),
    modules: Collection[str] = (),
    definitions_only: bool = False,
) -> Carried:
    """Return a module's source without zae.

    Parameters
    ----------
    source : str
        The module.
    trainers : collection of str
        Names of its trainer classes: their bases become ``Trainer``.
    dropped : collection of str
        Names of its classes that are left out: add-ons.
    options : collection of str
        Options that the loop has taken over; they go from the calls that make a trainer.
    helpers : collection of str
        Functions of zae that the script defines itself: ``zae.schedulers.cosine`` becomes ``cosine``.
    modules : collection of str
        Modules that the script contains: imports from them go.
    definitions_only : bool
        Leave out statements other than imports, classes, functions and constants.

    Raises
    ------
    ConfigError
        The source is not valid Python.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"the source of the script cannot be read: {error}") from None
    of_zae = _names_of_zae(tree)
    edits, makers = _Edits(source), _makers(tree, {*trainers, *of_zae.values()})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in helpers and _is_module(node, of_zae):
            edits.replace(node, node.attr)
            of_zae[node.attr] = node.attr
    for node in sorted(ast.walk(tree), key=lambda each: getattr(each, "end_col_offset", 0) or 0):
        if isinstance(node, ast.Call) and _is_add_on(node.func):
            edits.replace(node, edits.text(node.func.value))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in trainers:
            _make_plain(node, edits, of_zae, trainers)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _makes(node.func, makers)]
    for call in reversed(calls):  # Calls inside of the arguments of others come last.
        _drop_options(call, edits, options)
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            _drop_arguments(node.value.elts[1], edits)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node not in tree.body and _is_import_of(node, {*modules, "zae"}):
            edits.replace(node, "pass")
    kept = [node for node in tree.body if not (definitions_only and not _is_definition(node))]
    kept = [node for node in kept if not _is_import_of(node, {*modules, "zae"})]
    kept = [node for node in kept if not (_is_main(node) or getattr(node, "name", None) in dropped)]
    passes_dict = any(each.arg is None for call in calls for each in call.keywords)
    return _collect(tree, edits, {**dict.fromkeys(dropped, ""), **of_zae}, kept)._replace(passes_dict=passes_dict)


def returned_keys(source: str, function: str) -> set[str] | None:
    """Return the keys of the dicts that a method of this name returns; None where one is not written as a dict."""
    found: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for each in _own_returns(node):
                called = each.value.func if isinstance(each.value, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr in _METHODS and called.attr != function:
                    found |= returned_keys(source, called.attr) or {""}
                    continue
                if isinstance(called, ast.Name) and called.id == "dict" and isinstance(each.value, ast.Call):
                    found |= {key.arg or "" for key in each.value.keywords}
                    continue
                keys = each.value.keys if isinstance(each.value, ast.Dict) else [None]
                if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                    return None
                found |= {key.value for key in keys}  # type: ignore[union-attr]
    return None if "" in found else found or None


def _own_returns(function: ast.AST) -> Iterator[ast.Return]:
    """Yield the returns of a function, without those of functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _own_returns(node)


def _names_of_zae(tree: ast.Module) -> dict[str, str]:
    """Map each name that an import of zae binds to what it is there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "zae":
            found.update({each.asname or each.name: each.name for each in node.names})
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "zae":
                    found[each.asname or "zae"] = each.name
    return found


def _is_add_on(function: ast.AST) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "add_on"


def _makers(tree: ast.Module, classes: Collection[str]) -> set[str]:
    """Return the names that are called to make a trainer: classes, and what ``add_on`` was assigned to."""
    found = {*classes}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_add_on(node.value.func):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found


def _makes(function: ast.AST, makers: Collection[str]) -> bool:
    if isinstance(function, ast.Call):
        return _is_add_on(function.func)
    return isinstance(function, ast.Name) and function.id in makers


def _make_plain(node: ast.ClassDef, edits: _Edits, of_zae: dict[str, str], trainers: Collection[str]) -> None:
    """Let a trainer class derive from its bases without add-ons; Trainer is that of the script."""
    kept = []
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        if of_zae.get(name, name) == "Trainer":
            edits.replace(base, "Trainer")
            kept.append("Trainer")
        elif name not in of_zae and not _is_module(base, of_zae):
            kept.append(edits.text(base))
    if len(kept) < len(node.bases) and node.bases:
        first, last = node.bases[0], node.bases[-1]
        begin, end = edits.span(first)[0], edits.span(last)[1]
        plain = [each for each in kept if each != "Trainer" or not (set(kept) & set(trainers))]
        edits._found = [each for each in edits._found if not (begin <= each[0] and each[1] <= end)]
        edits._found.append((begin, end, ", ".join(plain or ["Trainer"])))


def _is_module(base: ast.AST, of_zae: dict[str, str]) -> bool:
    """Return whether an expression is an attribute of a module of zae."""
    while isinstance(base, ast.Attribute):
        base = base.value
    return isinstance(base, ast.Name) and base.id in of_zae


def _drop_options(call: ast.Call, edits: _Edits, options: Collection[str]) -> None:
    """Leave options out of a call."""
    kept = [each for each in call.keywords if each.arg not in options]
    if len(kept) < len(call.keywords):
        given = [edits.text(each) for each in (*call.args, *kept)]
        edits.replace(call, edits.text(call.func) + edits.laid_out(call, "()", given))


def _drop_arguments(arguments: ast.expr, edits: _Edits) -> None:
    """Leave the arguments of ``run`` that the loop has taken over out of a dict that is written out."""
    wanted = ("n_epoch", "loader", "valid_loader")
    if isinstance(arguments, ast.Dict):
        pairs = list(zip(arguments.keys, arguments.values, strict=True))
        kept = [(key, value) for key, value in pairs if not isinstance(key, ast.Constant) or key.value in wanted]
        if len(kept) < len(pairs):
            shown = [f"{edits.text(key)}: {edits.text(value)}" if key else f"**{edits.text(value)}"
                     for key, value in kept]  # fmt: skip
            edits.replace(arguments, edits.laid_out(arguments, "{}", shown))
    elif isinstance(arguments, ast.Call) and isinstance(arguments.func, ast.Name) and arguments.func.id == "dict":
        _drop_options(arguments, edits, {each.arg for each in arguments.keywords if each.arg} - {*wanted})


def _is_definition(node: ast.stmt) -> bool:
    """Return whether a statement defines a name without doing anything else."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(each, ast.Call) for each in ast.walk(node))
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


def _collect(tree: ast.Module, edits: _Edits, of_zae: dict[str, str], kept: Collection[ast.stmt]) -> Carried:
    """Return the statements that stay, with the comments before them, and the names of zae in them."""
    imports, pieces = list[str](), list[str]()
    left: list[tuple[int, str, str]] = []
    text, at, was_long, was_kept = edits.source.decode(), 0, False, False
    for index, node in enumerate(tree.body):
        begin, end = edits.span(node)
        before = edits.source[at:begin].decode()
        at = end
        trailing, _, before = before.partition("\n") if index else ("", "", before)
        if trailing.strip() and was_kept:  # A comment behind the statement before.
            pieces[-1] = f"{pieces[-1].rstrip()}  {trailing.strip()}\n"
        was_kept = False
        if node not in kept or _is_unused(node, kept, edits, of_zae):
            continue
        if index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # Its docstring.
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(edits.text(node))
            continue
        is_long = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        pieces.append("\n\n" if pieces and (is_long or was_long) else "")
        pieces.append(before.strip("\n") + "\n" if before.strip() else "")
        pieces.append(edits.text(node) + "\n")
        was_long, was_kept = is_long, True
    body = "".join(pieces)
    defined = {node.name for node in kept if isinstance(node, ast.ClassDef)}
    for each in _names_read(ast.parse(body)):
        if each.id in of_zae and of_zae[each.id] != "Trainer" and each.id not in defined:
            line = body.splitlines()[each.lineno - 1].strip()
            left.append((_line_in(text, line), each.id, of_zae[each.id]))
    return Carried(imports, body.strip("\n"), sorted(set(left)))


def _names_read(tree: ast.AST) -> Iterator[ast.Name]:
    """Yield the names in a tree, without those of annotations."""
    for field, value in ast.iter_fields(tree):
        if field not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.Name):
                    yield each
                elif isinstance(each, ast.AST):
                    yield from _names_read(each)


def _is_unused(node: ast.stmt, kept: Collection[ast.stmt], edits: _Edits, of_zae: dict[str, str]) -> bool:
    """Return whether a statement names add-ons of zae for calls of ``add_on`` alone, which are gone."""
    if not isinstance(node, ast.Assign) or not any(each.id in of_zae for each in _names_read(node.value)):
        return False
    names = {each.id for each in node.targets if isinstance(each, ast.Name)}
    others = [ast.parse(edits.text(each)) for each in kept if each is not node]
    return bool(names) and not any(each.id in names for other in others for each in _names_read(other))


def _line_in(source: str, line: str) -> int:
    """Return the number of a line in a source; 0 where it was changed."""
    return next((number for number, each in enumerate(source.splitlines(), 1) if each.strip() == line), 0)


def _is_import_of(node: ast.stmt, modules: Collection[str]) -> bool:
    """Return whether a statement imports from one of these modules, or from zae."""
    names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        name = node.module or ""
        if node.level and any(each.rpartition(".")[2] == name.rpartition(".")[2] for each in modules):
            return True
        names.append(name)
    return any(name in modules or name.partition(".")[0] == "zae" for name in names)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
