"""`python -m zae plot`: what is drawn, to the character, and what is refused."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from zae.cli import main
from zae.display.text_plot import Series, draw

GOLDEN = Path(__file__).parent.parent / "golden" / "plots.txt"


@pytest.fixture(autouse=True)
def runs() -> None:
    """Two runs; the loss of the first falls, that of the second rises."""
    steps = range(1, 33)
    for name, rows in {
        "a": [{"step": i, "train/loss": 1 / i, "valid/loss": 0.5, "lr": 0.1} for i in steps],
        "b": [{"step": i, "train/loss": i / 32} for i in steps],
    }.items():
        Path(name).mkdir()
        Path(name, "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def plot(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = main(["plot", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_what_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """One run and two, in braille and in ASCII, linear and logarithmic, wide and narrow."""
    drawn = []
    for arguments in (
        "a train/loss --width 48 --height 8",
        "a train/loss valid/loss --width 48 --height 8",
        "a train/loss --width 48 --height 6 --log",
        "a b train/loss --width 60 --height 8 --ascii",
        "a lr --width 20 --height 3",
    ):
        status, said, error = plot(capsys, *arguments.split())
        assert (status, error) == (0, "")
        width = int(arguments.split("--width ")[1].split()[0])
        assert max(map(len, said.splitlines())) <= width
        assert said.isascii() == ("--ascii" in arguments or "valid" in arguments), "two curves look unlike"
        drawn.append(f"$ zae plot {arguments}\n{said}")
    assert "\n".join(drawn) == GOLDEN.read_text(encoding="utf-8")


def test_the_width_is_that_of_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without metrics every loss is drawn."""
    for columns in (40, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        said = plot(capsys, "a", "b")[1]
        assert max(map(len, said.splitlines())) == columns
        assert said.splitlines()[-3:] == [
            "* a train/loss: 1 -> 0.03125", "o a valid/loss: 0.5 -> 0.5", "+ b train/loss: 0.03125 -> 1",
        ]  # fmt: skip


def test_json_holds_the_points(capsys: pytest.CaptureFixture[str]) -> None:
    status, said, _ = plot(capsys, "a", "valid/loss", "--json")
    assert (status, json.loads(said)) == (0, {"valid/loss": [[i, 0.5] for i in range(1, 33)]})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "train/los"), "a has no metric 'train/los'; did you mean 'train/loss'? Available: train/loss, valid/l"),
        (("nowhere", "lr"), "nowhere does not exist; give the folder or the log of a run, then metrics"),
        (("b", "lr"), "b has no metric 'lr'; available: train/loss"),
        (("b", "--width", "0"), "--width 0 is too small for a plot; give at least 20"),
        (("b", "--height", "-5"), "--height -5 is too small for a plot; give at least 3"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    status, said, error = plot(capsys, *arguments)
    assert (status, said) == (2, "")
    assert words in error


def test_colours_tell_curves_apart_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, in a pipe or with NO_COLOR, marks do; the characters are the same but for the colours."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    said = plot(capsys, "a", "--width", "48", "--height", "8")[1]
    lines = said.splitlines()
    assert lines[-2:] == ["\x1b[34m━━\x1b[0m train/loss: 1 -> 0.03125", "\x1b[33m━━\x1b[0m valid/loss: 0.5 -> 0.5"]
    bare = [re.sub(r"\x1b\[\d+m", "", line) for line in lines]
    assert bare[0] == "      1 │⡇"
    assert lines[0] == "      1 │\x1b[34m⡇\x1b[0m"
    assert max(map(len, bare)) == 48
    assert "\x1b" not in plot(capsys, "a", "train/loss")[1], "one curve needs no colour"
    monkeypatch.setenv("NO_COLOR", "1")
    assert plot(capsys, "a")[1].isascii()


@pytest.mark.parametrize("is_ascii", [False, True])
@pytest.mark.parametrize("is_log", [False, True])
def test_any_values_can_be_drawn(is_ascii: bool, is_log: bool) -> None:
    """One point, equal ones, none that is finite, values below zero, and a width for next to nothing."""
    for values in ([1.0], [2.0, 2.0], [math.nan, math.inf], [-1.0, 0.0, 1e300, -1e300], []):
        series = Series(list(range(len(values))), values, [math.nan] * len(values))
        for width in (1, 30):
            text = draw({"x\x1b[31m": series}, width, 4, is_ascii=is_ascii, is_log=is_log)
            assert "\x1b" not in text
            assert max(map(len, text.splitlines())) <= max(width, 28)
