"""Models whose weights are made by their first batch, with everything that looks at weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kit.hand import digest
from zae import ConfigError, Trainer
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    MultiGPUAddon,
    PrefetchAddon,
    StateManagerAddon,
    TensorBoardLoggerAddon,
)
from zae.addons.ddp import DDPEngine
from zae.parts import SingleProcess

BATCHES = list(torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(0)))
ADD_ONS: dict[Any, dict[str, Any]] = {
    JSONLLoggerAddon: {"jsonl_path": "log.jsonl"},
    LedgerAddon: {"ledger_path": "ledger.jsonl"},
    TensorBoardLoggerAddon: {"log_dir": "events"},
    EMAAddon: {"decay": 0.5},
    StateManagerAddon: {"save_path": "saved", "save_every": 1, "resume": "auto"},
    AMPAddon: {"precision": "bf16"},
    EarlyStoppingAddon: {"patience": 9},
    PrefetchAddon: {},
    GradientAccumulationAddon: {"gradient_accumulation_steps": 2},
}


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def network(lazy: bool = True) -> nn.Module:
    torch.manual_seed(0)
    if lazy:
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1))
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def make(add_ons: Any, model: nn.Module, **options: Any) -> Any:
    given = {key: value for each in add_ons for key, value in ADD_ONS[each].items()} | options
    return Task.add_on(*add_ons)(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **given)


@pytest.mark.parametrize("add_on", [*ADD_ONS, None])
def test_a_lazy_model_trains_as_ever(add_on: Any) -> None:
    """Each add-on alone, and all of them: the weights of the model without it, and a plan of the run."""
    add_ons = list(ADD_ONS) if add_on is None else [add_on]
    plain = [a for a in add_ons if a in (AMPAddon, GradientAccumulationAddon)]
    weights = []
    for chosen in (plain, add_ons):
        model = network()
        trainer = make(chosen, model)
        assert "steps" in str(trainer.plan(2, BATCHES, BATCHES))
        torch.manual_seed(5)  # The first batch draws the weights.
        trainer.run(2, BATCHES, BATCHES)
        weights.append(digest(model))
    assert weights[0] == weights[1]


def test_the_average_of_a_lazy_model_begins_at_the_weights_of_its_first_batch() -> None:
    """As that of the same model whose weights are there from the beginning."""
    ends = []
    made = network()
    torch.manual_seed(5)
    made(BATCHES[0])
    for lazy in (True, False):
        model = network(lazy)
        if not lazy:
            model.load_state_dict({**made.state_dict(), **{k: v for k, v in model.state_dict().items() if "1." in k}})
        trainer = make([EMAAddon], model)
        torch.manual_seed(5)
        trainer.run(1, BATCHES, BATCHES)
        ends.append((digest(model), digest(*trainer.average.values()), trainer.valid_history))
    assert ends[0] == ends[1]
    untouched = make([EMAAddon], network())
    assert "loss" in untouched.evaluate(BATCHES)


def test_a_lazy_run_is_resumed_with_its_average() -> None:
    ends = []
    for folder, calls in (("straight", [3]), ("stopped", [1, 3])):
        for n_epoch in calls:
            model = network()
            torch.manual_seed(5)
            trainer = make([EMAAddon, StateManagerAddon, JSONLLoggerAddon], model, save_path=folder)
            trainer.run(n_epoch, BATCHES, BATCHES)
        ends.append((digest(model), digest(*trainer.average.values()), trainer.valid_history))
    assert ends[0] == ends[1]


def test_ranks_refuse_a_lazy_model_in_words() -> None:
    trainer = Task.add_on(MultiGPUAddon)(network(), ["cpu", "cpu"], optimizer=torch.optim.SGD)
    with pytest.raises(
        ConfigError, match=r"the model is lazy.*call it once with a batch before run\(\): model\(inputs"
    ):
        DDPEngine(SingleProcess(), torch.device("cpu")).wrap(trainer.model, True)  # As a rank does.
