"""Odd models, losses and optimizers against loops written by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from kit import hand
from kit.hand import digest, loader, network
from kit.regression import Regression, Untouched, build, line, pairs, valid
from kit.table import Task
from zae import CheckpointMismatch, ConfigError, Trainer
from zae.addons import EMAAddon, GradientAccumulationAddon, StateManagerAddon

# --- odd models, losses and optimizers


def run_like(step: Any, model: nn.Module, batches: list[Any], by_hand: nn.Module, **options: Any) -> Any:
    """Train one model by zae and its twin by hand, with SGD."""

    class Odd(Trainer):
        def train_step(self, batch: Any) -> Any:
            return step(self.model, batch)

        def test_step(self, batch: Any) -> Any:
            return step(self.model, batch)

    trainer = Odd(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), **options)
    trainer.run(2, batches)
    optimizer = SGD(by_hand.parameters(), lr=0.1)
    for batch in batches * 2:
        step(by_hand, batch)["loss"].backward()
        if options.get("gradient_clip"):
            nn.utils.clip_grad_norm_(by_hand.parameters(), options["gradient_clip"])
        optimizer.step()
        optimizer.zero_grad()
    assert digest(model) == digest(by_hand)
    return trainer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = line(), line()
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x)) * self.scale


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = line(), line(1, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) + self.high(x.double())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1 + 1j], [2 - 1j], [0.5 + 0j]]))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = line(), line(1)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.body(x))


@pytest.mark.parametrize("kind", [Tied, Mixed, Complex, Frozen])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_odd_models(kind: Any, clip: float, tmp_path: Any) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return {"loss": (model(batch[0]) - batch[1]).square().mean()}

    trainer = run_like(step, kind(), pairs(4, 2), kind(), gradient_clip=clip if kind is not Complex else 0.0)
    twin = kind()
    twin.load_state_dict(trainer.model.state_dict())
    trainer.apply_weights(trainer.save_model(tmp_path / "odd.safetensors"))
    assert digest(trainer.model) == digest(twin)


def thaw(model: Any, optimizer: Any) -> None:
    model.body.requires_grad_(True)


def thaw_and_add(model: Any, optimizer: Any) -> None:
    model.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.3})


def grow(model: Any, optimizer: Any) -> None:
    model.head = nn.Sequential(model.head, nn.PReLU())
    optimizer.add_param_group({"params": list(model.head[1].parameters())})


@pytest.mark.parametrize("change", [thaw, thaw_and_add, grow])
@pytest.mark.parametrize("clip", [0.0, 0.02])
def test_what_is_thawed_or_added_between_epochs_is_trained_and_clipped(change: Any, clip: float) -> None:
    """The parameters are those that the model and the optimizer have as an epoch begins, as by hand."""

    class Changing(Regression):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.progress_checker.epoch == 1:
                change(self.unwrap(), self.optimizer)

    def trained(model: Any) -> Any:
        return SGD((model if change is thaw else model.head).parameters(), lr=0.1, momentum=0.9)

    model, by_hand, batches = Frozen(), Frozen(), pairs(4, 2)
    Changing(model, "cpu", optimizer=trained(model), gradient_clip=clip).run(3, batches)
    optimizer = trained(by_hand)
    for epoch, (inputs, targets) in itertools.product(range(3), batches):
        if epoch == 1 and inputs is batches[0][0]:
            change(by_hand, optimizer)
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(by_hand.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    assert digest(model) == digest(by_hand)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_added_between_two_steps_of_an_epoch_is_trained_and_clipped(several: bool, accumulate: int) -> None:
    """An optimizer that is given another group follows the hand loop from that step on; so does an average."""

    class Growing(Regression):
        def train_step(self, batch: Any) -> Any:
            if self.progress_checker.step == 1 and not hasattr(self.model.head, "1"):
                grow(self.model, list(self.optimizers.values())[-1])
            return {**super().train_step(batch), "num_targets": len(batch[0])}

    def trained(model: Any) -> list[Any]:
        body = [SGD(model.body.parameters(), lr=0.1)] if several else []
        return [*body, SGD(model.head.parameters(), lr=0.1, momentum=0.9)]

    model, by_hand, batches = Frozen(), Frozen(), pairs(2, 4, 3, 3)
    trainer = build(GradientAccumulationAddon, EMAAddon, task=Growing, model=model, optimizer=trained(model),
                    gradient_clip=0.02, gradient_accumulation_steps=accumulate, decay=0.5)  # fmt: skip
    trainer.run(2, batches)
    optimizers, average = trained(by_hand), {}
    windows = [batches[start : start + accumulate] for start in range(0, 4, accumulate)]
    for step, window in enumerate(windows * 2):
        if step == 1:
            grow(by_hand, optimizers[-1])
        targets = sum(len(inputs) for inputs, _ in window)
        for inputs, wanted in window:
            loss = nn.functional.mse_loss(by_hand(inputs), wanted)
            (loss if accumulate == 1 else loss * len(inputs)).backward()
        held = [p for p in by_hand.parameters() if p.grad is not None]
        for parameter in held if accumulate > 1 else ():
            parameter.grad.div_(targets)
        for p in by_hand.head.parameters():
            average.setdefault(p, p.detach().clone())
        nn.utils.clip_grad_norm_(held, 0.02)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, mean in average.items():
            mean.mul_(0.5).add_(p.detach(), alpha=0.5)
    assert digest(model) == digest(by_hand)
    assert digest(*(trainer.average[name] for name, _ in model.head.named_parameters(prefix="head"))) == digest(
        *(average[p] for p in by_hand.head.parameters())
    )
    assert not any("add_param_group" in vars(each) for each in trainer.optimizers.values())
    trainer.run(1, batches)


def test_a_lazy_model_is_planned_saved_and_resumed(tmp_path: Any) -> None:
    """Its shapes are known after its first batch, or after a load; a shape that differs is refused."""

    def make(width: int = 8, **options: Any) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.LazyLinear(width), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Dropout(0.2), nn.LazyLinear(2))
        return build(StateManagerAddon, model=model, save_every=1, optimizer=AdamW(model.parameters()), **options)

    whole, first = make(save_path=tmp_path / "whole"), make(save_path=tmp_path / "s")
    plan = first.plan(2, loader(), valid())
    assert plan.last_step == 12
    torch.manual_seed(4)
    whole.run(2, loader())
    torch.manual_seed(4)
    first.run(2, loader(), max_steps=4)
    second = make(save_path=tmp_path / "s", resume=True)
    data = loader()
    second.run(2, data, max_steps=4)  # The call that was made already.
    second.run(2, data)
    assert digest(whole.model) == digest(second.model)
    assert digest(whole.model) != digest(first.model)
    for weights in (whole.save_model(tmp_path / "w.safetensors"), whole.model.state_dict()):
        fresh = make(save_path=tmp_path / "fresh")
        fresh.apply_weights(weights)
        assert digest(fresh.model) == digest(whole.model)
    grown = make(width=9, save_path=tmp_path / "grown")
    grown.evaluate(valid())
    with pytest.raises(CheckpointMismatch, match=r"0.weight is \(8, 4\) and must be \(9, 4\)"):
        grown.apply_weights(whole.model.state_dict())


class Observer(nn.Module):
    """Knows its shape after its first batch, and loads another one itself, as those of quantization-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            low = inputs.detach().amin(0)
            low = torch.minimum(low, self.low) if len(self.low) else low
            self.low.resize_(low.shape).copy_(low)
        return inputs - self.low if len(self.low) else inputs

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if prefix + "low" in state and state[prefix + "low"].dim() == 1:
            self.low.resize_(state[prefix + "low"].shape)
        super()._load_from_state_dict(state, prefix, *args)


