"""Import public names at their first use.

`import zae` runs this module, which imports only the standard library: ``python -m zae --help`` answers at once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from importlib import import_module

__all__ = ["load", "missing_name", "names_in_stub"]


def names_in_stub(package: str, init_file: str) -> dict[str, str]:
    """Map each name that the stub ``__init__.pyi`` of a package imports to the module that it is in.

    A type checker reads the same stub, so that the names are listed once. A name is left out where its module is not
    there: who deletes a feature need not find the lists that it is in. Where the stub itself is not there, the package
    has no such names, and `import zae` and its modules still work.
    """
    folder = os.path.dirname(init_file)
    homes = {}
    for line in _read(os.path.join(folder, "__init__.pyi")).splitlines():
        match line.split():
            case ["from", module, "import", name, "as", _] if _is_there(module, package, folder):
                homes[name] = module
    return homes


def _read(path: str) -> str:
    """Return the text of a file of an installed package, in an archive too; empty where it is not there."""
    try:
        text: bytes = __loader__.get_data(path)  # type: ignore[name-defined]
    except (AttributeError, OSError):
        return ""
    return text.decode("utf-8")


def _is_there(module: str, package: str, folder: str) -> bool:
    """Return whether a module of a package has a file or a folder, without importing anything."""
    if not os.path.isfile(os.path.join(folder, "__init__.py")):
        return True  # The package is in an archive, or frozen, where nobody deletes a feature.
    below = module.removeprefix(package).split(".")[1:]
    path = os.path.join(folder, *below)
    return os.path.isdir(path) or os.path.isfile(f"{path}.py")


def load(module: str, name: str) -> object:
    """Import a module and return one of its names."""
    try:
        return getattr(import_module(module), name)
    except ImportError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ImportError(f"cannot import {name!r}: {module} failed with {problem}", name=module) from error


def missing_name(module: str, name: str, names: Iterable[str], home: str = "") -> Exception:
    """Return the error for a name that a module does not have, of those that it, or another home, has.

    Python 3.11 names none that is near, and of an AttributeError it shows nothing in ``from module import name``. So a
    name that is nearly a class is an ImportError. The name of a submodule has no capital, and is looked for after this.
    """
    if name.islower() or name.startswith("_"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    bare = {_bare(known_name): known_name for known_name in names}
    near = difflib.get_close_matches(_bare(name), bare, n=1, cutoff=0.8)
    if not near:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    meant = bare[near[0]]
    return ImportError(
        f"cannot import name {name!r} from {module!r}; write: from {home or module} import {meant}", name=module
    )


def _bare(name: str) -> str:
    return name.lower().removesuffix("addon")
