"""Describe the code and the data of a run, so that two runs can be compared by them."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zae.compose.introspect import add_ons_of, recipe_of
from zae.data.loader_state import FINGERPRINT, facts_of
from zae.description import describe_options

__all__ = ["describe_code", "describe_data", "describe_run"]

_MOST = 100  # Files that are listed.


def describe_code(cls: Any, model: torch.nn.Module) -> dict[str, dict[str, str]]:
    """Return "code", a hash of each file with classes of the user, and "versions" of what is installed.

    The classes are those of the task, of the add-ons and of the modules of the model. One that was typed into a console
    or a notebook has no file.
    """
    code = dict[str, str]()
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in dict.fromkeys(each.__module__ for each in _classes(cls, model)):
        module, package = sys.modules.get(name), name.partition(".")[0]
        file = getattr(module, "__file__", None)
        if file is None or _is_installed(Path(file)):
            version = getattr(sys.modules.get(package), "__version__", None)
            versions |= {package: version} if type(version) is str and package not in versions else {}
        elif os.path.isfile(file) and len(code) < _MOST:
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
            code[Path(file).name if Path(file).name not in code else f"{name}.py"] = digest
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


def _is_installed(file: Path) -> bool:
    """Return whether a file belongs to an installed package or to Python."""
    inside = {"site-packages", "dist-packages"} & set(file.parts)
    return bool(inside) or file.is_relative_to(sysconfig.get_path("stdlib"))
