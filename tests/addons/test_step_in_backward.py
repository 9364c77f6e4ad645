"""StepInBackwardAddon: the weights of the loop by hand, one gradient at a time, and refusals of what needs all."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import zae
from kit import engines, faults, hand, optimizers, table
from kit.faults import everything
from kit.ranks import each_rank, on_ranks
from zae import AddOnBase, ConfigError, NonFiniteError, StepError, Trainer
from zae.addons import (
    AMPAddon,
    CallbackAddon,
    EMAAddon,
    FSDPAddon,
    GradientCheckpointingAddon,
    LedgerAddon,
    StateManagerAddon,
    StepInBackwardAddon,
)
from zae.cli.diff import compare, read_ledger
from zae.optimizers import MasterWeights, muon
from zae.testing.watch import difference


class Task(Trainer):
    """A classifier."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": cross_entropy(self.model(batch[0]).float(), batch[1])}

    test_step = train_step


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(
    *add_ons: Any, task: Any = Task, model: Any = None, epochs: int = 2, loader: Any = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    options = {"optimizer": adamw, "log_bar": False, **options}
    trainer = task.add_on(*add_ons)(hand.network() if model is None else model(), "cpu", **options)
    trainer.run(epochs, hand.loader() if loader is None else loader)
    return trainer


def core(trainer: Any) -> dict[str, Any]:
    """Weights, states of optimizers and schedulers, counters, history and random state."""
    return table.core_of(trainer)


# --------------------------------------------------------------------------------------------- the loop by hand

ELEMENTWISE = {
    name: make for name, make in optimizers.OPTIMIZERS.items() if name not in ("LBFGS", "Muon", "SparseAdam")
}


@pytest.mark.sample(count=3)
@pytest.mark.parametrize("name", [*ELEMENTWISE, "foreach", "fused"])
def test_the_weights_are_those_of_the_loop_by_hand(name: str) -> None:
    """Of every optimizer of torch, and of its other kernels, bitwise."""
    make: Any = ELEMENTWISE.get(name, torch.optim.AdamW)
    options = {name: True} if name in ("foreach", "fused") else {}
    model = hand.network()
    torch.manual_seed(0)
    hand.train(model, make(model.parameters(), lr=0.01, **options), hand.loader(), 2)
    found = trained(StepInBackwardAddon, optimizer=lambda parameters: make(parameters, lr=0.01, **options))
    assert hand.digest(found.unwrap()) == hand.digest(model)


def linear(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)


def in_groups(parameters: Any) -> Any:
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": rest}], lr=0.05, momentum=0.9)


def low() -> nn.Module:
    return hand.network().to(torch.bfloat16)


def tied() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = hand.network()
    model[0].requires_grad_(False)
    return model


class Thawing(Task):
    """Train a layer from the second epoch on."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.unwrap()[0].requires_grad_(self.progress_checker.epoch > 0)


class Growing(Task):
    """Give a layer to the optimizer in the second epoch."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        optimizer = self.optimizers["0"]
        if self.progress_checker.epoch == 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [*self.unwrap()[4].parameters()], "lr": 0.3})


class OwnBackward(Task):
    """A backward of the task, whose gradients are part of the step."""

    def train_step(self, batch: Any) -> Any:
        if self.mode == "train":
            self.unwrap()[0].weight.square().sum().backward()
            self.unwrap()[4].bias.sum().backward()
        hidden = self.model[:4](batch[0]).detach()
        return {"loss": cross_entropy(self.model[4](hidden), batch[1])}

    test_step = train_step


