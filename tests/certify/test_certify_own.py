"""What `certify` adds for zae's own trainers: each kind of fault is found by its promise, with the script as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zae.cli import main

SCRIPT = '''
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zae import AddOnBase, Trainer
from zae.addons import (
    EMAAddon, GradientAccumulationAddon, JSONLLoggerAddon, MultiGPUAddon, StateManagerAddon, ThroughputAddon
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Task(Trainer):
    def train_step(self, batch):
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.model(x), y)}

    def test_step(self, batch):
        return self.train_step(batch)


class Restless(Task):
    def train_step(self, batch):
        return {"loss": super().train_step(batch)["loss"] * (1 + time.time_ns() % 1000 * 1e-6)}


class NoisyLogger(AddOnBase):
    """Log a random number."""

    layer = "observe"

    def on_step_end(self, outputs):
        super().on_step_end(outputs)
        torch.rand(1)


class HalvingLogger(AddOnBase):
    """Log halved gradients."""

    layer = "observe"

    def unscale(self):
        super().unscale()
        for parameter in self.parameters:
            parameter.grad.mul_(0.5)


class NoiseAddon(AddOnBase):
    """Add noise to each gradient."""

    layer = "loop"

    def unscale(self):
        super().unscale()
        for parameter in self.parameters:
            parameter.grad.add_(0.01 * torch.randn_like(parameter))


class ThirdAddon(AddOnBase):
    """Double each third gradient."""

    layer = "loop"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = 0

    def unscale(self):
        super().unscale()
        self.count += 1
        if self.count % 3 == 0:
            for parameter in self.parameters:
                parameter.grad.mul_(2)


class DeclaredThirdAddon(ThirdAddon):
    """Double each third gradient, also after a resume."""

    state_attributes = ("count",)


class MainOnlyAddon(AddOnBase):
    """Double the gradients of rank 0 alone."""

    layer = "loop"

    def backward(self, loss, **kwargs):
        super().backward(loss * 2 if self.rank == 0 and self.world_size > 1 else loss, **kwargs)


class Derived(Task.add_on(HalvingLogger)):
    """A task that has an add-on in itself."""


class DerivedEngine(Task.add_on(MultiGPUAddon)):
    """A task with its engine in itself."""


def make(*more, task=Task, device="cpu", batches=None, **options):
    torch.manual_seed(3)
    model = Net()
    x = torch.randn(40, 4)
    loader = batches or DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 4, shuffle=True)
    valid_loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 10)
    trainer = task.add_on(EMAAddon, StateManagerAddon, GradientAccumulationAddon, JSONLLoggerAddon, *more)(
        model, device, optimizer=torch.optim.AdamW(model.parameters(), lr=0.02), save_path="runs/a", resume="auto",
        jsonl_path="log.jsonl", decay=0.9, gradient_clip=0.5, **{"gradient_accumulation_steps": 2, **options})
    return trainer, {"n_epoch": 4, "loader": loader, "valid_loader": valid_loader}


def right(): return make(ThroughputAddon)


def two_epochs():
    trainer, arguments = make(gradient_accumulation_steps=1)
    return trainer, {**arguments, "n_epoch": 2}


def noisy(): return make(NoisyLogger)
def halving(): return make(HalvingLogger)
def noise(): return make(NoiseAddon)
def third(): return make(ThirdAddon)
def declared(): return make(DeclaredThirdAddon)
def main_only(): return make(MainOnlyAddon)
def restless(): return make(task=Restless)
def derived(): return make(task=Derived)
def derived_engine(): return make(task=DerivedEngine, device=["cpu", "cpu"])
def engine(): return make(MultiGPUAddon, device=["cpu", "cpu"])
def streams(): return make(batches=[(torch.ones(4, 4), torch.zeros(4).long())] * 6)
'''

BEGIN = """
if __name__ == "__main__":  # Several devices: their processes import the script.
    trainer, arguments = globals()[sys.argv[1]]()
    trainer.run(**arguments)
