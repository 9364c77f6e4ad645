"""When values are marked, put back, and in which object; what does not come back; what is said."""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import os
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from user_state.test_values import Transition

from kit.faults import everything
from kit.hand import data
from kit.ranks import each_rank, on_ranks
from zae import AddOnBase, Every, Trainer
from zae.addons import CallbackAddon, EMAAddon, GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon
from zae.errors import CheckpointMismatch, ConfigError
from zae.loop.user_state import names_of_trainer

INPUTS = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]
STOPS = (2, 6, 9)  # In the first epoch, at its end, and in the second one.


class Task(Trainer):
    """Its loss depends on what a class derived from it keeps."""

    def factor(self, batch: Any) -> float:
        return 1.0

    def train_step(self, batch: Any) -> Any:
        return {"loss": (self.model(batch * self.factor(batch)) - 1).square().mean()}

    def test_step(self, batch: Any) -> Any:
        return {"loss": (self.model(batch) - 1).square().mean()}


def build(task: Any, folder: Path, model: Callable[[], nn.Module] = lambda: nn.Linear(4, 1), **options: Any) -> Any:
    add_ons = options.pop("add_ons", ())
    known: dict[str, Any] = {"save_every": Every(epochs=9), "resume": "auto", "log_bar": False, "seed": 0, **options}
    optimizer = known.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    return task.add_on(StateManagerAddon, *add_ons)(model, "cpu", optimizer=optimizer, save_path=folder, **known)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in trainer.unwrap().state_dict().items()}


def assert_resumes(
    task: Callable[[], Any], tmp_path: Path, *args: Any, epochs: int = 2, stops: Any = STOPS, **options: Any
) -> Any:
    """Compare runs that are ended and resumed with one that is not; return the trainer of the last one."""

    def train(folder: str, *limits: int | None) -> Any:
        for limit in limits:
            trainer = build(task(), tmp_path / folder, *args, **options)
            trainer.run(epochs, INPUTS, max_steps=limit)
        return trainer

    straight = weights(train("straight", None))
    for stop in stops:
        trainer = train(f"from {stop}", stop, None)
        for name, value in weights(trainer).items():
            assert torch.equal(value, straight[name]), f"resumed at step {stop}: {name} differs"
    return trainer


@contextlib.contextmanager
def catch_warnings() -> Iterator[list[str]]:
    """Yield the warnings of zae within the block, also in a process that a test has begun."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zae").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("zae").removeHandler(handler)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# --------------------------------------------------------------------------------------- hooks that begin values anew


def hidden_state(where: str) -> Any:
    class Recurrent(Task):
        hidden: Any = None

        def reset(self) -> None:
            self.hidden = torch.zeros(())

        def factor(self, batch: Any) -> float:
            self.hidden = 0.5 * self.hidden + batch.mean()
            return 1.0 + float(self.hidden)

    def hook(self: Any, *args: Any) -> Any:
        if where == "run_epoch":
            self.reset()
            return super(Recurrent, self).run_epoch(*args)
        result = getattr(super(Recurrent, self), where)(*args)
        self.reset()
        return result

    setattr(Recurrent, where, hook)
    if where in ("on_epoch_end", "on_step_end"):
        Recurrent.hidden = torch.zeros(())
    return Recurrent


HOOKS = ["on_run_begin", "on_epoch_begin", "run_epoch", "on_epoch_end", "setup", "on_step_begin", "on_step_end"]


@pytest.mark.parametrize("where", HOOKS)
def test_a_hidden_state_that_a_hook_begins(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_resumes(lambda: hidden_state(where), tmp_path)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("generator", [None, torch.Generator()])
@pytest.mark.parametrize("where", ["on_epoch_begin", "run_epoch"])
@pytest.mark.parametrize("draw", ["seed", "number"])
def test_random_numbers_that_a_hook_draws_as_an_epoch_begins(
    draw: str, where: str, generator: torch.Generator | None, tmp_path: Path
) -> None:
    """They are drawn after those of the epoch before, also where an epoch is the first after a resume."""

    class Draws(Task):
        level = 0.0

        def factor(self, batch: Any) -> float:
            return 1.0 + self.level

    def hook(self: Any, *args: Any) -> Any:
        if where == "on_epoch_begin":
            getattr(super(Draws, self), where)(*args)
        if draw == "seed":
            (generator or torch.default_generator).manual_seed(self.progress_checker.epoch)
        else:
            self.level = float(torch.rand((), generator=generator))
        return super(Draws, self).run_epoch(*args) if where == "run_epoch" else None

    setattr(Draws, where, hook)

    def train(folder: str, *limits: int | None) -> Any:
        for limit in limits:
            if generator is not None:
                generator.manual_seed(3)
            loader = DataLoader(torch.cat(INPUTS), batch_size=6, shuffle=True, generator=generator)
            trainer = build(Draws, tmp_path / folder)
            trainer.run(3, loader, max_steps=limit)
        return weights(trainer)

    straight = train("straight", None)
    for stop in (3, 6, 12):
        ended = train(f"from {stop}", stop, None)
        assert all(torch.equal(ended[name], straight[name]) for name in straight), stop


class OwnLoop(Task):
    """Begins its state in a loop of its own."""

    def run_epoch(self, loader: Any) -> Any:
        self.level = 0.0
        for batch in loader:
            self.run_batch(batch)

    def factor(self, batch: Any) -> float:
        self.level += float(batch.mean())
        return 1.0 + self.level


class Template(Task):
    """Takes a copy of nothing: the zeros that it begins with stay zeros."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zeros = torch.zeros(2)
        self.hidden = self.zeros

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.hidden = self.zeros

    def factor(self, batch: Any) -> float:
        self.hidden = self.hidden + batch.mean()
        return 1.0 + float(self.hidden.sum()) + float(self.zeros.sum())


