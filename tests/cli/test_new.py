"""`python -m zae new`: what is written, what is refused, and that it passes its own tests, ruff and mypy."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from kit import hand
from kit.rank_tasks import forks
from kit.table import Task
from zae.addons import MultiGPUAddon
from zae.cli import main


def new(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["new", *arguments])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("kind", "name", "folder", "package"),
    [("project", "MyDigits", "my-digits", "my_digits"), ("addon", "grad-noise", "zae-grad-noise", "zae_grad_noise")],
)
def test_what_is_written(kind: str, name: str, folder: str, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of the templates is left in it; all files can be parsed, and are those that are told."""
    status, said, _ = new(capsys, kind, name, "--json")
    found = json.loads(said)
    assert (status, found["folder"], found["package"]) == (0, folder, package)
    files = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    assert files == sorted(found["files"])
    for file in files:
        text = Path(folder, file).read_text(encoding="utf-8")
        assert not re.search(r"\$|PACKAGE", text.replace("$ ", ""))
        if file.endswith(".py"):
            ast.parse(text)
    project = tomllib.loads(Path(folder, "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == [package]
    assert Path(folder, package, "__init__.py").is_file()
    if kind == "addon":
        assert project["project"]["entry-points"]["zae.addons"] == {
            "GradNoiseAddon": "zae_grad_noise.addon:GradNoiseAddon"
        }
    status, said, error = new(capsys, kind, name)
    assert (status, said) == (2, "")
    assert f"{folder} exists, and nothing is overwritten; give another name, or --folder" in error
    status, said, _ = new(capsys, kind, name, "--folder", "other")
    assert (status, said.splitlines()[:2]) == (0, [f"other: {len(files)} files. Next:", "  cd other"])


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("project", "torch", "a package 'torch' would be imported in the place of another one"),
        ("project", "json", "a package 'json' would be imported in the place of another one"),
        ("project", "../up", "'../up' cannot be a name; write letters, digits and hyphens"),
        ("project", "3d", "'3d' cannot be a name"),
        ("project", "class", "'class' cannot be a name"),
        ("addon", "Addon", "'Addon' cannot be a name"),
    ],
)
def test_what_cannot_be_a_name(kind: str, name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written."""
    status, _, error = new(capsys, kind, name)
    assert status == 2
    assert words in error
    assert os.listdir() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "name"), [("project", "my-digits"), ("addon", "grad-noise")])
def test_it_passes_its_own_checks(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tests, ruff, the formatter and mypy with strict=true; the commands that its README names."""
    assert new(capsys, kind, name, "--folder", "made")[0] == 0
    commands = ["-c from setuptools import setup; setup()", "-m pytest -q", "-m ruff check .",
                "-m ruff format --check .", f"-m mypy --python-executable {sys.executable} ."]  # fmt: skip
    commands += {"project": ["-m zae plan train.py", "train.py", "-m zae report runs/first"],
                 "addon": ["-m zae addons GradNoiseAddon"]}[kind]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    for command in commands:
        words = command.split(" ", 1) if command.startswith("-c") else command.split()
        words += ["-q", "egg_info"] if command.startswith("-c") else []
        done = subprocess.run([sys.executable, *words], cwd="made", capture_output=True, text=True, timeout=600,
                              env=environment)  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_two_ranks_train_with_the_new_add_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers that it adds to the gradients are the same on both, as the weights are compared after an epoch."""
    assert new(capsys, "addon", "even-noise", "--folder", "made")[0] == 0
    monkeypatch.syspath_prepend("made")
    add_on = importlib.import_module("zae_even_noise").EvenNoiseAddon
    model = hand.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = Task.add_on(MultiGPUAddon, add_on)
    trainer = task(model, ["cpu"] * 2, optimizer=optimizer, seed=3, gradient_noise=0.1, log_bar=False)
    with forks():
        assert trainer.run(2, hand.loader())["epoch"] == 2
