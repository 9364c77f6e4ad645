"""Run a snippet of another library's documents as it is written, or with the change that a message names."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import pytest

__all__ = ["changed", "run", "said_by"]


def changed(text: str, *changes: tuple[str, str]) -> str:
    """Return a snippet with some of its text replaced, each part of which is there."""
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


def run(text: str, names: Mapping[str, Any], *changes: tuple[str, str]) -> dict[str, Any]:
    """Execute a snippet with these names, and return the names that it has then."""
    namespace = {"__name__": "snippet", **names}
    exec(compile(textwrap.dedent(changed(text, *changes)), "<snippet>", "exec"), namespace)
    return namespace


def said_by(text: str, names: Mapping[str, Any], *changes: tuple[str, str]) -> str:
    """Execute a snippet that is refused, and return what is said of it."""
    with pytest.raises(Exception) as caught:
        run(text, names, *changes)
    return str(caught.value)
