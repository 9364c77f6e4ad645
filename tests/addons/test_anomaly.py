"""AnomalyAddon: it names where a number stops being finite, ends only what must end, and changes nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kit.ranks import on_ranks
from kit.regression import Float32Regression as Task
from kit.regression import NoisyNet
from zae import ConfigError, NonFiniteError
from zae.addons import (
    AMPAddon,
    AnomalyAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.random_state import capture
from zae.testing.watch import difference


class Call(nn.Module):
    """A module of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Explode(torch.autograd.Function):
    """An identity whose derivative is infinite, which torch's anomaly mode does not look for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(gradient, math.inf)


def distance(x: Tensor) -> Tensor:
    return (x - x.detach()).square().sum(-1, keepdim=True).sqrt()


def net(function: Any, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Call(function), nn.Linear(outputs, 1))


def batches(count: int = 6, bad: int | None = None) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    made = [(torch.rand(6, 4, generator=generator) + 0.1, torch.randn(6, 1, generator=generator))
            for _ in range(count)]  # fmt: skip
    if bad is not None:
        made[bad][0][2, 1] = math.nan
    return made


def build(model: nn.Module, *add_ons: Any, **options: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Task.add_on(AnomalyAddon, *add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    yield
    assert not torch.is_anomaly_enabled()


def fails(trainer: Any, data: list[Any]) -> str:
    """Return the error of a run, which leaves no hook and no gradient behind."""
    before = {name: value.clone() for name, value in trainer.unwrap().state_dict().items()}
    with pytest.raises(NonFiniteError) as raised:
        trainer.run(1, data)
    assert not any(each._forward_hooks for each in trainer.unwrap().modules())
    if not trainer.progress_checker.step:
        assert difference(before, trainer.unwrap().state_dict()) is None
    return "\n".join([str(raised.value), *raised.value.__notes__])


def test_a_module_that_makes_a_nan() -> None:
    said = fails(build(net(lambda x: (x - 1e3).sqrt())), batches())
    assert "step 1 (epoch 1, batch 1) is not finite: the loss is nan; the first NaN of the forward is in " in said
    assert "the output of '1' (Call); 24 of 24 values, its inputs are finite, its weights are finite" in said
    assert "the weights are those after step 0" in said


def test_an_infinity_before_a_nan_is_named_too() -> None:
    said = fails(build(nn.Sequential(nn.Linear(4, 1), Call(lambda x: x / 0), Call(lambda x: x * 0))), batches())
    assert said.index("first infinity of the forward is in the output of '1'") < said.index("first NaN")
    assert "in the output of '2' (Call); 6 of 6 values, its inputs are not" in said


def test_an_operation_whose_derivative_is_nan() -> None:
    with pytest.warns(UserWarning, match=r"in distance\n(?s:.*)x.detach"):
        said = fails(build(net(distance, 1)), batches())
    assert "in the backward, Function 'PowBackward0' returned nan values in its 0th output (a warning shows" in said
    assert "the outputs of all modules are finite" in said


def test_a_gradient_that_is_infinite_and_of_which_no_norm_is_computed() -> None:
    """Without the add-on the step would be taken, and the weights lost."""
    said = fails(build(nn.Sequential(nn.Linear(4, 1), Call(Explode.apply))), batches())
    assert "all modules are finite; the first gradient that is not finite is that of '0." in said


def test_the_batch_of_a_window_is_named() -> None:
    trainer = build(nn.Linear(4, 1), GradientAccumulationAddon, gradient_accumulation_steps=4)
    said = fails(trainer, batches(8, bad=6))
    assert "step 2 (epoch 1, batch 7) is not finite" in said
    assert "in the output of the model (Linear); 1 of 6 values, its inputs are not, its weights are finite" in said


def test_weights_that_are_not_finite() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight[0, 2] = math.inf
    assert "in the output of '1' (Linear); 6 of 6 values, its inputs are finite, its weights are not" in fails(
        build(model), batches()
    )


def test_an_infinity_that_does_not_reach_the_loss_is_no_error() -> None:
    def mask(x: Tensor) -> Tensor:
        return x.masked_fill(torch.tensor([True, False, False, False]), -math.inf)

    model = nn.Sequential(nn.Linear(4, 4), Call(mask), nn.Softmax(-1), nn.Linear(4, 1))
    assert build(model).run(1, batches())["nonfinite_steps"] == 0


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_other_policies_continue_and_a_warning_names_the_module(policy: str, caplog: Any) -> None:
    torch.manual_seed(0)
    model = NoisyNet(norm=False)
    with caplog.at_level(logging.WARNING, "zae"):
        metrics = build(model, on_nonfinite=policy).run(1, batches(bad=5))
    assert metrics["nonfinite_steps"] == 1
    assert "step 6: the first NaN of the forward is in the output of 'body.0' (Linear)" in caplog.text


def test_an_overflow_of_float16_is_skipped_as_without(caplog: Any) -> None:
    options = {"precision": "fp16", "loss_scale": (2.0**40, 1.0)}
    found = []
    for add_ons in ((AMPAddon,), (AMPAddon, AnomalyAddon)):
        torch.manual_seed(0)
        model = NoisyNet(norm=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)
        found.append((trainer.run(5, batches())["skipped_steps"], model.state_dict()))
    assert found[0][0] > 5
    assert difference(*found) is None
    assert "first gradient that is not finite is that of" in caplog.text


def test_only_the_steps_that_are_named_are_watched() -> None:
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), Call(lambda x: x), nn.Linear(4, 1))
    trainer = build(model, anomaly_steps=(3, 4))
    model[1].function = lambda x: seen.append(trainer.progress_checker.step + 1) or x if (
        torch.is_anomaly_enabled() and model[1]._forward_hooks) else x  # fmt: skip
    trainer.run(2, batches())
    assert seen == [3, 4]
    assert (
        "AnomalyAddon watches: steps 3 to 4, which makes them slower"
        in build(model, anomaly_steps=(3, 4)).plan(1, batches()).notes
    )


def test_weights_are_bitwise_those_without_it() -> None:
    found = []
    for add_ons in ((), (AnomalyAddon,)):
        torch.manual_seed(0)
        model = NoisyNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        kept = {"checkpoint_modules": ["body"], "gradient_accumulation_steps": 2}
        cls = Task.add_on(GradientCheckpointingAddon, GradientAccumulationAddon, *add_ons)
        cls(model, "cpu", optimizer=optimizer, log_bar=False, gradient_clip=0.5, **kept).run(2, batches())
        found.append((model.state_dict(), optimizer.state_dict(), capture()))
    assert difference(*found) is None


def test_a_run_that_has_failed_comes_to_its_step_again(tmp_path: Path) -> None:
    def start(*add_ons: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return Task.add_on(StateManagerAddon, *add_ons)(
            model, "cpu", optimizer=optimizer, log_bar=False, save_path=tmp_path, save_every=2, resume="auto"
        )

    with pytest.raises(NonFiniteError, match=r"step 6 \(epoch 1, batch 6\)"):
        start().run(1, batches(bad=5))
    again = start(AnomalyAddon)
    with pytest.raises(NonFiniteError, match=r"step 6 .*NaN of the forward is in the output of '0' \(Linear\)"):
        again.run(1, batches(bad=5))


def test_the_mode_that_the_user_has_set_stays() -> None:
    torch.autograd.set_detect_anomaly(True)
    try:
        build(nn.Linear(4, 1), on_nonfinite="warn").run(1, batches())
        build(nn.Linear(4, 1), anomaly_steps=(2, 3)).run(1, batches())
        assert torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (3, r"anomaly_steps=3; write \(first, last\)"),
        ((4, 3), "the last of anomaly_steps=3; it must be a whole number of at least 4"),
        ((0, 3), "the first of anomaly_steps=0"),
        ((1, math.inf), "the last of anomaly_steps=inf"),
    ],
)
def test_steps_that_are_no_range(steps: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(nn.Linear(4, 1), anomaly_steps=steps)


def test_a_compiled_model_is_refused() -> None:
    whole, part = torch.compile(nn.Linear(4, 1)), nn.Sequential(nn.Linear(4, 1))
    part[0].compile()
    for model in (whole, part):
        with pytest.raises(ConfigError, match=r"compiled code has no modules(?s:.*)without torch.compile"):
            build(model)


@pytest.mark.parametrize("engine", [MultiGPUAddon, FSDPAddon])
@on_ranks(2)
def test_engines(world: int, engine: Any) -> None:
    """A rank names the module by its name in the model that was given, whatever is put around it."""
    assert torch.distributed.get_world_size() == 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    data = [(x * (math.nan if index >= 4 else 1), y) for index, (x, y) in enumerate(batches(8))]
    trainer = build(model, engine)
    with pytest.raises(NonFiniteError, match=r"step 3 .*NaN of the forward is in the output of '0' \(\w*Linear\)"):
        trainer.run(1, data)
    assert trainer.progress_checker.step == 2
