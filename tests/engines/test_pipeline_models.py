"""Models and steps as people write them, in stages: equal to one process, or refused with the line to write."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_pipeline import LIMIT, Mean, each_rank_failing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit.engines import F64, Engine, Task, build, distance, sgd, weights
from kit.stages import VOCABULARY, Language, Outputs, Records, Skips, beside, in_halves, recorded
from zae import ConfigError
from zae.addons import PipelineAddon
from zae.addons.pipeline.chain import chain_of, fake_loss


class Fits(Mean):
    """Predict a target."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": nn.functional.mse_loss(self.model(x), y), "largest": x.abs().mean()}

    test_step = train_step


class Named(Mean):
    """Use what a model returns in a dataclass."""

    def train_step(self, batch: Any) -> Any:
        out = self.model(batch[0])
        return {"loss": nn.functional.mse_loss(out.out, batch[1]) + 0.1 * out.middle.square().mean()}

    test_step = train_step


def pairs(rows: int = 16) -> DataLoader[Any]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(3), dtype=F64)
    return DataLoader(TensorDataset(x, x[:, :3].sin()), 8)


def tokens(rows: int = 16) -> DataLoader[Any]:
    found = torch.randint(VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(found), 8)


Case = tuple[Any, type[Task], Any, Any, dict[str, Any]]
MODELS: dict[str, Case] = {
    "skips": (Skips, Fits, pairs, functools.partial(pairs, 13),
              {"split": beside, "stages_per_rank": 2, "pipeline_schedule": "Interleaved1F1B"}),
    "dataclass": (Records, Named, pairs, pairs, {"split": recorded}),
    "encoder": (functools.partial(Language, "encoder"), Task, tokens, functools.partial(tokens, 5),
                {"split": in_halves}),
    "decoder": (functools.partial(Language, "decoder"), Task, tokens, tokens, {"split": in_halves}),
}  # fmt: skip


def beside_one_process(name: str) -> tuple[float, Any, Any]:
    make, task, loader, valid, options = MODELS[name]
    ends, trainers = [], []
    for engine in (Engine((PipelineAddon,), 2, 1, {"pipeline_microbatches": 4, **options}), None):
        torch.manual_seed(0)
        trainer = build(engine, task=task, model=make().double(), optimizer=sgd, gradient_clip=0.5)
        ends.append(trainer.run(2, loader(), valid())["valid_metrics_history"][-1]["valid_loss"])
        trainers.append(trainer)
    assert dist.get_world_size() == trainers[0].world_size == 2
    return distance(*trainers), *ends


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "skips" else pytest.mark.exhaustive) for n in MODELS]
)
def test_a_model_is_that_of_one_process(name: str, crews: Any) -> None:
    """Weights after four steps with a clip, and the loss of an evaluation whose last batch is short."""
    found = crews(2).call(beside_one_process, name)
    assert all(each[0] < LIMIT for each in found), found
    assert all(each[1] == pytest.approx(each[2], rel=1e-9) for each in found)


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_trial_differentiates_what_a_dataclass_contains() -> None:
    """Torch tries each stage once; a loss without a gradient would end the run."""
    values = torch.ones(2, requires_grad=True)
    assert fake_loss(Outputs(values, values.detach())).requires_grad


class Positional(Records):
    def forward(self, *tensors: torch.Tensor) -> Outputs:
        return super().forward(tensors[0])


def test_a_forward_without_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the forward of Positional takes \*tensors: name each input"):
        chain_of(Positional(), ["last"], 2)


def test_a_forward_that_decides_by_shapes_is_refused_with_its_line() -> None:
    """A function that gives the stages is the remedy."""

    class Decides(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](x)) if x.shape[0] > 2 else x

    model = Decides(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"test_pipeline_models.py, line \d+, `.*shape.*give split=a function"):
        chain_of(model, ["1"], 2)
    with pytest.raises(ConfigError, match=r"forward of Language cannot be divided .*give split=a function"):
        chain_of(Language("encoder"), ["stack.layers.2"], 2)


class Branches(nn.Module):
    """Three layers, of which the second is left out if a function of the test says so."""

    def __init__(self, decides: Any) -> None:
        super().__init__()
        self.a, self.b, self.c, self.decides = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), decides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.c(self.b(x) if self.decides(x) else x)


