"""`python -m zae addons [NAME]`: list the add-ons that are installed, ours and those of others, or describe one.

The list comes from the metadata of the installed distributions (entry points of the group ``zae.addons``) and from the
text of the files: nothing is imported. Only the one that is named is.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import shutil
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from zae.cli import Answer
from zae.common.lazy import names_in_stub
from zae.errors import ConfigError, did_you_mean, printable

__all__ = ["InstalledAddon", "add_arguments", "list_addons", "run"]


class InstalledAddon(NamedTuple):
    """An add-on as its distribution lists it."""

    name: str
    line: str
    module: str
    distribution: str
    version: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="import this add-on, and show its options, what it "
        "overrides and what it saves (default: list all, and import none)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """Return the list, or what is known of one; the status is 1 where two distributions use one name."""
    found = list_addons()
    if arguments.name is not None:
        description = _describe(_find(arguments.name, found))
        return Answer(description, _page(description))
    names = [each.name for each in found]
    clashes = sorted({name for name in names if names.count(name) > 1})
    lines = _table(found)
    for name in clashes:
        owners = " and ".join(f"{each.distribution} {each.version}" for each in found if each.name == name)
        lines.append(f"-> {name} is in {owners}: uninstall one of them, or import the class by its module")
    data = {"add_ons": [each._asdict() for each in found], "clashes": clashes}
    return Answer(data, "\n".join(map(printable, lines)), 1 if clashes else 0)


def list_addons() -> list[InstalledAddon]:
    """List the installed add-ons by name, those of zae first.

    Returns
    -------
    list of InstalledAddon
        Each with the first line of its docstring, an empty one where its file is not found.

    Examples
    --------
    >>> from zae.cli.addons import list_addons
    >>> next(each.line for each in list_addons() if each.name == "EMAAddon")
    'Average the weights, exponentially or uniformly, and evaluate with the average.'
    """
    found = set()
    for point in metadata.entry_points(group="zae.addons"):
        if point.dist is not None:
            line = _first_line(point.module, point.attr)
            found.add(InstalledAddon(point.name, line, point.module, point.dist.name, point.dist.version))
    return sorted(found, key=lambda each: (each.distribution != "zae", each.distribution, each.name))


def _first_line(module: str, name: str) -> str:
    """Return the first line of the docstring of a class, from the text of its file."""
    try:
        path = _file_of(module)
        if path is not None and path.with_suffix(".pyi").is_file():  # A package that lists where its names are.
            path = _file_of(names_in_stub(module, str(path)).get(name, module))
        tree = ast.parse(b"" if path is None else path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    text = next((ast.get_docstring(node) for node in classes), None) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _file_of(module: str) -> Path | None:
    """Find the file of a module without importing the packages that it is in."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not parts:
        return None if spec is None or spec.origin is None else Path(spec.origin)
    places = [Path(folder, *parts) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def _table(found: list[InstalledAddon]) -> list[str]:
    """Return the lines of the list, as wide as the terminal, with a heading for each distribution."""
    names = max((len(each.name) for each in found), default=0)
    columns = max(names + 30, shutil.get_terminal_size().columns)
    lines: list[str] = []
    for each in found:
        heading = f"{each.distribution} {each.version}"
        lines += [heading] if heading not in lines else []
        rest = textwrap.wrap(each.line, columns - names - 4) or [each.module]
        lines += [f"  {name:<{names}}  {text}" for name, text in zip([each.name, *[""] * len(rest)], rest)]
    return lines or ["no add-on is installed: not even zae is, pip install -e . in its folder"]


def _find(name: str, found: list[InstalledAddon]) -> InstalledAddon:
    """Return the add-on of this name, which may lack the word Addon."""
    known = {each.name: each for each in found}
    of_word = {each.lower(): each for each in known}
    exact = next((each for each in (name, f"{name}Addon") if each in known), None)
    word = exact or of_word.get(name.lower()) or of_word.get(f"{name.lower()}addon")
    if word is not None:
        return known[word]
    hint = (
        did_you_mean(name, known)
        or did_you_mean(f"{name}Addon", known, cutoff=0.75)
        or "; python -m zae addons lists all"
    )
    raise ConfigError(f"no add-on {name!r} is installed{hint}")


def _describe(listed: InstalledAddon) -> dict[str, Any]:
    """Import an add-on, and return its options, layer, overrides and state."""
    [point] = [
        each for each in metadata.entry_points(group="zae.addons", name=listed.name) if each.module == listed.module
    ][:1]
    try:
        cls: Any = point.load()
    except Exception as error:
        raise ConfigError(
            f"{listed.name} of {listed.distribution} {listed.version} cannot be imported: {type(error).__name__}: "
            f"{error}; install what it needs, or uninstall {listed.distribution}"
        ) from None
    from zae.compose.introspect import hooks_of, is_add_on, is_base
    from zae.compose.options import own_options

    if not is_add_on(cls):
        raise ConfigError(f"{listed.name} of {listed.distribution} is not an add-on; it has to derive from AddOnBase")
    own = [klass for klass in cls.__mro__ if is_add_on(klass)]
    options = {name: p for klass in reversed(own) for name, p in own_options(klass).items()}
    return {
        **listed._asdict(),
        "layer": cls.layer,
        "slot": cls.slot,
        "requires": [getattr(each, "__name__", each) for each in cls.requires],
        "overrides": [name for name in hooks_of(cls) if any(name in c.__dict__ for c in own if not is_base(c))],
        "saves": [*cls.state_attributes, *cls.rank_state_attributes],
        "options": {name: None if p.default is p.empty else repr(p.default) for name, p in options.items()},
        "doc": inspect.getdoc(cls) or "",
    }


def _page(described: dict[str, Any]) -> str:
    """Format what is known of an add-on."""
    lines = [f"{described['name']}, of {described['distribution']} {described['version']} ({described['module']})", ""]
    for title in ("layer", "slot", "requires", "overrides", "saves"):
        value = described[title]
        text = ", ".join(value) if isinstance(value, list) else value
        if text:
            lines += textwrap.wrap(text, 68, initial_indent=f"{title:<11}", subsequent_indent=" " * 11)
    given = [name if default is None else f"{name}={default}" for name, default in described["options"].items()]
    lines += textwrap.wrap(", ".join(given) or "none", 68, initial_indent="options    ", subsequent_indent=" " * 11)
    return printable("\n".join([*lines, "", described["doc"]]))
