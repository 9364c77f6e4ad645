"""The CSV logger of docs/howto/own_logger.md: after kills each record is in its file once."""

from __future__ import annotations

import re
import signal
import types
from pathlib import Path
from typing import Any

import pytest

from kit import faults, hand
from kit.blocks import find_page
from zae.addons import JSONLLoggerAddon, StateManagerAddon


@pytest.fixture(scope="module")
def page() -> Any:
    """The classes of the page, without what it trains."""
    module = types.ModuleType("own_logger")
    blocks = re.findall(r"^```python\n(.*?)^```", find_page("own_logger").read_text(encoding="utf-8"), re.M | re.S)
    (block,) = [each for each in blocks if "class CSVLoggerAddon" in each]
    exec(block.partition("check_addon(CSVLoggerAddon")[0], vars(module))
    return module


def train(folder: Path, *loggers: Any, kill_at: int = -1, **options: Any) -> None:
    """Train two epochs of six steps with a record for each step; validation begins later, and adds columns."""
    trainer = faults.build(
        faults.Task, StateManagerAddon, faults.KillAddon, *loggers, save_path=folder / "saved", save_every=4,
        resume="auto", log_every=1, kill_at=kill_at, **options,
    )  # fmt: skip
    trainer.run(2, hand.loader(), hand.loader())


def train_in_a_process(folder: Path, loggers: Any, kill_at: int, options: Any) -> int:
    """Return the exit status."""
    return faults.forked(lambda: train(folder, *loggers, kill_at=kill_at, **options)).status


def test_after_kills_the_file_is_that_of_a_run_without_any(page: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / name / "log.csv" for name in ("straight", "killed")}
    loggers = [page.CSVLoggerAddon]
    assert train_in_a_process(tmp_path / "straight", loggers, -1, {"csv_path": files["straight"]}) == 0
    statuses = [
        train_in_a_process(tmp_path / "killed", loggers, step, {"csv_path": files["killed"]})
        for step in (3, 5, 7, 8, 11, -1)
    ]
    assert statuses == [-signal.SIGKILL] * 5 + [0]
    assert files["killed"].read_text() == files["straight"].read_text()
    header, *rows = files["killed"].read_text().splitlines()
    assert header == "step,epoch,batch,train/loss,train/noise,lr,valid/loss,valid/hit"
    assert [int(row.split(",")[0]) for row in rows] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 12]


def test_a_logger_that_is_added_later_has_each_record_once(page: Any, tmp_path: Path) -> None:
    """Its file has fewer records than the state counts; a row that a kill has cut off is taken out."""
    jsonl = {"jsonl_path": tmp_path / "log.jsonl"}
    both = {**jsonl, "csv_path": tmp_path / "log.csv"}
    assert train_in_a_process(tmp_path, [JSONLLoggerAddon], 5, jsonl) == -signal.SIGKILL
    assert train_in_a_process(tmp_path, [JSONLLoggerAddon, page.CSVLoggerAddon], 10, both) == -signal.SIGKILL
    with both["csv_path"].open("a") as file:
        file.write("1")
    assert train_in_a_process(tmp_path, [JSONLLoggerAddon, page.CSVLoggerAddon], -1, both) == 0
    rows = both["csv_path"].read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == [5, 6, 6, 7, 8, 9, 10, 11, 12, 12]
