"""MasterWeights: a model in bfloat16 whose optimizer steps float32 weights, bitwise as the loop by hand does."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kit import faults, hand
from kit.faults import everything
from kit.ranks import each_rank
from zae import ConfigError, Trainer
from zae.addons import AMPAddon, EMAAddon, FSDPAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon
from zae.optimizers import MasterWeights, float32_weights, muon

BF16 = torch.bfloat16
INNER: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


class Task(Trainer):
    """Its inputs are converted, as the weights are."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": cross_entropy(self.model(batch[0].to(BF16)).float(), batch[1])}

    test_step = train_step


def network() -> nn.Module:
    return hand.network().to(BF16)


def wrapped(name: str) -> Any:
    return lambda parameters: MasterWeights(INNER[name](parameters))


def by_hand(
    name: str, *, accumulate: int = 1, clip: float = 0.0, decay: float | None = None, autocast: bool = False
) -> tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """Train with a float32 copy of each parameter; return the model, its copies, and the average of its weights."""
    model = network()
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer, loader = INNER[name](copies), hand.loader()
    average = [p.detach().float() for p in model.parameters()]
    for _ in range(3):
        for index, (inputs, targets) in enumerate(loader):
            window = min(accumulate, len(loader) - index // accumulate * accumulate)
            with torch.autocast("cpu", dtype=BF16, enabled=autocast):
                loss = cross_entropy(model(inputs.to(BF16)).float(), targets)
            (loss / window if window > 1 else loss).backward()
            if (index + 1) % accumulate and index + 1 < len(loader):
                continue
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for weights, p in zip(copies, model.parameters(), strict=True):
                weights.grad = p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for weights, p, mean in zip(copies, model.parameters(), average, strict=True):
                    p.copy_(weights)
                    if decay is not None:
                        mean.mul_(decay).add_(p, alpha=1 - decay)
            model.zero_grad()
    return model, copies, average


CASES: dict[str, Any] = {
    "plain": ((), {}, {}),
    "clip": ((), {"gradient_clip": 0.1}, {"clip": 0.1}),
    "accumulation": ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 4}, {"accumulate": 4}),
    "EMA": ((EMAAddon,), {"decay": 0.5}, {"decay": 0.5}),
    "AMP": ((AMPAddon,), {"precision": "bf16"}, {"autocast": True}),
    "together": (
        (AMPAddon, EMAAddon, GradientAccumulationAddon),
        {"precision": "bf16", "decay": 0.5, "gradient_accumulation_steps": 2, "gradient_clip": 0.1},
        {"autocast": True, "decay": 0.5, "accumulate": 2, "clip": 0.1},
    ),
}
ALL = [("AdamW", case) for case in CASES] + [(name, "plain") for name in INNER if name != "AdamW"]


@pytest.mark.parametrize(("name", "case"), ALL, ids="-".join)
def test_the_weights_are_those_of_the_loop_by_hand(name: str, case: str) -> None:
    """Bitwise those of the model, and the float32 ones."""
    add_ons, options, hand_options = CASES[case]
    torch.manual_seed(0)
    expected, copies, average = by_hand(name, **hand_options)
    torch.manual_seed(0)
    trainer = Task.add_on(*add_ons)(network(), "cpu", optimizer=wrapped(name), log_bar=False, **options)
    trainer.run(3, hand.loader())
    assert hand.digest(trainer.unwrap()) == hand.digest(expected)
    found = float32_weights(trainer.unwrap(), *trainer.optimizers.values())
    for key, weights in zip(dict(expected.named_parameters()), copies, strict=True):
        assert torch.equal(found[key], weights), key
    if "decay" in hand_options:
        with trainer.ready(), trainer.evaluation_context():
            for (key, p), mean in zip(trainer.unwrap().named_parameters(), average, strict=True):
                assert torch.equal(trainer.average[key], mean), key  # In float32.
                assert torch.equal(p, mean.to(BF16)), key


def test_small_steps_are_not_lost() -> None:
    """A thousand steps that bfloat16 alone rounds away; the float32 weights are those of a model in float32."""
    low, high = nn.Parameter(torch.ones(8, dtype=BF16)), nn.Parameter(torch.ones(8))
    alone = nn.Parameter(torch.ones(8, dtype=BF16))
    optimizers = [
        MasterWeights(torch.optim.SGD([low], lr=1e-3)),
        *(torch.optim.SGD([p], lr=1e-3) for p in (high, alone)),
    ]
    for _ in range(1000):
        for p, optimizer in zip((low, high, alone), optimizers, strict=True):
            p.grad = torch.full_like(p, 0.25)
            optimizer.step()
    assert torch.equal(optimizers[0].state[low]["master"], high.detach())
    assert torch.equal(low, high.to(BF16))
    assert alone.unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["AdamW", "momentum", "Adagrad"])