class Aliases(Task):
    """Has one tensor under two names, and in a list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = torch.zeros(1)
        self.all, self.same = [self.mean, 0], self.mean

    def factor(self, batch: Any) -> float:
        self.mean.mul_(0.5).add_(batch.mean())
        self.all[1] += 1
        return 1.0 + float(self.all[0] + self.same)


class Learner(Task):
    """Has a target network, a queue of named tuples, and another optimizer, as reinforcement learning has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory: deque[Any] = deque(maxlen=4)
        self.target = copy.deepcopy(self.unwrap())
        self.temperature = torch.zeros(1, requires_grad=True)
        self.other = torch.optim.Adam([self.temperature], lr=0.1)

    def factor(self, batch: Any) -> float:
        self.memory.append(Transition(batch.mean(0), float(batch.sum())))
        with torch.no_grad():
            for mean, weight in zip(self.target.parameters(), self.model.parameters(), strict=True):
                mean.data.copy_(0.9 * mean.data + 0.1 * weight.data)
        (self.temperature.exp() * batch.mean()).sum().backward()
        self.other.step()
        self.other.zero_grad()
        values = self.target(torch.stack([each.state for each in self.memory]))
        return 1.0 + 0.1 * float(values.detach().mean()) + float(self.temperature) + 0.01 * self.memory[0].reward


class Phase(enum.Enum):
    FIRST = 1
    SECOND = 2


class Curriculum(Task):
    """Goes from one of its objects to the next, and from one phase to the next."""

    class Level:
        def __init__(self, factor: float) -> None:
            self.factor, self.uses = factor, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.levels = [self.Level(1.0 + index) for index in range(4)]
        self.current, self.phase = self.levels[0], Phase.FIRST

    def factor(self, batch: Any) -> float:
        self.current.uses += 1
        if self.current.uses == 4:
            self.current = self.levels[self.levels.index(self.current) + 1]
            self.phase = Phase.SECOND
        return self.current.factor * self.phase.value


class Removes(Task):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.warm_up, self.settings = 3.0, {"first": 2.0, "second": 1.0}

    def factor(self, batch: Any) -> float:
        found = getattr(self, "warm_up", 1.0) * sum(self.settings.values())
        if self.progress_checker.step == 1:
            del self.warm_up
            del self.settings["first"]
        return found


class NamesOfZae(Task):
    """Has attributes of the names that objects of zae have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.index = self.batch = self.inside = self.slot = self.news = self.signals = self.records = 0

    def factor(self, batch: Any) -> float:
        for name in ("index", "batch", "inside", "slot", "news", "signals", "records"):
            setattr(self, name, getattr(self, name) + 1)
        return 1.0 + 0.1 * (self.index + self.batch + self.inside + self.slot + self.news + self.signals + self.records)


class OwnState(Task):
    """Saves one of two attributes itself."""

    first = second = 0.0

    def factor(self, batch: Any) -> float:
        self.first += 1.0
        self.second = 0.5 * self.second + float(batch.mean())
        return 1.0 + 0.1 * self.first + self.second

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "first": self.first}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        rest = dict(state)
        self.first = rest.pop("first")
        super().load_state_dict(rest, strict)


class Keeper:
    """Has a state of its own, which leaves out one attribute."""

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0
        self.handle = iter(range(3))  # No checkpoint can hold it.

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


class HasKeeper(Task):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keeper = Keeper()

    def factor(self, batch: Any) -> float:
        self.keeper.count += 1
        self.keeper.mean = 0.5 * self.keeper.mean + float(batch.mean())
        return 1.0 + 0.1 * self.keeper.count + self.keeper.mean


class KeepsGradients(Task):
    def zero_grad(self) -> None:
        pass


class EverySecondStep(Task):
    def optimizer_step(self) -> bool:
        return super().optimizer_step() if self.progress_checker.step % 2 else False

    def zero_grad(self) -> None:
        if self.progress_checker.step % 2:
            super().zero_grad()


class Weights(Task):
    """Has the model's own tensors in attributes: as parameters, and as views of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chosen: list[Any] = []
        self.shown: Any = None

    def factor(self, batch: Any) -> float:
        self.chosen = list(self.model.parameters())
        self.shown = self.model.state_dict()
        return 1.0 + float(self.chosen[0].detach().sum() + self.shown["weight"].sum())


class Large(Task):
    """Changes one number of large tensors and arrays, also through ``data``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows, self.averages = torch.zeros(600, 1000), torch.zeros(600, 1000)
        self.table = np.zeros((300, 1000))

    def factor(self, batch: Any) -> float:
        step = self.progress_checker.step
        self.rows[step, 500] += 1
        self.averages.data[step, 7] += 1
        self.table[step, 3] += 1
        return 1.0 + 0.01 * float(self.rows.sum() + self.averages.sum() + self.table.sum())


TASKS = (
    *(OwnLoop, Template, Aliases, Learner, Curriculum, Removes, NamesOfZae, OwnState, HasKeeper, KeepsGradients),
    *(EverySecondStep, Weights, Large),
)


@pytest.mark.parametrize("task", TASKS)
def test_a_task(task: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_resumes(lambda: task, tmp_path)
    assert warnings_in(caplog) == []


class Buffer(nn.Module):
    """Keeps a hidden state in a buffer, which is in its state, or in one that is not."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("hidden", torch.zeros(()), persistent=persistent)

    def forward(self, inputs: Any) -> Any:
        self.hidden = 0.5 * self.hidden + inputs.mean()
        return self.linear(inputs * (1 + self.hidden))


