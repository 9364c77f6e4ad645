"""What a step returns is what it was then: a parameter, a buffer or a filled tensor may be another one afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zae import Trainer
from zae.addons import GradientAccumulationAddon
from zae.metrics import Max, Mean, Sum


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.scales = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("both", torch.zeros(2))


def values_of(model: Any, filled: torch.Tensor, array: np.ndarray) -> dict[str, Any]:
    """Return numbers that are other ones after the step, or after the next batch."""
    return {
        "scale": model.scale,
        "view": model.scales[0],
        "reshaped": model.scale.reshape(()),
        "detached": model.scale.detach(),
        "seen": model.seen,
        "entry": model.both[1],
        "filled": filled,
        "array": array,
        "sum of arrays": Sum(array),
        "sum": Sum(model.seen),
        "max": Max(filled),
        "weighed": Mean(model.seen, weight=filled),
        "nested": {"scale": model.scale, "seen": model.seen},
    }


def numbers_of(values: Any) -> dict[str, float]:
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= {f"{key}/{inner}": float(each.detach()) for inner, each in value.items()}
        elif isinstance(value, tuple):
            found[key] = float(value[0])
        else:
            found[key] = float(torch.as_tensor(value).detach())
    return found


class Task(Trainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.filled = torch.zeros(())
        self.array = np.zeros(())
        self.returned: list[dict[str, float]] = []
        self.at_step_end: list[Any] = []

    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        model = self.model
        model.seen += len(batch)
        model.both += len(batch)
        self.filled.fill_(batch.sum())
        self.array[...] = float(batch.sum())
        values = values_of(model, self.filled, self.array)
        self.returned.append(numbers_of(values))
        return {"loss": (model.scale * model.scales.sum() * batch).mean(), **values}

    test_step = train_step

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)
        self.at_step_end += [numbers_of({key: each.values[key] for key in values}) for each in outputs
                             for values in [values_of(self.model, self.filled, self.array)]]  # fmt: skip


BATCHES = [torch.ones(2), torch.ones(2), torch.ones(2) * 3, torch.ones(2)]


@pytest.mark.parametrize("window", [1, 2])
def test_a_number_of_a_step_is_the_one_that_it_returned(window: int) -> None:
    net = Net()
    cls = Task.add_on(GradientAccumulationAddon)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = cls(net, "cpu", optimizer=optimizer, log_bar=False, gradient_accumulation_steps=window)
    row = trainer.run(1, BATCHES)["train_metrics_history"][0]
    column = {key: [each[key] for each in trainer.returned] for key in trainer.returned[0]}
    expected = {key: sum(numbers) / len(numbers) for key, numbers in column.items()}
    for key in ("sum", "sum of arrays"):
        expected[key] = sum(column[key])
    expected["max"] = max(column["max"])
    weights = column["filled"]
    expected["weighed"] = sum(a * b for a, b in zip(column["seen"], weights, strict=True)) / sum(weights)
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert trainer.at_step_end == trainer.returned


class Counted(Trainer):
    """A mean over targets, whose number is in a tensor that each batch fills."""

    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        self.model.seen.fill_(len(batch))
        return {"loss": (self.model.scale * batch).mean(), "num_targets": self.model.seen}

    test_step = train_step


def test_targets_in_a_tensor_that_is_filled_anew_weigh_their_own_batch() -> None:
    net = Net()
    options = {"optimizer": torch.optim.SGD([net.scale], lr=0.1), "gradient_accumulation_steps": 2}
    Counted.add_on(GradientAccumulationAddon)(net, "cpu", log_bar=False, **options).run(
        1, [torch.ones(6), torch.ones(2)]
    )
    assert net.scale.item() == pytest.approx(0.9)


class Keeping(Task):
    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": super().train_step(batch)["loss"], "scales": self.model.scales, "both": self.model.both}

    def metric_on_epoch_end(self) -> dict[str, float]:
        log = self.log_train if self.mode == "train" else self.log_test
        return {"first": float(log["scales"][0][0]), "first_both": float(log["both"][0][0])}

    def on_step_end(self, outputs: Any) -> None: ...


@pytest.mark.parametrize("window", [1, 2])
def test_outputs_that_are_kept_are_those_of_their_batch(window: int) -> None:
    net = Net()
    options = {"keep_train_outputs": True, "gradient_accumulation_steps": window}
    cls = Keeping.add_on(GradientAccumulationAddon)
    trainer = cls(net, "cpu", optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log_bar=False, **options)
    row = trainer.run(1, BATCHES)["train_metrics_history"][0]
    assert (row["first"], row["first_both"]) == (1.0, 2.0)


class Plain(Trainer):
    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": (self.model.scale * batch).mean()}

    test_step = train_step