def test_it_resumes_bitwise_from_every_checkpoint(name: str, tmp_path: Path) -> None:
    """The float32 weights, and what they are rounded to: mid-epoch, between two, and after the last step."""

    def run(resume: Any, place: str, seed: int) -> Any:
        faults.ambient(seed)
        keeps = {"save_path": tmp_path / place, "save_every": 2, "keep_last": None, "resume": resume, "seed": 7}
        trainer = Task.add_on(StateManagerAddon, EMAAddon)(
            network(), "cpu", optimizer=wrapped(name), log_bar=False, decay=0.5, **keeps
        )
        trainer.run(2, hand.loader(), hand.loader(8))
        masters = float32_weights(trainer.unwrap(), *trainer.optimizers.values())
        return everything(trainer), hand.digest(torch.cat([each.flatten() for each in masters.values()]))

    whole = run(False, "whole", 1)
    saved = sorted(path for path in (tmp_path / "whole").iterdir() if path.name.startswith("step-"))
    assert len(saved) > 2
    for index, path in enumerate(saved):
        assert run(str(path), f"again-{index}", 2 + index) == whole, path.name


def one_step(optimizer: Any, *parameters: Any) -> None:
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()


def test_weights_that_something_else_has_changed_are_taken_from_the_model() -> None:
    """Only those: an exchange of the weights and back, as for an average, changes no bit of the float32 ones."""
    weight = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1e-3))
    one_step(optimizer, weight)
    before = optimizer.state[weight]["master"].clone()
    with torch.no_grad():
        kept = weight.clone()
        weight.zero_()
        weight.copy_(kept)
        weight[1] = 5.0
    one_step(optimizer, weight)
    expected = torch.where(torch.tensor([True, False, True]), before, torch.tensor(5.0)) - 1e-3 * torch.ones(3)
    assert torch.equal(optimizer.state[weight]["master"], expected)


def test_loaded_weights_are_trained_from_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = Task(network(), "cpu", optimizer=wrapped("SGD"), log_bar=False)
    trainer.run(1, hand.loader())
    other = {key: torch.zeros_like(each) for key, each in trainer.unwrap().state_dict().items()}
    trainer.apply_weights(other)
    found = float32_weights(trainer.unwrap(), *trainer.optimizers.values())
    assert not any(each.any() for each in found.values())
    path = trainer.save_model(tmp_path / "low.safetensors")
    assert {each.dtype for each in Task(network(), "cpu", mode="test").model.state_dict().values()} >= {BF16}
    twin = Task(network(), "cpu", mode="test")
    twin.apply_weights(path)
    assert hand.digest(twin.unwrap()) == hand.digest(trainer.unwrap())


def test_a_state_of_plain_torch_keeps_float32() -> None:
    """torch casts what it loads to the type of the parameter, which would round the float32 weights."""
    weight = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = MasterWeights(INNER["AdamW"]([weight]))
    one_step(optimizer, weight)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)),
                  MasterWeights(INNER["AdamW"]([nn.Parameter(weight.detach().clone())]))):  # fmt: skip
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (twin,) = other.param_groups[0]["params"]
        assert {each.dtype for each in other.state[twin].values()} == {torch.float32}
        one_step(other, twin)
        fresh = copy.deepcopy(optimizer)
        (expected,) = fresh.param_groups[0]["params"]
        one_step(fresh, expected)
        assert torch.equal(other.state[twin]["master"], fresh.state[expected]["master"])
        assert twin.dtype == BF16


def test_parameters_in_float32_and_without_a_gradient() -> None:
    low, high, unused = (
        nn.Parameter(torch.ones(2, dtype=BF16)),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2, dtype=BF16)),
    )
    optimizer = MasterWeights(torch.optim.AdamW([low, high, unused], lr=0.1))
    one_step(optimizer, low, high)
    assert torch.equal(low, high.to(BF16))
    assert low.grad.dtype == BF16
    assert "master" not in optimizer.state[high]
    assert unused not in optimizer.state
    one_step(optimizer, low, high, unused)  # Its first step.
    assert float(unused.detach()[0]) < 1


