"""Models and steps as people write them, in stages: equal to one process, or refused with the line to write."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_pipeline import LIMIT, Mean, each_rank_failing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit.engines import F64, Engine, Task, build, distance, sgd, weights
from kit.stages import VOCABULARY, Language, Outputs, Records, Skips, hugging
from zae import ConfigError
from zae.addons import PipelineAddon
from zae.launch.pipeline.chain import Chain, fake_loss
from zae.launch.pipeline.timing import as_arguments


class Fits(Mean):
    """Predict a target; a model may compute the loss itself."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": nn.functional.mse_loss(self.model(x), y), "largest": x.abs().mean()}

    def test_step(self, batch: Any) -> Any:
        return {"loss": self.model(*batch)["loss"]}


class Hugging(Mean):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(input_ids=batch[0], labels=batch[0][:, 0] % 2 if self.is_bert else batch[0]).loss}

    @property
    def is_bert(self) -> bool:
        return "Bert" in type(self.unwrap()).__name__

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


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


IDS = torch.zeros(2, 6, dtype=torch.int64)
LABELS = {"input_ids": IDS, "labels": IDS}
Case = tuple[Any, type[Task], Any, Any, dict[str, Any]]
MODELS: dict[str, Case] = {
    "skips": (Skips, Fits, pairs, functools.partial(pairs, 13),
              {"split": ["deep", "up", "last"], "pipeline_schedule": "Interleaved1F1B"}),
    "dataclass": (Records, Named, pairs, pairs, {"split": ["last"]}),
    "encoder": (functools.partial(Language, "encoder"), Task, tokens, functools.partial(tokens, 5), {}),
    "decoder": (functools.partial(Language, "decoder"), Task, tokens, tokens, {"split": ["stack.layers.2"]}),
    "bert": (functools.partial(hugging, "bert"), Hugging, tokens, tokens,
             {"pipeline_example": {"input_ids": IDS, "labels": IDS[:, 0]}}),
    "llama": (functools.partial(hugging, "llama"), Hugging, tokens, functools.partial(tokens, 13),
              {"split": 4, "pipeline_schedule": "ZBVZeroBubble", "pipeline_example": LABELS}),
    "gpt2": (functools.partial(hugging, "gpt2"), Hugging, tokens, tokens,
             {"split": ["transformer.h.2"], "pipeline_example": LABELS}),
}  # fmt: skip


def beside_one_process(name: str) -> tuple[float, Any, Any, list[str]]:
    make, task, loader, valid, options = MODELS[name]
    ends, trainers = [], []
    for engine in (Engine((PipelineAddon,), 2, 1, {"pipeline_microbatches": 4, **options}), None):
        torch.manual_seed(0)
        trainer = build(engine, task=task, model=make().double(), optimizer=sgd, gradient_clip=0.5)
        ends.append(trainer.run(2, loader(), valid())["valid_metrics_history"][-1]["valid_loss"])
        trainers.append(trainer)
    assert dist.get_world_size() == trainers[0].world_size == 2
    return distance(*trainers), *ends, trainers[0]._begins or []


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "skips" else pytest.mark.exhaustive) for n in MODELS]
)
def test_a_model_is_that_of_one_process(name: str, crews: Any) -> None:
    """Weights after four steps with a clip, and the loss of an evaluation whose last batch is short."""
    if name in ("bert", "llama", "gpt2"):
        hugging(name)  # Imported here, once.
    found = crews(2).call(beside_one_process, name)
    assert all(each[0] < LIMIT for each in found), found
    exact = 1e-6 if name in ("bert", "llama", "gpt2") else 1e-9  # Transformers computes a loss in float32.
    assert all(each[1] == pytest.approx(each[2], rel=exact) for each in found)
    assert found[0][3] == found[1][3]  # Rank 0 alone has measured.
    assert bool(found[0][3]) == (name in ("bert", "llama"))


# ------------------------------------------------------------------------------------------------ the measured split