"""


def certify(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Certify the run of a function of the script; return the exit status, and what was found of each promise."""
    Path("train.py").write_text(SCRIPT + OWN_STREAM + BEGIN)
    before = sorted(map(str, Path().rglob("*")))
    status = main(["certify", "--json", *options, "train.py", name])
    said, error = capsys.readouterr()
    assert said, error
    assert sorted(map(str, Path().rglob("*"))) == before
    return status, {each["name"]: (each["verdict"], each["message"]) for each in json.loads(said)["promises"]}


OWN_STREAM = """
class Noisy(torch.utils.data.Dataset):
    stream = torch.Generator().manual_seed(0)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.randn(4, generator=self.stream), index % 2



def noisy_data():
    trainer, run = make(batches=DataLoader(Noisy(), 4, shuffle=True))
    return trainer, {**run, "valid_loader": None}


def noisy_validation():
    trainer, run = noisy_data()
    return trainer, {**run, "valid_loader": DataLoader(Noisy(), 4)}
"""


@pytest.mark.exhaustive
def test_a_logger_that_draws_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """And not the other one."""
    status, found = certify(capsys, "noisy", "--only", "neutral")
    assert status == 1
    verdict, words = found["observers are neutral"]
    assert (verdict, words.partition(". ")[0]) == (
        "failed", "NoisyLogger changes training: random streams differ first in step 1"
    )  # fmt: skip


@pytest.mark.exhaustive
def test_a_right_composition_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """All promises."""
    status, found = certify(capsys, "right", "--kills", "6")
    assert status == 0, found
    assert {name: verdict for name, (verdict, _) in found.items() if verdict != "passed"} == {}
    assert "20 updates of the loop by hand, in plain PyTorch" in found["your loop"][1]
    assert "float64, BatchNorm frozen, dropout off): 12 steps" in found["ranks equal one process"][1]


@pytest.mark.exhaustive
def test_two_ranks_make_the_steps_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs are shortened to batches that two ranks can divide."""
    status, found = certify(capsys, "two_epochs", "--only", "ranks equal")
    assert (status, found["ranks equal one process"][0]) == (0, "passed"), found


FAULTS: dict[str, dict[str, tuple[str, str]]] = {
    "noisy": {
        "observers are neutral": ("failed", "NoisyLogger changes training"),
    },
    "halving": {"observers are neutral": ("failed", "HalvingLogger changes training: weights")},
    "derived": {"observers are neutral": ("failed", "HalvingLogger changes training: weights")},
    "derived_engine": {"ranks equal one process": ("passed", "its own engine")},
    "noise": {
        "ranks equal one process": ("failed", "drifted apart"),
        "your loop": ("passed", "both without NoiseAddon, which the loop by hand does not have"),
    },
    "third": {
        "resume is exact": ("failed", "the same weights, samples and random numbers, and other gradients"),
        "observers are neutral": ("passed", ""),
    },
    "declared": {
        "resume is exact": ("passed", ""),
        "ranks equal one process": ("passed", ""),
    },
    "main_only": {"ranks equal one process": ("failed", "of its largest entry, more than 1e-09")},
    "restless": {"repeatable": ("failed", "two runs differ first in step 1: the loss (")},
    "engine": {"ranks equal one process": ("passed", "its own engine"), "resume is exact": ("passed", "")},
    "streams": {"ranks equal one process": ("not tried", "the loader is no DataLoader with a batch_size")},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_its_promise(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what is wrong, and nothing else."""
    only = [word for promise in FAULTS[name] for word in ("--only", promise)]
    status, found = certify(capsys, name, *only)
    for promise, (verdict, words) in FAULTS[name].items():
        assert found[promise][0] == verdict, found
        assert words in found[promise][1]
    verdicts = {verdict for verdict, _ in FAULTS[name].values()}
    assert status == (1 if "failed" in verdicts else 0 if "passed" in verdicts else 2)


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("noisy_data", "passed", "updates of the loop by hand"),
        pytest.param("noisy_validation", "not tried", "give run() no valid_loader", marks=pytest.mark.exhaustive),
    ],
)
def test_a_dataset_with_a_generator_is_no_fault_of_the_loop(
    name: str, verdict: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It draws the same numbers in both loops, unless a validation draws as well."""
    status, found = certify(capsys, name, "--only", "loop")
    assert found["your loop"][0] == verdict
    assert words in found["your loop"][1]
    assert status != 1
