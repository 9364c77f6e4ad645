"""Optimizers of torchao: states in 8 and 4 bits, and stochastic rounding: the loop by hand, and several ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from kit import faults, hand
from kit.faults import everything
from kit.ranks import each_rank
from zae import CheckpointError, CheckpointMismatch, ConfigError, Trainer
from zae.addons import (
    AMPAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.optimizers.quantized import flatten_states, quantize_states

pytestmark = [
    pytest.mark.fits,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
BOUND = 1e-3  # After six steps of rate 0.01: a rounding of an average over ranks may move a code.
KINDS = {"AdamW8bit": "OptimState8bit", "AdamW4bit": "OptimState4bit", "AdamWFp8": "OptimStateFp8"}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its step, which takes a minute; its numbers differ from these in the last bits."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def make(name: str, **options: Any) -> Any:
    import torchao.optim

    return lambda parameters: getattr(torchao.optim, name)(parameters, lr=0.01, **options)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A matrix of 4096 numbers, which is quantized, and smaller ones, which are not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(64, 2)).to(dtype)


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        inputs = batch[0].to(next(self.unwrap().parameters()).dtype)
        return {"loss": cross_entropy(self.model(inputs).float(), batch[1])}

    test_step = train_step


def linear(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)


FEATURES: dict[str, Any] = {
    "plain": ((), {}, {}),
    "clip": ((), {"gradient_clip": 0.1}, {"clip": 0.1}),
    "AMP, bf16": ((AMPAddon,), {"precision": "bf16"}, {"precision": "bf16"}),
    "AMP, fp16": ((AMPAddon,), {"precision": "fp16"}, {"precision": "fp16"}),
    "accumulation": ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 4}, {"accumulate": 4}),
    "EMA": ((EMAAddon,), {"decay": 0.9}, {"decay": 0.9}),
    "together": (
        (AMPAddon, EMAAddon, GradientAccumulationAddon),
        {"precision": "bf16", "decay": 0.9, "gradient_accumulation_steps": 2, "gradient_clip": 0.1},
        {"precision": "bf16", "decay": 0.9, "accumulate": 2, "clip": 0.1},
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", KINDS)
def test_the_weights_are_those_of_the_loop_by_hand(name: str, feature: str) -> None:
    """Bitwise, with a schedule of the rate, which is a tensor."""
    add_ons, options, by_hand = FEATURES[feature]
    model = network()
    optimizer = make(name)(model.parameters())
    torch.manual_seed(0)
    expected = hand.train(model, optimizer, hand.loader(), 3, scheduler=linear(optimizer), **by_hand)
    torch.manual_seed(0)
    trainer: Any = Task.add_on(*add_ons)(
        network(), "cpu", optimizer=make(name), scheduler=linear, log_bar=False, **options
    )
    trainer.run(3, hand.loader())
    assert hand.digest(trainer.unwrap()) == hand.digest(model)
    assert type(trainer.optimizers["0"].state[trainer.unwrap()[4].weight]["exp_avg"]).__name__ == KINDS[name]
    if "decay" in by_hand:
        assert all(torch.equal(each, expected["average"][key]) for key, each in trainer.average.items())


STOCHASTIC = ("_AdamW", torch.bfloat16, {"bf16_stochastic_round": True})
CASES = {**{name: (name, torch.float32, {}) for name in KINDS}, "stochastic rounding": STOCHASTIC}


@pytest.mark.parametrize("case", CASES)
def test_it_resumes_bitwise_from_every_second_checkpoint(case: str, tmp_path: Path) -> None:
    """In mid-epoch too; a checkpoint has the parts of each quantized tensor as plain tensors."""
    name, dtype, own = CASES[case]

    def run(resume: Any, place: str, seed: int) -> Any:
        faults.ambient(seed)
        trainer = Task.add_on(StateManagerAddon)(
            network(dtype), "cpu", optimizer=make(name, **own), log_bar=False, save_path=tmp_path / place,
            save_every=1, keep_last=None, resume=resume, seed=7,
        )  # fmt: skip
        trainer.run(2, hand.loader())
        return everything(trainer)

    whole = run(False, "whole", 1)
    saved = sorted(path for path in (tmp_path / "whole").iterdir() if path.name.startswith("step-"))
    assert len(saved) > 5
    for index, path in enumerate(saved[::2]):
        assert run(str(path), f"again-{index}", 2 + index) == whole, path.name
    if name in KINDS:
        assert KINDS[name] in json.dumps(json.loads((saved[-1] / "state.json").read_text()))


def test_stochastic_rounding_is_that_of_the_loop_by_hand_and_keeps_small_steps() -> None:
    """Bitwise of the same random stream; of steps that bfloat16 rounds away, their mean is left."""
    name, dtype, own = STOCHASTIC
    model = network(dtype)
    optimizer = make(name, **own)(model.parameters())
    torch.manual_seed(0)
    for _ in range(2):
        for inputs, targets in hand.loader():
            cross_entropy(model(inputs.to(dtype)).float(), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.manual_seed(0)
    trainer = Task(network(dtype), "cpu", optimizer=make(name, **own), log_bar=False)
    trainer.run(2, hand.loader())
    assert hand.digest(trainer.unwrap()) == hand.digest(model)
    weight = nn.Parameter(torch.ones(10_000, dtype=dtype))
    import torchao.optim

    small = torchao.optim._AdamW([weight], lr=1e-4, weight_decay=0.0, bf16_stochastic_round=True)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        small.step()
    assert abs(float(weight.float().mean()) - (1 - 20e-4)) < 1e-4


def test_a_plan_counts_the_bytes_of_the_parts() -> None:
    """After a step, when the state is there."""
    trainer = Task(network(), "cpu", optimizer=make("AdamW8bit"), log_bar=False)
    trainer.run(1, hand.loader())
    quantized = 4096 + 4096 // 256 * 4 + 256 * 4
    others = sum(each.numel() for each in trainer.parameters) - 4096
    counters = 4 * len(trainer.parameters)
    found = trainer.plan(1, hand.loader()).memory.optimizer
    assert found == pytest.approx(2 * (quantized + 4 * others) + counters, rel=1e-3)


# ---------------------------------------------------------------------------------------------------- hostile states


def entry(**changes: Any) -> dict[str, Any]:
    import torchao.optim

    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.ones_like(weight)
    optimizer = torchao.optim.AdamW8bit([weight])
    optimizer.step()
    found = flatten_states(optimizer.state_dict())
    found["state"][0]["exp_avg"] |= changes
    return found


DAMAGED: dict[str, Any] = {
    "another class": ({"torchao": "os.system"}, "contains a 'os.system', which is not a class of torchao"),
    "no text": ({"torchao": ["a"]}, "which is not a class of torchao"),
    "a scale that does not fit": ({"scale": torch.ones(7)}, "OptimState8bit whose parts do not fit together"),
    "another type": ({"codes": torch.zeros(64, 64)}, "whose parts do not fit together"),
    "no tensor": ({"qmap": None}, "whose parts do not fit together"),
    "no context": ({"context": None}, "whose parts do not fit together"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_parts_that_do_not_fit_are_refused(name: str) -> None:
    """Nothing but three classes of torchao is made, and of parts that fit."""
    changes, text = DAMAGED[name]
    with pytest.raises(CheckpointMismatch, match=text):
        quantize_states(entry(**changes))
    again = quantize_states(entry())
    assert type(again["state"][0]["exp_avg"]).__name__ == "OptimState8bit"


def test_a_state_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = entry()
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(CheckpointMismatch, match=r"which cannot be imported .* pip install torchao"):
        quantize_states(saved)


# ---------------------------------------------------------------------------------------------------- several ranks


def on(engine: Any, case: str, batch_size: int, folder: Path | None = None) -> Any:
    name, dtype, own = CASES[case]
    add_ons = [each for each in (engine, StateManagerAddon if folder else None) if each is not None]
    saving = {"save_path": folder, "save_every": 2} if folder else {}
    model = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) / 8)
    trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=make(name, **own), log_bar=False, seed=3, **saving)
    trainer.run(2, hand.loader(24, batch_size, shuffle=False))
    return trainer


def weights(trainer: Any) -> Tensor:
    return torch.cat([each.float().flatten() for each in trainer.model_state().values()])


def of_rank(engine: Any, case: str, folder: Path | None) -> tuple[int, str, Any]:
    torch.compiler.set_stance("force_eager")
    trainer = on(engine, case, 4, folder)
    own = hand.digest(*(each.detach() for each in trainer.unwrap().parameters())) if engine is MultiGPUAddon else ""
    return trainer.world_size, own, weights(trainer).numpy()


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_with_ddp_are_replicas(name: str, tmp_path: Path) -> None:
    """Their weights are the same, and those of one process but for roundings; checkpoints are saved and read."""
    expected = weights(on(None, name, 8))
    found = each_rank(2, of_rank, MultiGPUAddon, name, tmp_path)
    assert [each[0] for each in found] == [2, 2]
    assert found[0][1] == found[1][1]
    assert float((torch.from_numpy(found[0][2]) - expected).abs().max()) < BOUND
    assert [*tmp_path.glob("step-*")]


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_with_fsdp_step_their_parts_and_save_nothing(name: str) -> None:
    """The blocks of a part are those of the whole tensor; a state in parts is refused in words."""
    expected = weights(on(None, name, 8))
    for world, _, found in each_rank(2, of_rank, FSDPAddon, name, None):
        assert world == 2
        assert float((torch.from_numpy(found) - expected).abs().max()) < BOUND


def refusal(engine: Any, case: str, folder: Path | None) -> tuple[str, str]:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        of_rank(engine, case, folder)
    return type(caught.value).__name__, str(caught.value)


def test_what_ranks_cannot_do_is_refused(tmp_path: Path) -> None:
    """A checkpoint of states in parts, and random numbers that differ from rank to rank."""
    for kind, text in each_rank(2, refusal, FSDPAddon, "AdamW8bit", tmp_path):
        assert kind == "CheckpointError"
        assert "keeps an OptimState8bit in parts on the ranks" in text
    for kind, text in each_rank(2, refusal, MultiGPUAddon, "stochastic rounding", None):
        assert kind == "ConfigError"
        assert "bf16_stochastic_round=True, and each rank would draw other numbers" in text
