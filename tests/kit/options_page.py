"""docs/reference/options.md, made from the classes: ``python tests/kit/options_page.py`` writes it."""

from __future__ import annotations

import configparser
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zae.addons
from zae import AddOnBase, Trainer
from zae.composition.metaclass import options_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "options.md"
INTRODUCTION = """# Add-ons and options

This page is generated from the docstrings by `python tests/kit/options_page.py`; a test fails if it is out of date.

`from zae.addons import EMAAddon` imports an add-on, `Task.add_on(EMAAddon)` mixes it in, and its options are then
arguments of the class. The [guide](../guide.md#add-ons) explains what a layer and a slot are. "saves" says whether a
checkpoint contains state of the add-on. Two add-ons with the same slot cannot be combined. An extra is installed with
`pip install -e ".[wandb]"`.
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
    return any("state_dict" in base.__dict__ or base.__dict__.get("state_attributes") for base in bases)


def page() -> str:
    """Return the text of docs/reference/options.md."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    plain = [name for name in options_of(Trainer) if name not in ("args", "kwargs")]
    parts = [INTRODUCTION, "| add-on | what it does | layer | slot | saves | extra |\n|---|---|---|---|---|---|"]
    for name, cls in add_ons().items():
        extra = name.removesuffix("LoggerAddon").lower()
        extra = f"`{extra}`" if extra in setup["options.extras_require"] else "-"
        does = markdown(parse(cls)[0].splitlines()[0])
        cells = (f"[`{name}`](#{name.lower()})", does, cls.layer, cls.slot or "-", "yes" if saves(cls) else "no", extra)
        parts.append("| " + " | ".join(cells) + " |")
    parts += ["\n## Every trainer\n", *table(Trainer, plain)]
    for name, cls in add_ons().items():
        parts += [f"\n## {name}\n", markdown(parse(cls)[0])]
        own = [option for option in options_of(Trainer.add_on(cls)) if option not in plain]
        parts += ["", *table(Trainer.add_on(cls), own)] if own else []
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
