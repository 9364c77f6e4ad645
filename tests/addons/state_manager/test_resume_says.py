"""What a run says of its checkpoints: where it continues, that nothing is left, and what a signal has saved."""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from zae import Every, Trainer
from zae.addons import EarlyStoppingAddon, StateManagerAddon


class Task(Trainer):
    """Ended by SIGTERM, as by a cluster, in the step ``ends``."""

    ends = -1

    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        if self.progress_checker.step == self.ends:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


BATCHES = [torch.ones(2, 4)] * 5


def build(folder: Path, *add_ons: Any, ends: int = -1, **options: Any) -> Any:
    given = {"optimizer": torch.optim.SGD, "seed": 0, "save_path": folder, "resume": "auto", **options}
    trainer = Task.add_on(StateManagerAddon, *add_ons)(lambda: torch.nn.Linear(4, 1), "cpu", **given)
    trainer.ends = ends
    return trainer


def said(capsys: Any) -> list[str]:
    """The lines that are not those of epochs."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if not re.match(r"epoch \d+/|\d+ epochs?, ", line)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "present").mkdir()
    monkeypatch.chdir(tmp_path / "present")


def test_a_signal_a_resume_and_the_end(capsys: Any) -> None:
    folder = Path("runs/first")
    with pytest.raises(SystemExit):
        build(folder, ends=12).run(4, BATCHES, BATCHES[:1])
    place = "step 13 (epoch 3 of 4), in runs/first/step-00000013"
    assert said(capsys) == [f"warning: signal 15: saved at {place}; started again, the run continues from there"]
    build(folder).run(4, BATCHES, BATCHES[:1])
    assert said(capsys) == ["resumed from step 13 (epoch 3 of 4) of runs/first"]
    build(folder).run(4, BATCHES, BATCHES[:1])
    assert said(capsys) == ["already finished; nothing to train: runs/first is at step 20 (epoch 4 of 4)"]
    trainer = build(folder.absolute())
    trainer.run(5, BATCHES)
    assert said(capsys) == ["resumed from step 20 (epoch 4 of 5) of runs/first"]
    trainer.run(1, BATCHES)
    assert said(capsys) == [], "a new call of the same script resumes nothing"


def test_a_run_that_was_stopped_early_says_why(tmp_path: Path, capsys: Any) -> None:
    options: dict[str, Any] = {"patience": 1, "optimizer": lambda each: torch.optim.SGD(each, lr=0.0)}
    build(tmp_path, EarlyStoppingAddon, **options).run(9, BATCHES, BATCHES)
    said(capsys)
    build(tmp_path, EarlyStoppingAddon, **options).run(9, BATCHES, BATCHES)
    (line,) = said(capsys)
    assert line.startswith(f"already finished; nothing to train: {tmp_path} is at step 10 (epoch 2 of 9), stopped: ")


def test_each_call_of_run_is_named(tmp_path: Path, capsys: Any) -> None:
    """A script with two calls, ended in the second one."""

    def both(**options: Any) -> None:
        trainer = build(tmp_path, **options)
        trainer.run(1, BATCHES)
        trainer.run(1, BATCHES)

    with pytest.raises(SystemExit):
        both(ends=7)
    said(capsys)
    both()
    assert said(capsys) == [
        "call 1 of run() was finished before; nothing to train",
        f"resumed from step 8 (epoch 2 of 2) of {tmp_path}",
    ]


def test_a_checkpoint_that_is_named_and_the_parts_of_another_run(tmp_path: Path, capsys: Any) -> None:
    """A state of a failed run, and a new run that begins from one."""

    class Fails(Task):
        def on_step_end(self, outputs: Any) -> None:
            super().on_step_end(outputs)
            if self.progress_checker.step == 3:
                raise RuntimeError("here")

    given: dict[str, Any] = {"optimizer": torch.optim.SGD, "seed": 0, "save_every": Every(steps=2)}
    with pytest.raises(RuntimeError, match="here"):
        Fails.add_on(StateManagerAddon)(lambda: torch.nn.Linear(4, 1), "cpu", save_path=tmp_path / "a", **given).run(
            1, BATCHES
        )
    crash = tmp_path / "a" / "crash-00000003"
    said(capsys)
    build(tmp_path / "b", resume=crash).run(1, BATCHES)
    assert said(capsys) == [f"resumed from step 3 (epoch 1 of 1) of {crash}"]
    build(tmp_path / "c", start_from=tmp_path / "b").run(1, BATCHES)
    assert said(capsys) == [f"a new run starts from model of {tmp_path / 'b' / 'step-00000005'}"]


def test_without_a_display_it_goes_to_the_log(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "zae")
    with pytest.raises(SystemExit):
        build(tmp_path, ends=1, log_bar=False).run(1, BATCHES)
    build(tmp_path, log_bar=False).run(1, BATCHES)
    build(tmp_path, log_bar=False).run(1, BATCHES)
    records = [(each.levelname, each.getMessage().partition(" (")[0]) for each in caplog.records]
    assert ("WARNING", "signal 15: saved at step 2") in records
    assert ("INFO", "resumed from step 2") in records
    assert ("INFO", f"already finished; nothing to train: {tmp_path} is at step 5") in records
    assert capsys.readouterr().err == ""
