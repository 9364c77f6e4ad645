"""What a failed run has saved, and when a run that is started again continues from it: where that is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from kit import faults, hand
from kit.faults import answer, build, everything, forked
from zae import Every
from zae.addons import EMAAddon, StateManagerAddon

STEPS = 6  # Of an epoch.


class Faulty(Dataset[Any]):
    """Fails once for a sample, where it is told to."""

    def __init__(self, marks: Path, draws: bool = False) -> None:
        self.data, self.marks, self.draws = hand.data(24), marks, draws

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == 5 and (self.marks / "loader").exists():
            (self.marks / "loader").unlink()
            raise OSError("a hiccup of the disk")
        inputs, target = self.data[index]
        return inputs + torch.rand(()) if self.draws else inputs, target


class Fails(faults.Task):
    """Fails once in a step or a validation, or arms its loader after a step, where a file says so."""

    marks: Path

    def fail(self, place: str) -> None:
        if self.progress_checker.step >= STEPS + 1 and (self.marks / place).exists():
            (self.marks / place).unlink()
            raise RuntimeError(f"in a {place}")

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.fail("step")
        return super().train_step(batch)

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.fail("validation")
        return super().test_step(batch)

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if self.progress_checker.epoch == 1 and (self.marks / "armed").exists():
            (self.marks / "armed").rename(self.marks / "loader")
        self.fail("hook")


class Backwards(Sampler[int]):
    """One of somebody's own, which may draw whenever it likes."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return iter(range(23, -1, -1))


def run(folder: Path, seed: int = 0, order: Any = None, workers: int = 2, draws: bool = False, **options: Any) -> Any:
    """Train three epochs; return the end, and the steps at which the run was resumed."""
    faults.ambient(seed)
    options = {"resume": "auto", "save_every": Every(epochs=1), "valid_every": None} | options
    valid_every = options.pop("valid_every")
    trainer = build(Fails, StateManagerAddon, EMAAddon, decay=0.5, save_path=folder / "run", **options)
    trainer.marks = folder
    shuffled = {"shuffle": True} if order is None else {"sampler": order()}
    loader = DataLoader(Faulty(folder, draws), 4, num_workers=workers, **shuffled)
    trainer.run(3, loader, hand.loader(9, 4, seed=8, shuffle=False), valid_every=valid_every)
    return everything(trainer), trainer.checkpoints.lineage.resumed_at


def failed(folder: Path, place: str, seed: int = 1, **options: Any) -> int:
    """Let a run fail at a place, and return the step of what it has saved."""
    (folder / place).touch()
    outcome = forked(lambda: run(folder, seed, **options) and None)
    assert outcome.status == 1, outcome.error
    assert "a hiccup" in outcome.error or "RuntimeError: in a" in outcome.error
    (saved,) = (folder / "run").glob("crash-*")
    return int(saved.name[6:])


def whole(folder: Path, **options: Any) -> Any:
    other = folder / "whole"
    other.mkdir()
    return answer(lambda: run(other, 9, **options))[0]


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("armed", {}),
        ("armed", {"order": lambda: torch.utils.data.SubsetRandomSampler(range(24)), "save_every": 4}),
        ("validation", {}),
        ("validation", {"workers": 0, "draws": True, "valid_every": 4, "save_every": 3}),
        ("validation", {"save_every": Every(epochs=9)}),
    ],
)
def test_an_exact_state_is_continued_from(folder: Path, place: str, options: Any) -> None:
    """Workers that fail to give a batch, and a failed validation: nothing was drawn, and nothing is lost."""
    step = failed(folder, place, **options)
    end, resumed_at = answer(lambda: run(folder, 2, **options))
    assert resumed_at == [step]
    assert end == whole(folder, **options)


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("armed", {"workers": 0, "draws": True}),
        ("armed", {"order": lambda: RandomSampler(range(24), replacement=True)}),
        ("armed", {"order": Backwards}),
        ("step", {}),
        ("hook", {}),
    ],
)
def test_any_other_state_is_not(folder: Path, place: str, options: Any) -> None:
    """What this process may have drawn, or half done, is made again from the last checkpoint."""
    step = failed(folder, place, **options)
    end, resumed_at = answer(lambda: run(folder, 2, **options))
    assert resumed_at
    assert resumed_at[0] < step
    assert end == whole(folder, **options)


def test_a_state_that_is_older_or_of_another_run_is_not(folder: Path) -> None:
    """A newer checkpoint is taken, and where another run has begun in the folder, its own."""
    step = failed(folder, "armed")
    assert answer(lambda: run(folder, 2))[1] == [step]
    assert answer(lambda: run(folder, 3))[1] == [step, 3 * STEPS]
    (saved,) = (folder / "run").glob("crash-*")
    saved.rename(saved.with_name("crash-00000099"))
    assert answer(lambda: run(folder, 4, resume=False, overwrite=True))[1] == []
    assert answer(lambda: run(folder, 5))[1] == [3 * STEPS]


def test_a_damaged_state_is_passed_over(folder: Path) -> None:
    """The run continues from its last checkpoint instead."""
    failed(folder, "armed")
    (weights,) = (folder / "run").glob("crash-*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    end, resumed_at = answer(lambda: run(folder, 2, resume=True))
    assert resumed_at == [STEPS]
    assert end == whole(folder)
