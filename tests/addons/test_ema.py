"""The average of the weights: when it moves, where it is used, what is saved. Values: tests/test_trainer_models.py."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torchmetrics import SumMetric

from kit.hand import digest, loader, network
from kit.ranks import on_ranks
from kit.table import Task
from zae import ConfigError
from zae.addons import EMAAddon, MultiGPUAddon, StateManagerAddon, TorchMetricsAddon
from zae.errors import CheckpointMismatch


def build(*more: Any, **options: Any) -> Any:
    model = network()
    options.setdefault("decay", 0.5)
    return Task.add_on(EMAAddon, *more)(model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05), **options)


def valid() -> Any:
    return loader(10, seed=9, shuffle=False)


@pytest.mark.parametrize("decay", [1.0, -0.1, 2, "0.9", None, True, float("nan")])
def test_a_decay_that_cannot_be_meant(decay: Any) -> None:
    with pytest.raises(ConfigError, match=r"decay=.* in \[0, 1\)"):
        build(decay=decay)


def test_the_model_file_holds_training_weights_and_the_average_beside_them(tmp_path: Any) -> None:
    """Also at the moment of a validation, and in a checkpoint."""
    trainer = build(StateManagerAddon, save_path=tmp_path / "states", save_every=1)
    held: list[bool] = []
    checkpoint = trainer.checkpoint

    def look() -> None:
        checkpoint()
        plain = network()
        plain.load_state_dict(trainer.state_dict()["model"])
        held.append(digest(plain) == digest(trainer.model) and trainer.model.training)

    trainer.checkpoint = look
    trainer.run(2, loader(), valid(), valid_every=1)
    assert all(held)
    model, average = network(), network()
    other = Task(model, "cpu", mode="test")
    other.apply_weights(trainer.save_model(tmp_path / "model.safetensors"))
    assert digest(model) == digest(trainer.model)
    Task(average, "cpu", mode="test").apply_weights(trainer.save_average(tmp_path / "average.safetensors"))
    assert all(torch.equal(value, trainer.average[key]) for key, value in average.state_dict().items())
    assert digest(average) != digest(model)


def test_evaluation_uses_the_average_and_gives_the_weights_back() -> None:
    trainer = build()
    trainer.run(2, loader())
    averaged = network()
    averaged.load_state_dict(trainer.average)
    before = digest(trainer.model)
    assert trainer.evaluate(valid()) == Task(averaged, "cpu", mode="test").evaluate(valid())
    assert digest(trainer.model) == before


class Looking(Task):
    """It uses the model with the averaged weights at each event."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.weights: dict[str, bool] = {}

    def look(self, event: str) -> None:
        modes = [module.training for module in self.model.modules()]
        trained = {name: value.clone() for name, value in self.model.state_dict().items()}
        with self.averaged():
            with self.averaged():  # A function that is called within may use it as well.
                pass
            state = self.model.state_dict()
            is_average = all(torch.equal(state[name], value) for name, value in self.average.items())
            self.weights[event] = is_average and not torch.equal(state["0.weight"], trained["0.weight"])
            output = self.model(torch.ones(3, 4))
            assert not output.requires_grad
            assert not self.model.training
        assert all(torch.equal(value, trained[name]) for name, value in self.model.state_dict().items())
        assert modes == [module.training for module in self.model.modules()]

    def train_step(self, batch: Any) -> Any:
        self.look("train_step")
        return super().train_step(batch)

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)
        self.look("on_step_end")

    def on_validation_begin(self) -> None:
        super().on_validation_begin()
        self.look("on_validation_begin")

    def on_validation_end(self, metrics: Any) -> None:
        super().on_validation_end(metrics)
        self.look("on_validation_end")

    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.look("on_epoch_end")

    def on_run_end(self) -> None:
        super().on_run_end()
        self.look("on_run_end")


def test_the_average_is_at_hand_at_each_event_and_changes_nothing() -> None:
    """Also after the run; the steps and the validations are those of a task that does not look."""
    made = []
    for task in (Looking, Task):
        trainer = task.add_on(EMAAddon)(
            lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)),
            "cpu",
            optimizer=lambda parameters: AdamW(parameters, lr=0.05),
            decay=0.5,
            seed=0,
        )
        metrics = trainer.run(2, loader(24), valid())
        made.append((digest(trainer.model, *trainer.average.values()), metrics["valid_metrics_history"]))
        if task is Looking:
            trainer.look("after the run")
            assert len(trainer.weights) == 7
            assert all(trainer.weights.values()), trainer.weights
    assert made[0] == made[1]