FEATURES: dict[str, tuple[Any, ...]] = {
    "AMP": ((AMPAddon,), {"precision": "bf16"}),
    "EMA": ((EMAAddon,), {"decay": 0.5}),
    "schedule of steps": ((), {"scheduler": linear, "scheduler_step_on_batch": True}),
    "schedule of epochs": ((), {"scheduler": linear}),
    "groups": ((), {"optimizer": in_groups, "scheduler": linear, "scheduler_step_on_batch": True}),
    "Muon and AdamW": ((), {"optimizer": muon(lr=0.01)}),
    "float32 weights": ((), {"model": low, "optimizer": lambda p: MasterWeights(adamw(p)), "task": None}),
    "tied": ((), {"model": tied}),
    "frozen": ((), {"model": frozen}),
    "thawing": ((), {"task": Thawing}),
    "growing": ((), {"task": Growing, "optimizer": lambda p: torch.optim.SGD([*p][:4], lr=0.1)}),
    "its own backward": ((), {"task": OwnBackward}),
    "checkpointing": ((GradientCheckpointingAddon,), {"checkpoint_modules": ["*"]}),
    "together": ((AMPAddon, EMAAddon, GradientCheckpointingAddon), {
        "precision": "bf16", "decay": 0.5, "checkpoint_modules": ["*"], "scheduler": linear,
        "scheduler_step_on_batch": True,
    }),
}  # fmt: skip


class Low(Task):
    def train_step(self, batch: Any) -> Any:
        return super().train_step((batch[0].to(torch.bfloat16), batch[1]))

    test_step = train_step


@pytest.mark.sample(count=5)
@pytest.mark.parametrize("name", FEATURES)
def test_it_changes_nothing_but_the_memory(name: str) -> None:
    """Weights, states of the optimizers in the usual layout, schedules, counters and random state, bitwise."""
    add_ons, options = FEATURES[name]
    options = {**options, "task": options.get("task", Task) or Low}
    with_it, without = trained(StepInBackwardAddon, *add_ons, **options), trained(*add_ons, **options)
    assert difference(core(with_it), core(without)) is None
    for a, b in zip(
        with_it.state_dict()["optimizer"].values(), without.state_dict()["optimizer"].values(), strict=True
    ):
        assert [*a["state"]] == [*b["state"]]
    if "decay" in options:
        assert all(map(torch.equal, with_it.average.values(), without.average.values()))
    assert not any(each._post_accumulate_grad_hooks for each in with_it.parameters)


