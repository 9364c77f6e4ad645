"""Checkpoints that fit their manifest and cannot be: somebody has written other numbers into the state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kit.faults import reseal
from zae import Trainer
from zae.addons import StateManagerAddon
from zae.errors import CheckpointError, CheckpointMismatch
from zae.optim.saved_state import check_rates


class Task(Trainer):
    """A regression."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def build(folder: Path, tensor_rate: bool = False, **options: Any) -> Trainer:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1) if tensor_rate else 0.1, capturable=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return Task.add_on(StateManagerAddon)(
        model, "cpu", optimizer=optimizer, scheduler=schedule, save_path=folder, log_bar=False, **options
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "states"
    build(folder).run(2, [torch.ones(4, 2)] * 3)
    return folder / "step-00000006"


def changed(saved: Path, folder: Path, where: tuple[str, ...], value: Any, **manifest: Any) -> Path:
    """Copy the checkpoint with another value in its state, and seal it again."""
    directory = Path(shutil.copytree(saved, folder / saved.name))
    state = json.loads((directory / "state.json").read_text())
    place = state
    for key in where[:-1]:
        place = place[int(key) if isinstance(place, list) else key]
    assert where[-1] in place
    place[where[-1]] = value
    (directory / "state.json").write_text(json.dumps(state))
    reseal(directory, **manifest)
    return directory


GROUP = ("optimizer", "0", "param_groups", "0")
CASES = [
    (("progress", "step"), -4, "the manifest says step"),
    (("progress", "step"), {"$int": hex(2**80)}, "the manifest says step"),
    ((*GROUP, "lr"), "0.1", "lr='0.1', which is not a number"),
    ((*GROUP, "lr"), -0.1, "lr=-0.1, which is not a rate"),
    ((*GROUP, "lr"), {"$float": "nan"}, "lr=nan, which is not a rate"),
    ((*GROUP, "weight_decay"), None, "weight_decay=None, which is not a number"),
    ((*GROUP, "betas"), {"$tuple": ["0.9", 0.99]}, "betas=.*which is not a number"),
    (("scheduler", "0", "last_epoch"), "two", "last_epoch='two', which is not a number"),
    (("scheduler", "0", "base_lrs"), ["x"], "base_lrs=.*which is not a number"),
    (("scheduler", "0", "_last_lr"), [{"$float": "inf"}], "_last_lr=.*which is not a rate"),
]


@pytest.mark.parametrize(("where", "value", "said"), CASES, ids=str)
def test_what_cannot_be_is_refused_and_nothing_is_loaded(
    saved: Path, tmp_path: Path, where: tuple[str, ...], value: Any, said: str
) -> None:
    state = json.loads((saved / "state.json").read_text())
    name = next(iter(state["optimizer"]))
    where = tuple(name if key == "0" and at == 1 else key for at, key in enumerate(where))
    found = changed(saved, tmp_path, where, value)
    trainer = build(tmp_path / "other", resume=str(found))
    weights = [each.detach().clone() for each in trainer.model.parameters()]
    with pytest.raises(CheckpointMismatch, match=said):
        trainer.run(3, [torch.ones(4, 2)] * 3)
    assert all(map(torch.equal, weights, trainer.model.parameters()))
    assert trainer.progress_checker.step == 0


@pytest.mark.parametrize(("name", "value"), [("step", 4), ("epoch", 999_999_999)])
def test_a_manifest_of_another_state(saved: Path, tmp_path: Path, name: str, value: int) -> None:
    forged = changed(saved, tmp_path, ("progress", "step"), 6, **{name: value})
    with pytest.raises(CheckpointError, match=f"the manifest says {name} {value}, and the state"):
        build(tmp_path / "other", resume=str(forged)).run(3, [torch.ones(4, 2)] * 3)


def test_what_can_be_is_loaded(saved: Path, tmp_path: Path) -> None:
    """A rate in a tensor where it was a number, also, and whole numbers for floats."""
    found = changed(saved, tmp_path, ("progress", "step"), 6)
    trainer = build(tmp_path / "other", tensor_rate=True, resume=str(found))
    assert trainer.run(3, [torch.ones(4, 2)] * 3)["step"] == 9
    check_rates("optimizer", {"lr": 1, "betas": (0, 0.9), "x": "text"}, {"lr": torch.tensor(0.1), "betas": [0.1, 0.2]})
