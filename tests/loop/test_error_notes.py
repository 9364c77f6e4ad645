"""A model and data that do not fit are named at the first forward: the innermost call, its shapes, and its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from zae import Trainer
from zae.addons import AMPAddon, EMAAddon, GradientCheckpointingAddon


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


class OwnLoss(Task):
    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": nn.CrossEntropyLoss()(self.model(inputs), targets)}


class Masked(nn.Module):
    """Its forward takes a keyword, and changes its input before it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Any, *, mask: Any) -> Any:
        x = x.flatten(1)
        return x * self.scale * mask


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Masked()])

    def forward(self, x: Any) -> Any:
        return self.inner[0](x, mask=torch.ones(2, 7, dtype=torch.bool))


CLASSES = torch.tensor([0, 1])


def made(make: Callable[[], nn.Module], task: Any = Task, *add_ons: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    return task.add_on(*add_ons)(make, "cpu", optimizer=sgd, log_bar=False, **options)


def notes_of(trainer: Any, batch: Any, *, valid: Any = None) -> list[str]:
    with pytest.raises((RuntimeError, IndexError, ValueError)) as caught:
        trainer.run(1, [batch], valid)
    return caught.value.__notes__


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "features": (
        lambda: nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 3))),
        Task,
        (torch.ones(2, 5), CLASSES),
        "1.0 (Linear), with the parameters weight [3, 4], bias [3]; its input was Tensor[2, 5] float32",
    ),
    "channels": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()),
        Task,
        (torch.ones(2, 3, 8, 8), CLASSES),
        "0 (Conv2d), with the parameters weight [2, 1, 3, 3], bias [2]; its input was Tensor[2, 3, 8, 8] float32",
    ),
    "type": (
        lambda: nn.Linear(4, 3),
        Task,
        (torch.ones(2, 4, dtype=torch.float64), CLASSES),
        "Linear, with the parameters weight [3, 4], bias [3]; its input was Tensor[2, 4] float64",
    ),
    "tokens": (
        lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten()),
        Task,
        (torch.tensor([[9], [1]]), CLASSES),
        "0 (Embedding), with the parameters weight [5, 3]; its input was Tensor[2, 1] int64 from 1 to 9",
    ),
    "classes": (
        lambda: nn.Linear(4, 3),
        Task,
        (torch.ones(2, 4), torch.tensor([0, 7])),
        "cross_entropy, called with input Tensor[2, 3] float32, target Tensor[2] int64 from 0 to 7",
    ),
    "module of a loss": (
        lambda: nn.Linear(4, 3),
        OwnLoss,
        (torch.ones(2, 4), torch.tensor([0, 7])),
        "CrossEntropyLoss; its input was Tensor[2, 3] float32, Tensor[2] int64 from 0 to 7",
    ),
    "own module": (
        Outer,
        Task,
        (torch.ones(2, 1, 3), CLASSES),
        "inner.0 (Masked), with the parameters scale [3]; its input was Tensor[2, 1, 3] float32, "
        "mask=Tensor[2, 7] bool",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_innermost_call_is_named(case: str) -> None:
    make, task, batch, said = CASES[case]
    call, place = notes_of(made(make, task), batch)
    assert place.startswith("zae: in epoch 1, step 1 (batch 1), on cpu; the batch was ")
    assert call == f"zae: the error is of {said}"


@pytest.mark.parametrize(("add_ons", "options"), [
    ((AMPAddon,), {"precision": "bf16"}),
    ((EMAAddon,), {}),
    ((GradientCheckpointingAddon,), {"checkpoint_modules": ["0"]}),
])  # fmt: skip
def test_add_ons_change_nothing_of_it(add_ons: Any, options: Any) -> None:
    call, _ = notes_of(made(lambda: nn.Sequential(nn.Linear(4, 3)), Task, *add_ons, **options),
                        (torch.ones(2, 5), CLASSES))  # fmt: skip
    assert call.startswith(
        "zae: the error is of 0 (Linear), with the parameters weight [3, 4], bias [3]; its input was"
    )


def test_a_validation_says_it_too() -> None:
    good, wrong = (torch.ones(2, 4), CLASSES), (torch.ones(2, 6), CLASSES)
    call, place = notes_of(made(lambda: nn.Linear(4, 3)), good, valid=[wrong])
    assert place.startswith("zae: in an evaluation after step 1")
    assert call.endswith("its input was Tensor[2, 6] float32")


def test_an_error_of_the_step_itself_names_no_call() -> None:
    class Wrong(Task):
        def train_step(self, batch: Any) -> Any:
            super().train_step(batch)
            raise ValueError("of the task")

    assert len(notes_of(made(lambda: nn.Linear(4, 3), Wrong), (torch.ones(2, 4), CLASSES))) == 1