TOGETHER = [entry for entry in table.TABLE if table.compatible(entry, table.Entry(StepInBackwardAddon, dict, dict))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", TOGETHER, ids=lambda entry: entry.id)
def test_it_changes_nothing_beside_any_other_add_on(entry: Any, tmp_path: Path) -> None:
    """Of the table of add-ons, with the options that bite; float16 is refused."""
    found = []
    for add_ons in ((), (StepInBackwardAddon,)):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        options = {**entry.biting(folder), "gradient_clip": 0.0}
        if entry.id == "AMPAddon-fp16":
            with pytest.raises(ConfigError, match="precision='fp16' skips a step"):
                table.Task.add_on(AMPAddon, StepInBackwardAddon)(hand.network(), "cpu", optimizer=adamw, **options)
            return
        torch.manual_seed(0)
        model, optimizer = table.parts()
        trainer = table.Task.add_on(entry.add_on, *add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)
        trainer.run(2, hand.loader(), hand.loader(8, shuffle=False))
        found.append(core(trainer))
    assert difference(*found) is None


# ------------------------------------------------------------------------------------------------------- memory


def test_there_is_one_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as each parameter steps; the plan says the same, and tests/engines/test_plan_memory.py measures it."""
    counts: list[int] = []
    trainer: Any = Task.add_on(StepInBackwardAddon)(hand.network(), "cpu", optimizer=adamw, log_bar=False)
    step = torch.optim.AdamW.step

    def counting(self: Any, *args: Any) -> Any:
        counts.append(sum(each.grad is not None for each in trainer.parameters))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", counting)
    monkeypatch.setattr("zae.addons.step_in_backward._check", lambda *_: None)
    plan = trainer.plan(1, hand.loader())
    counts.clear()
    trainer.run(1, hand.loader())
    assert counts == ([1] * 6 + [0]) * 6
    assert "each parameter steps in the backward, when its gradient is complete" in plan.notes
    largest = max(each.numel() * 4 for each in trainer.parameters)
    assert (plan.memory.gradients, plan.memory.entries()["gradients"]) == (largest, largest)


# -------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("is_resumed_with_it", [True, False])
def test_checkpoints_are_those_without_it(is_resumed_with_it: bool, tmp_path: Path) -> None:
    """A run that was saved with it resumes without it, and the other way round, bitwise."""

    def run(has_it: bool, place: str, resume: Any) -> Any:
        faults.ambient(3)
        add_ons = (StateManagerAddon, EMAAddon, *([StepInBackwardAddon] if has_it else []))
        trainer = faults.Task.add_on(*add_ons)(
            hand.network(), "cpu", optimizer=adamw, scheduler=linear, scheduler_step_on_batch=True, log_bar=False,
            save_path=tmp_path / place, save_every=1, keep_last=None, resume=resume, seed=7, decay=0.5,
        )  # fmt: skip
        trainer.run(2, hand.loader())
        return everything(trainer)

    whole = run(not is_resumed_with_it, "whole", False)
    assert run(is_resumed_with_it, "again", str(tmp_path / "whole" / "step-00000004")) == whole


class Breaking(Task):
    """The backward of the second step fails when half of the parameters have stepped."""

    def train_step(self, batch: Any) -> Any:
        if self.progress_checker.step == 1:
            self.unwrap()[0].weight.register_hook(_fail)
        return super().train_step(batch)


def _fail(gradient: Tensor) -> None:
    raise MemoryError("in the backward")


def test_a_backward_that_fails_saves_no_state_of_half_a_step(tmp_path: Path) -> None:
    """The error says so, and names the newest checkpoint, from which a run resumes."""
    with pytest.raises(MemoryError) as caught:
        trained(StepInBackwardAddon, StateManagerAddon, task=Breaking, save_path=tmp_path, save_every=1)
    notes = "\n".join(caught.value.__notes__)
    assert "the weights are neither those before nor those after this step" in notes
    assert "the state is that of no step, and is not saved; the newest regular checkpoint is" in notes
    assert [path.name for path in tmp_path.glob("crash-*")] == []
    again = trained(StepInBackwardAddon, StateManagerAddon, save_path=tmp_path, resume="auto")
    assert again.progress_checker.step == 12


# ----------------------------------------------------------------------------------------------- losses, and hooks


class NotFinite(Task):
    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)["loss"]
        return {"loss": loss * math.nan if self.progress_checker.step == 3 else loss}


@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_a_loss_that_is_not_finite_is_seen_before_the_backward(policy: str, caplog: Any) -> None:
    with_it, without = (trained(*a, task=NotFinite, on_nonfinite=policy) for a in ((StepInBackwardAddon,), ()))
    assert difference(core(with_it), core(without)) is None
    assert with_it.progress_checker.nonfinite_steps >= 1


def test_a_loss_that_is_not_finite_raises_before_any_parameter_steps() -> None:
    torch.manual_seed(0)
    trainer = NotFinite.add_on(StepInBackwardAddon)(hand.network(), "cpu", optimizer=adamw, log_bar=False)
    with pytest.raises(NonFiniteError, match="The optimizer did not step: the weights are those after step 3"):
        trainer.run(1, hand.loader())
    model = hand.network()
    torch.manual_seed(0)
    batches = [*hand.loader()][:3]
    hand.train(model, adamw(model.parameters()), batches, 1)  # type: ignore[arg-type]
    assert all(map(torch.equal, trainer.unwrap().parameters(), model.parameters()))


class Again(nn.Module):
    """A block that is computed in a backward within the backward, twice with the same weights or once each."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        first, last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.first, self.blocks = first, nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        if is_tied:
            self.blocks[1].weight = self.blocks[0].weight
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        output: Tensor = self.last(x)
        return output


def test_a_gradient_that_comes_in_two_parts_is_refused() -> None:
    """Reentrant checkpoints differentiate block by block; weights of one block alone are complete."""
    with_it, without = (trained(*a, model=lambda: Again(False)) for a in ((StepInBackwardAddon,), ()))
    assert difference(core(with_it), core(without)) is None
    with pytest.raises(StepError, match=r"blocks.0.weight came twice .* use_reentrant=False"):
        trained(StepInBackwardAddon, model=lambda: Again(True))


def test_a_ledger_is_that_without_it(tmp_path: Path) -> None:
    """The gradients are hashed before they are freed; the line says that the step was made in the backward."""
    add_ons = ((StepInBackwardAddon, LedgerAddon), (LedgerAddon,))
    for index, each in enumerate(add_ons):
        trained(*each, task=OwnBackward, ledger_path=tmp_path / f"{index}.jsonl", ledger_tensors=True)
    with_it, without = (read_ledger(tmp_path / f"{index}.jsonl") for index in range(2))
    assert len(with_it) == 12
    assert compare(with_it, without) is None
    stages = [each[5]["stages"]["backward"]["tensors"] for each in (with_it, without)]
    assert [*stages[0].items()] == [*stages[1].items()]
    assert with_it[5]["stages"]["step"]["in_backward"] is True
    assert "in_backward" not in without[5]["stages"]["step"]


def test_explain_shows_where_the_step_is() -> None:
    text = Task.add_on(StepInBackwardAddon).explain()
    assert (
        "backward(loss)                          # StepInBackwardAddon: Step each parameter when its gradient is"
        in text
    )
    assert "optimizer_step()              # StepInBackwardAddon: Step what the backward has left." in text


# ------------------------------------------------------------------------------------------------------ refusals


class Overriding(Task):
    def may_step(self, outputs: Any) -> bool:
        return bool(super().may_step(outputs))


class Noise(AddOnBase):
    """Change the gradients."""

    layer = "loop"

    def unscale(self) -> None:
        super().unscale()
        for parameter in self.parameters:
            parameter.grad.add_(1.0)


class TwoLosses(Task):
    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)["loss"]
        return {"loss": {"a": loss, "b": loss * 2}}


