"""`python -m zae certify`: a right composition passes, and each kind of fault is found by its promise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from zae.cli import main

SCRIPT = '''
import os
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


def make_trainer():
    torch.manual_seed(3)
    model = Net()
    x = torch.randn(40, 4)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 4, shuffle=True)
    trainer = Task.add_on(EMAAddon, StateManagerAddon, GradientAccumulationAddon, JSONLLoggerAddon, ThroughputAddon)(
        model, "cpu", optimizer=torch.optim.AdamW(model.parameters(), lr=0.02), save_path="runs/a", resume="auto",
        jsonl_path="log.jsonl", decay=0.9, gradient_accumulation_steps=2, gradient_clip=0.5)
    return trainer, {"n_epoch": 4, "loader": loader, "valid_loader": loader}


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
def streams(): return make(batches=[(torch.randn(4, 4), torch.zeros(4).long())] * 6)
def failing(): return make(batches=[(torch.randn(4, 5), torch.zeros(4).long())] * 6)
def alone(): return make()[0]
def slow():
    trainer, run = make(batches=Slow())
    return trainer, {**run, "n_epoch": 100}


class Slow:
    def __iter__(self):
        for _ in range(100):
            time.sleep(0.3)
            yield torch.randn(4, 4), torch.zeros(4).long()
'''


@pytest.fixture(autouse=True)
def script() -> None:
    """A script in the present folder, and the checkpoints of an earlier run, which are not to be touched."""
    Path("train.py").write_text(SCRIPT)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/note.txt").write_text("mine")


def certify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status, and what was found of each promise."""
    before = sorted(map(str, Path().rglob("*")))
    status = main(["certify", *arguments, "--json", "--minutes", "8"])
    said, error = capsys.readouterr()
    assert said, error
    data = json.loads(said)
    page = Path("certificate.md").read_text()
    Path("certificate.md").unlink()
    assert sorted(map(str, Path().rglob("*"))) == before
    assert all(each["promise"] in page for each in data["findings"])
    return status, {each["promise"]: (each["status"], each["detail"]) for each in data["findings"]}


def test_a_logger_that_draws_is_found_and_a_kill_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The logger is named, and not the other one; its draws do not spoil the resume."""
    status, found = certify(capsys, "train.py:noisy", "--only", "neutral", "--only", "resume", "--kills", "1")
    assert status == 1
    result, words = found["observers are neutral"]
    assert (result, words.partition(". ")[0]) == (
        "failed", "NoisyLogger changes training: random streams differ first in step 1"
    )  # fmt: skip
    result, words = found["resume is exact"]
    assert result == "passed"
    assert words.startswith("1 kill by SIGKILL, resumed from steps ")


@pytest.mark.exhaustive
def test_a_right_composition_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """All promises; the page says the same."""
    maker = SCRIPT.partition("def make_trainer")[2].partition("def noisy")[0]
    Path("right.py").write_text(f"{SCRIPT.partition('class Restless')[0]}def make_trainer{maker}")
    status, found = certify(capsys, "right.py")
    assert status == 0
    assert {name: result for name, (result, _) in found.items()} == {
        "repeatable": "passed", "your loop": "passed", "observers are neutral": "passed",
        "ranks equal one process": "passed", "resume is exact": "passed",
    }  # fmt: skip
    assert "20 updates of the loop by hand, in plain PyTorch" in found["your loop"][1]
    assert "float64, BatchNorm frozen, dropout off): 12 steps" in found["ranks equal one process"][1]
    assert "4 kills by SIGKILL" in found["resume is exact"][1]


@pytest.mark.parametrize("steps", [6, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (2, 3, 5, 7, 9))])
def test_ranks_and_one_process_make_as_many_steps_of_any_number(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs are shortened to batches that two ranks can divide."""
    arguments = ("train.py:two_epochs", "--steps", str(steps), "--only", "ranks equal")
    status, answer = certify(capsys, *arguments)
    assert status == 0, answer


