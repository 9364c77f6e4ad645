"""Muon beside AdamW, Adafactor and schedule-free AdamW, with everything that a loop is given: the loop by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from kit import faults, hand
from kit.faults import everything
from kit.ranks import each_rank
from zae import ConfigError, Trainer
from zae.addons import (
    AMPAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    StateManagerAddon,
)

RATE = 0.01


def schedule_free(parameters: Any) -> Any:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(parameters, lr=RATE)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices without that of the last layer."""
    return [each for each in model.parameters() if each.ndim == 2][:-1]


def muon(model: nn.Module) -> Any:
    return torch.optim.Muon(hidden_matrices(model), lr=RATE, adjust_lr_fn="match_rms_adamw")


def adamw(model: nn.Module) -> Any:
    hidden = set(hidden_matrices(model))
    rest = [each for each in model.parameters() if each not in hidden]
    return torch.optim.AdamW(rest, lr=2 * RATE, betas=(0.9, 0.95))


OPTIMIZERS: dict[str, Any] = {
    "Muon": {"muon": muon, "adamw": adamw},
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=RATE),
    "schedule-free": schedule_free,
}


@dataclass
class Feature:
    """What the trainer has, and what the loop by hand does."""

    add_ons: tuple[type, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    by_hand: dict[str, Any] = field(default_factory=dict)


FEATURES = {
    "plain": Feature(),
    "clip": Feature((), {"gradient_clip": 0.1}, {"clip": 0.1}),
    "AMP, bf16": Feature((AMPAddon,), {"precision": "bf16"}, {"precision": "bf16"}),
    "AMP, fp16": Feature((AMPAddon,), {"precision": "fp16"}, {"precision": "fp16"}),
    "accumulation": Feature((GradientAccumulationAddon,), {"gradient_accumulation_steps": 4}, {"accumulate": 4}),
    "EMA": Feature((EMAAddon,), {"decay": 0.9}, {"decay": 0.9}),
    "schedule": Feature((), {"scheduler": "linear"}, {"schedule": True}),
    "together": Feature(
        (AMPAddon, EMAAddon, GradientAccumulationAddon),
        {"precision": "bf16", "decay": 0.9, "gradient_accumulation_steps": 2, "gradient_clip": 0.1},
        {"precision": "bf16", "decay": 0.9, "accumulate": 2, "clip": 0.1},
    ),
}


def linear(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)


def made(name: str, model: nn.Module) -> list[Any]:
    given = OPTIMIZERS[name]
    return [make(model) for make in given.values()] if isinstance(given, dict) else [given(model.parameters())]


def train(name: str, loader: Any, *, accumulate: int = 1, clip: float = 0.0, precision: str = "fp32",
          decay: float | None = None, schedule: bool = False) -> tuple[nn.Module, Any]:  # fmt: skip
    """The loop by hand, over three epochs; return the model and the average of its weights."""
    model = hand.network()
    optimizers = made(name, model)
    schedulers = [linear(each) for each in optimizers] if schedule else []
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=precision == "fp16")
    average = [p.detach().clone() for p in model.parameters()]
    modes = [each for each in optimizers if hasattr(each, "eval")]
    for _ in range(3):
        model.train()
        [each.train() for each in modes]
        for index, (inputs, targets) in enumerate(loader):
            window = min(accumulate, len(loader) - index // accumulate * accumulate)
            with hand.autocast(precision):
                loss = cross_entropy(model(inputs), targets)
            scaler.scale(loss / window if window > 1 else loss).backward()
            if (index + 1) % accumulate and index + 1 < len(loader):
                continue
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                if clip:
                    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            [optimizer.zero_grad() for optimizer in optimizers]
            if decay is not None:
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.mul_(decay).add_(p.detach(), alpha=1 - decay)
        [each.step() for each in schedulers]
    [each.eval() for each in modes]
    return model, average


def build(name: str, feature: Feature, *add_ons: Any, **options: Any) -> Any:
    options = {**feature.options, **options}
    if options.pop("scheduler", None):
        options["scheduler"] = dict.fromkeys(OPTIMIZERS[name], linear) if name == "Muon" else linear
    model = hand.network()
    return faults.Task.add_on(*feature.add_ons, *add_ons)(
        model, "cpu", optimizer=OPTIMIZERS[name], log_bar=False, **options
    )


class Plain(Trainer):
    """The step of the loop by hand."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": cross_entropy(self.model(batch[0]), batch[1])}

    test_step = train_step


@pytest.mark.sample(count=3, covering=("name",))
@pytest.mark.parametrize("feature", list(FEATURES))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_weights_are_those_of_the_loop_by_hand(name: str, feature: str) -> None:
    """Bitwise, in training, and of what an evaluation uses."""
    spec = FEATURES[feature]
    torch.manual_seed(0)
    expected, average = train(name, hand.loader(), **spec.by_hand)
    torch.manual_seed(0)
    options = {**spec.options}
    if options.pop("scheduler", None):
        options["scheduler"] = dict.fromkeys(OPTIMIZERS[name], linear) if name == "Muon" else linear
    trainer = Plain.add_on(*spec.add_ons)(hand.network(), "cpu", optimizer=OPTIMIZERS[name], log_bar=False, **options)
    trainer.run(3, hand.loader())
    with trainer.ready(), trainer.optimization.evaluation_weights():
        assert hand.digest(trainer.unwrap()) == hand.digest(expected)
    if "decay" in spec.by_hand and name != "schedule-free":
        with trainer.ready(), trainer.evaluation_context():
            assert all(map(torch.equal, trainer.unwrap().parameters(), average))


@pytest.mark.sample(count=3, covering=("name",))
@pytest.mark.parametrize("feature", list(FEATURES))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_it_resumes_bitwise_from_every_second_checkpoint(name: str, feature: str, tmp_path: Path) -> None:
    """In mid-epoch, between two, and after the last step: weights, states of both optimizers, averages, scale."""
    spec = FEATURES[feature]

    def run(resume: Any, place: str, seed: int) -> Any:
        faults.ambient(seed)
        keeps = {"save_path": tmp_path / place, "save_every": 1, "keep_last": None, "resume": resume, "seed": 7}
        trainer = build(name, spec, StateManagerAddon, **keeps)
        trainer.run(2, hand.loader())
        return everything(trainer)

    whole = run(False, "whole", 1)
    saved = sorted(path for path in (tmp_path / "whole").iterdir() if path.name.startswith("step-"))
    assert len(saved) > 2
    for index, path in enumerate(saved[::2]):
        assert run(str(path), f"again-{index}", 2 + index) == whole, path.name


# ---------------------------------------------------------------------------------------------------------- over ranks


class Regression(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}

    test_step = train_step


def regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def on(name: str, add_ons: tuple[Any, ...], batch_size: int, **options: Any) -> Any:
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(32, n, generator=drawn, dtype=torch.float64) for n in (4, 2)))
    made = Regression.add_on(GradientAccumulationAddon, *add_ons)(
        regression(), "cpu", optimizer=OPTIMIZERS[name], log_bar=False, gradient_clip=1.0, seed=3,
        gradient_accumulation_steps=2, **options,
    )  # fmt: skip
    made.run(3, DataLoader(data, batch_size, shuffle=True))
    return made


def weights(trainer: Any) -> dict[str, Any]:
    with trainer.ready(), trainer.optimization.evaluation_weights():
        state = trainer.unwrap().state_dict()
        return {key: getattr(each, "full_tensor", lambda each=each: each)().detach().clone().numpy() for key, each in
                state.items()}  # fmt: skip


def resumed(name: str, engine: Any, folder: Path) -> tuple[int, Any, bool]:
    options = {"save_every": 1, "keep_last": None}
    first = on(name, (engine, StateManagerAddon), 4, save_path=folder / "a", **options)
    found = weights(first)
    again = on(name, (engine, StateManagerAddon), 4, save_path=folder / "b", resume=str(folder / "a" / "step-00000003"),
               **options)  # fmt: skip
    rest = weights(again)
    return first.world_size, found, all(np.array_equal(found[key], rest[key]) for key in found)


# Muon orthogonalizes in bfloat16: where a gradient has directions without a part in it, roundings are amplified.
BOUNDS: dict[Any, Any] = {("Muon", FSDPAddon): 1e-2}


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("engine", [MultiGPUAddon, FSDPAddon])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_two_ranks_train_as_one_process_does(name: str, engine: Any, tmp_path: Path) -> None:
    """With clipping and accumulation, from the same samples; resumed in mid-epoch bitwise. Adafactor is refused."""
    if (name, engine) == ("Adafactor", FSDPAddon):
        with pytest.raises(AssertionError, match="FSDPAddon lets each rank hold a part of a parameter"):
            each_rank(2, resumed, name, engine, tmp_path)
        return
    expected = weights(on(name, (), 8))
    for world, found, is_same in each_rank(2, resumed, name, engine, tmp_path):
        assert world == 2
        assert is_same
        far = max(float(np.abs(found[key] - expected[key]).max()) for key in expected)
        assert far < BOUNDS.get((name, engine), 1e-12)


def steps_of_muon() -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def step(given: Any) -> Any:
        parameter = nn.Parameter(torch.zeros_like(given))
        parameter.grad = given
        torch.optim.Muon([parameter], lr=1.0).step()
        return parameter.detach()

    whole = step(gradient)
    parts = step(distribute_tensor(gradient, init_device_mesh("cpu", (2,)), [Shard(0)])).full_tensor()
    return float((whole - parts).norm() / whole.norm()), float((whole[:32] - step(gradient[:32])).norm() / whole.norm())


@pytest.mark.exhaustive
def test_a_matrix_in_parts_is_orthogonalized_as_a_whole() -> None:
    """With FSDP, Muon makes the step of the whole matrix, bitwise where its gradient is; a part alone is another."""
    for whole, part in each_rank(2, steps_of_muon):
        assert whole == 0
        assert part > 0.1


# ------------------------------------------------------------------------------------------------- what is refused


def muon_with_options(*, momentum: float = 0.9) -> Any:
    return lambda model: torch.optim.Muon(hidden_matrices(model), momentum=momentum)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (muon_with_options, r"optimizer is muon_with_options, .* call it: optimizer=muon_with_options\(\)"),
        (torch.optim.Muon, r"for matrices alone; write optimizer=\{'muon': "),
    ],
)
def test_what_does_not_fit_is_refused(optimizer: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Plain(hand.network(), "cpu", optimizer=optimizer)


def test_its_two_rates_are_recorded() -> None:
    """The table of a run has a rate for each of the two."""
    trainer = Plain(hand.network(), "cpu", optimizer=OPTIMIZERS["Muon"], log_bar=False)
    row = trainer.run(1, hand.loader())["train_metrics_history"][0]
    assert {key: value for key, value in row.items() if "lr" in key} == {"lr/muon": 0.01, "lr/adamw": 0.02}