def test_schedules_groups_and_the_plan_see_the_optimizer() -> None:
    model = network()
    optimizer = MasterWeights(INNER["AdamW"](model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = Task(model, "cpu", optimizer=optimizer, scheduler=scheduler, log_bar=False)
    plan = trainer.plan(2, hand.loader())
    count = sum(p.numel() for p in model.parameters())
    assert plan.memory.gradients == 2 * count
    assert 12 * count <= plan.memory.optimizer <= 12 * count + 64  # Float32 weights and two moments, and the steps.
    assert plan.learning_rates["lr"][::6] == [0.01, 0.005]
    trainer.run(2, hand.loader())
    assert optimizer.inner.param_groups[0]["lr"] == 0.0025
    extra = nn.Parameter(torch.ones(1, dtype=BF16))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.inner.param_groups[1]["lr"] == 0.5


def test_of_several_optimizers_each_is_wrapped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(BF16)
    makes = {name: (lambda model, make=make: MasterWeights(make(model))) for name, make in muon(lr=0.01).items()}
    trainer = Task(model, "cpu", optimizer=makes, log_bar=False)
    trainer.run(1, hand.loader())
    found = float32_weights(trainer.unwrap(), *trainer.optimizers.values())
    assert all(torch.equal(found[key].to(BF16), each) for key, each in model.state_dict().items())


def on_two_ranks(folder: Path) -> tuple[int, bool, str]:
    def run(resume: Any, place: str) -> Any:
        options = {"save_path": folder / place, "save_every": 1, "keep_last": None, "resume": resume, "seed": 3}
        trainer = Task.add_on(MultiGPUAddon, StateManagerAddon)(
            network(), "cpu", optimizer=wrapped("AdamW"), log_bar=False, gradient_clip=0.5, **options
        )
        trainer.run(2, hand.loader())
        masters = float32_weights(trainer.unwrap(), *trainer.optimizers.values())
        return trainer, hand.digest(torch.cat([each.flatten() for each in masters.values()]))

    trainer, first = run(False, "a")
    _, again = run(str(folder / "a" / "step-00000002"), "b")
    return trainer.world_size, first == again, first


def test_two_ranks_have_the_same_float32_weights_and_resume(tmp_path: Path) -> None:
    outcomes = each_rank(2, on_two_ranks, tmp_path)
    assert [(world, same) for world, same, _ in outcomes] == [(2, True)] * 2
    assert len({digest for *_, digest in outcomes}) == 1


def refused_by_fsdp() -> None:
    trainer = Task.add_on(FSDPAddon)(network(), "cpu", optimizer=wrapped("AdamW"), log_bar=False)
    with pytest.raises(ConfigError, match=r"cannot step a DTensor; FSDPAddon keeps float32 shards itself"):
        trainer.run(1, hand.loader())


def test_shards_are_refused_with_what_fsdp_does_instead() -> None:
    each_rank(2, refused_by_fsdp)


def test_what_cannot_be_stepped_is_refused() -> None:
    weight, high = nn.Parameter(torch.ones(2, dtype=BF16)), nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match=r"takes an optimizer, and got type; write MasterWeights\(torch"):
        MasterWeights(torch.optim.AdamW)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="those of AdamW are in float32; convert the model first"):
        MasterWeights(torch.optim.AdamW([high]))
    with pytest.raises(ConfigError, match="cannot step LBFGS, which evaluates the loss itself"):
        MasterWeights(torch.optim.LBFGS([weight]))
    import schedulefree

    with pytest.raises(ConfigError, match="cannot step AdamWScheduleFree, which exchanges the weights"):
        MasterWeights(schedulefree.AdamWScheduleFree([weight]))
    with pytest.raises(ConfigError, match="takes no closure"):
        MasterWeights(torch.optim.SGD([weight])).step(lambda: 0.0)  # type: ignore[arg-type]


class Failing(torch.optim.SGD):
    """An optimizer whose step may fail."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("the step fails")
        return super().step(closure)


def test_a_step_that_fails_keeps_the_float32_weights() -> None:
    """Else the next step, or a checkpoint, would begin with those of the model, which are rounded."""
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    optimizer = MasterWeights(Failing([weight], lr=1e-3))
    for fails in (False, True, False):
        weight.grad = torch.ones_like(weight)
        optimizer.inner.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="the step fails"):
                optimizer.step()
        else:
            optimizer.step()
    expected = torch.ones(1).sub_(1e-3).sub_(1e-3)
    assert torch.equal(optimizer.state[weight]["master"], expected)