def test_within_an_evaluation_the_average_is_there_already() -> None:
    """The metrics of the validation that counts are not begun again."""

    class Asking(Task):
        asks = True

        def test_step(self, batch: Any) -> Any:
            with self.averaged() if self.asks else nullcontext():
                return super().test_step(batch)

    found = []
    for asks in (True, False):
        model = network()
        trainer = Asking.add_on(EMAAddon, TorchMetricsAddon)(
            model,
            "cpu",
            optimizer=AdamW(model.parameters(), lr=0.05),
            decay=0.5,
            torch_metrics={"count": SumMetric()},
            torch_metrics_inputs={"count": ("loss",)},
        )
        trainer.asks = asks
        torch.manual_seed(0)
        found.append(trainer.run(1, loader(), valid())["valid_metrics_history"])
    assert found[0] == found[1]


def test_without_an_average_it_is_the_model_in_evaluation_mode() -> None:
    model = network()
    trainer = Task(model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05))
    trainer.run(1, loader())
    before = digest(model)
    with pytest.raises(RuntimeError, match="a fault of the block"), trainer.averaged():  # noqa: PT012
        assert (digest(model), model.training, trainer.mode) == (before, False, "test")
        raise RuntimeError("a fault of the block")
    assert (model.training, trainer.mode) == (True, "train")


@on_ranks(2)
def test_rank_0_alone_may_use_the_average(world: int) -> None:
    class Sampling(Task):
        def on_validation_end(self, metrics: Any) -> None:
            super().on_validation_end(metrics)
            if self.is_main:
                with self.averaged():
                    self.samples = self.model(torch.ones(3, 4))

    trainer = Sampling.add_on(EMAAddon, MultiGPUAddon)(
        network, "cpu", optimizer=lambda parameters: AdamW(parameters, lr=0.05), decay=0.5, seed=0
    )
    trainer.run(1, loader(), valid())
    if trainer.is_main:
        plain = network()
        plain.load_state_dict(trainer.average)
        assert torch.equal(trainer.samples, plain.eval()(torch.ones(3, 4)))


def test_buffers_are_copied() -> None:
    trainer = build(decay=0.9)
    trainer.run(1, loader())
    for name, buffer in trainer.model.named_buffers():
        assert torch.equal(trainer.average[name], buffer)


class Renewing(nn.Module):
    """Buffers that are made again in each step, one of them in another shape, and its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = network(), 0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
            self.seen = torch.cat([self.seen, inputs])[-40:]
            self.calls += 1
        return self.line(inputs - self.mean)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = int(state)


class OfManyKinds(nn.Module):
    """Weights and buffers of several types and memory layouts; a kernel takes those together that are alike."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, **options: Any) -> torch.Tensor:
            return torch.randn(shape, generator=generator, **options)

        self.scale = nn.Parameter(draw())
        self.lines = nn.ParameterList(draw(3, 4) for _ in range(3))
        self.turned = nn.Parameter(draw(4, 3).t())
        self.narrow = nn.Parameter(draw(5).bfloat16())
        self.wide = nn.Parameter(draw(5, dtype=torch.float64))
        self.waves = nn.Parameter(draw(5, dtype=torch.complex64))
        self.empty = nn.Parameter(draw(0, 3))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("one", torch.zeros(()).expand(3))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("ragged", torch.nested.nested_tensor([draw(2), draw(3)], layout=torch.jagged))
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.flag.logical_not_()
            self.sparse.mul_(0.5)
        rows = self.norm(inputs) @ sum(self.lines).t() @ self.turned.t()[:3, :3] * self.scale
        others = (self.narrow, self.wide, self.waves, self.empty)
        return sum((each.abs().square().sum() for each in others), rows.square().mean())


class ByKind(Task):  # type: ignore[misc, valid-type]
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0])}

    test_step = train_step