class Slow(nn.Module):
    """Few parameters, and much work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(80):
            x = (x @ self.weight).tanh()
        return nn.functional.dropout(x, 0.1)


def test_stages_are_balanced_by_measured_time() -> None:
    """By parameters the last layer is a stage; by time the two that compute most are divided. Nothing else changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Slow(), Slow(), nn.Linear(64, 2000))
    assert Chain(model, 2, 2).begins == ["4"]
    before, streams = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    for example in (x := torch.randn(256, 64), (x,), {"input": x}):
        streams = torch.get_rng_state()
        assert Chain(model, 2, 2, example).begins == ["3"]
        assert torch.equal(streams, torch.get_rng_state())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    for example in (torch.ones(3, 5), {"inputs": x}, (x, x)):
        with pytest.raises(ConfigError, match="the model cannot be called with pipeline_example"):
            Chain(model, 2, 2, example)


def test_a_forward_may_decide_by_shapes_that_are_known() -> None:
    """A plan of its stages needs an example; what it decides is looked at again for other shapes."""

    class Decides(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[0](x)
            for _ in range(x.shape[0]):
                x = self[1](x) if x.dim() == 2 and len(x.shape) == 2 else x
            return self[2](x) if x.shape[0] > 2 else self[2](x) * 2

    model = Decides(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"test_pipeline_models.py, line \d+, `.*range.*give pipeline_example="):
        Chain(model, ["2"], 2)
    chain = Chain(model, ["2"], 2, torch.ones(2, 4))
    for rows in (2, 3):
        arguments = as_arguments(model, torch.ones(rows, 4))
        programs = chain.programs(arguments, (0, 1))
        passed = programs[0](arguments, ())
        torch.testing.assert_close(programs[1](arguments, passed), model(torch.ones(rows, 4)))


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_trial_differentiates_what_a_dataclass_contains() -> None:
    """Torch tries each stage once; a loss without a gradient would end the run."""
    values = torch.ones(2, requires_grad=True)
    assert fake_loss(Outputs(values, values.detach())).requires_grad


class Positional(Records):
    def forward(self, *tensors: torch.Tensor) -> Outputs:
        return super().forward(tensors[0])


def test_a_forward_without_names_and_one_with_a_cache_are_refused() -> None:
    """The text names what to write for these models, and not what other models need."""
    with pytest.raises(ConfigError, match=r"IndexError.*Its forward takes \*tensors: name each input"):
        Chain(Positional(), ["last"], 2)
    model = hugging("gpt2")
    model.config.use_cache = True
    with pytest.raises(ConfigError, match=r"DynamicCache.*write model\.config\.use_cache = False$"):
        Chain(model, ["transformer.h.2"], 2, LABELS)


class Sets(nn.Module):
    """Two layers, and a forward that a test gives."""

    count = 0

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.function, self.aux = nn.Linear(4, 4), nn.Linear(4, 4), function, None
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        x = self.a(x)
        self.function(self, x)
        return self.b(x) * scale


def aux(model: Any, x: torch.Tensor) -> None:
    model.aux = x.square().mean()


def average(model: Any, x: torch.Tensor) -> None:
    model.calls.mul_(0.9).add_(x.detach().mean(0))


def number(model: Any, x: torch.Tensor) -> None:
    model.count += 1


@pytest.mark.parametrize(("function", "name"), [(aux, "aux"), (average, "calls"), (number, "count")])
def test_a_divided_forward_that_sets_something_is_refused(function: Any, name: str) -> None:
    """A buffer that it averages, a loss that it keeps, a call that it counts: no stage would do it."""
    model = Sets(function)
    model.count = 0
    with pytest.raises(ConfigError, match=f"the forward of Sets sets {name}, which no stage would do.*return it"):
        Chain(model, ["b"], 2)
    assert (model.aux, model.count, float(model.calls.sum())) == (None, 0, 0.0)


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
    runner = trainers[0]._chain._programs
    assert len(runner) <= 8
    assert weights(trainers[0]).keys() == weights(trainers[1]).keys()
    return distance(*trainers)


@pytest.mark.exhaustive
def test_a_number_that_changes_by_the_step(tmp_path: Any, crews: Any) -> None:
    assert max(crews(2).call(schedules_a_number, tmp_path)) < LIMIT
