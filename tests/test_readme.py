"""The README: every block of it runs, and what it claims of output and errors is looked up."""

from __future__ import annotations

import ast
import contextlib
import re

import pytest
import torch

import zae
import zae.addons
from _generators import pictures
from kit.blocks import FIRST, README, ROOT, Blocks, read_setup
from kit.error_catalogue import CATALOGUE
from kit.scripts import Script, besides_progress
from zae import Trainer


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """The README, evaluated from its top to its end in an empty folder."""
    folder = tmp_path_factory.mktemp("readme")
    blocks = Blocks(ROOT / "README.md")
    with contextlib.chdir(folder):
        blocks.run()
    blocks.with_add_ons = [float(number) for number in re.findall(r"0\.\d+", blocks.printed)]
    blocks.files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return blocks


def test_every_block_of_the_readme_runs(blocks):
    """Every block runs after the first alone, none is of an unknown language."""
    fences = re.findall(r"^```(\w+)$", README, re.M)
    assert blocks.evaluated == fences
    assert blocks.not_run == []
    assert README.count("```") == 2 * len(fences)
    assert blocks.evaluated.count("python") >= 2
    assert {path.split("/")[0] for path in blocks.files} == {"runs"}


def test_the_numbers_that_the_readme_says(blocks):
    """What both blocks print on any processor, the runs that were killed, and the errors that are tested."""
    trainer, test = (blocks.first[name] for name in ("trainer", "test"))
    said = re.search(r"It prints about ([\d.]+)", README)
    assert trainer.evaluate(test)["accuracy"] == pytest.approx(float(said[1]), abs=0.02)
    again = re.search(r"It prints about ([\d.]+) again\.", README)
    assert blocks.with_add_ons == pytest.approx([float(again[1])], abs=0.02)
    measured = (ROOT / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")
    row = re.search(r"^\| zae \d.*", measured, re.M)[0]
    killed, noticed = (re.search(rf"all (\d+) {words}", README)[1] for words in ("ended", "were noticed"))
    assert f"| {killed} of {killed} | {noticed} of {noticed} |" in row
    assert "more than a hundred" in README
    assert len(CATALOGUE) > 100
    required = [re.match(r"\w+", line)[0] for line in read_setup()["options"]["install_requires"].split()]
    extras = re.findall(r"`\.\[(\w+)\]`", README)
    assert f"zae[{','.join(sorted(extras[:-1]))}]" in read_setup()["options.extras_require"][extras[-1]]
    sentence = re.search(r"zae itself needs (.*?)\.\s", README, re.S)[1]
    assert [name for name in required if name not in sentence] == []


def test_no_run_validates_on_the_test_set():
    """A best epoch that is chosen on the test set makes its accuracy meaningless."""
    assert re.findall(r"(?:run|plan)\(\d+, train, test\)", README) == []
    assert re.findall(r"evaluate\((?!test\))", README) == []


def test_the_pictures_show_a_run_that_was_killed():
    """The numbers that a picture contains are the same with and without the kills."""
    assert "python docs/_generators pictures" in README
    for theme in pictures.COLORS:
        assert f"docs/resume-{theme}.svg" in README
        data = pictures.stored(theme)
        assert data["killed"] == data["straight"]
        assert data["kills"] == [*pictures.KILLED_AFTER]
        assert data["straight"]["valid/accuracy"][-1] > 0.97


def test_first_block_trains_real_data_in_eleven_lines():
    """At most 11 non-blank lines beyond the data, of at most 88 characters, and 5 names that are ours."""
    data, training = FIRST.split("# The data is ready. Now train on it:\n")
    assert "zae" not in data
    assert "optim" not in data
    lines = [line for line in training.splitlines() if line.strip()]
    assert len(lines) <= 11
    assert max(map(len, lines)) <= 88
    words = {node.id for node in ast.walk(ast.parse(training)) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(ast.parse(training)) if isinstance(node, ast.Attribute)}
    words |= {node.name for node in ast.walk(ast.parse(training)) if isinstance(node, (ast.FunctionDef, ast.alias))}
    # Two variables of the script and a method of its model are called so.
    ours = words & ({*dir(Trainer), *zae.__all__} - {"model", "metrics", "parameters"})
    assert ours == {"Trainer", "train_step", "test_step", "run", "evaluate"}


def test_first_block_copied_into_a_file(tmp_path):
    """At least 0.95; piped, it writes plain lines, to stderr its progress, no file."""
    (tmp_path / "first.py").write_text(FIRST)
    status, shown, said = Script(tmp_path / "first.py").end()
    assert status == 0, said
    assert besides_progress(said) == ""
    assert re.findall(r"(?m)^epoch (\d+)/20, step \d+, train_loss", said) == [*map(str, range(1, 21))]
    assert [sign for sign in shown + said if sign < " " and sign != "\n"] == []
    accuracy = re.fullmatch(r"test accuracy: (0\.\d+)\n", shown)
    assert accuracy
    assert float(accuracy[1]) >= 0.95
    assert [path.name for path in tmp_path.iterdir()] == ["first.py"]


def test_commands_are_the_agreed_ones_and_lines_are_not_too_wide():
    """The two commands that set everything up, word for word."""
    for extra, then in (("examples", "python examples/digits.py"), ("test", "python -m pytest")):
        assert f'\npython -m pip install -c constraints.txt -e ".[{extra}]" && {then}\n' in README
    lines = README.splitlines()
    assert [line for line in lines if len(line) > 120 and line[0] not in "|<" and "Error: " not in line] == []


def test_a_metric_that_is_not_there_is_named_with_those_that_are(blocks):
    """The history and the checkpoints asked for a metric that nothing returned."""
    digits, train = blocks.first["Digits"], blocks.first["train"]

    class NoLoss(digits):
        def test_step(self, batch):
            return {"accuracy": 0.5}

    model = torch.nn.Linear(64, 10)
    trainer = NoLoss.add_on(zae.addons.StateManagerAddon)(
        model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_path="runs/x"
    )
    metrics = trainer.run(1, train, train)
    for ask, found in (
        (lambda: metrics["accuracy"], r"no 'accuracy'; write metrics\['valid_metrics_history'\]\[-1\]\['accuracy'\]"),
        (lambda: metrics["best_valid"]["loss"], "available: none: "),
        (trainer.restore_best, "no validation returned monitor='loss'; write monitor= and the name"),
    ):
        with pytest.raises(zae.ZaeError, match=found):
            ask()
    assert metrics["valid_metrics_history"][-1]["accuracy"] == 0.5