class Penalty(Task):
    def backward(self, loss: Any, **kwargs: Any) -> None:
        super().backward(loss, retain_graph=True)


class Watching:
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise AssertionError


class Together(torch.optim.SGD):
    """A step whose size is that of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in held:
            parameter.sub_(parameter.grad / (1 + sum(float(each.grad.norm()) for each in held)))


class Random(torch.optim.SGD):
    """A step with noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.sub_(parameter.grad * torch.rand_like(parameter))


class Counting(torch.optim.SGD):
    """A number of the group that each step changes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if any(each.grad is not None for each in group["params"]):
                group["count"] = group.get("count", 0) + 1


def hooked(parameters: Any) -> Any:
    made = adamw(parameters)
    made.register_step_pre_hook(lambda *_: None)
    return made


def replaced(parameters: Any) -> Any:
    made = adamw(parameters)
    step = made.step
    made.step = lambda *args: step(*args)
    return made


def schedule_free(parameters: Any) -> Any:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(parameters, lr=0.01)


DEPENDS = "the step of one depends on those of others, or on random numbers"
AT_RUN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "several losses": ((), {"task": TwoLosses, "optimizer": "two"}, "returned 2 losses"),
    "an override of the backward": ((), {"task": Penalty}, r"backward\(\) of Penalty may need the gradients"),
    "all together": ((), {"optimizer": lambda p: Together(p, lr=0.1)}, rf"0 \(Together\) cannot .*: {DEPENDS}"),
    "random": ((), {"optimizer": lambda p: Random(p, lr=0.1)}, DEPENDS),
    "a count": ((), {"optimizer": lambda p: Counting(p, lr=0.1)}, DEPENDS),
    "schedule-free": ((), {"optimizer": schedule_free}, "it counts and averages over the steps of all parameters"),
    "hooks": ((), {"optimizer": hooked}, "hooks are registered for its step"),
    "another step": ((), {"optimizer": replaced}, r"its step\(\) was replaced"),
    "a callback": ((CallbackAddon,), {"callbacks": [Watching]}, "on_pre_optimizer_step of Watching sees"),
    "float16 of a list": ((AMPAddon,), {"precision": ["fp16"]}, "AMPAddon has chosen fp16"),
    "clip": ((), {"gradient_clip": 1.0}, r"gradient_clip=1 needs .*; write gradient_clip=0, or leave"),
    "norm": ((), {"gradient_clip": math.inf}, "gradient_clip=inf needs the norm of all gradients"),
    "float16": ((AMPAddon,), {"precision": "fp16"}, "write precision='bf16', or leave StepInBackwardAddon out"),
    "an override": ((), {"task": Overriding}, r"may_step\(\) of Overriding may need the gradients"),
    "another add-on": ((Noise,), {}, r"unscale\(\) of Noise may need the gradients, which are freed"),
}


@pytest.mark.parametrize("name", AT_RUN)
def test_what_needs_all_gradients_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At construction, in setup, or in the first step; no parameter has stepped."""
    add_ons, options, text = AT_RUN[name]
    options = {**options}
    model = hand.network()
    if options.get("optimizer") == "two":
        options["optimizer"] = {"a": adamw(model[0].parameters()), "b": adamw(model[4].parameters())}
    if name == "float16 of a list":
        monkeypatch.setattr("zae.addons.amp._is_native", lambda *_: True)
    before = hand.digest(*(each.detach().clone() for each in model.parameters()))
    with pytest.raises(ConfigError, match=text):
        trained(StepInBackwardAddon, *add_ons, model=lambda: model, **options)
    assert hand.digest(*(each.detach() for each in model.parameters())) == before


