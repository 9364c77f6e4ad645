"""AMPAddon with dtype="bf16": weights in bfloat16 are those of the loop by hand, bitwise."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from kit import faults, hand
from kit.faults import KillAddon, answer, everything, forked
from kit.ranks import each_rank
from kit.table import Task
from zae import CheckpointMismatch, ConfigError, OptionError
from zae.addons import (
    AccelerateAddon,
    AMPAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    MultiGPUAddon,
    StateManagerAddon,
)

BF16, FP32 = torch.bfloat16, torch.float32
MAKES: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}


def adamw(parameters: Any) -> Any:
    return MAKES["AdamW"](parameters)


def build(*add_ons: Any, model: Any = hand.network, **options: Any) -> Any:
    options = {"optimizer": adamw, "dtype": "bf16", "log_bar": False, **options}
    return Task.add_on(AMPAddon, *add_ons)(model, "cpu", **options)


def linear_then_steps(optimizer: Any) -> Any:
    warmup = LinearLR(optimizer, 0.1, total_iters=3)
    return SequentialLR(optimizer, [warmup, StepLR(optimizer, 2, 0.5)], [3])


# ------------------------------------------------------------------------------------------------- the loop by hand


@pytest.mark.parametrize("given", ["object", "function"])
@pytest.mark.parametrize("name", MAKES)
def test_the_weights_are_those_of_the_loop_by_hand(name: str, given: str) -> None:
    """Of each optimizer, with clipping, accumulation, an average and a schedule of objects or of functions."""
    make, model = MAKES[name], hand.network()
    if given == "function":  # It is called when the model is converted, and some optimizers make their state then.
        hand.lower(model)
    optimizer = make(model.parameters())
    torch.manual_seed(0)
    options = {"accumulate": 2, "clip": 0.5, "decay": 0.5, "scheduler": linear_then_steps(optimizer)}
    out = hand.train(model, optimizer, hand.loader(), 2, precision="bf16", dtype="bf16", every_step=True, **options)

    net = hand.network()
    made = {"optimizer": make(net.parameters())} if given == "object" else {"optimizer": make}
    made["scheduler"] = linear_then_steps(made["optimizer"]) if given == "object" else linear_then_steps
    torch.manual_seed(0)
    trainer = build(
        GradientAccumulationAddon, EMAAddon, model=net, **made, scheduler_step_on_batch=True, gradient_clip=0.5,
        gradient_accumulation_steps=2, decay=0.5,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # A schedule that does not see the steps of its optimizer warns.
        trainer.run(2, hand.loader())
    assert hand.digest(trainer.unwrap()) == hand.digest(model)
    assert hand.losses(trainer) == out["means"]
    assert all(torch.equal(trainer.average[key], value) for key, value in out["average"].items())
    assert trainer.optimizers["0"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


# --------------------------------------------------------------------------------------------------- what is converted


class Parts(nn.Module):
    """Each kind of parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)])
        self.spectral = spectral_norm(nn.Linear(4, 4))
        self.tied, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.turn = nn.Parameter(torch.ones(1, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
        self.register_buffer("frequencies", torch.linspace(0, 1, 4) / 3)
        self.last = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.frozen(self.tied(self.first(inputs)) + self.frequencies)
        for norm in self.norms:
            out = norm(out)
        return self.last(self.spectral(out) * self.scale * self.turn.real)


@pytest.mark.parametrize("before", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_norms_are_in_float32_whatever_they_were(before: torch.dtype) -> None:
    model = hand.network().to(before)
    build(model=model).run(1, hand.loader())
    assert [each.dtype for each in model.parameters()] == [BF16] * 2 + [FP32] * 2 + [BF16] * 2
    assert {each.dtype for each in model[1].buffers() if each.is_floating_point()} == {FP32}


def test_parameters_are_converted_but_those_of_norms_and_parametrizations() -> None:
    """Buffers keep their types, tied weights stay tied, and the parameters are the same objects."""
    model = Parts()
    frequencies, before = model.frequencies.clone(), dict(model.named_parameters())
    trainer = build(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    trainer.run(1, hand.loader())
    assert dict(model.named_parameters()) == before
    low = {name for name, each in model.named_parameters() if each.dtype == BF16}
    assert low == {
        "first.weight", "first.bias", "tied.bias", "frozen.weight", "frozen.bias", "scale", "spectral.bias",
        "norms.3.weight",
        "last.0.weight", "last.0.bias", "last.2.weight", "last.2.bias",
    }  # fmt: skip
    assert model.tied.weight is model.first.weight
    assert {each.dtype for each in model.buffers() if each.is_floating_point()} == {FP32}
    assert torch.equal(model.frequencies, frequencies)
    assert (model.turn.dtype, model.codes.dtype) == (torch.complex64, torch.int8)


@pytest.mark.parametrize("dtype", [None, "fp32", torch.float32])
def test_by_default_nothing_is_converted(dtype: Any) -> None:
    trainer = build(dtype=dtype, precision="fp32")
    trainer.run(1, hand.loader())
    assert {each.dtype for each in trainer.unwrap().parameters()} == {FP32}
    assert type(trainer.optimizers["0"]) is torch.optim.AdamW
    assert not any("weights in" in note for note in trainer.plan(1, hand.loader()).notes)


def test_the_forward_is_in_autocast_and_so_is_an_evaluation() -> None:
    class Noting(Task):
        def test_step(self, batch: Any) -> Any:
            seen.append((self.model(batch[0]).dtype, batch[0].dtype, torch.is_autocast_enabled("cpu")))
            return super().test_step(batch)

        train_step = test_step

    seen: list[Any] = []
    for mode in ("train", "test"):
        options = {"optimizer": adamw} if mode == "train" else {}
        trainer = Noting.add_on(AMPAddon)(hand.network, "cpu", mode, dtype=BF16, log_bar=False, **options)
        trainer.run(1, hand.loader())
    assert set(seen) == {(BF16, FP32, True)}
    assert {each.dtype for each in trainer.unwrap().parameters()} == {BF16, FP32}


def test_a_layer_that_was_added_later_is_converted_too() -> None:
    trainer = build()
    trainer.run(1, hand.loader())
    trainer.unwrap()[4] = nn.Linear(8, 2)
    trainer.optimizer = adamw(trainer.unwrap().parameters())
    trainer.run(1, hand.loader())
    assert trainer.unwrap()[4].weight.dtype == BF16


# ------------------------------------------------------------------------------------------------------ what is saved


def resumable(folder: Path, resume: Any, *add_ons: Any, **options: Any) -> Any:
    cls = faults.Task
    kept = {"save_path": folder, "save_every": 2, "keep_last": None, "resume": resume, "decay": 0.5, **options}
    return faults.build(cls, AMPAddon, EMAAddon, StateManagerAddon, *add_ons, dtype="bf16", **kept)


def run(folder: Path, resume: Any, seed: int, *add_ons: Any, **options: Any) -> Any:
    faults.ambient(seed)
    trainer = resumable(folder, resume, *add_ons, **options)
    trainer.run(2, hand.loader(), hand.loader(8))
    return everything(trainer)


def test_a_run_that_was_killed_resumes_bitwise(tmp_path: Path) -> None:
    """Within an epoch and after one, each time in a new process."""
    whole = answer(run, tmp_path / "whole", False, 1)
    killed = tmp_path / "killed"
    for step, seed in ((3, 2), (7, 3), (11, 4)):
        outcome = forked(lambda at, begin: run(killed, "auto", begin, KillAddon, kill_at=at), step, seed)
        assert outcome.status == -9
    assert answer(run, killed, "auto", 5) == whole


def test_a_state_is_loaded_before_the_first_run() -> None:
    """Into the model that is in bfloat16 by then, and training continues bitwise."""
    trainer = build(model=hand.network)
    torch.manual_seed(0)
    trainer.run(1, hand.loader())
    state = copy.deepcopy(trainer.state_dict())
    for given in ("object", "function"):
        model = hand.network(seed=2)
        twin = build(model=model, optimizer=adamw(model.parameters()) if given == "object" else adamw)
        twin.load_state_dict(copy.deepcopy(state))
        assert hand.digest(twin.unwrap()) == hand.digest(trainer.unwrap())
        again = build(model=hand.network)
        again.load_state_dict(copy.deepcopy(state))
        for each in (twin, again):
            torch.manual_seed(5)
            each.run(1, hand.loader())
        assert hand.digest(twin.unwrap()) == hand.digest(again.unwrap())


def test_a_state_of_weights_of_another_type_is_refused(tmp_path: Path) -> None:
    """Its weights alone can be taken, and are rounded."""
    states = {}
    for dtype in ("fp32", "bf16"):
        trainer = build(dtype=dtype, precision="bf16")
        trainer.run(1, hand.loader())
        states[dtype] = copy.deepcopy(trainer.state_dict())
        trainer.save_model(tmp_path / f"{dtype}.safetensors")
    for dtype, other in (("fp32", "bf16"), ("bf16", "fp32")):
        trainer = build(dtype=dtype, precision="bf16")
        with pytest.raises(CheckpointMismatch, match=r"0\.weight was torch\.\w+ and is .*alone: apply_weights"):
            trainer.load_state_dict(states[other])
        trainer.apply_weights(tmp_path / f"{other}.safetensors")
        for key, value in trainer.unwrap().state_dict().items():
            assert torch.equal(value, states[other]["model"][key].to(value.dtype)), key


def test_files_of_weights_have_the_types_of_the_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = build()
    trainer.run(1, hand.loader())
    found = load_file(trainer.save_model(tmp_path / "model.safetensors"))
    assert {key: each.dtype for key, each in found.items()} == {
        key: each.dtype for key, each in trainer.unwrap().state_dict().items()
    }


# ------------------------------------------------------------------------------------------------------ several ranks


def on_two_ranks(engine: Any, folder: Path) -> Any:
    def train(resume: Any, place: str) -> Any:
        options = {"save_path": folder / place, "save_every": 1, "keep_last": None, "resume": resume, "seed": 3}
        more = {"accelerator_args": {"cpu": True}} if engine is AccelerateAddon else {}
        trainer = build(engine, StateManagerAddon, gradient_clip=0.5, **options, **more)
        trainer.run(2, hand.loader())
        return hand.digest(trainer.unwrap())

    return train(False, "a"), train(str(folder / "a" / "step-00000002"), "b")


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("engine", [MultiGPUAddon, AccelerateAddon])
def test_two_ranks_have_the_same_weights_and_resume(engine: Any, tmp_path: Path) -> None:
    outcomes = each_rank(2, on_two_ranks, engine, tmp_path)
    assert len({*outcomes[0], *outcomes[1]}) == 1


# -------------------------------------------------------------------------------------------------- plan and refusals


def test_the_plan_says_what_is_lost() -> None:
    (note,) = build().plan(2, hand.loader()).notes
    assert "steps smaller than 1/256 of a weight are lost, unless the optimizer rounds at random" in note


@pytest.mark.parametrize(("options", "text"), [
    ({"dtype": "bfloat16"}, r"dtype='bfloat16'; it must be 'bf16', 'fp32' or None; did you mean 'bf16'\?"),
    ({"dtype": torch.float64}, r"dtype=torch\.float64; it must be"),
    ({"dtype": ["bf16"]}, r"dtype=\['bf16'\]; it must be"),
    ({"dtype": 16}, "dtype=16; it must be"),
    ({"dtype": "fp16"}, "GradScaler refuses them; write precision='fp16'.*or dtype='bf16'"),
    ({"dtype": torch.float16}, r"dtype=torch\.float16: gradients of weights in float16 underflow"),
    ({"precision": "fp32"}, "weights in bfloat16 compute in it; leave precision out"),
    ({"precision": ["bf16", "fp32"]}, "weights in bfloat16 compute in it; leave precision out"),
    ({"precision": "bf16-true", "dtype": None}, "or a list of them; write dtype='bf16'"),
    ({"precision": "16-true", "dtype": None}, "write precision='fp16', which keeps the weights in float32"),
    ({"precision": "bf16-mixed", "dtype": None}, "or a list of them; write precision='bf16'"),
])  # fmt: skip
def test_bad_options_are_refused(options: Any, text: str) -> None:
    model = hand.network()
    with pytest.raises(ConfigError, match=text):
        build(model=model, **options)
    assert {each.dtype for each in model.parameters()} == {FP32}


def norms_in_shards() -> str:
    with pytest.raises(AssertionError, match="uniform original parameter dtype") as caught:
        build(FSDPAddon).run(1, hand.loader())
    return "\n".join(caught.value.__notes__)


def test_shards_of_two_types_are_refused() -> None:
    """FSDP would gather norms, in float32, with the other weights: torch refuses that, and zae says what helps."""
    for text in each_rank(2, norms_in_shards):
        assert "the parameters of a block together, which must have one dtype; convert the model" in text


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_without_the_add_on_the_option_names_it(name: str) -> None:
    with pytest.raises(OptionError, match=rf"unknown argument '{name}' for Task; here it is dtype='bf16' \(AMPAddon\)"):
        Task(hand.network, "cpu", optimizer=adamw, **{name: "bf16"})


def test_slow_bfloat16_is_said_with_the_name_of_the_option(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from zae.addons import amp

    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    amp._warn_of_slow_bf16.cache_clear()
    build().run(1, hand.loader())
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage().startswith("dtype='bf16': this cpu has no instructions for bfloat16")
