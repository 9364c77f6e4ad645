"""docs/reference/options.md, made from the classes."""

from __future__ import annotations

import configparser
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zae.addons
from _generators import DOCS, ROOT
from zae import AddOnBase, Trainer
from zae.compose.options import options_of

INTRODUCTION = """# Add-ons and options

This page is generated from the docstrings by `python docs/_generators`; a test fails if it is out of date.

`from zae.addons import EMAAddon` imports an add-on, `Task.add_on(EMAAddon)` mixes it in, and its options are then
arguments of the class. The page of each add-on has its options, what it overrides, what it saves and what it costs.
[Writing an add-on](../extending/addons.md#what-an-add-on-declares) explains what a layer and a slot are. "saves" says
whether a checkpoint contains state of the add-on. Two add-ons with the same slot cannot be combined. An extra is
installed with `pip install -e ".[wandb]"`.
"""

TOCTREE = """:::{toctree}
:hidden:
:glob:
addons/*
:::
"""


def add_ons() -> dict[str, type]:
    """Return the add-ons to mix in, without the bases of others."""
    found = {name: getattr(zae.addons, name) for name in sorted(zae.addons.__all__)}
    bases = {base for add_on in found.values() for base in add_on.__mro__[1:]}
    return {name: each for name, each in found.items() if each not in bases}


def parse(cls: type) -> tuple[str, dict[str, tuple[str, str]]]:
    """Split a docstring into its prose, and the type and the meaning of each parameter."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    prose, _, rest = text.partition("\nParameters\n----------\n")
    prose = re.split(r"\n\w+\n-{3,}\n", prose)[0]
    rest = re.split(r"\n\n\w+\n-{3,}\n", rest)[0]
    parameters = {}
    for name, kind, meaning in re.findall(r"^(\w+) : (.*)\n((?:[ ]{4}.*\n?|\n)*)", rest + "\n", re.M):
        if not meaning.lstrip().startswith("Declared by"):
            parameters[name] = (kind, " ".join(meaning.split()))
    return prose.strip(), parameters


def markdown(text: str) -> str:
    """Return a docstring's text as Markdown."""
    return re.sub(r"``(.+?)``", lambda found: f"`{' '.join(found[1].split())}`", text, flags=re.S)


def table(cls: type, names: list[str]) -> Iterator[str]:
    """Yield the options of a class as a table; the docstring of the class that declares one explains it."""
    known: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        known |= {} if base.__module__ == "builtins" else parse(base)[1]
    signature = inspect.signature(cls)
    yield "| option | values | default | meaning |\n|---|---|---|---|"
    for name in names:
        default = signature.parameters[name].default
        shown = "required" if default is inspect.Parameter.empty else f"`{shown_default(default)}`"
        kind, meaning = known[name]
        row = (f"`{name}`", markdown(kind).removesuffix(", optional"), shown, markdown(meaning))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def shown_default(value: Any) -> str:
    """Return a default as one writes it."""
    return value.__name__ if isinstance(value, type) else repr(value)


def saves(cls: type) -> bool:
    """Return whether a checkpoint contains an entry of this add-on."""
    bases = [base for base in cls.__mro__ if base is not AddOnBase and getattr(base, "_is_addon", False)]
    attributes = ("state_dict", "state_attributes", "rank_state_attributes")
    return any(base.__dict__.get(name) for base in bases for name in attributes)


def extra_of(name: str) -> str:
    """Return the extra that an add-on needs; empty where it needs none."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extra = {"HuggingFaceAddon": "hf"}.get(name, name.removesuffix("Addon").removesuffix("Logger").lower())
    return extra if extra in setup["options.extras_require"] else ""


def page() -> str:
    """Return the text of docs/reference/options.md."""
    plain = [name for name in options_of(Trainer) if name not in ("args", "kwargs")]
    parts = [INTRODUCTION, "| add-on | what it does | layer | slot | saves | extra |\n|---|---|---|---|---|---|"]
    for name, cls in add_ons().items():
        extra = extra_of(name)
        does = markdown(parse(cls)[0].splitlines()[0])
        saved = "yes" if saves(cls) else "no"
        cells = (
            f"[`{name}`](addons/{name}.md)",
            does,
            cls.layer,
            cls.slot or "-",
            saved,
            f"`{extra}`" if extra else "-",
        )
        parts.append("| " + " | ".join(cells) + " |")
    parts += ["\n## Every trainer\n", *table(Trainer, plain), "", TOCTREE]
    return "\n".join(parts)


def files() -> dict[Path, str]:
    """Return the text of the page."""
    return {DOCS / "reference" / "options.md": page()}
