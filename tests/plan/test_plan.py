"""plan() says what run() with the same arguments does, and changes nothing."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zae
from kit import matrix, optimizers, oracle
from zae import ConfigError, Every, Trainer, random_state
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    StateManagerAddon,
)
from zae.loop.run import Run
from zae.loop.run_view import RunView
from zae.testing import PlainTask


class Task(Trainer):
    """A task that writes down what happens to it."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch[:2]
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets), "size": len(inputs)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch[:2]
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets), "accuracy": 0.5, "output": inputs}

    def metric_on_epoch_end(self) -> dict[str, float]:
        return {"spread": float(torch.cat(self.log_test["output"]).std())} if self.mode == "test" else {}

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.rates: dict[str, list[float]] = {}
        self.happened: dict[str, list[int]] = {"train": [], "valid": []}

    def optimizer_step(self) -> bool:
        for name, optimizer in self.optimizers.items():
            self.rates.setdefault("lr" if name == "0" else f"lr/{name}", []).append(optimizer.param_groups[0]["lr"])
        return super().optimizer_step()

    def log(self, metrics: Any, step: int) -> None:
        super().log(metrics, step)
        self.happened[next(iter(metrics)).split("/")[0]].append(step)


SCHEDULERS: dict[str, Any] = {
    "none": None,
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=60),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


def loaders(samples: int = 22) -> tuple[Any, Any]:
    data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 2))
    return DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)


