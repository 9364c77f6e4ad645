"""`python -m zae report`: which folders and files it takes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kit.loggers import build, loader
from zae.addons import JSONLLoggerAddon, StateManagerAddon
from zae.cli import main
from zae.report.loading import load_run, names_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a log and checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    options = {"save_path": folder / "saved", "jsonl_path": folder / "log.jsonl", "save_every": 4}
    build(JSONLLoggerAddon, StateManagerAddon, **options).run(2, loader(), loader(1))
    return folder


def report(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = main(["report", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_a_folder_and_its_log_make_the_same_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log says where the checkpoints are."""
    status, said, _ = report(capsys, folder, "-o", "deep/a.html")
    assert (status, said.startswith("deep/a.html (")) == (0, True)
    assert report(capsys, folder / "log.jsonl", "-o", "b.html", "--json")[0] == 0
    for name in ("deep/a.html", "b.html"):
        text = Path(name).read_text(encoding="utf-8")
        assert text.startswith("<!DOCTYPE html>")
        for words in ("step-00000008", "resume=True resumes from", "StateManagerAddon", "save_every"):
            assert words in text
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl", "saved"], "nothing is written to the run"


def test_json_says_what_was_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said, _ = report(capsys, folder, folder / "log.jsonl", "--json")
    found = json.loads(said)
    assert status == 0
    assert found["file"] == "report.html"
    assert found["bytes"] == len(Path("report.html").read_bytes())
    assert list(found["points"]) == ["first", "log"]


def test_checkpoints_alone_are_enough(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The history that a checkpoint contains is that of the log, but for the times."""
    logged = load_run(folder, "a")
    for path in (folder / "saved", folder / "saved" / "step-00000008"):
        run = load_run(path, "b")
        for key in ("train/loss", "valid/loss", "lr"):
            assert run.records.series[key].values == logged.records.series[key].values
            assert run.records.series[key].steps == logged.records.series[key].steps
        assert run.composition == ["JSONLLoggerAddon", "StateManagerAddon"]
        assert run.checkpoints[0]["checkpoints"][0]["whole"]


def test_a_damaged_checkpoint_is_said(folder: Path, tmp_path: Path) -> None:
    options = {"save_path": tmp_path / "saved", "save_every": 4}
    build(StateManagerAddon, **options).run(1, loader())
    (tmp_path / "saved" / "step-00000004" / "model.safetensors").write_bytes(b"x")
    run = load_run(tmp_path / "saved", "a")
    assert [each["whole"] for each in run.checkpoints[0]["checkpoints"]] == [False]
    assert run.records.series == {}
    assert main(["report", str(tmp_path), "-o", "a.html"]) == 0
    assert "damaged" in Path("a.html").read_text(encoding="utf-8")


def test_what_cannot_be_a_report_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    for arguments, words in [
        (("empty",), "empty contains neither a log nor checkpoints; give the folder of a run"),
        (("nowhere",), "nowhere does not exist; give the folder of a run"),
        ((folder, "-o", folder / "log.jsonl"), "would not be opened as a page; end it with .html"),
    ]:
        status, said, error = report(capsys, *arguments)
        assert (status, said) == (2, "")
        assert words in error
    assert not Path("report.html").exists()
    Path("full").write_text("a file")
    status, said, error = report(capsys, folder, "-o", "full/report.html")
    assert (status, said) == (2, "")
    assert "full/report.html was not saved" in error or "full is a file, not a directory" in error


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    assert names_of([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert names_of([Path("a/saved"), Path("b/saved")]) == ["a/saved", "b/saved"]
    assert names_of([tmp_path / "a.jsonl"]) == ["a"]
    assert names_of([Path("runs/v1.5")]) == ["v1.5"]


def test_a_folder_of_runs_is_not_taken_for_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several are named, to choose from."""
    above = tmp_path / "above"
    shutil.copytree(folder, above / "first")
    for name in ("second", "third"):
        shutil.copytree(folder / "saved", above / name)
    assert main(["report", str(above)]) == 2
    said = f"{above} contains 2 runs; give the ones that you mean: {above / 'second'} {above / 'third'}\n"
    assert capsys.readouterr().err == said
    assert main(["doctor", str(above)]) == 1
    assert f"python -m zae doctor {above / 'first' / 'saved'} examines" in capsys.readouterr().out
    assert main(["consolidate", str(above), "out.pt"]) == 2
    assert f"contains no checkpoint; give {above / 'first' / 'saved'} or {above / 'second'}" in capsys.readouterr().err
