"""JSON lines: each record exactly once, whatever kills the run, and a path that is wrong is found at construction."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import fsspec
import pytest
import torch

from kit import faults
from kit.loggers import Killed, Task, bare, build, digest, forked, lines, loader, warned
from kit.stores import Failing, Gate, planned
from zae import ConfigError, Every
from zae.addons import StateManagerAddon
from zae.addons.jsonl_logger import JSONLLoggerAddon
from zae.sinks.base import RunInfo
from zae.sinks.remote import RemoteJSONLSink


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


# --------------------------------------------------------------------------------------------- a copy elsewhere


def files_below(url):
    """Return the file system and the names in the folder of a URL."""
    files, path = fsspec.core.url_to_fs(url)
    folder = path.rpartition("/")[0]
    return files, sorted(each.rpartition("/")[2] for each in files.ls(folder, detail=False))


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_the_copy_of_a_log_is_the_file(tmp_path, scheme):
    """After two runs, of which the second is another one: the first is renamed here and there."""
    url = f"{scheme}://{tmp_path}/store/log.jsonl"
    for epochs in (1, 2):
        trainer = build(JSONLLoggerAddon, jsonl_path=tmp_path / "run.jsonl", jsonl_url=url)
        trainer.run(epochs, loader())
    files, names = files_below(url)
    assert names == ["log.1.jsonl", "log.jsonl"]
    for name in names:
        copy = files.cat(files._strip_protocol(url.replace("log.jsonl", name)))
        assert copy == (tmp_path / name.replace("log", "run")).read_bytes()


def test_a_run_that_moves_to_another_machine_and_back_continues_its_log(tmp_path):
    """Each record is there once, also where the first machine has an older file."""
    url, saved = f"file://{tmp_path}/store/log.jsonl", tmp_path / "saved"

    def part(machine, steps):
        trainer = build(JSONLLoggerAddon, StateManagerAddon, save_path=saved, resume="auto", log_every=1,
                        jsonl_path=tmp_path / machine / "run.jsonl", jsonl_url=url)  # fmt: skip
        trainer.run(3, loader(4), max_steps=steps)

    for machine, steps in (("a", 3), ("b", 7), ("a", None)):
        part(machine, steps)
    build(JSONLLoggerAddon, jsonl_path=tmp_path / "whole.jsonl", log_every=1).run(3, loader(4))
    assert lines(tmp_path / "a" / "run.jsonl") == lines(tmp_path / "whole.jsonl")
    assert (tmp_path / "store" / "log.jsonl").read_bytes() == (tmp_path / "a" / "run.jsonl").read_bytes()
    assert len(lines(tmp_path / "b" / "run.jsonl")) < len(lines(tmp_path / "a" / "run.jsonl"))


@pytest.mark.parametrize(("seconds", "uploaded"), [(0.0, [2, 3, 4]), (1e6, [None, None, None])])
def test_the_copy_grows_during_a_run(tmp_path, seconds, uploaded):
    """Without checkpoints; the first line describes the run."""
    sink = RemoteJSONLSink(tmp_path / "run.jsonl", f"file://{tmp_path}/store/log.jsonl")
    sink.seconds, copy, found = seconds, tmp_path / "store" / "log.jsonl", []
    sink.open(RunInfo(id="0123456789abcdef"))
    for step in range(3):
        sink.write({"train/loss": 0.5}, step)
        found.append(len(copy.read_text().splitlines()) if copy.exists() else None)
    assert found == uploaded
    sink.close(False)
    assert len(copy.read_text().splitlines()) == 4


def test_a_store_that_fails_costs_a_warning(tmp_path, caplog):
    """Weights and file are those without it."""
    (tmp_path / "file").write_text("not a folder")
    url = f"file://{tmp_path}/file/log.jsonl"
    trainer = build(JSONLLoggerAddon, jsonl_path=tmp_path / "run.jsonl", jsonl_url=url)
    trainer.run(3, loader())
    (told,) = warned(caplog)
    assert f"{url} could not be renamed (" in told
    assert told.endswith(f"; the records are in {tmp_path / 'run.jsonl'}")
    twin = build(JSONLLoggerAddon, jsonl_path=tmp_path / "twin.jsonl")
    twin.run(3, loader())
    assert digest(trainer) == digest(twin)
    assert lines(tmp_path / "run.jsonl") == lines(tmp_path / "twin.jsonl")


def test_a_store_that_hangs_or_is_slow_keeps_no_record_waiting(tmp_path, caplog):
    """One warning, and the file is that of a run without the store; an upload that ends late is whole."""
    gate, url = Gate("put_file"), f"faulty://{tmp_path}/store/log.jsonl"
    options = {"log_every": 1, "logger_timeout": 0.9}
    with planned(gate):
        trainer = build(JSONLLoggerAddon, StateManagerAddon, save_path=tmp_path / "saved", save_every=3,
                        jsonl_path=tmp_path / "run.jsonl", jsonl_url=url, **options)  # fmt: skip
        trainer.run(3, loader(4))
        assert gate.reached.is_set()
        (told,) = warned(caplog)
        assert f"{url} could not be uploaded (TimeoutError: no answer within 0.3 s)" in told
        gate.opened.set()
        faults.wait_for(lambda: (tmp_path / "store" / "log.jsonl").exists())
    build(JSONLLoggerAddon, jsonl_path=tmp_path / "whole.jsonl", **options).run(3, loader(4))
    assert lines(tmp_path / "run.jsonl") == lines(tmp_path / "whole.jsonl")
    copy = lines(tmp_path / "store" / "log.jsonl")
    assert copy
    assert copy == lines(tmp_path / "run.jsonl")[: len(copy)]


@pytest.mark.parametrize("error", ["client", "permission", "time"])
def test_a_copy_that_could_not_be_read_is_not_written_over(tmp_path, error, caplog):
    """The records of another machine are kept beside the new copy."""
    url, saved, store = f"faulty://{tmp_path}/store/log.jsonl", tmp_path / "saved", tmp_path / "store"

    def part(machine, steps):
        trainer = build(JSONLLoggerAddon, StateManagerAddon, save_path=saved, resume="auto", log_every=1,
                        jsonl_path=tmp_path / machine / "run.jsonl", jsonl_url=url)  # fmt: skip
        trainer.run(3, loader(4), max_steps=steps)

    part("a", 3)
    part("b", 7)
    theirs = (store / "log.jsonl").read_bytes()
    with planned(Failing(0, error, names=("info",))):
        part("a", None)
    assert (store / "log.1.jsonl").read_bytes() == theirs
    assert (store / "log.jsonl").read_bytes() == (tmp_path / "a" / "run.jsonl").read_bytes()
    assert f"{url} could not be downloaded (" in caplog.text


@pytest.mark.parametrize("url", ["log.jsonl", 3, "nothing://bucket/log.jsonl"])
def test_a_url_that_is_none_is_refused_at_construction(tmp_path, url):
    with pytest.raises(ConfigError, match=r"jsonl_url=.*; give "):
        build(JSONLLoggerAddon, jsonl_path=tmp_path / "run.jsonl", jsonl_url=url)


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
