"""X-24: public names stay, and what changes is in the changelog."""

from __future__ import annotations

import json
import re
import zipfile

import pytest

import zae
from kit import frozen, public_api
from zae.storage.manifest import SHARDED_FORMAT

CHANGELOG = (public_api.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## \[([\w.]+)\] - [^\n]+\n(.*?)(?=^## |\Z)", CHANGELOG, re.M | re.S))
GROUPS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def changes(before: str, after: str) -> list[str]:
    """Write the lines of a changelog that turn one snapshot into the other."""
    old, new = public_api.names_in(before), public_api.names_in(after)
    lines = [f"### Removed: - `{name}`: write ... instead" for name in sorted(old.keys() - new.keys())]
    lines += [f"### Added: - `{name}`" for name in sorted(new.keys() - old.keys())]
    both = sorted(old.keys() & new.keys())
    return lines + [f"### Changed: - `{new[name]}`; it was `{old[name]}`" for name in both if old[name] != new[name]]


@pytest.mark.covers("X-24")
def test_the_public_names_and_their_parameters():
    """A name that is removed, added or changed needs the line in CHANGELOG.md that this shows, and a new snapshot."""
    kept = public_api.present().read_text(encoding="utf-8")
    assert changes(kept, public_api.describe()) == [], "then run python tests/kit/public_api.py"


def test_a_change_is_shown_with_its_line():
    before = "zae.Old(a)\nzae.Kept(a, b=1)\n"
    after = "zae.Kept(a, b=2)\nzae.New\n"
    assert changes(before, after) == [
        "### Removed: - `zae.Old`: write ... instead",
        "### Added: - `zae.New`",
        "### Changed: - `zae.Kept(a, b=2)`; it was `zae.Kept(a, b=1)`",
    ]


@pytest.mark.covers("X-24", "X-25")
def test_the_changelog_has_the_present_version_and_each_name():
    """What differs from the version before is in the section of this version, each name in backquotes."""
    numbers = [tuple(map(int, version.split("."))) for version in SECTIONS]
    assert numbers == sorted(numbers, reverse=True)
    assert next(iter(SECTIONS)) == zae.__version__
    assert {group for text in SECTIONS.values() for group in re.findall(r"^### (\w+)$", text, re.M)} <= GROUPS
    files = {path.stem: path for path in public_api.FOLDER.glob("*.txt")}
    assert set(files) == set(SECTIONS)
    snapshots = [files[version].read_text(encoding="utf-8") for version in SECTIONS] + [""]
    for text, after, before in zip(SECTIONS.values(), snapshots, snapshots[1:]):
        old, new = public_api.names_in(before), public_api.names_in(after)
        names = {name for name in old.keys() ^ new.keys() if re.fullmatch(r"zae(\.[a-z]\w*)*\.\w+", name)}
        names |= {name for name in old.keys() & new.keys() if old[name] != new[name]} | (old.keys() - new.keys())
        words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
        assert {name for name in names if name.rpartition(".")[2] not in words} == set()


@pytest.mark.covers("X-24")
def test_each_format_of_a_checkpoint_is_kept():
    """A checkpoint of each format that this version reads is among those that test_frozen.py loads."""
    manifests = [json.loads(zipfile.ZipFile(path).read("manifest.json")) for path in frozen.FOLDER.glob("*.zip")]
    assert {content["format"] for content in manifests} == {*range(1, SHARDED_FORMAT + 1)}
