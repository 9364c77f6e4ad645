"""Copies of modules that keep what their last forward has computed, which torch's own deepcopy refuses."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zae
from zae import Trainer
from zae.model.copying import deep_copy


@dataclass
class Held:
    value: Any


class Keeps(nn.Module):
    """Keeps its activation, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 1), how
        self.kept: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        ways = {"alone": outputs, "list": [outputs], "dict": {"a": (outputs,)}, "object": Held(outputs)}
        self.kept = ways.get(self.how, self.inner.weight.t())
        return outputs


class Normed(nn.Module):
    """The former weight_norm of torch, whose weight is computed in each forward."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.inner = nn.utils.weight_norm(nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs


class Task(Trainer):
    def train_step(self, batch: Tensor) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


MODELS = [*(pytest.param(Keeps(how), id=how) for how in ("alone", "list", "dict", "object", "view")),
          pytest.param(Normed(), id="weight_norm")]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_a_module_that_keeps_an_activation_is_copied(model: nn.Module) -> None:
    inputs = torch.ones(2, 4)
    outputs = model(inputs)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    twin = deep_copy(model)
    assert torch.equal(twin(inputs), outputs)
    assert {*map(id, twin.parameters())}.isdisjoint(map(id, model.parameters()))
    twin(inputs).sum().backward()
    assert all(each.grad is None for each in model.parameters())


def test_tied_weights_and_what_is_shared_stay_so() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    model.kept = model[0](torch.ones(1, 2))
    model.again = model.kept
    shared = Held(None)
    model.shared = shared
    twin = deep_copy(model, {id(shared): shared})
    assert twin[1].weight is twin[0].weight is not model[0].weight
    assert twin.again is twin.kept is not model.kept
    assert twin.shared is shared


@pytest.mark.parametrize("model", MODELS)
def test_tools_that_copy_a_trained_model(model: nn.Module) -> None:
    """A rate is searched on a copy, after a run that has left an activation."""
    batches = [torch.ones(2, 4)] * 4
    trainer = Task(model, "cpu", optimizer=lambda each: torch.optim.SGD(each, lr=0.01), log_bar=False)
    trainer.run(1, batches, batches)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zae.find_lr(trainer, batches, steps=10)
    trainer.model(batches[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trainer.run(1, batches, batches)
