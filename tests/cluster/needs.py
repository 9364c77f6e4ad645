"""Fail a test that needs what this machine lacks, and say what that is."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def need_root_and(packages: dict[str, str]) -> None:
    """Fail where this is not root, or a command of a package of Debian is missing."""
    if os.geteuid() != 0:
        pytest.fail("network namespaces need root")
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = sorted({package for command, package in packages.items() if shutil.which(command, path=path) is None})
    if missing:
        pytest.fail(f"missing here: apt-get install {' '.join(missing)}")


def need_modules(*names: str) -> None:
    """Fail where a module of the extra `cluster` is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(f"missing here: {', '.join(missing)}; pip install -e '.[cluster]'")