def test_a_second_backward_is_refused() -> None:
    """An add-on of zae would pass retain_graph; those of others are refused as they override backward()."""
    trainer = Task.add_on(StepInBackwardAddon)(hand.network(), "cpu", optimizer=adamw, log_bar=False)
    with trainer.ready(), pytest.raises(ConfigError, match="a second backward would need the weights of before"):
        trainer.backward(trainer.model(torch.ones(4, 4)).sum(), retain_graph=True)


@pytest.mark.parametrize("name", sorted(StepInBackwardAddon.excludes))
def test_add_ons_that_need_all_gradients_are_refused_by_name(name: str) -> None:
    """When the class is made, with what to write instead."""
    from zae.interop.lightning import LightningAddon

    other = LightningAddon if name == "LightningAddon" else getattr(zae.addons, name)
    with pytest.raises(zae.AddOnConflict, match=rf"{name}.*(leave|write) "):
        Task.add_on(StepInBackwardAddon, other)


# ------------------------------------------------------------------------------------------------------ two ranks


def sharded(*add_ons: Any, task: Any = engines.Task, **options: Any) -> Any:
    torch.manual_seed(0)
    trainer = task.add_on(FSDPAddon, *add_ons)(
        engines.Net().double(), "cpu", optimizer=adamw, log_bar=False, seed=1, **options
    )
    trainer.run(2, engines.data(12, 4))
    return trainer


def both(folder: Path) -> list[Any]:
    rows = []
    for index, add_ons in enumerate(((), (StepInBackwardAddon,))):
        place = {"ledger_path": folder / f"{index}-{{rank}}.jsonl"}
        trainer = sharded(*add_ons, LedgerAddon, EMAAddon, decay=0.5, **place)
        state = copy.deepcopy(trainer.state_dict())
        rows.append((trainer.world_size, table.fingerprint([state["model"], state["optimizer"]])))
    return rows


def test_two_ranks_with_fsdp_step_their_parts(tmp_path: Path) -> None:
    """The weights, states and ledgers of both ranks are those without the add-on, bitwise."""
    for without, with_it in each_rank(2, both, tmp_path):
        assert without[0] == 2
        assert with_it == without
    for rank in range(2):
        ledgers = [read_ledger(tmp_path / f"{index}-{rank}.jsonl") for index in range(2)]
        assert len(ledgers[0]) == len(ledgers[1]) > 2
        assert compare(*ledgers) is None


class SomeNotFinite(engines.Task):
    def train_step(self, batch: Any) -> Any:
        loss = super().train_step(batch)["loss"]
        return {"loss": loss * math.nan if self.progress_checker.step == 2 and self.rank == 1 else loss}


@on_ranks(2)
def test_ranks_skip_together_and_refuse_counted_targets(world: int) -> None:
    """The loss of one rank is not finite; no rank differentiates. Targets are counted after the backward."""
    found = [table.fingerprint(sharded(*each, task=SomeNotFinite, on_nonfinite="skip").state_dict()["model"])
             for each in ((), (StepInBackwardAddon,))]  # fmt: skip
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match="train_step returned 'num_targets', by whose sum over the ranks"):
        sharded(StepInBackwardAddon, task=engines.Counted)
