"""The public names with their parameters, one line each; ``python tests/kit/public_api.py`` writes those of now.

``golden/api`` has a file for each version. That of a released version stays as it is.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "tests" / "golden" / "api"
MODULES = (
    *("zae", "zae.addons", "zae.data", "zae.metrics", "zae.optimizers", "zae.schedulers", "zae.search", "zae.testing"),
    *("zae.interop.fairseq2", "zae.interop.lightning", "zae.interop.transformers"),
)
"""What users import from; other modules are internal."""


def parameters_of(function: Any) -> str:
    """Write the parameters and their defaults, without annotations."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # A type of Python, or one that derives from it.
        return ""
    found = [each.replace(annotation=each.empty) for each in parameters if each.name not in ("self", "cls")]
    text = str(inspect.Signature(found))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def member_of(cls: type, name: str) -> str:
    """Describe one attribute of a class: a function by its parameters, anything else by its name."""
    value = inspect.getattr_static(cls, name)
    while isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    return f".{name}{parameters_of(value) if inspect.isfunction(value) else ''}"


def members_of(cls: type, bases: list[type]) -> list[str]:
    """Describe what a class has beside its constructor, without what its public bases have in the same way."""
    foreign = {name for base in cls.__mro__ if base.__module__.partition(".")[0] != "zae" for name in vars(base)}
    own = {name for base in cls.__mro__ for name in vars(base) if not name.startswith("_")} - foreign
    inherited = {member_of(base, name) for base in bases for name in own & {*dir(base)}}
    return sorted({member_of(cls, name) for name in own & {*dir(cls)}} - inherited)


def options_of(cls: Any) -> str:
    """Write what the constructor takes; of an add-on, its own options."""
    from zae.composition.options import own_options

    if getattr(cls, "_is_addon", False):
        found = {name: each for base in reversed(cls.__mro__[:-1]) for name, each in options_in(base, own_options)}
        return f"(*, {', '.join(found.values())})" if found else "()"
    return parameters_of(cls)


def options_in(base: Any, own_options: Any) -> Iterator[tuple[str, str]]:
    """Yield the options that a class of add-ons declares, with their defaults."""
    if getattr(base, "_is_addon", False):
        for name, parameter in own_options(base).items():
            yield name, str(parameter.replace(annotation=parameter.empty))


def public_classes() -> Iterator[type]:
    """Yield every public class."""
    for module in map(importlib.import_module, MODULES):
        yield from filter(inspect.isclass, (getattr(module, name) for name in module.__all__))


def lines_of(module: str) -> Iterator[str]:
    """Describe each public name of a module."""
    home = importlib.import_module(module)
    for name in sorted(home.__all__):
        value, where = getattr(home, name), f"{module}.{name}"
        bases = [each for each in public_classes() if inspect.isclass(value) and each in value.__mro__[1:]]
        if inspect.isclass(value) and issubclass(value, Exception):
            yield f"{where} is {', '.join(base.__name__ for base in value.__mro__[1:-2])}"
        elif inspect.isclass(value):
            yield f"{where}{options_of(value)}"
            yield from (f"{where}{member}" for member in members_of(value, bases))
        else:
            yield f"{where}{parameters_of(value) if callable(value) else ''}"


def describe() -> str:
    """Return the lines of all modules."""
    return "\n".join(line for module in MODULES for line in lines_of(module)) + "\n"


def names_in(text: str) -> dict[str, str]:
    """Split lines into names and what follows them."""
    return {re.match(r"[\w.]+", line)[0]: line for line in text.splitlines()}


def present() -> Path:
    """Return the file of the present version."""
    import zae

    return FOLDER / f"{zae.__version__}.txt"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    FOLDER.mkdir(exist_ok=True)
    present().write_text(describe())
