"""CompileAddon: the whole step in one graph has eager's weights, state and schedule, or is refused (issue 6)."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kit import hand
from zae import AddOnBase, ConfigError, NonFiniteError, Trainer
from zae.addons import (
    AMPAddon,
    CompileAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    LedgerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)

FAST = {"compile_mode": "fused", "compile_backend": "eager"}
# The graph as inductor would be given it, with its backward: for what torch itself may lose on the way.
TRACED = {"compile_mode": "fused", "compile_backend": "aot_eager"}


class Task(Trainer):
    """A classifier."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        output = self.model(inputs.to(self.model[0].weight.dtype))
        return {"loss": nn.functional.cross_entropy(output, targets), "output": output}

    test_step = train_step


def batches(dtype: torch.dtype = torch.float64) -> list[Any]:
    """Six batches, the last one short."""
    return [(inputs.to(dtype), targets) for inputs, targets in hand.loader(22, shuffle=False)]


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)).double()


def groups(parameters: Any) -> list[dict[str, Any]]:
    """Two groups of different settings."""
    first, *rest = parameters
    return [{"params": [first], "lr": 0.02, "weight_decay": 0.1}, {"params": rest}]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(groups(p), lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(groups(p), lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, all": lambda p: torch.optim.AdamW(groups(p), lr=0.01, amsgrad=True, maximize=True, fused=True),
}
CLOSE = {"sgd": 1e-12, "momentum": 1e-12, "nesterov": 1e-12}


def made(cls: type[Trainer] = Task, optimizer: Any = "adamw", model: Any = None, **options: Any) -> Any:
    options = {"gradient_clip": 0.05, "log_bar": False, **options}
    return cls(model or network(), "cpu", optimizer=OPTIMIZERS.get(optimizer, optimizer), **options)


def trained(cls: type[Trainer] = Task, optimizer: Any = "adamw", epochs: int = 3, **options: Any) -> Any:
    task = made(cls, optimizer, **options)
    torch.manual_seed(2)
    task.run(epochs, batches(), batches())
    return task


def tensors(task: Any) -> list[Tensor]:
    """Weights, and the optimizer's state in its order."""
    state = task.optimizer.state_dict()["state"]
    return [
        *task.unwrap().state_dict().values(),
        *(torch.as_tensor(value) for key in sorted(state) for _, value in sorted(state[key].items())),
    ]


def furthest(a: Any, b: Any) -> float:
    pairs = zip(tensors(a), tensors(b), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


def types(task: Any) -> Any:
    """What a checkpoint knows of an optimizer's state, beside its numbers."""
    kept = task.optimizer.state_dict()
    return kept["param_groups"], {
        (key, name): (type(value), value.dtype, value.shape, value.stride())
        for key, each in kept["state"].items()
        for name, value in each.items()
        if isinstance(value, Tensor)
    }


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_state_are_those_of_eager(optimizer: str) -> None:
    """float64, with a clip that bites, evaluation in between, and a short batch in each epoch."""
    eager, whole = trained(Task, optimizer), trained(Task.add_on(CompileAddon), optimizer, **TRACED)
    assert float(eager.grad_norm) > 0.05
    assert float(whole.grad_norm) == pytest.approx(float(eager.grad_norm), abs=1e-10)
    report = whole.compile_report
    # A short batch in each epoch, and the first step, where the optimizer makes its state.
    assert (report["kept"], report["graphs"], report["eager_batches"]) == ("fused", 1, 3 + (optimizer != "sgd"))
    assert furthest(eager, whole) < CLOSE.get(optimizer, 1e-10)
    assert types(eager) == types(whole)
    assert whole.get_loss_history("test") == pytest.approx(eager.get_loss_history("test"), abs=1e-10)
    assert [*whole.log_train] == [*eager.log_train]


def test_a_norm_that_limits_nothing_changes_nothing() -> None:
    without, measured = (trained(Task.add_on(CompileAddon), gradient_clip=clip, **TRACED) for clip in (0.0, math.inf))
    assert measured.compile_report["kept"] == "fused"
    assert furthest(without, measured) == 0
    assert float(measured.grad_norm) == pytest.approx(float(trained(gradient_clip=math.inf).grad_norm), abs=1e-10)


class Scale(nn.Module):
    """One number that is learnt, without any dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_parameter_without_dimensions_keeps_its_state(optimizer: str, dtype: torch.dtype) -> None:
    """Torch takes a number in double precision for a constant: what a graph writes to it is lost."""
    eager, whole = (
        trained(cls, optimizer, model=nn.Sequential(*network(), Scale()).to(dtype), **options)
        for cls, options in ((Task, {}), (Task.add_on(CompileAddon), TRACED))
    )
    assert whole.compile_report["kept"] == "fused"
    assert furthest(eager, whole) < (1e-10 if dtype == torch.float64 else 1e-5)
    assert types(eager) == types(whole)


def test_inductor_makes_the_step_in_single_precision_too() -> None:
    """With dropout, which is drawn as eager does on request."""
    ends = []
    for cls, options in ((Task, {}), (Task.add_on(CompileAddon), {"compile_mode": "fused", "fallback_random": True})):
        task = made(cls, model=network(0.5).float(), **options)
        torch.manual_seed(2)
        task.run(2, batches(torch.float32))
        ends.append(task)
    assert ends[1].compile_report["kept"] == "fused"
    assert furthest(*ends) < 1e-5


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=100),
}


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_schedule_is_followed_and_nothing_compiled_anew(scheduler: str, optimizer: str) -> None:
    """Momenta and betas that it moves too; and it never warns that no optimizer was stepped."""
    options = {"scheduler": SCHEDULERS[scheduler], "scheduler_step_on_batch": True}
    if (scheduler, optimizer) == ("one cycle", "sgd"):
        options["scheduler"] = lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, max_lr=0.1, total_steps=100, cycle_momentum=False
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager = trained(Task, optimizer, **options)
        whole = trained(Task.add_on(CompileAddon), optimizer, **options, **FAST)
    assert whole.compile_report["graphs"] == 1
    assert furthest(eager, whole) < CLOSE.get(optimizer, 1e-10)
    assert whole.scheduler.last_epoch == eager.scheduler.last_epoch == 18


class Diverging(Task):
    """Its loss, or with a clip its gradient alone, is not finite at some steps."""

    where = "loss"

    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        bad = batch[0].abs().amax() > 90
        if self.where == "loss":
            return {**out, "loss": out["loss"] + torch.where(bad, torch.inf, 0.0)}
        weight = self.model[0].weight
        zero = torch.where(bad, weight - weight.detach(), torch.ones_like(weight))
        return {**out, "loss": out["loss"] + zero.sqrt().sum()}  # Its slope at 0 is infinite.


def poisoned() -> list[Any]:
    loader = batches()
    loader[2] = (torch.full_like(loader[2][0], 91.0), loader[2][1])
    return loader


@pytest.mark.sample(covering=1, of="policy")
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_a_step_that_is_not_finite_is_what_it_is_in_eager(policy: str, where: str, optimizer: str) -> None:
    """With "raise" and "skip" weights, state and counters stay; "warn" takes the step all the same."""
    ends = []
    for cls, options in ((Diverging, {}), (Diverging.add_on(CompileAddon), FAST)):
        task = made(cls, optimizer, on_nonfinite=policy, **options)
        task.where = where
        with pytest.raises(NonFiniteError, match="are those after step 2") if policy == "raise" else nullcontext():
            task.run(1, poisoned()[:5])
        ends.append(task)
    eager, whole = ends
    assert whole.compile_report["graphs"] == 1
    assert whole.progress_checker.state_dict() == eager.progress_checker.state_dict()
    assert [torch.isnan(x).any() for x in tensors(eager)] == [torch.isnan(x).any() for x in tensors(whole)]
    for a, b in zip(tensors(eager), tensors(whole), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=0, atol=1e-10, equal_nan=True)


# --------------------------------------------------------------------------------------------------------- checkpoints


def resumable(folder: Any, max_steps: int | None, add_ons: tuple[Any, ...] = (), **options: Any) -> Any:
    """A run of four epochs that ends early, or continues from where one ended."""
    task = made(
        Task.add_on(StateManagerAddon, *add_ons), model=network(0.2), seed=5, save_path=folder, resume="auto", **options
    )
    task.run(4, hand.loader(22), max_steps=max_steps)
    return task


def test_a_run_resumes_bitwise_and_goes_on_with_the_add_on_or_without_it(tmp_path: Any) -> None:
    """From a checkpoint nothing is eager but the short batches, and nothing in it is the add-on's."""
    straight = resumable(tmp_path / "straight", None, (CompileAddon,), **FAST)
    eager = resumable(tmp_path / "eager", None)
    ends = {}
    for first, then in ((True, True), (True, False), (False, True)):
        folder = tmp_path / f"{first}{then}"
        stopped = resumable(folder, 8, (CompileAddon,) if first else (), **(FAST if first else {}))
        assert stopped.state_dict().keys() == eager.state_dict().keys()
        ends[first, then] = resumable(folder, None, (CompileAddon,) if then else (), **(FAST if then else {}))
        assert ends[first, then].progress_checker.step == 24
        assert types(ends[first, then]) == types(eager)
    assert furthest(straight, ends[True, True]) == 0
    assert ends[True, True].compile_report["eager_batches"] == 3
    assert all(furthest(eager, end) < 1e-10 for end in ends.values())


# ------------------------------------------------------------------------------------------- beside others, or refused


@pytest.mark.parametrize(
    "add_ons",
    [
        {EMAAddon: {"decay": 0.5}, EarlyStoppingAddon: {"patience": 9}},
        {AMPAddon: {"precision": "fp32"}, GradientAccumulationAddon: {}, MultiGPUAddon: {}},
        {JSONLLoggerAddon: {"jsonl_path": "log.jsonl"}},
    ],
    ids=lambda add_ons: "+".join(each.__name__ for each in add_ons),
)
def test_it_composes_with_what_acts_after_the_step_or_not_at_all(
    add_ons: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {name: value for each in add_ons.values() for name, value in each.items()}
    ends = []
    for name, own in (("eager", {}), ("whole", FAST)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        cls = Task.add_on(*add_ons, *([CompileAddon] if own else []))
        task = trained(cls, **options, **own)
        ends.append((task, task.evaluate(batches())))
    (eager, its), (whole, own) = ends
    assert whole.compile_report["kept"] == "fused"
    assert furthest(eager, whole) < 1e-10
    assert own == pytest.approx(its, abs=1e-10)


def test_bfloat16_forwards_are_in_the_graph() -> None:
    ends = []
    for add_ons, options in (((), {}), ((CompileAddon,), FAST)):
        task = made(Task.add_on(AMPAddon, *add_ons), model=network().float(), precision="bf16", **options)
        task.run(2, batches(torch.float32))
        ends.append(task)
    assert (ends[1].compile_report["kept"], ends[1].compile_report["graphs"]) == ("fused", 1)
    assert furthest(*ends) < 1e-4


class ClippingAddon(AddOnBase):
    """Clip by value, which needs a gradient to look at."""

    layer = "loop"

    def __init__(self, *args: Any, largest: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.largest = largest

    def clip(self) -> None:
        """Clip."""
        super().clip()
        nn.utils.clip_grad_value_(self.parameters, self.largest)


class Stepping(Task):
    """Steps in its own way."""

    def optimizer_step(self) -> bool:
        self.unwrap()[0].weight.grad.zero_()
        return super().optimizer_step()


class OwnAdamW(torch.optim.AdamW):
    """Of somebody's own."""


def with_hook(parameters: Any) -> Any:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def with_own_step(parameters: Any) -> Any:
    optimizer = torch.optim.AdamW(parameters)
    step = optimizer.step
    optimizer.step = lambda *_: step()  # type: ignore[method-assign]
    return optimizer


def with_step_in_a_wrapper(parameters: Any) -> Any:
    optimizer = torch.optim.AdamW(parameters)
    step = optimizer.step
    optimizer.step = functools.wraps(step)(lambda *_: step())  # type: ignore[method-assign]
    return optimizer


REFUSED: dict[str, Any] = {
    "running statistics of BatchNorm or the like (1)": ((), {"model": lambda: normalized()}),
    "the step of optimizer 0, a Rprop, which is not SGD, Adam or AdamW": ((), {"optimizer": torch.optim.Rprop}),
    "the step of optimizer 0, a OwnAdamW, which is not SGD": ((), {"optimizer": OwnAdamW}),
    "hooks of the step of optimizer 0": ((), {"optimizer": with_hook}),
    "a custom step() of optimizer 0": ((), {"optimizer": with_own_step}),
    "a custom step() of optimizer": ((), {"optimizer": with_step_in_a_wrapper}),  # One that says what it wraps.
    "parameters of torch.bfloat16": ((), {"model": lambda: network().bfloat16()}),
    "windows of several batches": ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 2}),
    "clip() of ClippingAddon": ((ClippingAddon,), {"largest": 0.001}),
    "clip() of LedgerAddon": ((LedgerAddon,), {"ledger_path": "ledger.jsonl"}),
    "optimizer_step() of Stepping": ((), {"cls": Stepping}),
}  # fmt: skip


def normalized() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


@pytest.mark.parametrize("named", REFUSED)
def test_what_the_graph_cannot_hold_is_refused_by_name_and_left_to_another_by_auto(
    named: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add_ons, given = REFUSED[named]
    options = {"cls": Task, **given}
    cls = options.pop("cls").add_on(CompileAddon, *add_ons)
    model = options.pop("model", network)
    with pytest.raises(ConfigError) as error:
        made(cls, model=model(), **options, **FAST).run(1, batches())
    assert str(error.value).startswith(f"compile_mode='fused' does not support {named}")
    assert str(error.value).endswith("; write compile_mode='graph', which does")
    auto = made(cls, model=model(), **options, compile_mode="auto", compile_backend="eager")
    auto.run(1, batches())
    assert auto.compile_report["not_fused"].startswith(named)
    assert auto.compile_report["kept"] == "auto"  # It has not been timed often enough.


def test_a_step_that_is_differentiated_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not support optimizer 0, which is capturable or differentiable"):
        trained(Task.add_on(CompileAddon), lambda p: torch.optim.AdamW(p, differentiable=True), **FAST)


class HookedLater(Task):
    """Counts the optimizer's steps from the fourth on, by a hook."""

    counted = 0

    def checkpoint(self) -> None:
        super().checkpoint()
        if self.progress_checker.step == 3:
            self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.counted += 1


def test_a_hook_that_comes_later_is_called() -> None:
    whole = trained(HookedLater.add_on(CompileAddon), **FAST)
    assert whole.counted == 15
    assert whole.compile_report["eager_batches"] == 1 + 3  # In the first epoch; with the second it is given up.
    assert "hooks of the step of optimizer 0" in whole.compile_report["reason"]
    assert furthest(trained(), whole) < 1e-10


class Freezing(Task):
    """Trains its first layer every second epoch, and never what has no part in the loss."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.model[0].weight.requires_grad_(self.progress_checker.epoch % 2 == 1)


class WithSpare(nn.Sequential):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__(*network())
        self.spare = nn.ParameterList([nn.Parameter(torch.ones(3).double())])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in list(self)[:4]:
            inputs = layer(inputs)
        return inputs


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_layers_may_be_frozen_and_thawed_and_some_unused(optimizer: str) -> None:
    """What has no gradient has no state either, and keeps the count of its own steps."""
    eager = trained(Freezing, optimizer, epochs=4, model=WithSpare())
    whole = trained(Freezing.add_on(CompileAddon), optimizer, epochs=4, model=WithSpare(), **FAST)
    assert whole.compile_report["graphs"] == 2
    assert types(eager) == types(whole)
    assert furthest(eager, whole) < CLOSE.get(optimizer, 1e-10)


class Branching(WithSpare):
    """Uses its spare layer while it is told to."""

    uses = True

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        return output * self.spare[0].sum() if self.uses else output


class Branched(Task):
    """Uses the spare layer in every epoch but one."""

    unused = 1

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.model.uses = self.progress_checker.epoch != self.unused


@pytest.mark.sample(count=1)
@pytest.mark.parametrize(("unused", "kept"), [(1, "fused"), (0, "eager")])
def test_a_layer_may_take_part_in_some_steps_only(unused: int, kept: str) -> None:
    """A step without a gradient is none of its own; one that begins after the graph is not a graph's."""
    eager, whole = (type("Branched", (Branched,), {"unused": unused}) for _ in range(2))
    eager = trained(eager, model=Branching())
    whole = trained(whole.add_on(CompileAddon), model=Branching(), **FAST)
    assert whole.compile_report["kept"] == kept
    steps = [[float(state["step"]) for state in each.optimizer.state.values()] for each in (eager, whole)]
    assert steps[0] == steps[1]
    assert sorted(steps[0]) == [12.0, 18.0, 18.0, 18.0, 18.0]
    assert furthest(eager, whole) < 1e-10


def test_a_setting_that_is_changed_by_hand_is_that_of_the_next_step() -> None:
    ends = []
    for cls, options in ((Task, {}), (Task.add_on(CompileAddon), FAST)):
        task = made(cls, "momentum", **options)
        task.run(1, batches())
        for rate, momentum in ((0.3, 0.5), (torch.tensor(0.2, dtype=torch.float64), 0.7)):
            task.optimizer.param_groups[0].update(lr=rate, momentum=momentum)
            task.run(1, batches())
        ends.append(task)
    assert ends[1].compile_report["graphs"] == 1
    assert furthest(*ends) < 1e-12


def test_auto_times_all_three_and_keeps_one(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zae.compiling.benchmark._SECONDS", 0.0)
    with caplog.at_level(logging.INFO, logger="zae"):
        task = trained(Task.add_on(CompileAddon), epochs=14, compile_mode="auto", compile_backend="aot_eager")
    report = task.compile_report
    assert list(report["seconds"]) == ["eager", "graph", "fused"]
    assert report["kept"] in report["seconds"]
    assert report["graphs"] == 2
    assert f"keeps the step {report['kept']!r}" in caplog.text
    assert furthest(trained(epochs=14), task) < 1e-9
