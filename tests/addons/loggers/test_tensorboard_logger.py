"""TensorBoard, read back with its own reader."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path

import pytest
import torch.utils.tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kit.loggers import Killed, Task, build, digest, forked, lines, loader, scalars, warned
from zae import AddOnRequirement, ConfigError
from zae.addons import StateManagerAddon
from zae.addons.loggers.tensorboard_logger import TensorBoardLoggerAddon


def test_every_record_is_read_back(tmp_path):
    trainer = build(TensorBoardLoggerAddon, log_dir=tmp_path / "tb")
    trainer.run(2, loader(), loader(2))
    trainer.run(1, loader(), loader(2))
    found = scalars(tmp_path / "tb")
    for tag in ("train/loss", "valid/loss", "lr"):
        logged = [(row["step"], row[tag]) for row in trainer.log_history if tag in row]
        assert [step for step, _ in found[tag]] == [step for step, _ in logged]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in logged], rel=1e-6)
    assert [value for _, value in found["batch"]] == [*range(1, 5), 4, *range(5, 9), 8, *range(9, 13), 12]
    assert {value for _, value in found["epoch"]} == {1.0, 2.0, 3.0}


def test_not_a_number_is_shown_as_such(tmp_path):
    class Broken(Task):
        def test_step(self, batch):
            return {"a": math.nan, "b": math.inf}

    build(TensorBoardLoggerAddon, task=Broken, log_dir=tmp_path, mode="test").run(1, loader(1))
    found = scalars(tmp_path)
    assert math.isnan(found["valid/a"][0][1])
    assert found["valid/b"] == [(0, math.inf)]


def test_text_and_config_are_there(tmp_path):
    trainer = build(TensorBoardLoggerAddon, log_dir=tmp_path)
    trainer.setup()
    trainer.log({"note": "a remark", "loss": 1.0}, 1)
    trainer.teardown()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert {"note/text_summary", "config/text_summary"} <= set(reader.Tags()["tensors"])
    (event,) = reader.Tensors("config/text_summary")
    assert b'"composition": [\n    "TensorBoardLoggerAddon"' in event.tensor_proto.string_val[0]


def train(folder, at=None):
    Killed.at = at
    trainer = build(
        StateManagerAddon, TensorBoardLoggerAddon, task=Killed, log_dir=folder / "tb", save_path=folder / "saved",
        save_every=3, resume="auto",
    )  # fmt: skip
    trainer.run(3, loader())
    return digest(trainer)


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("at", [3, 7, 11])
def test_killed_and_resumed_it_shows_the_uninterrupted_run(tmp_path, at):
    """What was written before a checkpoint is on the disk; what comes again is shown once."""
    expected = train(tmp_path / "whole")
    assert forked(lambda: train(tmp_path / "cut", at)) == -signal.SIGKILL
    assert train(tmp_path / "cut") == expected
    assert scalars(tmp_path / "cut" / "tb") == scalars(tmp_path / "whole" / "tb")


def test_fault_the_real_writer_raises_at_step_7(tmp_path, monkeypatch, caplog):
    plain = build()
    plain.run(3, loader())
    real = torch.utils.tensorboard.SummaryWriter.add_scalar

    def add_scalar(self, tag, value, global_step=None, **kwargs):
        if global_step == 7:
            raise OSError(28, "No space left on device")
        real(self, tag, value, global_step, **kwargs)

    monkeypatch.setattr(torch.utils.tensorboard.SummaryWriter, "add_scalar", add_scalar)
    trainer = build(TensorBoardLoggerAddon, log_dir=tmp_path)
    trainer.run(3, loader())
    assert digest(trainer) == digest(plain)
    failed, told = warned(caplog)
    assert "tensorboard failed: OSError: [Errno 28] No space left on device" in failed
    assert "give another log_dir" in failed
    assert "6 records of tensorboard" in told
    assert [row["step"] for row in lines(next(Path("zae-offline").iterdir()))] == list(range(7, 13))
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == list(range(1, 7))


def test_fault_the_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(AddOnRequirement, match=r'pip install "zae\[tensorboard\]"'):
        build(TensorBoardLoggerAddon, log_dir=tmp_path)


def test_a_folder_that_cannot_be_written_is_found_at_construction(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="log_dir"):
            build(TensorBoardLoggerAddon, log_dir=path)
    with pytest.raises(TypeError, match="log_dir"):
        build(TensorBoardLoggerAddon)


def test_the_folder_is_beside_the_checkpoints_where_none_is_given(tmp_path):
    trainer = build(StateManagerAddon, TensorBoardLoggerAddon, save_path=tmp_path / "run")
    assert trainer.log_dir == tmp_path / "run" / "runs"
    trainer.run(1, loader())
    assert [step for step, _ in scalars(trainer.log_dir)["train/loss"]] == [1, 2, 3, 4]
    resumed = build(StateManagerAddon, TensorBoardLoggerAddon, save_path=tmp_path / "run", resume=True)
    resumed.load_state()  # The folder of events is not taken for a checkpoint.
    assert resumed.progress_checker.step == trainer.progress_checker.step > 0

    class Own(Task.add_on(TensorBoardLoggerAddon)):
        def __init__(self, *args, log_dir=tmp_path / "own", **kwargs):
            super().__init__(*args, log_dir=log_dir, **kwargs)

    assert build(StateManagerAddon, task=Own, save_path=tmp_path / "run").log_dir == tmp_path / "own"
