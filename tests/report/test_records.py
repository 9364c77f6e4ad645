"""What a log becomes: series of steps that increase, whatever was repeated, torn or not a number."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.loggers import build, lines, loader
from zae import ConfigError
from zae.addons import JSONLLoggerAddon
from zae.report.records import THROUGHPUT, Records, find_log, read_log


def test_the_log_of_a_run_becomes_its_series(tmp_path: Path) -> None:
    """Each number of each line, with its step and its time, and the description that comes first."""
    path = tmp_path / "run.jsonl"
    build(JSONLLoggerAddon, jsonl_path=path, gradient_clip=1.0).run(2, loader(3), loader(1))
    records, rows = read_log(path), lines(path)
    for key in ("train/loss", "valid/loss", "lr", "grad_norm"):
        points = [(row["step"], row[key]) for row in rows if key in row]
        assert list(zip(records.series[key].steps, records.series[key].values, strict=True)) == points
        assert records.series[key].times == sorted(records.series[key].times)
    assert (records.epochs.steps, records.epochs.values) == ([1, 4], [1, 2])
    assert records.description_of("config")["composition"] == ["JSONLLoggerAddon"]
    assert records.description_of("environment")["device"] == "cpu"
    assert "for each epoch" in records.about["explain"]
    assert all(rate > 0 for rate in records.series[THROUGHPUT].values)


def test_a_log_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Without times and without a description; what another program wrote between the records is passed over."""
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "epoch": 1, "batch": 1, "train/loss": 0.5}\nhello\n{"step": 2, "valid/loss": 0.25}')
    records = read_log(path)
    assert {key: each.values for key, each in records.series.items()} == {"train/loss": [0.5], "valid/loss": [0.25]}
    assert (records.about, math.isnan(records.began)) == ({}, True)


def test_not_a_number_is_a_gap_that_is_known() -> None:
    rows = [{"step": i, "x": value} for i, value in enumerate(["nan", 1, "inf", "-inf", True, "text", None, [1]])]
    series = Records.of(rows).series["x"]
    assert repr(series.values) == repr([math.nan, 1.0, math.inf, -math.inf, 1.0])
    assert series.steps == [0, 1, 2, 3, 4]
    assert Records.of([{"step": 1, "x": 10**400, "y": -(10**400)}]).series["y"].values == [-math.inf]


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("ab")), max_size=40))
def test_what_a_resume_repeats_is_there_once(points: list[tuple[int, str]]) -> None:
    """The last record of a step counts, and those after it that were written before it do not."""
    records = Records.of([{"step": step, name: number} for number, (step, name) in enumerate(points)])
    for name, series in records.series.items():
        own = [(step, number) for number, (step, other) in enumerate(points) if other == name]
        kept = [pair for at, pair in enumerate(own) if all(step > pair[0] for step, _ in own[at + 1 :])]
        assert list(zip(series.steps, series.values, strict=True)) == kept


def test_the_throughput_does_not_count_the_time_between_two_processes() -> None:
    about = {"config": {}, "explain": "", "environment": {}}
    rows = [
        {"step": 0, "run": about, "unix_time": 100.0},
        *({"step": i, "train/loss": 0.0, "unix_time": 100.0 + i} for i in range(1, 4)),
        {"step": 2, "run": about, "unix_time": 900.0},
        *({"step": i, "train/loss": 0.0, "unix_time": 900.0 + i - 2} for i in range(3, 6)),
    ]
    records = Records.of(rows)
    assert records.series[THROUGHPUT].steps == [1, 2, 3, 4, 5]
    assert records.series[THROUGHPUT].values == [1.0] * 5
    assert [each["step"] for each in records.sessions] == [0, 2]


@pytest.mark.parametrize(
    "line",
    [
        *('{"step": 1e999, "x": 1}', '{"step": -1, "x": 1}', '{"step": "1", "x": 1}', "[" * 100_000, '{"x": 1}'),
        *(f'{{"step": {2**53}, "x": 1}}', "\x00", '{"step": 1', '"a"', "null", "[1]"),
    ],
)
def test_a_hostile_line_is_no_record(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line + '\n{"step": 3, "x": 4}\n')
    assert read_log(path).series["x"].steps == [3]
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="contains no records; give a file that JSONLLoggerAddon wrote"):
        read_log(path)


def test_a_description_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [{"step": 0, "run": {"config": [1], "environment": "x", "explain": 3}}, {"step": 1, "x": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (read_log(path).description_of("config"), read_log(path).description_of("environment")) == ({}, {})


def test_the_log_in_a_folder_is_found(tmp_path: Path) -> None:
    """Neither a ledger nor the log that a new run moved aside; several are refused."""
    assert find_log(tmp_path) is None
    (tmp_path / "ledger.jsonl").write_text('{"ledger": 1, "begins_after": 0}\n{"step": 1, "stages": {}}\n')
    (tmp_path / "empty.jsonl").touch()
    assert find_log(tmp_path) is None
    for name in ("log.jsonl", "log.1.jsonl", "log.2.jsonl"):
        (tmp_path / name).write_text('{"step": 1, "x": 1}\n')
    assert find_log(tmp_path) == tmp_path / "log.jsonl"
    (tmp_path / "other.jsonl").write_text('{"step": 1, "x": 1}\n')
    with pytest.raises(ConfigError, match=r"several logs: log\.jsonl, other\.jsonl; give one of these files"):
        find_log(tmp_path)
    with pytest.raises(ConfigError, match="is not a file; give the folder of a run, or a file of JSON lines"):
        read_log(tmp_path)
