"""Describe the code and the data of a run, so that two runs can be compared by them."""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from zae.composition.introspect import add_ons_of, recipe_of
from zae.data.loader_state import FINGERPRINT, facts_of
from zae.preview.describe import describe_options

__all__ = ["describe_code", "describe_data", "describe_run"]

_MOST = 100  # Classes of a model that are listed.


def describe_code(cls: Any, model: torch.nn.Module) -> dict[str, dict[str, str]]:
    """Return "code", a hash of the source of each class of the user, and "versions" of what is installed.

    The classes are those of the task, of the add-ons and of the modules of the model. Comments and layout do not
    count. A class whose source is not known is left out, as are functions that these classes call.
    """
    code = dict[str, str]()
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for each in _classes(cls, model):
        package = each.__module__.partition(".")[0]
        if _is_installed(each):
            version = getattr(sys.modules.get(package), "__version__", None)
            versions |= {package: version} if type(version) is str and package not in versions else {}
        elif (file := _file_of(each)) is not None:
            digest = _hashes(file, _changed_at(file)).get(each.__qualname__)
            if digest is not None and len(code) < _MOST:  # Else it was made by another class, or typed into a console.
                name = each.__qualname__.rpartition("<locals>.")[2]
                code[name if name not in code else f"{each.__module__}.{name}"] = digest
    versions.pop("zae", None)  # Each manifest has it.
    return {"code": code, "versions": versions}


def describe_run(instance: Any, hide: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what the manifest of a checkpoint has of a trainer: "monitor", "options" and "data"."""
    data = describe_data(instance.loader_position.loader)
    return {"monitor": instance.monitor, "options": describe_options(instance, hide), "data": data}


def describe_data(loader: Any) -> dict[str, Any]:
    """Return what decides the batches of an epoch, and the kind and the fingerprint of the dataset if it has one."""
    if loader is None:
        return {}
    found = {"fingerprint" if name == FINGERPRINT else name: value for name, value in facts_of(loader).items()}
    if hasattr(loader, "dataset"):
        found["dataset"] = type(loader.dataset).__name__
    return found


def _classes(cls: Any, model: torch.nn.Module) -> list[type]:
    """Return the classes of a run, the task first, without those of zae and without doubles."""
    roots = [recipe_of(cls)[0], *add_ons_of(cls), *dict.fromkeys(map(type, model.modules()))]
    found = dict.fromkeys(base for root in roots for base in root.__mro__)
    return [each for each in found if each.__module__.partition(".")[0] not in ("zae", "builtins", "abc", "typing")]


def _is_installed(cls: type) -> bool:
    """Return whether a class belongs to an installed package or to Python."""
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if path is None:
        return cls.__module__ in sys.builtin_module_names
    inside = {"site-packages", "dist-packages"} & set(Path(path).parts)
    return bool(inside) or Path(path).is_relative_to(sysconfig.get_path("stdlib"))


def _file_of(cls: type) -> str | None:
    """Return the file, or the cell of a notebook, that a class is defined in."""
    for value in vars(cls).values():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, FunctionType) and function.__code__.co_qualname.startswith(cls.__qualname__):
            return function.__code__.co_filename
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def _changed_at(file: str) -> int:
    """Return when a file was changed; 0 for the cell of a notebook, whose name is its own."""
    return os.stat(file).st_mtime_ns if os.path.isfile(file) else 0


@functools.lru_cache(maxsize=64)  # A search makes many trainers of one script.
def _hashes(file: str, changed_at: int) -> dict[str, str]:
    """Return the hash of each class that a file defines, by its qualified name."""
    linecache.checkcache(file)
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found = dict[str, str]()
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    for node, prefix in waiting:
        if isinstance(node, ast.ClassDef):
            source = ast.unparse(node).encode(errors="backslashreplace")
            found[prefix + node.name] = hashlib.sha256(source).hexdigest()[:16]
            prefix += f"{node.name}."
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            prefix += f"{node.name}.<locals>."
        waiting += [(each, prefix) for each in ast.iter_child_nodes(node)]
    return found