@pytest.mark.parametrize("decay", [0.9, None])
def test_the_average_of_tensors_of_many_kinds(decay: float | None) -> None:
    """Bit by bit the formula for one tensor; a uniform average begins with the weights themselves."""
    model = OfManyKinds()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    options = {"averaging": "uniform"} if decay is None else {"decay": decay}
    trainer = ByKind.add_on(EMAAddon)(model, "cpu", optimizer=optimizer, log_bar=False, **options)
    expected = {name: each.detach().clone() for name, each in model.named_parameters()}
    expected["narrow"] = expected["narrow"].float()

    def average(kept: float) -> None:
        for name, each in model.named_parameters():
            expected[name].mul_(kept).add_(each.detach(), alpha=1 - kept)

    if decay is None:
        for epoch in range(3):
            trainer.run(1, loader())
            average(epoch / (epoch + 1))
    else:
        with trainer.ready():
            for batch in loader():
                trainer.run_batch(batch)
                average(decay)
    for name, each in expected.items():
        assert digest(trainer.average[name].resolve_conj()) == digest(each), name
    for name, each in model.named_buffers():
        kept = trainer.average[name]
        assert kept.layout == each.layout
        assert all(map(torch.equal, *([own.unbind() if own.is_nested else [own.to_dense()] for own in (kept, each)])))


def test_buffers_that_are_made_anew_are_followed(tmp_path: Any) -> None:
    """The average holds, saves and evaluates them as they are, whatever object they have become."""
    model = Renewing()
    trainer = Task.add_on(EMAAddon)(model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05), decay=0.9)
    trainer.run(2, loader(), valid(), valid_every=5)
    assert trainer.average["_extra_state"] == 12
    twin = Renewing()
    twin.seen = torch.zeros(40, 4)  # For torch; whose module it is knows how.
    twin.load_state_dict(torch.load(trainer.save_average(tmp_path / "average.pt"), weights_only=True))
    for name, buffer in model.named_buffers():
        assert torch.equal(trainer.average[name], buffer)
        assert torch.equal(dict(twin.named_buffers())[name], buffer)
    before, trained = digest(model.mean, model.seen), model.mean.clone()
    model.mean = model.mean + 1.0  # As after a step that was skipped: the average is of before it.
    with trainer.evaluation_context():
        assert torch.equal(model.mean, trained)
    assert torch.equal(model.mean, trained + 1.0)
    model.mean = trained
    assert digest(model.mean, model.seen) == before


def test_a_second_run_goes_on_with_the_average() -> None:
    whole, pieces = build(), build()
    torch.manual_seed(1)
    whole.run(4, loader())
    torch.manual_seed(1)
    pieces.run(3, loader())
    pieces.run(1, loader())
    assert all(torch.equal(whole.average[key], pieces.average[key]) for key in whole.average)


def test_the_average_of_another_model_is_refused() -> None:
    trainer = build()
    trainer.run(1, loader())
    for own, what in (
        (3, "it is None"),
        ({}, "it is None"),
        ({"average": 3}, "it is 3"),
        ({"average": {"x": torch.ones(1)}}, "x is not in Sequential"),
        ({"average": {"0.bias": torch.ones(3)}}, r"0.bias is \(3,\) and must be \(8,\)"),
        ({"average": {"0.bias": 3.0}}, "0.bias is a float"),
    ):
        before = copy.deepcopy(trainer.average)
        with pytest.raises(CheckpointMismatch, match=f"no average of this model's weights: {what}; build .*apply"):
            trainer.load_state_dict({**trainer.state_dict(), "EMAAddon": own})
        assert all(torch.equal(before[key], trainer.average[key]) for key in before)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_average_of_half_precision_is_in_float32(kind: torch.dtype, tmp_path: Any) -> None:
    """In the type of the weights, steps of 1 - decay would be rounded away; resumed, and from a state in that type."""
    options = {"decay": 0.999, "save_path": tmp_path / "run", "resume": "auto", "log_bar": False}

    def train(steps: int) -> Any:
        model = nn.Linear(1, 1, bias=False).to(kind)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        trainer = Falling.add_on(EMAAddon, StateManagerAddon)(model, "cpu", optimizer=optimizer, **options)
        trainer.run(None, [torch.ones(1, 1, dtype=kind)] * 4, max_steps=steps)
        return trainer

    expected, weight = torch.ones(1, 1), 1.0
    for _ in range(4):
        weight -= 0.25
        expected.mul_(0.999).add_(torch.full((1, 1), weight), alpha=1 - 0.999)
    train(2)
    trainer = train(4)
    assert trainer.average["weight"].dtype == torch.float32
    assert torch.equal(trainer.average["weight"], expected)
    assert trainer.model.weight.dtype == kind
    state = trainer.state_dict()
    state["EMAAddon"]["average"] = {"weight": expected.to(kind)}
    trainer.load_state_dict(state)
    assert torch.equal(trainer.average["weight"], expected.to(kind).float())


class Falling(Task):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch).sum()}

    test_step = train_step
