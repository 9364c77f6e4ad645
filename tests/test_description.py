"""describe(): what an add-on tells once stands in plans, in logs, in reports and in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import hand
from zae import AddOnBase, Description, Trainer
from zae.addons import EMAAddon, JSONLLoggerAddon, StateManagerAddon
from zae.checkpoint.manifest import read_manifest
from zae.cli import main


class TellingAddon(AddOnBase):
    """Watch some steps, and tell it."""

    layer = "observe"

    def describe(self) -> list[Description]:
        """Tell one fact of each kind."""
        return [
            *super().describe(),
            Description("corpus", "wiki-2024", where="trainer"),
            Description("looks at the outputs", where="on_step_end"),
            Description("window", 3, "steps", where="on_step_end"),
            Description("the last step looked at", lambda plan: plan.last_step, where="on_step_end"),
            Description("nothing", None, where="on_step_end"),
        ]


class Task(Trainer):
    """Classify by cross entropy."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return {"loss": torch.nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


def make(*add_ons: Any, **options: Any) -> Any:
    model = hand.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def test_a_plan_has_what_an_add_on_tells_of_the_run(tmp_path: Path) -> None:
    """Notes in the order of the add-ons; a function is given the plan."""
    plan = make(StateManagerAddon, TellingAddon, save_path=tmp_path / "b").plan(2, hand.loader())
    told = ["looks at the outputs", "window: 3 steps", f"the last step looked at: {plan.last_step}"]
    assert [note for note in plan.notes if note in told] == told
    assert not any("wiki-2024" in note or "nothing" in note for note in plan.notes)


def test_logs_reports_and_checkpoints_have_how_a_trainer_is_made(tmp_path: Path) -> None:
    trainer = make(
        StateManagerAddon,
        TellingAddon,
        JSONLLoggerAddon,
        save_path=tmp_path / "saved",
        jsonl_path=tmp_path / "log.jsonl",
    )
    trainer.run(1, hand.loader())
    header = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert header["run"]["config"]["corpus"] == "wiki-2024"
    assert header["run"]["config"]["model"] == type(trainer.unwrap()).__name__
    assert main(["report", str(tmp_path / "log.jsonl"), "-o", str(tmp_path / "report.html")]) == 0
    assert "wiki-2024" in (tmp_path / "report.html").read_text()
    (saved,) = (tmp_path / "saved").glob("step-*")
    assert read_manifest(saved)["info"]["run"]["script"]["corpus"] == "wiki-2024"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_facts_can_be_asked_for_at_any_time(moment: str) -> None:
    """A fact that needs a plan is a function, which is not called."""
    trainer = make(EMAAddon, TellingAddon)
    if moment == "after":
        trainer.run(1, hand.loader())
    facts = {fact.name: fact for fact in trainer.describe()}
    assert facts["composition"].value == ["TellingAddon", "EMAAddon"]
    assert facts["log_bar"].value is False
    assert facts["parameters"].value == sum(each.numel() for each in trainer.unwrap().parameters())
    assert callable(facts["the last step looked at"].value)
