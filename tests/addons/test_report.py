"""ReportAddon: the page of a run, however it ends, and nothing that a run could notice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kit.loggers import Task, build, digest, lines, loader, warned
from kit.pages import Page, curves
from zae import ConfigError, Every
from zae.addons import EMAAddon, JSONLLoggerAddon, ReportAddon, StateManagerAddon
from zae.report.records import Records


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_has_each_record_of_the_log(tmp_path: Path) -> None:
    """The numbers, epochs and processes are those of the JSON lines of the same run; the next call adds to them."""
    options: dict[str, Any] = {"report_path": tmp_path / "run" / "report.html", "jsonl_path": tmp_path / "log.jsonl"}
    trainer = build(ReportAddon, JSONLLoggerAddon, EMAAddon, decay=0.5, gradient_clip=1.0, **options)
    for _ in range(2):
        trainer.run(1, loader(), loader(1), valid_every=Every(steps=2))
    page, logged = page_of(options["report_path"]), Records.of(lines(tmp_path / "log.jsonl"))
    for key, series in logged.series.items():
        assert curves(page)[key] == list(zip(series.steps, series.values, strict=True))
    assert page.data["runs"][0]["epochs"] == [list(each) for each in zip(logged.epochs.steps, logged.epochs.values)]
    assert "steps_per_s" in curves(page)
    assert {"EMAAddon", "ReportAddon"} <= set(page.texts["li"])
    assert page.texts["h1"] == ["run"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]


def test_the_page_of_a_resumed_run_is_whole(tmp_path: Path) -> None:
    """The earlier records come from the checkpoint; the step of the resume is marked; the checkpoints are listed."""
    options: dict[str, Any] = {"save_path": tmp_path / "saved", "report_path": tmp_path / "a.html", "resume": "auto"}
    build(ReportAddon, StateManagerAddon, **options).run(1, loader())
    trainer = build(ReportAddon, StateManagerAddon, **options)
    trainer.run(2, loader())
    page = page_of(tmp_path / "a.html")
    assert [step for step, _ in curves(page)["train/loss"]] == list(range(1, 9))
    assert [value for _, value in curves(page)["train/loss"]] == [row["train/loss"] for row in trainer.log_history]
    assert page.data["runs"][0]["resumed"] == [4]
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "step-00000008" in text
    assert "not verified" in text
    assert f"python -m zae doctor {tmp_path / 'saved'} verifies them" in text


def test_a_state_of_before_takes_later_records_away(tmp_path: Path) -> None:
    trainer = build(ReportAddon, report_path=tmp_path / "a.html")
    trainer.run(1, loader())
    state = trainer.state_dict()
    trainer.run(1, loader())
    trainer.load_state_dict(state)
    trainer.run(1, loader(2))
    assert [step for step, _ in curves(page_of(tmp_path / "a.html"))["train/loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_ends_early_has_its_page(tmp_path: Path, error: type[BaseException]) -> None:
    class Fails(Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.step == 3:
                raise error
            return super().train_step(batch)

    trainer = build(ReportAddon, task=Fails, report_path=tmp_path / "a.html")
    with pytest.raises(error):
        trainer.run(1, loader())
    page = page_of(tmp_path / "a.html")
    assert [step for step, _ in curves(page)["train/loss"]] == [1, 2, 3]
    assert any(f"ended by {error.__name__}" in text for text in page.texts["p"])


def test_an_evaluation_writes_no_page_and_a_test_run_does(tmp_path: Path) -> None:
    trainer = build(ReportAddon, report_path=tmp_path / "a.html")
    trainer.evaluate(loader(1))
    assert list(tmp_path.iterdir()) == []
    build(ReportAddon, report_path=tmp_path / "a.html", mode="test").run(1, loader(1))
    assert list(curves(page_of(tmp_path / "a.html"))) == ["valid/loss"]


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training is that of a run without it."""
    trainer = build(ReportAddon, report_path=tmp_path / "away" / "a.html")
    (tmp_path / "away").write_text("a file")
    with caplog.at_level(logging.WARNING, "zae"):
        trainer.run(1, loader())
    (said,) = warned(caplog)
    assert "the report is missing: " in said
    assert "away is a file, not a directory; choose another folder" in said
    plain = build()
    plain.run(1, loader())
    assert digest(trainer) == digest(plain)


def test_a_path_that_is_wrong_is_found_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"would not be opened as a page; end it with \.html"):
        build(ReportAddon, report_path=tmp_path / "report.json")
    with pytest.raises(ConfigError, match="is a folder; give a file in it"):
        build(ReportAddon, report_path=tmp_path)


def test_secrets_are_not_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdefsecret")
    build(ReportAddon, report_path=tmp_path / "0123456789abcdefsecret" / "a.html").run(1, loader(1))
    text = (tmp_path / "0123456789abcdefsecret" / "a.html").read_text(encoding="utf-8")
    assert "0123456789abcdefsecret" not in text