def test_a_module_that_loads_another_shape_itself_is_resumed(tmp_path: Any) -> None:
    """With its average; what neither it nor torch's own modules take is refused before anything loads."""

    def make(**options: Any) -> Any:
        model = nn.Sequential(Observer(), network())
        return build(EMAAddon, StateManagerAddon, model=model, save_every=1, decay=0.5, **options)

    torch.manual_seed(4)
    whole = make(save_path=tmp_path / "whole")
    whole.run(2, loader(), valid())
    torch.manual_seed(4)
    make(save_path=tmp_path / "s").run(2, loader(), valid(), max_steps=7)
    resumed = make(save_path=tmp_path / "s", resume=True)
    data = loader()
    resumed.run(2, data, valid(), max_steps=7)
    assert resumed.progress_checker.step == 7
    resumed.run(1, data, valid())
    assert digest(whole.model) == digest(resumed.model)
    assert digest(*whole.average.values()) == digest(*resumed.average.values())
    fresh, state = make(save_path=tmp_path / "fresh"), whole.model.state_dict()
    before = digest(fresh.model)
    for key, wrong in (("0.low", torch.zeros(2, 2)), ("1.1.running_mean", torch.zeros(9))):
        with pytest.raises(CheckpointMismatch, match=f"of another shape .*{key} is"):
            fresh.apply_weights({**state, key: wrong})
    assert digest(fresh.model) == before


