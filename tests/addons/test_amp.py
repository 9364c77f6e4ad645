"""Mixed precision: which one is taken, what it does to a forward, and how its loss scale moves and is kept."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from kit.hand import digest, loader, network
from kit.table import Task
from zae import ConfigError
from zae.addons import AMPAddon, amp
from zae.device import cpu_computes_in_bf16


class Noting(Task):
    """Notes the type that a forward computes in."""

    def train_step(self, batch: Any) -> Any:
        self.__dict__.setdefault("seen", []).append(self.model(batch[0]).dtype)
        return super().train_step(batch)


def build(task: Any = Noting, **options: Any) -> Any:
    model = options.pop("model", None) or network()
    options.setdefault("optimizer", AdamW(model.parameters(), lr=0.01))
    return task.add_on(AMPAddon)(model, "cpu", **options)


@pytest.mark.parametrize("precision", ["fp8", "BF16", 16, [], ["bf16", "fp8"], None, [["bf16"]]])
def test_a_precision_that_is_none(precision: Any) -> None:
    """An empty list is one without a wish."""
    if precision == []:
        trainer = build(precision=[])
        trainer.run(1, loader())
        assert trainer.precision == "fp32"
        return
    with pytest.raises(ConfigError, match=r"precision=.*; it must be 'auto', 'bf16', 'fp16', 'fp32' or a list"):
        build(precision=precision)


@pytest.mark.parametrize(
    "scale",
    [(0.0, 0.0), (1.0, 2.0), (4.0,), 4.0, (4.0, -1.0), ("4", "1"), (4.0, None), (math.inf, 1.0), (True, True)],
    ids=str,
)
def test_a_loss_scale_that_cannot_be_meant(scale: Any) -> None:
    """From an infinite one no step would ever take place."""
    with pytest.raises(ConfigError, match=r"loss_scale=.*the first scale and the smallest"):
        build(precision="fp16", loss_scale=scale)


@pytest.fixture(params=[True, False], ids=["with bf16", "without bf16"])
def native(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What the processor is said to have; what was said of an earlier one is forgotten."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "avx512_bf16": request.param})
    amp._warn_of_slow_bf16.cache_clear()
    return bool(request.param)


@pytest.mark.parametrize(
    ("precision", "taken", "without"),
    [("auto", "bf16", "fp32"), ("bf16", "bf16", "bf16"), ("fp16", "fp16", "fp16"), ("fp32", "fp32", "fp32"),
     (["fp16", "bf16"], "bf16", "fp32"), (["fp16"], "fp32", "fp32"), (["fp32", "bf16"], "fp32", "fp32")],
)  # fmt: skip
def test_a_list_is_a_preference_among_what_is_native(precision: Any, taken: str, without: str, native: bool) -> None:
    """On the CPU that is bf16, where the processor has instructions for it; one name is taken at its word."""
    trainer = build(precision=precision, loss_scale=(8.0, 1.0))
    trainer.run(1, loader())
    expected = taken if native else without
    assert trainer.precision == expected
    assert set(trainer.seen) == {{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[expected]}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_slow_bf16_is_said_once(native: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where it was asked for by name, on a processor without it; not of each run and each trainer."""
    for precision in ("auto", "fp32", "bf16", "bf16"):
        trainer = build(precision=precision)
        for _ in range(2):
            trainer.run(1, loader())
    records = [record for record in caplog.records if "bf16" in record.getMessage()]
    assert [record.levelname for record in records] == ([] if native else ["WARNING"])
    assert all("this cpu has no instructions for bfloat16" in record.getMessage() for record in records)


@pytest.mark.parametrize(
    ("found", "is_native"),
    [({"amx_bf16": True}, True), ({"architecture": "arm64", "bf16": True}, True), ({"avx2": True}, False), ({}, False)],
)
def test_what_torch_says_of_the_processor(found: Any, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its public page of capabilities, by the private functions of an older torch, or not at all."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert cpu_computes_in_bf16() is is_native
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: is_native, raising=False)
    assert cpu_computes_in_bf16() is is_native
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert cpu_computes_in_bf16() is False