def make(add_ons: Any = (), scheduler: str = "none", as_factory: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = oracle.Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = SCHEDULERS[scheduler]
    if as_factory:
        optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    elif made is not None:
        made = made(optimizer)
    return Task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, scheduler=made, **options)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"n_epoch": 3}),
    "accumulated": (
        {"add_ons": [GradientAccumulationAddon], "gradient_accumulation_steps": 4, "scheduler": "step",
         "scheduler_step_on_batch": True, "log_every": 2},
        {"n_epoch": 3, "valid_every": 2},
    ),
    "ends-in-an-epoch": ({"scheduler": "cosine", "log_every": 3}, {"n_epoch": 5, "max_steps": 15, "valid_every": 4}),
    "ends-with-an-epoch": ({"scheduler": "step"}, {"n_epoch": 5, "max_steps": 12, "valid_every": Every(epochs=2)}),
    "onecycle": ({"scheduler": "onecycle", "scheduler_step_on_batch": True}, {"n_epoch": 2}),
    "sequence": ({"scheduler": "sequence", "scheduler_step_on_batch": True, "as_factory": True}, {"n_epoch": 2}),
    "by-epoch": ({"scheduler": "lambda", "as_factory": True}, {"n_epoch": 4, "valid_every": Every(epochs=3, after=1)}),
    "short-epochs": ({"log_every": Every(epochs=2)}, {"n_epoch": None, "max_steps": 11, "steps_per_epoch": 4}),
    "everything": (
        {"add_ons": [AMPAddon, EMAAddon, GradientAccumulationAddon, EarlyStoppingAddon, StateManagerAddon],
         "precision": "bf16", "gradient_accumulation_steps": 3, "patience": 99, "save_path": "save", "save_every": 2,
         "keep_last": None, "scheduler": "step", "log_every": 1, "gradient_clip": 0.5},
        {"n_epoch": 4, "valid_every": 3},
    ),
    "saved-by-epochs": (
        {"add_ons": [StateManagerAddon, GradientAccumulationAddon], "gradient_accumulation_steps": 4, "keep_best": 0,
         "save_path": "save", "save_every": Every(epochs=2), "keep_last": None},
        {"n_epoch": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_plan_is_what_a_run_then_does(case: str) -> None:
    """Steps, batches, epochs, learning rates, validations, records and checkpoints."""
    options, arguments = CASES[case]
    trainer, (loader, valid) = make(**options), loaders()
    n_epoch, rest = arguments["n_epoch"], {k: v for k, v in arguments.items() if k != "n_epoch"}
    plan = trainer.plan(n_epoch, loader, valid, **rest)
    before = trainer.progress_checker.step
    metrics = trainer.run(n_epoch, loader, valid, **rest)
    progress = trainer.progress_checker
    assert plan.steps == progress.step - before
    assert plan.last_step == progress.step
    assert [epoch for epoch, _ in plan.epoch_ends] == [row["epoch"] for row in trainer.train_history]
    assert [step for _, step in plan.epoch_ends] == [row["step"] for row in trainer.train_history]
    assert plan.learning_rates == trainer.rates
    assert plan.logs_at == trainer.happened["train"]
    assert plan.validates_at == trainer.happened["valid"] == [r["step"] for r in metrics["valid_metrics_history"]]
    if StateManagerAddon in options.get("add_ons", ()):
        saved = {int(path.name.removeprefix("step-")) for path in Path("save").glob("step-*")}
        keeps_best = trainer.checkpoints.retention.best > 0
        assert set(plan.saves_at) <= saved <= {*plan.saves_at, *(plan.validates_at if keeps_best else ())}


def test_plan_goes_on_where_a_run_ended() -> None:
    """A second call, and an epoch that was left open."""
    trainer, (loader, valid) = make(scheduler="step", scheduler_step_on_batch=True), loaders()
    trainer.run(2, loader, valid, max_steps=9)
    plan = trainer.plan(2, loader, valid, valid_every=4)
    assert plan.first_step == 10
    trainer.run(2, loader, valid, valid_every=4)
    assert plan.last_step == trainer.progress_checker.step
    assert plan.learning_rates == trainer.rates
    assert plan.validates_at == trainer.happened["valid"]
    assert plan.epoch_ends == [(row["epoch"], row["step"]) for row in trainer.train_history[-2:]]


def test_plan_of_random_runs() -> None:
    """Thirty random schedules of a run."""
    draw = random.Random(3)
    for _ in range(30):
        accumulate = draw.choice([1, 2, 3, 5])
        trainer = make([GradientAccumulationAddon], draw.choice(["none", "step", "cosine"]),
                       gradient_accumulation_steps=accumulate, scheduler_step_on_batch=draw.random() < 0.5,
                       log_every=draw.choice([None, 1, 2, Every(epochs=2)]))  # fmt: skip
        loader, valid = loaders(draw.choice([6, 10, 16]))
        arguments = {
            "max_steps": draw.choice([None, 1, 4, 7]),
            "valid_every": draw.choice([None, 1, 3, Every(epochs=2)]),
            "steps_per_epoch": draw.choice([None, 1, 2]),
        }
        n_epoch = draw.choice([1, 2, 4])
        plan = trainer.plan(n_epoch, loader, valid, **arguments)
        trainer.run(n_epoch, loader, valid, **arguments)
        assert (plan.last_step, plan.learning_rates) == (trainer.progress_checker.step, trainer.rates)
        assert (plan.logs_at, plan.validates_at) == (trainer.happened["train"], trainer.happened["valid"])
        assert [step for _, step in plan.epoch_ends] == [row["step"] for row in trainer.train_history]


# ------------------------------------------------------------------------------------------------- no side effect


def world(trainer: Any, loader: Any) -> dict[str, Any]:
    """Everything that planning could have touched."""
    return {
        "weights": {k: v.clone() for k, v in trainer.unwrap().state_dict().items()},
        "modes": [module.training for module in trainer.unwrap().modules()],
        "gradients": [p.grad is None for p in trainer.unwrap().parameters()],
        "optimizer": repr(trainer.optimizer.state_dict()),
        "scheduler": repr(trainer.scheduler.state_dict()),
        "hooks": [len(trainer.optimizer._optimizer_step_post_hooks), len(trainer.unwrap()._forward_hooks)],
        "random": repr(random_state.capture()),
        "generator": loader.generator.get_state(),
        "files": sorted(str(path) for path in Path(".").rglob("*")),
        "attributes": {k: repr(v) for k, v in trainer.__dict__.items() if k not in ("model", "_module")},
    }


class Drawing(Task):
    """Steps that draw from every stream, and count in the model and in the trainer."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.seen = getattr(self, "seen", 0) + 1
        self.model.norm.running_mean.add_(1)
        return {**super().test_step(batch), "noise": torch.rand(1).item() + random.random() + np.random.rand()}


@pytest.mark.parametrize("how", ["whole", "in place", "part"])
def test_a_model_that_the_script_has_compiled_trains_as_without(how: str) -> None:
    """The weights are the same in each form, and the names in a state are those of the module itself."""
    ends = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        if compiles and how == "in place":
            model.compile(backend="eager")
        elif compiles and how == "part":
            model[1] = torch.compile(model[1], backend="eager")
        elif compiles:
            model = torch.compile(model, backend="eager")
        batches = [(torch.ones(4, 4), torch.ones(4, 2)), (torch.ones(3, 4), torch.ones(3, 2))]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = PlainTask(model, "cpu", optimizer=optimizer, log_bar=False)
        trainer.run(1, batches)
        ends.append(trainer.state_dict()["model"])
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def test_plan_has_no_side_effect() -> None:
    """Weights, modes, optimizer, schedulers, random streams, the loader's generator, files: all as they were."""
    add_ons = [AMPAddon, EMAAddon, GradientAccumulationAddon, EarlyStoppingAddon, StateManagerAddon]
    model = oracle.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Drawing.add_on(*add_ons)(
        model, "cpu", optimizer=optimizer, scheduler=SCHEDULERS["onecycle"](optimizer), save_path="save",
        gradient_accumulation_steps=2, scheduler_step_on_batch=True,
    )  # fmt: skip
    data = TensorDataset(torch.randn(22, 3), torch.randn(22, 2))
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    valid = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    before = world(trainer, loader)
    trainer.plan(2, loader, valid)
    after = world(trainer, loader)
    for part, value in before.items():
        assert matrix.first_difference(value, after[part]) is None, part


def test_plan_leaves_a_run_bitwise_as_it_is() -> None:
    outcomes = []
    for planned in (False, True):
        random_state.seed_everything(0)
        trainer, (loader, valid) = make(scheduler="cosine"), loaders()
        torch.manual_seed(9)
        if planned:
            trainer.plan(2, loader, valid)
        trainer.run(2, loader, valid)
        outcomes.append((trainer.unwrap().state_dict(), trainer.optimizer.state_dict(), repr(random_state.capture())))
    assert matrix.first_difference(*outcomes) is None


def held_by(trainer: Any) -> dict[str, Any]:
    """All that training reads of an optimizer and a scheduler: each tensor, each number, and what a schedule counts."""
    of = {"optimizer": trainer.optimizer, "scheduler": trainer.scheduler}
    return copy.deepcopy(
        {
            "weights": trainer.unwrap().state_dict(),
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in trainer.optimizer.param_groups],
            **{name: each and each.state_dict() for name, each in of.items()},
            "attributes": {name: sorted(vars(each)) for name, each in of.items() if each},
            "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()],
        }
    )


def assert_untouched(trainer: Any, batches: list[Any]) -> None:
    """Plan, explain, evaluate and read what the bar shows; before a run, and after it."""
    for _ in range(2):
        before = held_by(trainer)
        trainer.plan(2, batches, batches)
        trainer.explain()
        trainer.evaluate(batches)
        trainer.inference(batches)
        assert RunView(Run(trainer)).current() or trainer.metrics
        difference = matrix.first_difference(before, held_by(trainer))
        assert difference is None, f"{type(trainer.optimizer).__name__}, {type(trainer.scheduler).__name__}{difference}"
        trainer.run(1, batches, batches)


def test_looking_changes_no_optimizer_of_torch() -> None:
    """A rate that is a tensor is written in place by a scheduler, also by the copy that a plan steps."""
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"}
    assert kinds == optimizers.OPTIMIZERS.keys()
    tensors = 0
    for make_optimizer in optimizers.OPTIMIZERS.values():
        make_scheduler = optimizers.SCHEDULERS["ExponentialLR"]
        try:
            trainer = optimizers.make(make_optimizer, make_scheduler, lr=torch.tensor(0.05))
            tensors += 1
        except ValueError:  # It takes no tensor for a rate.
            trainer = optimizers.make(make_optimizer, make_scheduler)
        assert_untouched(trainer, optimizers.batches(2))
    assert tensors > len(kinds) / 2


@pytest.mark.parametrize("name", optimizers.SCHEDULERS)
def test_looking_changes_no_scheduler_of_torch(name: str) -> None:
    """Whatever a schedule changes of a group, rates and betas."""
    assert {*optimizers.SCHEDULERS, "LRScheduler"} == set(torch.optim.lr_scheduler.__all__)
    options = {"scheduler_step_on_batch": name == "OneCycleLR"}
    trainer = optimizers.make(torch.optim.Adam, optimizers.SCHEDULERS[name], lr=torch.tensor(0.05), **options)
    assert_untouched(trainer, optimizers.batches(2))


def test_plan_takes_nothing_from_an_iterator() -> None:
    batches = [(torch.ones(4, 3), torch.ones(4, 2))] * 5
    trainer, stream = make(), iter(batches)
    plan = trainer.plan(None, stream, max_steps=4, steps_per_epoch=2)
    assert len(list(stream)) == 5
    assert (plan.steps, plan.epoch_ends) == (4, [(1, 2), (2, 4)])


def test_plan_of_a_stream_says_what_cannot_be_known() -> None:
    plan = make().plan(1, itertools.repeat((torch.ones(4, 3), torch.ones(4, 2))))
    assert plan.steps is None
    assert plan.learning_rates == {}
    assert "has no length" in str(plan)


# ---------------------------------------------------------------------------------------------- what it refuses


def test_plan_refuses_what_run_refuses() -> None:
    """A schedule that is too short."""
    loader, valid = loaders()
    trainer = make(scheduler="onecycle", scheduler_step_on_batch=True)
    with pytest.raises(ConfigError, match=r"ends after 60 steps, but this run has .*a length of 66 steps"):
        trainer.plan(11, loader, valid)
    with pytest.raises(ConfigError, match="n_epoch"):
        trainer.plan(0.5, loader)


# -------------------------------------------------------------------------------------------------- how it shows


class Alike(Trainer):
    """Returns one metric from both of its steps, as the plan assumes."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}

    test_step = train_step


def test_plan_prints_a_page() -> None:
    options = {"gradient_accumulation_steps": 3, "scheduler_step_on_batch": False}
    trainer = make([GradientAccumulationAddon, EarlyStoppingAddon], "cosine", **options)
    loader, valid = loaders()
    plan = trainer.plan(4, loader, valid)
    text = str(plan)
    for told in ("6 an epoch of 4 samples", "2 an epoch, 8 in this run, of 3 batches each; 12 samples a step",
                 "4 ended, the last at step 8", "at steps 2, 4, 6, 8", "0.01 at step 1", "may end"):  # fmt: skip
        assert told in text
    assert repr(plan) == text
    assert plan.effective_batch_size == 12


def test_plan_says_why_a_loader_does_not_take_the_exact_data_path() -> None:
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 2))
    plan = make().plan(1, DataLoader(data, batch_size=4, num_workers=1))
    assert any("exact data path" in note and "worker" in note for note in plan.notes)
    assert not any("exact data path" in note for note in make().plan(1, DataLoader(data, batch_size=4)).notes)


def test_plan_of_several_optimizers_and_loaders() -> None:
    model = nn.ModuleDict({"a": oracle.Net(), "b": oracle.Net()})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"}
    schedulers = {name: SCHEDULERS["step"](optimizer) for name, optimizer in optimizers.items()}

    class Pair(Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": {n: nn.functional.mse_loss(self.model[n](batch[0]), batch[1]) for n in "ab"}}

        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"error": 1.0, "output": batch[0]}

    trainer = Pair(model, "cpu", optimizer=optimizers, scheduler=schedulers, monitor="error")
    loader, valid = loaders()
    plan = trainer.plan(3, loader, {"x": valid, "y": valid})
    trainer.run(3, loader, {"x": valid, "y": valid})
    assert plan.learning_rates == trainer.rates


def test_plan_is_quick_for_a_long_run() -> None:
    """A hundred thousand steps are planned in a few seconds, and a million are not simulated one by one."""
    batches = DataLoader(TensorDataset(torch.zeros(100_000, 1)), batch_size=1)
    model = nn.Linear(1, 1)
    trainer = Task(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    plan = trainer.plan(100, batches)
    assert plan.steps == 10_000_000
    assert any("first 200000 steps" in note for note in plan.notes)
    assert hashlib.sha256(str(plan).encode()).hexdigest()
    assert os.listdir(".") == []
    assert isinstance(plan, zae.plan.page.RunPreview)


def test_a_run_in_mode_test_has_no_steps() -> None:
    """Run() evaluates its loader then; a monitor is nothing to it."""
    trainer = PlainTask(oracle.Net(), "cpu", mode="test", monitor="recall")
    loader = [(torch.ones(2, 3), torch.ones(2, 2))] * 3
    made = trainer.plan(2, loader)
    assert (made.batches_per_epoch, made.steps, made.epoch_ends, made.logs_at) == (3, 0, [], [])
    assert "nothing is trained" in str(made)
    assert trainer.run(2, loader)["step"] == 0


@pytest.mark.parametrize("scheduler", [None, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)])
def test_a_trainer_without_an_optimizer_is_not_planned_to_train(scheduler: Any) -> None:
    """Made to evaluate and toggled, it is told what ``run`` would tell it; what it lacks is named."""
    trainer = Task(nn.Linear(3, 2), "cpu", "test", scheduler=scheduler)
    data = [(torch.ones(4, 3), torch.ones(4, 2))]
    assert "nothing is trained" in str(trainer.plan(1, data))
    trainer.toggle("train")
    assert "optimizer_step()" in trainer.explain()
    with pytest.raises(ConfigError, match="optimizer is None, and training needs one"):
        trainer.plan(1, data)
    with pytest.raises(ConfigError, match="has no optimizer; give" if scheduler else "optimizer is None, and train"):
        trainer.run(1, data)


class Growing:
    """A batch sampler whose batches are larger, and fewer, in each epoch."""

    def __init__(self) -> None:
        self.size = 2

    def __len__(self) -> int:
        return -(-24 // self.size)

    def __iter__(self) -> Any:
        yield from torch.arange(24).split(self.size)
        self.size *= 2


def test_an_epoch_of_another_number_of_batches_is_said_to_be_uncertain() -> None:
    """A batch sampler of one's own may make another number in each; one of torch's does not."""
    data = TensorDataset(torch.ones(24, 3), torch.ones(24, 2))
    model = nn.Linear(3, 2)
    trainer = PlainTask(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    growing, said = DataLoader(data, batch_sampler=Growing()), "counted with the 12 batches that Growing has now"
    made = trainer.plan(3, growing)
    assert made.steps == 36
    assert said in str(made)
    assert said not in str(trainer.plan(1, growing))
    assert "batches that" not in str(trainer.plan(3, DataLoader(data, batch_size=2)))
    assert trainer.run(3, growing)["step"] == 12 + 6 + 3
