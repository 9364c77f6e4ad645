"""JSON lines: each record exactly once, whatever kills the run, and a path that is wrong is found at construction."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
import torch

from kit.loggers import Killed, Task, bare, build, digest, forked, lines, loader, warned
from zae import ConfigError, Every
from zae.addons import StateManagerAddon
from zae.addons.loggers.jsonl_logger import JSONLLoggerAddon


def train(folder, at=None, epochs=3, **options):
    """Train three epochs of four steps, killed at a step or not."""
    Killed.at = at
    options = {
        "resume": "auto",
        "save_every": 3,
        "jsonl_path": folder / "run.jsonl",
        **options,
    }
    trainer = build(JSONLLoggerAddon, StateManagerAddon, task=Killed, save_path=folder / "saved", **options)
    trainer.run(epochs, loader(4), loader(1), valid_every=2)
    return trainer


@pytest.mark.exhaustive
def test_killed_at_any_step_each_line_is_there_once(tmp_path):
    """SIGKILL at every step, again in the resumed run, and resume: the file is that of the uninterrupted run."""
    expected = digest(train(tmp_path / "whole"))
    whole = lines(tmp_path / "whole" / "run.jsonl")
    assert [row["step"] for row in whole if "train/loss" in row] == list(range(1, 13))
    assert len([row for row in whole if "valid/loss" in row]) == 6
    for at in range(12):
        folder = tmp_path / str(at)
        for again in (at, min(at + 4, 11)):
            assert forked(lambda: train(folder, again)) == -signal.SIGKILL  # noqa: B023
        assert digest(train(folder)) == expected
        assert lines(folder / "run.jsonl") == whole


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("save_every", [4, Every(epochs=1)])
def test_a_checkpoint_between_two_records_of_one_step(tmp_path, save_every):
    """The last step of an epoch saves before the epoch's own records of the same step."""
    options = {"save_every": save_every, "log_every": Every(epochs=1)}
    train(tmp_path / "whole", **options)
    whole = lines(tmp_path / "whole" / "run.jsonl")
    for at in (4, 5, 8):
        folder = tmp_path / str(at)
        assert forked(lambda: train(folder, at, **options)) == -signal.SIGKILL  # noqa: B023
        train(folder, **options)
        assert lines(folder / "run.jsonl") == whole


def test_a_line_torn_by_the_kill(tmp_path):
    train(tmp_path / "whole")
    assert forked(lambda: train(tmp_path / "cut", 8)) == -signal.SIGKILL
    with (tmp_path / "cut" / "run.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "trai')
    train(tmp_path / "cut")
    assert lines(tmp_path / "cut" / "run.jsonl") == lines(tmp_path / "whole" / "run.jsonl")


def test_two_calls_of_run_are_one_file(tmp_path):
    trainer = build(JSONLLoggerAddon, jsonl_path=tmp_path / "run.jsonl")
    trainer.run(1, loader())
    trainer.run(2, loader())
    twin = build(JSONLLoggerAddon, jsonl_path=tmp_path / "twin.jsonl")
    twin.run(3, loader())
    assert lines(tmp_path / "run.jsonl") == lines(tmp_path / "twin.jsonl")
    assert [row["step"] for row in lines(tmp_path / "run.jsonl")] == list(range(1, 13))


def test_what_a_line_holds(tmp_path):
    """Step, epoch (from 1) and batch, and every number as it was logged."""
    trainer = build(JSONLLoggerAddon, jsonl_path=str(tmp_path / "a" / "b" / "run.jsonl"), gradient_clip=1.0)
    trainer.run(2, loader(2), loader(1))
    rows = lines(tmp_path / "a" / "b" / "run.jsonl")
    assert list(rows[0]) == ["step", "epoch", "batch", "train/loss", "lr", "grad_norm"]
    assert [(row["step"], row["epoch"], row["batch"]) for row in rows] == [
        (1, 1, 1), (2, 1, 2), (2, 1, 2), (3, 2, 3), (4, 2, 4), (4, 2, 4),
    ]  # fmt: skip
    assert bare(rows) == bare(trainer.log_history)


def test_not_a_number_is_written_as_text(tmp_path):
    class Broken(Task):
        def test_step(self, batch):
            return {"a": math.nan, "b": math.inf, "c": torch.tensor(-math.inf)}

    trainer = build(JSONLLoggerAddon, task=Broken, jsonl_path=tmp_path / "run.jsonl", mode="test")
    trainer.run(1, loader(1))
    (row,) = lines(tmp_path / "run.jsonl")
    assert (row["valid/a"], row["valid/b"], row["valid/c"]) == ("nan", "inf", "-inf")


def test_another_runs_file_is_kept_beside_the_new_one(tmp_path):
    path = tmp_path / "run.jsonl"
    build(JSONLLoggerAddon, jsonl_path=path).run(1, loader())
    before = path.read_bytes()
    build(JSONLLoggerAddon, jsonl_path=path).run(1, loader(2))
    assert len(lines(path)) == 2
    assert (tmp_path / "run.1.jsonl").read_bytes() == before


def test_a_path_that_cannot_be_written_is_found_at_construction(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path, text in [
        (tmp_path / "folder", "is a folder; give a file in it"),
        (tmp_path / "file" / "run.jsonl", "is a file, not a folder"),
        ("", "must be the path of a file"),
        (3, "must be the path of a file"),
    ]:
        with pytest.raises(ConfigError, match=text):
            build(JSONLLoggerAddon, jsonl_path=path)
    # The tests may run as root, whom no right stops: ask as if the disk were mounted read-only.
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        for path in (tmp_path / "file", tmp_path / "new" / "run.jsonl"):
            with pytest.raises(ConfigError, match="cannot be written to"):
                build(JSONLLoggerAddon, jsonl_path=path)
    with pytest.raises(TypeError, match="jsonl_path"):
        build(JSONLLoggerAddon)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_fault_a_folder_that_vanishes_under_way(caplog, tmp_path):
    """The disk that the file was to be on is gone when the run begins: the records are kept elsewhere."""
    trainer = build(JSONLLoggerAddon, jsonl_path=tmp_path / "away" / "run.jsonl")
    (tmp_path / "away").write_text("now a file")
    trainer.run(1, loader())
    assert len(warned(caplog)) == 2
    assert len(lines(next(Path("zae-offline").iterdir()))) == 4