@pytest.mark.parametrize(
    ("decides", "message"),
    [
        (lambda x: torch.rand(()) > 0.5, "the forward of Branches draws random numbers"),
        (lambda x: random.random() > 0.5, "the forward of Branches draws random numbers"),
        (lambda x: x.dim() == 2, r"line \d+, `.*dim of what passes from one module to the next.*give split=a function"),
        (lambda x: hasattr(x, "shape"), "of what passes from one module to the next"),
    ],
)
def test_a_forward_that_decides_is_refused(decides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chain_of(Branches(decides), ["c"], 2)


def test_what_passes_is_a_tensor_and_each_call_is_looked_at() -> None:
    """A forward that asks for a tensor gets one; one that goes another way later is refused then."""
    model = Branches(torch.is_tensor)
    chain = chain_of(model, ["c"], 2)
    assert [sorted(each) for each in chain.names] == [["a.bias", "a.weight", "b.bias", "b.weight"],
                                                      ["c.bias", "c.weight"]]  # fmt: skip
    x = torch.randn(3, 4)
    programs = chain.programs({"x": x}, range(2))
    assert torch.equal(programs[1]({"x": x}, [programs[0]({"x": x}, [])]), model(x))
    model.decides = lambda x: False
    with pytest.raises(ConfigError, match="Branches calls other modules than with the defaults of its forward"):
        chain.programs({"x": x}, range(2))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return super().forward(x) * scale


class Sets(nn.Module):
    """Two layers, and a forward that a test gives."""

    count = 0

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.function, self.aux = nn.Linear(4, 4), Scaled(4, 4), function, None
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        x = self.a(x)
        self.function(self, x)
        return self.b(x, scale)


def aux(model: Any, x: torch.Tensor) -> None:
    model.aux = x.square().mean()


def average(model: Any, x: torch.Tensor) -> None:
    model.calls.mul_(0.9).add_(x.detach().mean(0))


def number(model: Any, x: torch.Tensor) -> None:
    model.count += 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (aux, r"line \d+, `model\.aux = .*give split=a function"),
        (average, r"line \d+, `model\.calls.*give split=a function"),
        (number, "the forward of Sets sets count, which no stage would do.*return it"),
    ],
)
def test_a_divided_forward_that_sets_something_is_refused(function: Any, message: str) -> None:
    """A buffer that it averages, a loss that it keeps, a call that it counts: no stage would do it."""
    model = Sets(function)
    model.count = 0
    with pytest.raises(ConfigError, match=message):
        chain_of(model, ["b"], 2)
    assert (model.aux, model.count) == (None, 0)


class Counts(Mean):
    seen = 0

    def train_step(self, batch: Any) -> Any:
        self.seen = self.seen + 1
        return super().train_step(batch)


class Parts(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model.a(batch[0]).square().mean()}


class Items(Mean):
    def train_step(self, batch: Any) -> Any:
        return {**super().train_step(batch), "first": sum(each.count for each in self.model)}


class Decays(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"loss": super().train_step(batch)["loss"] + sum(p.square().sum() for p in self.model.parameters())}


class Device(Mean):
    def train_step(self, batch: Any) -> Any:
        device = next(iter(self.model.parameters())).device if self.rank == 0 else self.model.a.weight.device
        return {"loss": (self.model(batch[0]) - batch[0].to(device)).square().mean()}


class Numbers(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0], float(batch[0][0, 0])).square().mean()}


class Computed(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0].requires_grad_()).square().mean()}


PARTS = r"ConfigError: a step (uses|computes with).*A rank has the .* of its own stages alone: .*self\.device"
STEPS = {
    "counts": (Counts, r"StepError: the step changes self\.seen before it calls self\.model.*on_step_end"),
    "parts": (Parts, PARTS),
    "items": (Items, PARTS),
    "decays": (Decays, PARTS),
    "device": (Device, PARTS),
    "numbers": (Numbers, r"called with scale=\S+ for one micro-batch, and \S+ for another: give it as a tensor"),
    "computed": (Computed, "the inputs of self.model require a gradient"),
}


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Sets(lambda model, x: None).double()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_no_rank_could_compute_is_refused(name: str) -> None:
    task, message = STEPS[name]
    found = each_rank_failing(task, {"split": ["b"], "model": plain()})
    assert any(re.search(message, each, re.DOTALL) for each in found), found


def schedules_a_number(folder: Any) -> float:
    """A number that is another in each step is one of the whole step."""

    class Anneals(Mean):
        def train_step(self, batch: Any) -> Any:
            return {"loss": self.model(batch[0], 1 / (1 + self.progress_checker.step)).square().mean()}

        def test_step(self, batch: Any) -> Any:
            return self.train_step(batch)

    data = DataLoader(TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(1), dtype=F64)), 8)
    trainers = []
    for engine in (Engine((PipelineAddon,), 2, 1, {"split": ["b"], "pipeline_microbatches": 4}), None):
        trainer = build(engine, task=Anneals, model=plain(), optimizer=sgd)
        trainer.run(1, data)
        trainers.append(trainer)
    assert weights(trainers[0]).keys() == weights(trainers[1]).keys()
    return distance(*trainers)


@pytest.mark.exhaustive
def test_a_number_that_changes_by_the_step(tmp_path: Any, crews: Any) -> None:
    assert max(crews(2).call(schedules_a_number, tmp_path)) < LIMIT
