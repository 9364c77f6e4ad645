"""A trainer that is copied or pickled continues where the original stood, as one that loads its state does."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from kit.hand import digest, loader, network
from kit.table import Task
from zae import AddOnBase, Every
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    PrefetchAddon,
    StateManagerAddon,
)

SETS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "none": ((), {}),
    "averaged": ((EMAAddon, EarlyStoppingAddon), {"decay": 0.5}),
    "in windows": ((GradientAccumulationAddon, PrefetchAddon), {"gradient_accumulation_steps": 2}),
    "all": (
        (AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon, JSONLLoggerAddon, StateManagerAddon),
        {"precision": "bf16", "gradient_accumulation_steps": 2, "save_every": Every(steps=1), "patience": 9},
    ),
}


class CopyingAddon(AddOnBase):
    """Copy the trainer within a run, between two steps."""

    layer = "observe"

    def __init__(self, *args: Any, copy_at: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copy_at, self.copied = copy_at, b""

    def checkpoint(self) -> None:
        super().checkpoint()
        if self.progress_checker.step == self.copy_at and not self.copied:
            self.copied = pickle.dumps(self)


def build(name: str, folder: Path, *more: Any, **options: Any) -> Any:
    add_ons, own = SETS[name]
    if StateManagerAddon in add_ons:
        options |= {"save_path": folder, "overwrite": True, "jsonl_path": folder / "log.jsonl"}
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.05)
    options |= {"optimizer": optimizer, "scheduler": StepLR(optimizer, 1, 0.5), "seed": 3}
    return Task.add_on(*add_ons, *more)(model, "cpu", **own, **options)


def end_of(trainer: Any) -> tuple[Any, ...]:
    """Weights, average, history and place, as a run has left them."""
    average = digest(*trainer.average.values()) if hasattr(trainer, "average") else ""
    rows = [(row["epoch"], row["step"], row["train_loss"]) for row in trainer.train_history]
    return digest(trainer.model), average, rows, trainer.progress_checker.state_dict() | {"run_starts": None}


def finish(trainer: Any) -> tuple[Any, ...]:
    """Train to the end of epoch 3, from other random streams than the copy was made with."""
    torch.manual_seed(99)
    trainer.run(3 - trainer.progress_checker.epoch, loader(), loader(8, shuffle=False))
    return end_of(trainer)


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("name", SETS)
def test_a_copy_made_in_an_epoch_goes_on_at_the_same_batch(name: str, tmp_path: Path) -> None:
    """At each step of the second epoch, and at its ends: pickled, copied, or a copy of a copy."""
    straight = build(name, tmp_path / "straight")
    straight.run(3, loader(), loader(8, shuffle=False))
    wanted = end_of(straight)
    per_epoch = straight.progress_checker.step // 3
    for step in range(per_epoch, 2 * per_epoch + 1):
        first = build(name, tmp_path / f"{step}")
        first.run(None, loader(), loader(8, shuffle=False), max_steps=step)
        ways = [
            copy.deepcopy,
            lambda each: pickle.loads(pickle.dumps(each)),
            lambda each: copy.deepcopy(copy.copy(each)),
        ]
        again = ways[step % 3](first)
        if step % 2:
            again = copy.deepcopy(again)
        assert finish(again) == wanted, step


@pytest.mark.parametrize("name", SETS)
def test_a_copy_made_within_a_run_goes_on_behind_the_step(name: str, tmp_path: Path) -> None:
    """Also where validation, checkpoints and the lock of the folder are under way."""
    first = build(name, tmp_path / "first", CopyingAddon, copy_at=4)
    first.run(3, loader(), loader(8, shuffle=False))
    again = pickle.loads(first.copied)
    if name == "all":
        again.checkpointer.folder = tmp_path / "again"
    assert again.progress_checker.step == 4
    assert finish(again) == end_of(first)


def test_a_copy_goes_on_with_another_loader_as_the_original_does() -> None:
    """The open epoch is of another loader then: both begin the next one."""
    for copied in (lambda trainer: trainer, copy.deepcopy):
        trainer = build("none", Path())
        trainer.run(None, loader(), max_steps=2)
        trainer = copied(trainer)
        trainer.run(1, loader(8))
        assert (trainer.progress_checker.epoch, trainer.progress_checker.step) == (2, 4)


def test_a_copy_shares_no_weight_and_leaves_the_loader_behind() -> None:
    trainer = build("none", Path())
    batches = loader()
    batches.unpicklable = lambda: None  # type: ignore[attr-defined]
    trainer.run(None, batches, max_steps=2)
    again = pickle.loads(pickle.dumps(trainer))
    before = digest(trainer.model)
    again.run(1, batches)
    assert digest(trainer.model) == before != digest(again.model)
    assert isinstance(again.model, nn.Sequential)
