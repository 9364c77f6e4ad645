"""What a checkpoint overrides of the script is named; another class of optimizer or scheduler is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from kit import faults, hand
from kit.faults import everything
from zae.addons import StateManagerAddon
from zae.errors import CheckpointMismatch
from zae.schedulers import CosineAnnealingScheduler, SchedulerChain, WarmUpScheduler, linear

Make = Callable[[Any], Any]


def sequence(*parts: Make, milestones: tuple[int, ...] = (3,)) -> Make:
    return lambda o: torchs.SequentialLR(o, [part(o) for part in parts], milestones=list(milestones))


def constant(optimizer: Any) -> Any:
    return torchs.ConstantLR(optimizer, 1.0, 1000)


SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: torchs.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": constant,
    "LinearLR": lambda o: torchs.LinearLR(o, 0.5, 1.0, 7),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, 30),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, 40),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 4, 2),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 0.01, 0.1, 5),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=40),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, patience=0),
    "SequentialLR(ConstantLR, CosineAnnealingLR)": sequence(constant, lambda o: torchs.CosineAnnealingLR(o, 40)),
    "SequentialLR(ConstantLR, ExponentialLR)": sequence(constant, lambda o: torchs.ExponentialLR(o, 0.9)),
    "ChainedScheduler(ConstantLR, ExponentialLR)": lambda o: torchs.ChainedScheduler(
        [constant(o), torchs.ExponentialLR(o, 0.9)]
    ),
    "WarmUpScheduler": lambda o: WarmUpScheduler(o, 5),
    "SchedulerChain(WarmUpScheduler, CosineAnnealingScheduler)": lambda o: SchedulerChain(
        WarmUpScheduler(o, 5), CosineAnnealingScheduler(o, 40)
    ),
}
LEFT_OUT = ("Optimizer", "SparseAdam", "LBFGS", "Muon")
OPTIMIZERS = [name for name, each in vars(torch.optim).items() if isinstance(each, type) and name not in LEFT_OUT]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def build(folder: Path, optimizer: Make = sgd, scheduler: Make | None = None, **options: Any) -> Any:
    model = faults.classifier()
    made = optimizer(model.parameters())
    options = {"log_bar": False, "seed": 1, "scheduler_step_on_batch": True, "monitor": "train/loss", **options}
    return faults.Task.add_on(StateManagerAddon)(
        model, "cpu", optimizer=made, scheduler=scheduler and scheduler(made), save_path=folder, **options
    )


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of what a checkpoint overrides."""
    texts = [record.getMessage() for record in caplog.records if "overrides" in record.getMessage()]
    caplog.clear()
    return texts


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("name", [*SCHEDULERS, *OPTIMIZERS])
def test_an_unchanged_script_is_warned_of_nothing(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A schedule moves rates and momenta, and training may move the rest: the script has set none of that."""

    def script(**options: Any) -> Any:
        if name in SCHEDULERS:
            made = build(tmp_path, scheduler=SCHEDULERS[name], **options)
        else:
            made = build(tmp_path, getattr(torch.optim, name), **options)
        data = hand.loader()
        made.run(1, data)
        made.optimizer.param_groups[0]["weight_decay"] = 0.125
        made.run(1, data)
        return made

    script()
    assert script(resume="auto").progress_checker.epoch == 2
    assert said(caplog) == []


def test_another_scheduler_is_refused_by_name(tmp_path: Path) -> None:
    """Every class against every other, and what schedulers are made of; nothing is loaded."""
    trainers = {name: build(tmp_path / str(i), scheduler=make) for i, (name, make) in enumerate(SCHEDULERS.items())}
    for each in trainers.values():
        each.setup()
    states = {name: each.state_dict() for name, each in trainers.items()}
    for name, trainer in trainers.items():
        before = everything(trainer)
        for other, state in states.items():
            if other == name:
                trainer.load_state_dict(copy.deepcopy(state))
                continue
            with pytest.raises(CheckpointMismatch) as caught:
                trainer.load_state_dict(state)
            assert f"was saved by {other}, and is {name} here" in str(caught.value)
            assert "start_from=" in str(caught.value)
        assert everything(trainer) == before


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    """Also one whose settings have the same names."""
    first, second = build(tmp_path / "a", torch.optim.Adam), build(tmp_path / "b", torch.optim.AdamW)
    first.setup()
    second.setup()
    with pytest.raises(CheckpointMismatch, match="optimizer 0 was saved by Adam, and is AdamW here"):
        second.load_state_dict(first.state_dict())


def decayed(value: float) -> Make:
    def make(parameters: Any) -> Any:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": rest, "weight_decay": value}], lr=0.05)

    return make


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)},
         {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.001, betas=(0.8, 0.999), weight_decay=0.5, eps=1e-6)},
         ["lr=0.001 in the script and 0.01", "betas=[0.8, 0.999] in the script and [0.9, 0.999]", "weight_decay=0.5",
          "eps=1e-06"]),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.5))},
         {"optimizer": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.25), momentum=0.5)},
         ["lr=0.25 in the script and 0.5", "momentum=0.5 in the script and 0"]),
        ({"optimizer": decayed(0.1)}, {"optimizer": decayed(0.2)}, ["weight_decay of group 1=0.2 in the script and"]),
        ({"scheduler": lambda o: torchs.StepLR(o, 2, 0.5)}, {"scheduler": lambda o: torchs.StepLR(o, 3, 0.25)},
         ["step_size=3 in the script and 2", "gamma=0.25"]),
        ({"scheduler": lambda o: torchs.MultiStepLR(o, [2])}, {"scheduler": lambda o: torchs.MultiStepLR(o, [9, 30])},
         ["milestones=[9, 30] in the script and [2]"]),
        ({"scheduler": lambda o: torchs.CosineAnnealingLR(o, 16)},
         {"scheduler": lambda o: torchs.CosineAnnealingLR(o, 40)}, ["T_max=40 in the script and 16"]),
        ({"scheduler": sequence(constant, lambda o: torchs.LinearLR(o, 1.0, 0.1, 9))},
         {"scheduler": sequence(constant, lambda o: torchs.LinearLR(o, 1.0, 0.1, 8), milestones=(4,))},
         ["milestones=[4] in the script and [3]", "part 1: total_iters=8 in the script and 9"]),
        ({"scheduler": lambda o: torchs.OneCycleLR(o, 0.1, total_steps=40)},
         {"scheduler": lambda o: torchs.OneCycleLR(o, 0.2, total_steps=50)},
         ["lr=0.008 in the script and 0.004", "max_lr=0.2", "min_lr=8e-07", "total_steps=50"]),
        ({"scheduler": lambda o: CosineAnnealingScheduler(o, 40)},
         {"scheduler": lambda o: CosineAnnealingScheduler(o, 50, 0.001)},
         ["total_iters=50 in the script and 40", "eta_min=0.001"]),
        ({"scheduler": linear(warmup=2, total_steps=40)}, {"scheduler": linear(warmup=3, final=0.5, total_steps=50)},
         ["warmup=3 in the script and 2", "final=0.5", "total_iters=50"]),
    ],
)  # fmt: skip
def test_what_the_checkpoint_overrides_is_named_once(
    before: Any, after: Any, expected: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with both values each, at every resume; the checkpoint's are used."""
    first = build(tmp_path, **before)
    first.run(1, hand.loader())
    assert said(caplog) == []
    kept = copy.deepcopy(first.optimizer.state_dict()["param_groups"])
    for epochs in (1, 2):
        resumed = build(tmp_path, **after, resume=True)
        resumed.run(epochs, hand.loader())
        texts = said(caplog)
        assert len(texts) == 1
        assert all(text in texts[0] for text in expected), texts
        assert texts[0].count("in the script and") == len(expected)
        assert "start_from=" in texts[0]
        if epochs == 1:
            assert resumed.optimizer.state_dict()["param_groups"] == kept


def test_settings_that_are_objects_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A function is another object in every process, and an array has no single value."""

    class Own(torchs.LRScheduler):
        def __init__(self, optimizer: Any) -> None:
            self.shape, self.module = torch.rand(3), nn.Linear(1, 1)
            super().__init__(optimizer)

        def get_lr(self) -> list[Any]:
            return list(self.base_lrs)

        def state_dict(self) -> dict[str, Any]:
            return {"last_epoch": self.last_epoch}

    build(tmp_path, scheduler=Own).run(1, hand.loader())
    build(tmp_path, scheduler=Own, resume=True).run(2, hand.loader())
    assert said(caplog) == []