def test_this_processor_is_known() -> None:
    """What torch says is what the kernel says, where there is a Linux kernel on x86."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    known = flags is None or cpu_computes_in_bf16() == bool(flags & {"avx512_bf16", "amx_bf16"})
    assert known


def test_bf16_needs_no_scale_and_no_setting_is_kept_outside() -> None:
    trainer = build(precision="bf16")
    trainer.run(1, loader())
    assert trainer.scaler is None
    assert trainer.state_dict()["AMPAddon"] == {"scaler": {}}
    assert trainer.model(torch.ones(2, 4)).dtype == torch.float32


class Explosive(Task):
    """Its gradients are infinite at the steps that are told."""

    at: tuple[int, ...] = ()

    def train_step(self, batch: Any) -> Any:
        out = super().train_step(batch)
        if self.progress_checker.step in self.at:
            out["loss"].register_hook(lambda g: g * float("inf"))
        return out


def exploding(*at: int, **options: Any) -> Any:
    return build(type("Now", (Explosive,), {"at": at, "__module__": __name__}), precision="fp16", **options)


def test_the_scale_halves_and_grows() -> None:
    """Down at an overflow, up after so many steps without one (Micikevicius et al. 2018)."""
    trainer = exploding(1, loss_scale=(64.0, 1.0))
    scales = []
    trainer.checkpoint = lambda: scales.append(trainer.scaler.get_scale())
    trainer.on_run_begin = lambda: trainer.scaler.set_growth_interval(3)
    trainer.run(1, loader())
    assert scales[:6] == [64.0, 32.0, 32.0, 32.0, 64.0, 64.0]


def test_the_scale_is_held_at_its_least(caplog: Any) -> None:
    trainer = exploding(0, 1, 2, 3, loss_scale=(4.0, 2.0))
    trainer.run(1, loader())
    assert trainer.state_dict()["AMPAddon"]["scaler"]["scale"] == 2.0
    assert trainer.progress_checker.skipped_steps == 4
    assert "overflowed at the smallest loss scale, 2" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_the_scale_goes_on_in_the_next_run_and_in_a_fresh_trainer() -> None:
    first = exploding(0, 1, loss_scale=(64.0, 1.0))
    first.run(1, loader())
    state = first.state_dict()
    assert state["AMPAddon"]["scaler"]["scale"] == 16.0
    assert state["AMPAddon"]["scaler"]["_growth_tracker"] == 4
    fresh = exploding(loss_scale=(64.0, 1.0))
    fresh.load_state_dict(state)
    for trainer in (first, fresh):
        trainer.run(1, loader())
        assert trainer.state_dict()["AMPAddon"]["scaler"]["_growth_tracker"] == 10


def test_one_of_two_optimizers_overflows() -> None:
    """The other one steps; schedules wait, as for any step that was not whole."""
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    class Two(Task):
        def train_step(self, batch: Any) -> Any:
            first, second = (part(batch).float().square().mean() for part in self.model)
            if self.progress_checker.step == 0:
                first.register_hook(lambda g: g * float("inf"))
            return {"loss": first + second}

    trainer = build(Two, model=model, optimizer=[SGD(part.parameters(), lr=0.1) for part in model], precision="fp16",
                    loss_scale=(8.0, 1.0))  # fmt: skip
    before = [digest(part) for part in model]
    trainer.run(1, [torch.ones(2, 2)])
    assert [digest(part) == old for part, old in zip(model, before, strict=True)] == [True, False]
    assert trainer.progress_checker.skipped_steps == 1


@pytest.mark.parametrize("kind", [SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("overflows", [(), (0,), (0, 1, 4), (3,)], ids=str)
def test_a_fused_optimizer_is_not_called_where_the_gradients_overflowed(kind: Any, overflows: Any) -> None:
    """Torch would call it, and its state would be memory that nobody wrote; without an overflow it is by hand."""
    own = {"momentum": 0.9} if kind is SGD else {}
    trainer = exploding(*overflows, loss_scale=(64.0, 1.0))
    optimizer = kind(trainer.model.parameters(), lr=0.05, fused=True, **own)
    trainer.optimizer = optimizer
    steps: list[int] = []
    trainer.on_run_begin = lambda: optimizer.register_step_post_hook(lambda *_: steps.append(1))
    torch.manual_seed(1)
    trainer.run(1, loader())
    assert (len(steps), trainer.progress_checker.skipped_steps) == (6 - len(overflows), len(overflows))

    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=64.0)
    twin = kind(model.parameters(), lr=0.05, fused=True, **own)
    torch.manual_seed(1)
    for index, (inputs, targets) in enumerate(loader()):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        if index in overflows:  # By hand: the step is left out, and the scale is halved.
            twin.zero_grad()
            scaler.update(scaler.get_scale() / 2)
            continue
        scaler.step(twin)
        scaler.update()
        twin.zero_grad()
    assert digest(trainer.unwrap()) == digest(model)


def test_hooks_are_taken_off_the_optimizer() -> None:
    trainer = build(precision="fp16", loss_scale=(8.0, 1.0))
    for _ in range(3):
        trainer.run(1, loader())
    assert len(trainer.optimizer._optimizer_step_post_hooks) == 0


def test_a_state_of_something_else_is_refused() -> None:
    trainer = build(precision="fp16")
    whole = torch.amp.GradScaler("cpu").state_dict()
    for own in ({}, 3, {"scaler": 4}, {"scaler": {"scale": 2.0}}, {"scaler": {**whole, "scale": "2"}}):
        with pytest.raises(ValueError, match=r"AMPAddon contains .*scaler"):
            trainer.load_state_dict({**trainer.state_dict(), "AMPAddon": own})


def test_weights_in_float16_are_refused() -> None:
    """torch cannot unscale their gradients, and says so in the first step."""
    model = nn.Linear(4, 2).half()
    with pytest.raises(ConfigError, match=r"weight is in float16; leave model\.half\(\) out"):
        Task.add_on(AMPAddon)(model, "cpu", optimizer=torch.optim.SGD, precision="fp16")
