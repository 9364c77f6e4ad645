"""What a user imports from: each name of `__all__` is there, and the changelog has the present version."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import zae

CHANGELOG = (Path(__file__).parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## \[([\w.]+)\] - [^\n]+\n(.*?)(?=^## |\Z)", CHANGELOG, re.M | re.S))
GROUPS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
MODULES = (
    *("zae", "zae.addons", "zae.arguments", "zae.data", "zae.metrics", "zae.schedulers", "zae.search", "zae.testing"),
    *("zae.addons.fairseq2", "zae.addons.huggingface.transformers"),
)


@pytest.mark.parametrize("name", MODULES)
def test_each_public_name_is_there_once(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert len({*module.__all__}) == len(module.__all__)
    assert [each for each in module.__all__ if not hasattr(module, each)] == []


def test_the_changelog_has_the_present_version() -> None:
    """The newest version is first, and its groups are those of Keep a Changelog."""
    numbers = [tuple(map(int, version.split("."))) for version in SECTIONS]
    assert numbers == sorted(numbers, reverse=True)
    assert next(iter(SECTIONS)) == zae.__version__
    assert {group for text in SECTIONS.values() for group in re.findall(r"^### (\w+)$", text, re.M)} <= GROUPS