@pytest.mark.exhaustive
def test_what_the_loop_by_hand_does_not_have_is_left_out_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    """The rest of the trainer is compared, in one process, and the add-on is named."""
    maker = SCRIPT.partition("def make_trainer")[2].partition("def noisy")[0]
    maker = maker.replace("EMAAddon", "NoiseAddon, MultiGPUAddon, EMAAddon")
    add_on = SCRIPT.partition("class NoiseAddon")[2].partition("class Third")[0]
    Path("noise.py").write_text(
        f"{SCRIPT.partition('class Restless')[0]}class NoiseAddon{add_on}def make_trainer{maker}"
    )
    status, found = certify(capsys, "noise.py", "--only", "loop")
    result, words = found["your loop"]
    assert (status, result) == (0, "passed")
    assert words.startswith("20 updates of the loop by hand")
    assert words.endswith("; both without NoiseAddon, which the loop by hand does not have")


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
        "resume is exact": ("failed", "kills by SIGKILL, resumed from steps"),
        "observers are neutral": ("passed", ""),
    },
    "declared": {
        "resume is exact": ("passed", ""),
        "ranks equal one process": ("passed", ""),
    },
    "main_only": {"ranks equal one process": ("failed", "of its largest entry, more than 1e-09")},
    "restless": {"repeatable": ("failed", "loss and weights differ first in step 1")},
    "engine": {"ranks equal one process": ("passed", "its own engine"), "resume is exact": ("passed", "")},
    "streams": {"ranks equal one process": ("not applicable", "the loader is no DataLoader with a batch_size")},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_by_its_promise(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what is wrong, and nothing else."""
    only = [word for promise in FAULTS[name] for word in ("--only", promise)]
    status, found = certify(capsys, f"train.py:{name}", *only)
    for promise, (result, words) in FAULTS[name].items():
        assert found[promise][0] == result, found
        assert words in found[promise][1]
    assert status == int(any(result == "failed" for result, _ in FAULTS[name].values()))


@pytest.mark.exhaustive
def test_what_cannot_be_certified_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2: a run that fails, in the user's frames; a trainer without arguments; no time."""
    for target, words in {
        "train.py:failing": ", in train_step\n",
        "train.py:alone": "returned a trainer without the arguments of its run",
        "train.py:absent": "has no function 'absent'",
    }.items():
        assert main(["certify", target]) == 2
        error = capsys.readouterr().err
        assert "the run that all others are compared with fails: " in error
        assert words in error
    assert main(["certify", "train.py:slow", "--minutes", "0.01"]) == 2
    assert "0.01 minutes are too short for the first run; give --minutes" in capsys.readouterr().err
    assert main(["certify", "train.py:slow", "--minutes", "0.4", "--only", "repeat"]) == 0
    assert "of at most 24 optimizer steps" not in capsys.readouterr().out


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, at once."""
    for arguments, words in {
        ("absent.py",): "absent.py is not a file; give the file of a Python script",
        ("train.py", "--only", "speed"): "--only 'speed' is part of no promise; there are repeatable, your loop, ",
        ("train.py", "--steps", "1"): "--steps 1 is too small; give at least 2",
    }.items():
        assert main(["certify", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert sorted(os.listdir()) == ["runs", "train.py"]


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


@pytest.mark.parametrize(
    ("name", "result", "words"),
    [
        ("noisy_data", "passed", "updates of the loop by hand"),
        pytest.param("noisy_validation", "not applicable", "give run() no valid_loader", marks=pytest.mark.exhaustive),
    ],
)
def test_a_dataset_with_a_generator_is_no_fault_of_the_loop(
    name: str, result: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It draws the same numbers in both loops, unless a validation draws as well."""
    Path("train.py").write_text(SCRIPT + OWN_STREAM)
    status, found = certify(capsys, f"train.py:{name}", "--only", "loop")
    assert (status, found["your loop"][0]) == (0, result)
    assert words in found["your loop"][1]
