"""The file of JSON lines: strict, whole, and brought back to where a resumed run stands."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kit.loggers import lines
from zae.addons.loggers import base as sinks
from zae.addons.loggers.base import JSONLSink, RunInfo, Sink


def write(path, info, *rows):
    sink = JSONLSink(path)
    sink.open(info)
    for step, value in rows:
        sink.write({"x": value}, step)
    sink.flush()
    sink.close(False)


@pytest.fixture
def path(tmp_path):
    """A file that has lines of steps 1, 2, 2, 3, 3, 4."""
    path = tmp_path / "deep" / "er" / "run.jsonl"
    write(path, RunInfo("a"), (1, 1.0), (2, 2.0), (2, 2.5), (3, 3.0), (3, 3.5), (4, 4.0))
    return path


def steps(path):
    return [(row["step"], row["x"]) for row in lines(path)]


def test_every_line_is_strict_json(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, RunInfo("a"), (1, math.nan), (2, math.inf), (3, -math.inf), (4, 0.1), (5, 7), (6, True), (7, "ü\n"))
    assert [row["x"] for row in lines(path)] == ["nan", "inf", "-inf", 0.1, 7, True, "ü\n"]
    assert len(path.read_bytes().splitlines()) == 8


def test_numbers_of_numpy_are_written_like_pythons(tmp_path):
    """A NaN of NumPy is the text "nan", too; its float64 is a float that shows itself otherwise."""
    path = tmp_path / "run.jsonl"
    write(path, RunInfo("a"), (1, np.float64("nan")), (2, np.float64("-inf")), (3, np.float64(0.1)))
    assert [row["x"] for row in lines(path)] == ["nan", "-inf", 0.1]


def test_each_line_is_there_at_once(tmp_path):
    sink = JSONLSink(tmp_path / "run.jsonl")
    sink.open(RunInfo("a"))
    for step in range(3):
        sink.write({"step": "not this one", "x": 1}, step)
        assert [row["step"] for row in lines(sink.path)] == list(range(step + 1))
    sink.close(False)


@pytest.mark.parametrize(
    ("records", "resumed_at", "kept"),
    [
        (3, 2, [1.0, 2.0, 2.5]),  # a plain resume
        (2, 2, [1.0, 2.0]),  # saved between two records of one step
        (4, 3, [1.0, 2.0, 2.5, 3.0]),
        (99, 2, [1.0, 2.0, 2.5]),  # lines of another place were counted too: the step decides
        (None, 3, [1.0, 2.0, 2.5, 3.0, 3.5]),
        (0, 0, []),
        (6, 4, [1.0, 2.0, 2.5, 3.0, 3.5, 4.0]),
    ],
)
def test_a_resume_cuts_what_comes_again(path, records, resumed_at, kept):
    write(path, RunInfo("a", continued=True, resumed_at=resumed_at, records=records), (9, 9.0))
    assert [x for _, x in steps(path)] == [*kept, 9.0]
    assert [p.name for p in path.parent.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 3, "x"', b'{"step": 3, "x": 3.0}', b"\x00\x00\x00", b"\xff\n", b"[]\n"])
def test_a_torn_line_is_cut(path, torn):
    with path.open("ab") as file:
        file.write(torn)
    write(path, RunInfo("a", continued=True, resumed_at=9, records=99), (9, 9.0))
    assert [x for _, x in steps(path)] == [1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 9.0]


def test_what_needs_no_cut_is_not_rewritten(path):
    before = path.stat().st_ino
    write(path, RunInfo("a", continued=True, resumed_at=4, records=6))
    write(path, RunInfo("a", continued=True))
    assert path.stat().st_ino == before


def test_a_cut_that_fails_changes_nothing(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(sinks.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        JSONLSink(path).open(RunInfo("a", continued=True, resumed_at=1, records=1))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["run.jsonl"]


def test_a_cut_keeps_the_rights_and_the_link(path, tmp_path):
    path.chmod(0o640)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    write(link, RunInfo("a", continued=True, resumed_at=1, records=1))
    assert link.is_symlink()
    assert steps(path) == [(1, 1.0)]
    assert path.stat().st_mode & 0o777 == 0o640


def test_another_runs_file_is_moved_aside(path):
    before = path.read_bytes()
    write(path, RunInfo("b"), (1, 7.0))
    write(path, RunInfo("c"), (1, 8.0))
    assert steps(path) == [(1, 8.0)]
    assert path.with_name("run.1.jsonl").read_bytes() == before
    assert steps(path.with_name("run.2.jsonl")) == [(1, 7.0)]


def test_an_empty_file_is_taken(tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch()
    write(path, RunInfo("a"), (1, 1.0))
    assert steps(path) == [(1, 1.0)]


def test_a_run_that_goes_on_elsewhere_begins_a_new_file(tmp_path):
    write(tmp_path / "new.jsonl", RunInfo("a", continued=True, resumed_at=8, records=8), (9, 9.0))
    assert steps(tmp_path / "new.jsonl") == [(9, 9.0)]


def test_the_base_does_nothing_but_ask_for_write():
    sink = Sink()
    sink.load()
    sink.open(RunInfo("a"))
    sink.flush()
    sink.close(True)
    with pytest.raises(NotImplementedError):
        sink.write({}, 1)


def test_numbers_are_exact(tmp_path):
    write(tmp_path / "run.jsonl", RunInfo("a"), (2**53, 0.1 + 0.2))
    assert lines(tmp_path / "run.jsonl") == [{"step": 2**53, "x": 0.1 + 0.2}]


def test_a_run_and_each_resumed_one_describe_themselves(path):
    """Before the first record, and not where nothing is logged; a description is not counted as a record."""
    config = {"lr": math.nan, "nested": [{"x": math.inf}]}
    for resumed_at in (3, 4):
        info = RunInfo("a", continued=True, resumed_at=resumed_at, records=5, config=config, explain="the loop")
        write(path, info)
        write(path, info, (resumed_at + 1, 9.0))
        write(path, RunInfo("a", continued=True), (resumed_at + 2, 10.0))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    headers = [(each["step"], each["run"]["config"], each["run"]["explain"]) for each in found if "run" in each]
    resumed = {"lr": "nan", "nested": [{"x": "inf"}]}, "the loop"
    assert headers == [(0, {}, ""), (3, *resumed), (4, *resumed)]
    assert [step for step, _ in steps(path)] == [1, 2, 2, 3, 3, 5, 6]