@pytest.mark.parametrize("kind", [Tied, Mixed, Complex, Frozen])
def test_averages_of_odd_models(kind: Any) -> None:
    """Tied weights have one average, complex ones are averaged, and frozen ones stay."""
    model, first = kind(), kind()
    trainer = build(EMAAddon, task=Regression, model=model, optimizer=SGD(model.parameters(), lr=0.1), decay=0.75)
    expected = {name: p.detach().clone() for name, p in first.named_parameters()}
    optimizer_step = trainer.optimizer_step

    def noting() -> bool:
        stepped = optimizer_step()
        for name, p in model.named_parameters():
            expected[name].mul_(0.75).add_(p.detach(), alpha=0.25)
        return stepped

    trainer.optimizer_step = noting
    if kind is Mixed:
        trainer.train_step = lambda batch: {"loss": (model(batch[0]) - batch[1]).square().mean()}
    trainer.run(2, pairs(4, 2))
    for name, value in expected.items():
        assert torch.equal(trainer.average[name], value)
    if kind is Tied:
        assert trainer.average["a.weight"] is trainer.average["b.weight"]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_average_counts_updates(accumulate: int) -> None:
    """For accumulation 1 and 4 on the same effective batches."""
    big = pairs(8, 8, 8, dtype=torch.float64)
    batches = big if accumulate == 1 else [(a, b) for x, y in big for a, b in zip(x.split(2), y.split(2), strict=True)]
    model = line(dtype=torch.float64)
    trainer = build(EMAAddon, GradientAccumulationAddon, task=Regression, model=model, decay=0.9,
                    optimizer=SGD(model.parameters(), lr=0.1), gradient_accumulation_steps=accumulate)  # fmt: skip
    trainer.run(3, batches)
    by_hand = line(dtype=torch.float64)
    average, optimizer = by_hand.weight.detach().clone(), SGD(by_hand.parameters(), lr=0.1)
    for inputs, targets in big * 3:
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.mul_(0.9).add_(by_hand.weight.detach(), alpha=1 - 0.9)
    torch.testing.assert_close(trainer.average["weight"], average, rtol=1e-12, atol=1e-14)


def odd_loss(shape: str, model: nn.Module, batch: Any) -> Any:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.register_hook(lambda g: g * 2)
    return {"loss": {"one": loss.reshape(1), "two": loss.reshape(1, 1), "double": loss.double()}[shape]}


@pytest.mark.parametrize("shape", ["one", "two", "double"])
def test_odd_losses(shape: str) -> None:
    """Of shape [1], in float64, with a hook: differentiated as by hand, and recorded as a number."""
    trainer = run_like(lambda m, b: odd_loss(shape, m, b), line(), pairs(4, 2), line())
    history = trainer.metrics["train_metrics_history"]
    assert len(hand.losses(trainer)) == 2
    assert trainer.best["score"] == min(row["train_loss"] for row in history)


def test_a_model_without_parameters_and_parameters_outside_of_the_model() -> None:
    """They are trained, clipped, saved and resumed."""
    factor = nn.Parameter(torch.tensor([2.0]))

    class Outside(Trainer):
        def train_step(self, batch: Any) -> Any:
            return {"loss": (self.model(batch[0]) * self.factor).square().mean()}

        def test_step(self, batch: Any) -> Any:
            return self.train_step(batch)

    def make() -> Any:
        own = nn.Parameter(factor.detach().clone())
        trainer = Outside(nn.Tanh(), "cpu", optimizer=SGD([own], lr=0.1, momentum=0.9), gradient_clip=0.5)
        trainer.factor = own
        return trainer

    whole, first, second = make(), make(), make()
    whole.run(4, pairs(4, 2))
    first.run(2, pairs(4, 2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.factor, first.factor)
    assert second.factor is not first.factor
    second.run(2, pairs(4, 2))
    assert torch.equal(whole.factor, second.factor)
    assert not torch.equal(whole.factor, factor)


def test_an_optimizer_that_wants_a_closure_is_refused_in_words_or_stepped_by_the_user() -> None:
    """LBFGS evaluates the loss itself."""
    model, by_hand = line(), line()
    trainer = build(task=Untouched, model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match=r"LBFGS\) evaluates the loss itself.*def step_one"):
        trainer.run(1, pairs(8))

    class ByClosure(Regression):
        def gradients(self, batch: Any) -> Any:
            self.batch = batch
            return super().gradients(batch)

        def step_one(self, optimizer: Any) -> bool:
            def closure() -> Any:
                self.zero_grad()
                return super(ByClosure, self).gradients(self.batch)[0][0]["loss"]

            optimizer.step(closure)
            return True

    trainer = build(task=ByClosure, model=model, optimizer=torch.optim.LBFGS(model.parameters(), max_iter=5))
    trainer.run(3, pairs(8))
    optimizer = torch.optim.LBFGS(by_hand.parameters(), max_iter=5)
    for inputs, targets in pairs(8) * 3:

        def loss(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            value = nn.functional.mse_loss(by_hand(inputs), targets)
            value.backward()
            return value

        optimizer.step(loss)
    assert digest(model) == digest(by_hand)


def test_parameter_groups_keep_their_rates() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[4].parameters(), "lr": 0.2}]
    trainer = build(model=model, optimizer=SGD(groups), scheduler=lambda o: StepLR(o, 1, 0.5))
    trainer.run(2, loader())
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.025, 0.05]
    assert (trainer.train_history[-1]["lr"], trainer.train_history[-1]["lr/1"]) == (0.05, 0.1)


def test_training_without_an_optimizer_is_refused() -> None:
    """Also when a trainer for evaluation is toggled."""
    trainer = Task(network(), "cpu", mode="test")
    trainer.toggle("train")
    with pytest.raises(ConfigError, match="optimizer is None"):
        trainer.run(1, loader())
