"""The papers of the project: citation, security, issue forms, and how a version is released."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys

import pytest
import yaml

import zae
from kit import imports
from kit.blocks import read_setup
from zae.checkpoint import json_text, manifest

ROOT = imports.ROOT
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAPERS = ("CHANGELOG.md", "SECURITY.md", "RELEASING.md", ".github/PULL_REQUEST_TEMPLATE.md")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_is_valid():
    """The keys that version 1.2.0 of the format requires, those that it knows, and the present version of zae."""
    citation = yaml.safe_load(read("CITATION.cff"))
    required = {"cff-version", "message", "title", "authors"}
    known = required | {"abstract", "type", "version", "license", "keywords", "repository-code", "url", "doi"}
    assert required <= citation.keys() <= known | {"date-released", "identifiers", "references"}
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset")
    assert citation["version"] == zae.__version__
    assert citation["license"] == read_setup()["metadata"]["license_expression"]
    assert [author.keys() for author in citation["authors"]] == [{"name"}]
    assert citation["authors"][0]["name"] == read_setup()["metadata"]["author"]
    assert all(isinstance(word, str) for word in citation["keywords"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_the_issue_forms_are_valid(path):
    """The keys and kinds that an issue form may have; each field has a name of its own and a label."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert field["attributes"]["label"]
        assert field.get("validations", {}).keys() <= {"required"}
        options = field["attributes"].get("options", [])
        assert bool(options) == (field["type"] in ("checkboxes", "dropdown"))


@pytest.mark.parametrize("name", PAPERS)
def test_what_the_papers_name_is_there(name):
    """Files, tools and relative links; no address of a host or of a person is made up."""
    text = read(name)
    for link in re.findall(r"\]\((?!https://)([^)#\s]+)", text):
        assert (ROOT / name).parent.joinpath(link).exists(), link
    for path in re.findall(r"`(?:python )?((?:tests|docs|zae|\.ci)/[\w./-]+)(?: NAME)?`", text):
        assert (ROOT / path.replace("VERSION", zae.__version__)).exists(), path
    hosts = set(re.findall(r"https?://([^/)\s]+)", text))
    assert hosts <= {"keepachangelog.com", "semver.org"}
    assert not re.search(r"\w@\w", text)


def test_the_limits_of_the_security_policy_are_those_of_the_code():
    text = " ".join(read("SECURITY.md").split())
    sizes = re.search(r"A manifest has at most (\d+) MiB, a state at most (\d+) MiB", text)
    assert [int(size) << 20 for size in sizes.groups()] == [manifest.MANIFEST_LIMIT, json_text.STATE_LIMIT]


def test_the_lowest_versions_are_those_of_the_page():
    """setup.cfg, docs/reference/versions.md and .ci/versions agree on what is required."""
    required = dict(line.split(">=") for line in read_setup()["options"]["install_requires"].split())
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|", read("docs/reference/versions.md"), re.M)
    assert dict(rows) == required | {"Python": read_setup()["options"]["python_requires"].removeprefix(">=")}


def test_the_installed_packages_fit():
    """`pip check` finds nothing that concerns zae: each package that it requires is there in a version that fits."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=600)
    assert [line for line in done.stdout.splitlines() if line.startswith("zae ")] == []
    assert importlib.metadata.version("zae") == zae.__version__


def test_the_commands_of_a_release_can_be_parsed():
    """Each line of the shell blocks is one; what it runs of this repository is there."""
    blocks = re.findall(r"^ *```bash\n(.*?)```", read("RELEASING.md"), re.S | re.M)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]
    assert [command[:3] for command in commands[:2]] == [["python", "-m", "pip"], ["python", "-m", "build"]]
    assert len(commands) >= 6
