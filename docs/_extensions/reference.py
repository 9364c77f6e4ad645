"""The reference: which docstrings and names autodoc shows."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

from sphinx.application import Sphinx

from zae import AddOnBase, Trainer
from zae.addons.distributed import DistributedAddon
from zae.compose.introspect import hooks_of

HOOKS = hooks_of(Trainer)


def shorten(app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    """Leave out of a class what its page, or that of the options, says elsewhere: text, options and example."""
    if what != "class" or not (has_own_page(app) or value in (Trainer, AddOnBase)):
        return
    titles = [at - 1 for at, line in enumerate(lines) if at and line and set(line) == {"-"}]
    text = [] if has_own_page(app) else lines[: titles[0]] if titles else lines
    left_out = ("Attributes",) if value is AddOnBase else ("Parameters", "Raises", "Examples")
    kept = [lines[at:end] for at, end in zip(titles, [*titles[1:], len(lines)]) if lines[at] not in left_out]
    lines[:] = [line for section in (text, *kept) for line in section]


def shorten_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Leave out of a signature what the page says elsewhere, and the arguments of an object that nobody makes."""
    if signature is None:
        return None
    has_table = what == "class" and issubclass(value, (Trainer, AddOnBase))
    sections = sections_of(value)
    is_result = "Attributes" in sections and "Parameters" not in sections
    if has_table or (what == "class" and is_result):
        return "", None
    returned = None if returned in ("None", "Any") or "Returns" in sections else returned
    return without_types(signature) if "Parameters" in sections else signature, returned


def sections_of(value: Any) -> set[str]:
    """Return the titles in a docstring."""
    return {*re.findall(r"^(\w+)\n-{3,}$", inspect.getdoc(value) or "", re.MULTILINE)}


def without_types(signature: str) -> str:
    """Return a signature with names and defaults alone."""
    try:
        (function,) = ast.parse(f"def function{signature}: ...").body
    except SyntaxError:  # A default that stands for its factory, "<factory>".
        return signature
    assert isinstance(function, ast.FunctionDef)
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"({ast.unparse(function.args)})"


def skip_hooks(app: Sphinx, what: str, name: str, value: object, skip: bool, options: Any) -> bool | None:
    """Leave out of the page of an add-on the hooks that it overrides: the page of the trainer has them."""
    is_inherited = name in HOOKS or hasattr(AddOnBase, name) or hasattr(DistributedAddon, name)
    return True if shows_add_ons(app) and is_inherited else None


def has_own_page(app: Sphinx) -> bool:
    """Return whether autodoc reads the page of one add-on, with its text, options and example."""
    return app.env.docname.startswith("reference/addons/")


def shows_add_ons(app: Sphinx) -> bool:
    """Return whether autodoc reads the page of an add-on, or of the bases of some."""
    return app.env.docname.startswith(("reference/addons/", "reference/api/loggers", "reference/api/other_libraries"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", shorten, priority=100)  # Before napoleon.
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-skip-member", skip_hooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