class BeginsBuffer(Task):
    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.unwrap().hidden.zero_()


class ReplacesBuffer(Task):
    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        self.unwrap().hidden = torch.zeros(())


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("task", [Task, BeginsBuffer, ReplacesBuffer])
def test_a_buffer(task: Any, persistent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_resumes(lambda: task, tmp_path, lambda: Buffer(persistent))
    assert warnings_in(caplog) == []


def lower_rate(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.7


def clear_momenta(trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        state["momentum_buffer"].zero_()


def shrink(trainer: Any) -> None:
    trainer.unwrap().weight.data.mul_(0.9)  # Which no version of the tensor counts.


HOOK_ACTS: dict[str, Callable[[Any], None]] = {
    "rate": lower_rate,
    "momenta": clear_momenta,
    "state": lambda trainer: trainer.optimizer.state.clear(),
    "schedule": lambda trainer: trainer.scheduler.step(),
    "weights": shrink,
}


def task_with(hook: str, act: Callable[[Any], None]) -> Any:
    def acting(self: Any, *args: Any) -> Any:
        if hook == "run_epoch":
            act(self)
            return super(acts, self).run_epoch(*args)
        getattr(super(acts, self), hook)(*args)
        return act(self)

    acts = type("Acts", (Task,), {hook: acting, "__module__": __name__})
    return acts


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("hook", ["on_epoch_begin", "run_epoch"])
@pytest.mark.parametrize("name", list(HOOK_ACTS))
def test_what_a_hook_that_begins_an_epoch_does_is_done_once_an_epoch(name: str, hook: str, tmp_path: Path) -> None:
    """A resume within an epoch calls it again, of a callback too: optimizers, schedules and weights are put back."""
    options: dict[str, Any] = {"scheduler": scheduled, "epochs": 3, "stops": (2, 6, 9)}
    assert_resumes(lambda: task_with(hook, HOOK_ACTS[name]), tmp_path / "task", **options)
    if hook != "run_epoch":
        callback = type("Acting", (), {hook: lambda self, trainer: HOOK_ACTS[name](trainer)})
        options |= {"add_ons": (CallbackAddon,), "callbacks": [callback()]}
        assert_resumes(lambda: Task, tmp_path / "callback", **options)


def equal_layers() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))


def swap_layers(trainer: Any) -> None:
    layers = trainer.unwrap()
    layers[0], layers[2] = layers[2], layers[0]


def swap_weights(trainer: Any) -> None:
    first, _, second, _ = trainer.unwrap()
    first.weight, second.weight = second.weight, first.weight


@pytest.mark.parametrize("hook", ["on_epoch_begin", "run_epoch"])
@pytest.mark.parametrize("act", [swap_layers, swap_weights])
def test_layers_that_change_places_as_an_epoch_begins(act: Callable[[Any], None], hook: str, tmp_path: Path) -> None:
    """Each keeps its weights and its momenta: those of the optimizer were put back to the other one."""
    assert_resumes(lambda: task_with(hook, act), tmp_path, equal_layers, epochs=3, stops=(2, 6, 9))


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", ["rate", "schedule", "weights"])
def test_what_a_hook_changes_as_a_run_begins_is_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is called in each process, after the state was loaded."""
    for act, count in ((lambda trainer: None, 0), (HOOK_ACTS[name], 1)):
        for limit in (2, 9):
            trainer = build(task_with("on_run_begin", act), tmp_path / str(count), scheduler=scheduled)
            trainer.run(2, INPUTS, max_steps=limit)
        assert [text[:24] for text in warnings_in(caplog)] == ["on_run_begin has changed"] * count


def test_a_guard_that_goes_back_within_an_epoch_may_lower_the_rate(tmp_path: Path) -> None:
    """Its on_epoch_begin is called before the run continues, and what that sets is no repetition."""

    class Guard(Task):
        returns = 0
        unsaved_attributes = ("returns",)

        def on_step_end(self, outputs: Any) -> None:
            super().on_step_end(outputs)
            if self.progress_checker.step == 4 and not self.returns:
                self.returns += 1
                self.continue_from(self.save_path / "step-00000002")

        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.returns:
                self.optimizer.param_groups[0]["lr"] = 0.01

    trainer = build(Guard, tmp_path, save_every=1, keep_last=None)
    trainer.run(1, INPUTS)
    assert (trainer.progress_checker.step, trainer.optimizer.param_groups[0]["lr"]) == (6, 0.01)


class Momentum(torch.optim.Optimizer):
    """Keeps all of its state in attributes, which torch does not save."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count, self.means, self.stream = 0, {}, torch.Generator().manual_seed(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            mean = self.means.setdefault(parameter, torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
            parameter.sub_(mean * torch.rand((), generator=self.stream), alpha=0.1 / self.count)


def test_an_optimizer_of_the_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_resumes(lambda: Task, tmp_path, optimizer=Momentum)
    assert warnings_in(caplog) == []


class ById(torch.optim.SGD):
    """Keeps momenta by the ids of the parameters, and saves them by their places."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.momenta: dict[int, torch.Tensor] = {}

    def held(self) -> list[nn.Parameter]:
        return self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.held():
            each.grad = self.momenta.setdefault(id(each), torch.zeros_like(each)).mul_(0.9).add_(each.grad)
        super().step()

    def state_dict(self) -> dict[str, Any]:
        momenta = [self.momenta[id(each)].clone() for each in self.held() if id(each) in self.momenta]
        return {**super().state_dict(), "momenta": momenta}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "momenta"})
        self.momenta = {id(each): momentum.clone() for each, momentum in zip(self.held(), state["momenta"])}


def test_what_an_optimizer_loads_itself_is_not_put_back_over_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Magma of pytorch_optimizer does so: ids of the process that has saved name no parameter here."""
    assert_resumes(lambda: Task, tmp_path, optimizer=ById)
    assert warnings_in(caplog) == []


# -------------------------------------------------------------------------------------------- what does not come back


class Processes(Task):
    """Notes what is of the process as a run begins."""

    def on_run_begin(self) -> None:
        super().on_run_begin()
        self.began, self.process = time.time(), os.getpid()
        self.marker = object()


def test_what_is_set_as_a_run_begins_is_of_its_process(tmp_path: Path) -> None:
    first = build(Processes, tmp_path)
    first.run(2, INPUTS, max_steps=3)
    second = build(Processes, tmp_path)
    before = time.time()
    second.run(2, INPUTS)
    assert second.began >= before
    assert "values" not in second.state_dict().get("user_state", {})


class LazyHead(Task):
    """Has a module beside the model whose parameters the first step creates."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.head = nn.LazyLinear(1)
        self.weights = [nn.LazyLinear(1).weight]  # They stay without a shape.

    def factor(self, batch: Any) -> Any:
        outputs = self.head(batch).detach()
        with torch.no_grad():
            self.head.weight.mul_(0.9)
        return outputs


def test_a_lazy_module_beside_the_model(tmp_path: Path) -> None:
    assert_resumes(lambda: LazyHead, tmp_path)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.LeakyReLU(0.1), nn.Linear(8, 1))


def set_option(name: str, value: float) -> Callable[[Any], None]:
    return lambda trainer: setattr(trainer, name, value)


SETTINGS: dict[str, Callable[[Any], None]] = {
    "rate of a Dropout": lambda trainer: setattr(trainer.unwrap()[1], "p", 0.5),
    "slope of a LeakyReLU": lambda trainer: setattr(trainer.unwrap()[2], "negative_slope", 0.5),
    "another module of the class": lambda trainer: trainer.unwrap().__setitem__(2, nn.LeakyReLU(0.5)),
    "gradient_clip": set_option("gradient_clip", 0.01),
    "gradient_accumulation_steps": set_option("gradient_accumulation_steps", 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_training_changes(name: str, tmp_path: Path) -> None:
    """Of a module of torch, and of zae: once, after the first epoch."""

    class Schedules(Task):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.progress_checker.epoch == 1 and not self.progress_checker.epoch_batch:
                SETTINGS[name](self)

    options: Any = {"add_ons": [GradientAccumulationAddon]}
    last = assert_resumes(lambda: Schedules, tmp_path, net, epochs=3, stops=(5, 8), **options)
    plain = build(Task, tmp_path / "plain", net, **options)
    plain.run(3, INPUTS)
    assert not torch.equal(last.unwrap()[0].weight, plain.unwrap()[0].weight), "the setting has no effect"


def test_an_option_that_the_script_changed_is_the_scripts(tmp_path: Path) -> None:
    build(Task, tmp_path, gradient_clip=1.0).run(2, INPUTS, max_steps=3)
    second = build(Task, tmp_path, gradient_clip=2.0)
    second.run(2, INPUTS)
    assert second.gradient_clip == 2.0


def test_a_setting_that_the_script_changed_is_the_scripts(tmp_path: Path) -> None:
    """Also in a dict of which training changes another entry."""

    class Settings(Task):
        scale = 1.0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.settings = {"limit": 5, "seen": 0}

        def factor(self, batch: Any) -> float:
            self.settings["seen"] += 1
            return self.scale

    build(Settings, tmp_path).run(2, INPUTS, max_steps=3)
    second = build(Settings, tmp_path)
    second.scale, second.settings["limit"] = 2.0, 9
    second.run(2, INPUTS)
    assert (second.scale, second.settings) == (2.0, {"limit": 9, "seen": 12})


def test_a_class_leaves_attributes_out(tmp_path: Path) -> None:
    class Counts(Task):
        unsaved_attributes = ("reads",)
        reads = total = 0

        def factor(self, batch: Any) -> float:
            self.reads += 1
            self.total += 1
            return 1.0

    build(Counts, tmp_path).run(2, INPUTS, max_steps=3)
    second = build(Counts, tmp_path)
    second.run(2, INPUTS)
    assert (second.reads, second.total) == (9, 12)


def test_a_secret_is_in_no_file_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "hf_" + "abcdefghijklmnop" * 2

    class Client:
        def __init__(self) -> None:
            self.password = ""

    class Data(torch.utils.data.Dataset[Any]):
        token = ""

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            self.token = f"{secret}{index}"
            return INPUTS[index]

    class Collate(Client):
        def __call__(self, rows: Any) -> Any:
            self.password = secret
            return torch.cat(rows)

    class LogsIn(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.client, self.note, self.headers = Client(), "", {"a": ""}

        def factor(self, batch: Any) -> float:
            self.client.password = self.note = secret
            self.headers["a"] = f"Authorization: Bearer {secret}"
            return 1.0

    build(LogsIn, tmp_path).run(1, torch.utils.data.DataLoader(Data(), 2, collate_fn=Collate()))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    text = "\n".join(warnings_in(caplog))
    assert "self.note has changed" in text
    assert "self.client.password has changed" in text
    assert secret not in text


def test_a_resume_into_another_class_says_what_has_no_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Before(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.count, self.inner = 0, Keeper()

        def factor(self, batch: Any) -> float:
            self.count += 1
            self.inner.mean += 1.0
            return 1.0

    class After(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.count = ["another kind"]

    build(Before, tmp_path).run(2, INPUTS, max_steps=3)
    second = build(After, tmp_path)
    second.run(2, INPUTS)
    assert second.count == ["another kind"]
    (text,) = [each for each in warnings_in(caplog) if "have no place here" in each]
    assert "self.count (it was of the kind 'number', and is a list)" in text
    assert "self.inner.mean (its object does not exist" in text


@pytest.mark.parametrize(
    ("owner", "key"),
    [
        ("task", "train_step"),
        ("task", "model"),
        ("task", "_module"),
        ("task", "device"),
        ("task", "best"),
        ("task", "metrics"),
        ("task", "__class__"),
        ("task", "__dict__"),
        ("task", "user_state"),
        ("task", "a.b"),
        ("model", "forward"),
        ("model", "_parameters"),
        ("model", "training"),
        ("model", "weight"),
        ("task.optimizer", "lr"),
        ("options", "save_path"),
        ("options", "train_step"),
        ("os", "environ"),
    ],
)
@pytest.mark.parametrize("value", [7, ["list", [1]], ["object", "task"], ["object", "model"]])
def test_a_hostile_checkpoint_reaches_nothing_else(owner: str, key: str, value: Any, tmp_path: Path) -> None:
    class Hostile(Task):
        def factor(self, batch: Any) -> float:
            return 1.0

    trainer = build(Hostile, tmp_path)
    trainer.run(1, INPUTS, max_steps=2)
    before, methods = weights(trainer), (trainer.train_step, trainer.model, trainer.device, trainer.unwrap().forward)
    entry = {"owner": owner, "key": key, "was": None, "in place": True, "of class": True, "value": value}
    state = {**trainer.state_dict(), "user_state": {"values": [entry, {**entry, "of class": False}]}}
    trainer.load_state_dict(state)
    assert (trainer.train_step, trainer.model, trainer.device, trainer.unwrap().forward) == methods
    assert not hasattr(Hostile, "a.b")
    assert "train_step" not in vars(trainer)
    for name, each in weights(trainer).items():
        assert torch.equal(each, before[name])


@pytest.mark.parametrize(
    "entry",
    [
        [],
        {"values": 3},
        {"values": [3]},
        {"values": [{"owner": "task"}]},
        {"values": [{"owner": 1, "key": "a", "was": None, "in place": True, "of class": False, "value": 1}]},
        {"removed": [["task"]]},
        {"states": {1: 2}},
        {"gradients": {"weight": 3}},
    ],
)
def test_what_zae_has_not_saved_is_refused_before_anything_is_loaded(entry: Any, tmp_path: Path) -> None:
    trainer = build(Task, tmp_path)
    trainer.run(1, INPUTS, max_steps=2)
    state = {**copy.deepcopy(trainer.state_dict()), "user_state": entry or [1]}
    trainer.run(1, INPUTS)
    step = trainer.progress_checker.step
    with pytest.raises(CheckpointMismatch, match="user_state"):
        trainer.load_state_dict(state)
    assert trainer.progress_checker.step == step


class Game:
    """It cannot be looked into, and says itself where it stands: a new dict, list and stream each time."""

    def __init__(self, seed: int) -> None:
        self.moves: Iterator[float] = iter([])
        self.stream = np.random.default_rng(seed)
        self.place = np.zeros(2)

    def step(self) -> float:
        self.place = 0.9 * self.place + self.stream.random(2)
        return float(self.place.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"place": list(self.place), "stream": self.stream.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = np.array(state["place"])
        self.stream.bit_generator.state = state["stream"]


def test_several_objects_with_states_of_their_own(tmp_path: Path) -> None:
    class Plays(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.games = [Game(seed) for seed in range(8)]

        def factor(self, batch: Any) -> float:
            return 1.0 + sum(game.step() for game in self.games) / 100

    assert_resumes(lambda: Plays, tmp_path)


# ------------------------------------------------------------------------------------------------------ what is said


def test_what_no_checkpoint_can_hold_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Reads(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.others = iter(INPUTS * 9)
            self.grown: list[Any] = []

        def factor(self, batch: Any) -> float:
            self.grown.append(Keeper())
            return 1.0 + float(next(self.others).mean())

    build(Reads, tmp_path, save_every=1).run(2, INPUTS)
    grown, others = sorted(warnings_in(caplog))
    assert re.match(r"self.grown has changed, and no checkpoint can hold a \S*test_user_state.Keeper: ", grown)
    assert others.startswith("self.others has changed, and no checkpoint can hold a builtins.list_iterator")
    assert "unsaved_attributes = ('others',)" in others


class Window(deque[float]):
    """A deque of a class of the user: what it holds is not in its attributes."""


class Total(int):
    """A number of such a class."""


HELD_IN_C = [
    (Window([1.0]), Window([1.0, 2.0])),
    (Total(1), Total(2)),
    (bytearray(b"a"), bytearray(b"b")),
    (Decimal(1), Decimal(2)),
    (date(2020, 1, 1), date(2021, 1, 1)),
]


@pytest.mark.parametrize(("value", "other"), HELD_IN_C)
def test_a_value_that_is_held_in_c_is_named(
    value: Any, other: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Changes(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kept = value

        def factor(self, batch: Any) -> float:
            self.kept = other
            return 1.0

    build(Changes, tmp_path, save_every=1).run(2, INPUTS)
    (warning,) = warnings_in(caplog)
    assert warning.startswith("self.kept has changed, and no checkpoint can hold a ")


def test_too_many_values_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Many(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for index in range(5_100):
                setattr(self, f"value_{index}", index)

    build(Many, tmp_path, save_every=1).run(2, INPUTS)
    (warning,) = warnings_in(caplog)
    assert re.match(r"task.value_\d+ and what comes after it is not looked at: .* more than 5000 values", warning)


def test_the_size_of_a_replay_buffer_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Replays(Task):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.replay = torch.zeros(200, 50_000)

        def factor(self, batch: Any) -> float:
            self.replay[self.progress_checker.step, :4] = batch[0]
            return 1.0 + float(self.replay.sum())

    assert_resumes(lambda: Replays, tmp_path, stops=(9,), keep_last=1)
    told = [each for each in warnings_in(caplog) if "MB" in each]
    assert len(told) == 3, "once in each process"
    assert told[0].startswith("self.replay has changed, and each checkpoint contains its 38 MB")


class Images(torch.utils.data.Dataset[Any]):
    """It opens its file as it is first read, and keeps what it has read."""

    def __init__(self) -> None:
        self.transform: Callable[[Any], Any] = torch.abs
        self.file: Any = None
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or threading.Lock()
        self.cache.setdefault(index, Keeper())
        return self.transform(INPUTS[index % 6][index // 6])


def collate_doubled(rows: list[Any]) -> Any:
    return torch.stack(rows) * 2


DATA_CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "nothing": (lambda loader: None, ""),
    "transform": (lambda loader: setattr(loader.dataset, "transform", torch.square), "loader.dataset.transform"),
    "collate_fn": (lambda loader: setattr(loader, "collate_fn", collate_doubled), "loader.collate_fn"),
}


@pytest.mark.parametrize("change", DATA_CHANGES)
def test_functions_of_the_data_that_training_replaces(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are named; a file that is opened as it is first read, and a cache, are not: a resume opens it too."""
    replace, place = DATA_CHANGES[change]
    loader = DataLoader(Images(), 3)

    class Switches(Task):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.progress_checker.epoch == 1:
                replace(loader)

    build(Switches, tmp_path, save_every=1).run(3, loader)
    expected = [f"{place} has changed, and no checkpoint can hold a "] if place else []
    assert [text[: len(expected[0])] if expected else text for text in warnings_in(caplog)] == expected


@pytest.mark.parametrize("shuffles", [True, False])
def test_a_list_of_batches_that_training_shuffles(
    shuffles: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = list(INPUTS)

    class Shuffles(Task):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if shuffles:
                batches.reverse()

    build(Shuffles, tmp_path, save_every=1).run(3, batches)
    expected = ["training has changed the list of batches"] * shuffles
    assert [text[: len(expected[0])] if expected else text for text in warnings_in(caplog)] == expected


def test_attributes_of_a_dataset_that_workers_never_see(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Data(torch.utils.data.Dataset[Any]):
        level = 0

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return INPUTS[index] + self.level

    class Raises(Task):
        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            self.current_run.user_loader.dataset.level += 1

    loader = torch.utils.data.DataLoader(Data(), 2, num_workers=1, persistent_workers=True)
    build(Raises, tmp_path).run(3, loader)
    (text,) = warnings_in(caplog)
    assert text.startswith("loader.dataset.level has changed in this process, and the workers of the loader")


# ----------------------------------------------------------------------------------------------- more than one run


class Counts(Task):
    count = 0

    def factor(self, batch: Any) -> float:
        self.count += 1
        return 1.0 + 0.01 * self.count


def test_several_calls_of_run(tmp_path: Path) -> None:
    """What the script sets between two calls is the script's, in the call that it is for."""

    def script(folder: str, limit: int | None) -> Any:
        trainer = build(Counts, tmp_path / folder)
        trainer.run(1, INPUTS, max_steps=limit)
        if limit is not None and limit < 6:
            return None
        trainer.count = 100
        trainer.run(1, INPUTS, max_steps=None if limit is None else limit - 6)
        return trainer.count, weights(trainer)

    count, straight = script("straight", None)
    for stop in (2, 8):
        script(f"from {stop}", stop)
        again, resumed = script(f"from {stop}", None)
        assert again == count
        assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.parametrize("steps", [3, 6, 9], ids=["within an epoch", "at its end", "within the second"])
@pytest.mark.parametrize("same_loader", [True, False])
@pytest.mark.parametrize("own_stream", [True, False])
def test_draws_between_two_calls_of_run(own_stream: bool, same_loader: bool, steps: int, tmp_path: Path) -> None:
    """They count for the call that follows them, also where the newest checkpoint is of the end of the call before."""

    class Ended(Exception):
        pass

    def script(folder: str, ends_after: int = 9) -> Any:
        def loader() -> Any:
            generator = torch.Generator().manual_seed(3) if own_stream else None
            return DataLoader(torch.cat(INPUTS), batch_size=6, shuffle=True, generator=generator)

        trainer = build(Task, tmp_path / folder)
        loaders = [loader(), loader(), loader()]
        for call in range(3):
            trainer.run(2, loaders[0 if same_loader else call], max_steps=steps)
            if call == ends_after:
                raise Ended
            torch.rand(3)
            if own_stream and steps == 6:  # Within an epoch its loader's own stream goes on from the checkpoint.
                torch.rand(3, generator=loaders[0].generator)
        return weights(trainer), torch.rand(1)

    straight, number = script("straight")
    for call in range(2):
        with pytest.raises(Ended):
            script(f"ended after {call}", call)
        resumed, again = script(f"ended after {call}")
        assert all(torch.equal(resumed[name], straight[name]) for name in straight), call
        assert torch.equal(number, again), call


@pytest.mark.parametrize("limits", [(None,), (2, None), (6, None), (None, None), (2, 2)], ids=str)
def test_what_the_end_of_a_run_counts_is_counted_once(limits: Any, tmp_path: Path) -> None:
    """A run that is resumed, also a finished one, ends again: what its end changed before is not in the state."""

    class Ends(Task):
        steps = ends = 0

        def factor(self, batch: Any) -> float:
            self.steps += 1
            return 1.0

        def on_run_end(self) -> None:
            super().on_run_end()
            self.ends += 1

    for limit in limits:
        trainer = build(Ends, tmp_path)
        trainer.run(2, INPUTS, max_steps=limit)
    assert trainer.ends == 1
    assert trainer.steps == (limits[-1] or 12)


def test_two_trainers_of_one_class(tmp_path: Path) -> None:
    def script(folder: str, limit: int | None) -> list[Any]:
        ends = []
        for name in "ab":
            trainer = build(Counts, tmp_path / folder / name)
            trainer.run(2, INPUTS, max_steps=limit)
            ends.append((trainer.count, weights(trainer)["weight"].tolist()))
        return ends

    straight = script("straight", None)
    script("parts", 4)
    assert script("parts", None) == straight


@pytest.mark.parametrize("through", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_copy_goes_on_and_saves(through: Any, tmp_path: Path) -> None:
    first, straight = build(Counts, tmp_path / "a"), build(Counts, tmp_path / "b")
    first.run(1, INPUTS)
    straight.run(1, INPUTS)
    twin = through(first)
    twin.run(1, INPUTS)
    straight.run(1, INPUTS)
    assert twin.count == straight.count == 12
    assert torch.equal(twin.unwrap().weight, straight.unwrap().weight)
    again = build(Counts, tmp_path / "c")
    again.load_state_dict(copy.deepcopy(twin.state_dict()))
    assert again.count == twin.count


def test_a_state_is_put_back_where_it_is_loaded(tmp_path: Path) -> None:
    """An evaluation uses what training has learned."""
    first = build(Counts, tmp_path)
    first.run(1, INPUTS)
    again = build(Counts, tmp_path)
    again.evaluate(INPUTS)
    assert again.count == first.count


class Returns(Task):
    """Goes back once, and counts that itself."""

    unsaved_attributes = ("good",)
    good: Any = None
    returns = count = late = 0

    def factor(self, batch: Any) -> float:
        self.count += 1
        if self.progress_checker.step > 2:
            self.late += 1
        return 1.0 + 0.01 * self.count + 0.1 * self.late

    def checkpoint(self) -> None:
        super().checkpoint()
        if self.progress_checker.step == 2 and self.good is None:
            self.good = copy.deepcopy(self.state_dict())

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)
        if self.progress_checker.step == 5 and not self.returns:
            self.returns += 1
            self.continue_from(self.good)


class GoesBack(Returns):
    unsaved_attributes = ("returns",)


def test_continue_from_takes_what_has_changed_since(tmp_path: Path) -> None:
    """Also what had not changed yet in the state, and becomes what it was as the run began."""

    class Straight(GoesBack):
        returns = 1

    gone, straight = build(GoesBack, tmp_path / "a"), build(Straight, tmp_path / "b")
    gone.run(2, INPUTS)
    straight.run(2, INPUTS)
    assert (gone.count, gone.late) == (straight.count, straight.late) == (12, 9)
    assert everything(gone) == everything(straight)


def test_going_back_without_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone back to step 2 100 times.*unsaved_attributes = \('returns',\)"):
        build(Returns, tmp_path).run(2, INPUTS)


def test_the_best_state_is_that_of_evaluation_alone(tmp_path: Path) -> None:
    trainer = build(Counts, tmp_path, add_ons=[EMAAddon], decay=0.5)
    trainer.run(2, INPUTS, INPUTS)
    trainer.restore_best()
    assert trainer.count == 12


# ----------------------------------------------------------------------------------------------------- add-ons, ranks


class CountsAddon(AddOnBase):
    """Counts steps in an attribute that it neither annotates nor declares."""

    layer = "observe"

    def on_step_end(self, outputs: Any) -> None:
        super().on_step_end(outputs)
        self.steps_counted = getattr(self, "steps_counted", 0) + 1


def test_an_add_on_of_the_user(tmp_path: Path) -> None:
    build(Task, tmp_path, add_ons=[CountsAddon]).run(2, INPUTS, max_steps=3)
    second = build(Task, tmp_path, add_ons=[CountsAddon])
    second.run(2, INPUTS)
    assert second.steps_counted == 12


@on_ranks(2)
def test_a_task_may_declare_what_ranks_have(world: int, tmp_path: Path) -> None:
    class Hidden(Task):
        rank_state_attributes = ("hidden",)
        hidden: Any = None

        def factor(self, batch: Any) -> float:
            self.hidden = batch.mean() if self.hidden is None else 0.5 * self.hidden + batch.mean()
            return 1.0 + float(self.hidden)

    def run(folder: str, *limits: int | None) -> Any:
        for limit in limits:
            trainer = build(Hidden, tmp_path / folder, add_ons=[MultiGPUAddon])
            trainer.run(2, INPUTS, max_steps=limit)
        return weights(trainer), trainer.hidden

    straight, hidden = run("straight", None)
    resumed, again = run("parts", 2, None)
    assert torch.equal(hidden, again)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


class Episodes(IterableDataset[Any]):
    """Holds the task that it is for, and counts."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.count = 0

    def __iter__(self) -> Any:
        for batch in INPUTS:
            self.count += 1
            yield batch * self.count


def test_a_dataset_that_holds_its_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the task has is saved once, and what it learns is no setting of the data."""

    def run(folder: str, *limits: int | None) -> Any:
        for limit in limits:
            trainer = build(Task, tmp_path / folder)
            trainer.run(3, DataLoader(Episodes(trainer), batch_size=None), max_steps=limit)
        return weights(trainer)

    straight = run("straight", None)
    for stop in (6, 12):
        resumed = run(f"from {stop}", stop, None)
        assert all(torch.equal(resumed[name], straight[name]) for name in straight), stop
    assert [text for text in warnings_in(caplog) if "loaded and dropped" not in text] == []


class Scaling:
    """A collate object that keeps its count where nothing looks, and says it in its state."""

    def __init__(self) -> None:
        self.kept = threading.local()
        self.kept.count = 0

    def __call__(self, samples: Any) -> Any:
        self.kept.count += 1
        return torch.stack(samples) * self.kept.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.kept.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.kept.count = state["count"]


@on_ranks(2)
def test_a_collate_object_with_a_state_of_its_own_on_several_ranks(world: int, tmp_path: Path) -> None:
    def run(folder: str, *limits: int | None) -> Any:
        for limit in limits:
            loader = DataLoader(torch.cat(INPUTS), 6, collate_fn=Scaling())  # type: ignore[arg-type]
            trainer = build(Task, tmp_path / folder, add_ons=[MultiGPUAddon])
            trainer.run(2, loader, max_steps=limit)
        return weights(trainer)

    straight = run("straight", None)
    for stop in (2, 3, 4):
        resumed = run(f"from {stop}", stop, None)
        assert all(torch.equal(resumed[name], straight[name]) for name in straight), stop


@pytest.mark.parametrize("differs", [True, False])
def test_another_number_of_ranks_begins_with_the_values_of_rank_0(differs: bool, tmp_path: Path) -> None:
    """And says so, unless all ranks had the same."""
    loader = torch.utils.data.DataLoader(torch.cat(INPUTS), 4)

    class Hidden(Task):
        level = 0.0

        def factor(self, batch: Any) -> float:
            self.level += 1.0 + self.rank * differs
            return 1.0

    def run(limit: int | None) -> Any:
        with catch_warnings() as texts:
            trainer = build(Hidden, tmp_path, add_ons=[MultiGPUAddon], reshard=True)
            trainer.run(1, loader, max_steps=limit)
        return trainer.level, [text for text in texts if "objects of the script" in text]

    levels = [level for level, _ in each_rank(2, run, 2)]
    assert levels == [2.0, 4.0 if differs else 2.0]
    ((level, texts),) = each_rank(1, run, None)
    assert level == 7.0, "two steps of rank 0 with 8 rows of 36, and five with the rest"
    assert len(texts) == differs
    assert all("cannot be divided among 1: every rank begins with that of rank 0" in text for text in texts)


def test_the_attributes_of_zae_are_known_by_name() -> None:
    """What classes of zae set on a trainer is an option, declared, or annotated in them: the rest is the user's."""
    import ast

    from kit import imports

    properties = {name for name in dir(Trainer) if isinstance(getattr(Trainer, name), property)}
    allowed = names_of_trainer(Trainer) | properties
    missing = []
    for module, path in imports.sources().items():
        if not module.startswith("zae.addons."):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("Add" in ast.unparse(base) for base in node.bases):
                missing += [f"{node.name}.{name}" for name in _set_by(node) - allowed]
    assert missing == []


def _set_by(node: Any) -> set[str]:
    """Return the attributes that the methods of an add-on set on the trainer and that its class does not describe."""
    import ast

    # Options, and a property, of a class that this one is of.
    described = {"args", "mesh", "find_unused_parameters", "lr_scheduler"}
    stored = set[str]()
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            described.add(ast.unparse(each.target))
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and "_attributes" in ast.unparse(each).partition("=")[0]:
            described |= {part.value for part in ast.walk(each) if isinstance(part, ast.Constant)}
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            described |= {argument.arg for argument in (*each.args.args, *each.args.kwonlyargs)}
    for each in ast.walk(node):
        is_own = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_own and isinstance(each.value, ast.Name) and each.value.id == "self":
            stored.add(each.attr)
    return stored - described


def test_no_add_on_of_zae_leaves_a_value(tmp_path: Path) -> None:
    """What it changes in a run is its own, which it declares or saves."""
    trainer = build(Task, tmp_path, add_ons=[EMAAddon])
    trainer.run(1, [batch for batch, _ in [data(8).tensors] * 3])
    assert "values" not in trainer.state_dict().get("user_state", {})
