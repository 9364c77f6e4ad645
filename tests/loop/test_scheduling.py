"""A schedule is stepped when it is meant to be, or the run says so before its first batch."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as of_torch

from kit.hand import digest
from kit.rank_tasks import forks
from zae import ConfigError, Trainer
from zae.addons import GradientAccumulationAddon, MultiGPUAddon, StateManagerAddon
from zae.schedulers import CosineAnnealingScheduler, SchedulerChain, WarmUpScheduler

IN_EPOCH = 7


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


class Untouched(Task):
    def train_step(self, batch: Any) -> Any:
        raise AssertionError("a batch was taken")


def batches(count: int = IN_EPOCH) -> list[torch.Tensor]:
    return list(torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(1)))


def make(scheduler: Any, on_batch: bool | None = None, task: Any = Task, add_ons: Any = (), **options: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    given = {} if on_batch is None else {"scheduler_step_on_batch": on_batch}
    optimizer = SGD(model.parameters(), lr=0.1)
    return task.add_on(*add_ons)(model, "cpu", optimizer=optimizer, scheduler=scheduler, **given, **options)


def sequence(o: Any, n: int) -> Any:
    parts = [of_torch.LinearLR(o, 0.5, total_iters=1), of_torch.CosineAnnealingLR(o, n - 1)]
    return of_torch.SequentialLR(o, parts, [1])


LENGTHS: dict[str, Callable[[Any, int], Any]] = {
    "cosine": lambda o, n: of_torch.CosineAnnealingLR(o, n),
    "linear": lambda o, n: of_torch.LinearLR(o, 1.0, 0.2, total_iters=n),
    "polynomial": lambda o, n: of_torch.PolynomialLR(o, total_iters=n),
    "constant": lambda o, n: of_torch.ConstantLR(o, 0.5, total_iters=n),
    "sequence": sequence,
    "chained": lambda o, n: of_torch.ChainedScheduler(
        [of_torch.ConstantLR(o, 0.5, total_iters=1), of_torch.CosineAnnealingLR(o, n)], optimizer=o
    ),
    "our cosine": lambda o, n: CosineAnnealingScheduler(o, n),
    "our chain": lambda o, n: SchedulerChain(WarmUpScheduler(o, 1, eta_min=0.05), CosineAnnealingScheduler(o, n - 1)),
}
"""Schedules of so many steps, that have no number of steps to be wrong in another way."""


def of_length(name: str, length: int) -> Any:
    return lambda optimizer: LENGTHS[name](optimizer, length)


def warned(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "zae" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", LENGTHS)
def test_a_schedule_as_long_as_the_run_has_steps_is_not_stepped_by_epochs(name: str, caplog: Any) -> None:
    """Where the option was not written it is refused before batch 1, by plan() too; where it was, one warning."""
    for kind in (Task, Untouched):
        for call in ("plan", "run"):
            trainer = make(of_length(name, 3 * IN_EPOCH), task=kind)
            with pytest.raises(ConfigError, match=r"lasts 21 steps, .* write scheduler_step_on_batch=True \(or sched"):
                getattr(trainer, call)(3, batches())
    assert warned(caplog) == []
    make(of_length(name, 3 * IN_EPOCH), False).run(3, batches())
    assert [re.findall(r"as many as this run has optimizer steps.*", text) for text in warned(caplog)] == [
        ["as many as this run has optimizer steps, but is stepped once an epoch; if these are meant, write "
         "scheduler_step_on_batch=True"]
    ]  # fmt: skip
    assert any("lasts 21 steps" in n for n in make(of_length(name, 21), False).plan(3, batches()).notes)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_schedule_as_long_as_the_run_has_epochs_is_not_stepped_by_batches(name: str, caplog: Any) -> None:
    """It may be a warm-up: a warning; one that ends is refused with the line to write."""
    trainer = make(of_length(name, 3), True)
    if name.startswith("our"):
        with pytest.raises(ConfigError, match=r"if its steps are epochs, write scheduler_step_on_batch=False"):
            trainer.run(3, batches())
        return
    trainer.run(3, batches())
    assert len(warned(caplog)) == 1
    assert "lasts 3 steps, as many as this run has epochs" in warned(caplog)[0]
    assert "write scheduler_step_on_batch=False" in warned(caplog)[0]


@pytest.mark.sample(count=2)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # Of an epoch that a resume only closes.
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("on_batch", [None, False, True])
def test_what_is_meant_is_not_refused_nor_warned_of(name: str, on_batch: bool | None, caplog: Any) -> None:
    """Several calls of run, each resumed from every step of it: neither refused nor warned of, and the same end."""
    calls = [2, 1, 2]
    length = sum(calls) * (IN_EPOCH if on_batch else 1)
    states: list[Any] = []

    class Keeping(Task):
        def checkpoint(self) -> None:
            super().checkpoint()
            if self.keeps:
                states.append(copy.deepcopy(self.state_dict()))

    straight = make(of_length(name, length), on_batch, Keeping)
    straight.keeps = True
    for count in calls:
        straight.run(count, batches())
    for state in states[::3]:
        resumed = make(of_length(name, length), on_batch, Keeping)
        resumed.keeps = False
        resumed.load_state_dict(state)
        resumed.progress_checker.run_calls.index = 0  # As a script that begins again.
        for count in calls:
            resumed.run(count, batches())
        assert digest(resumed.model) == digest(straight.model)
    assert warned(caplog) == []


@pytest.mark.parametrize("name", LENGTHS)
def test_epochs_of_one_step_are_no_sign_of_anything(name: str, caplog: Any) -> None:
    for on_batch in (None, True):
        make(of_length(name, 4), on_batch).run(4, batches(1))
    make(of_length(name, 4)).run(4, batches(), steps_per_epoch=1)
    assert warned(caplog) == []


def test_the_steps_of_a_run_are_those_of_windows_and_limits() -> None:
    """After accumulation, and up to max_steps; a stream has a length where it is given one."""
    cases: list[tuple[Any, dict[str, Any], dict[str, Any], int]] = [
        ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 4}, {"n_epoch": 3}, 6),
        ((), {}, {"n_epoch": 3, "max_steps": 17}, 17),
        ((), {}, {"n_epoch": None, "max_steps": 50}, 50),
        ((), {}, {"n_epoch": 4, "steps_per_epoch": 5}, 20),
    ]
    for add_ons, options, arguments, length in cases:
        with pytest.raises(ConfigError, match=f"lasts {length} steps"):
            make(of_length("cosine", length), add_ons=add_ons, **options).run(loader=batches(), **arguments)
    with pytest.raises(ConfigError, match="lasts 9 steps"):
        make(of_length("cosine", 9)).run(None, iter(batches(20)), max_steps=9)


def one_cycle(total: int) -> Any:
    return lambda optimizer: of_torch.OneCycleLR(optimizer, 0.1, total_steps=total)


@pytest.mark.parametrize(
    ("total", "on_batch", "text"),
    [
        (21, None, r"write scheduler_step_on_batch=True \(for"),
        (90, None, r"write scheduler_step_on_batch=True \(for"),
        (3, None, r"write scheduler_step_on_batch=True, and total_steps=21 \(for"),
        (21, False, "write scheduler_step_on_batch=True$"),
        (2, False, "write scheduler_step_on_batch=True|ends after 2 steps, but this run has 3"),
        (20, True, r"ends after 20 steps, but this run has .*a length of 21 steps.*run\(..., max_steps=20\)"),
        (3, True, "or, if its steps are epochs, write scheduler_step_on_batch=False"),
    ],
)
def test_one_cycle_that_cannot_be_meant(total: int, on_batch: bool | None, text: str) -> None:
    for call in ("plan", "run"):
        with pytest.raises(ConfigError, match=text):
            getattr(make(one_cycle(total), on_batch), call)(3, batches())


def test_one_cycle_in_epochs_where_that_is_written(caplog: Any) -> None:
    """Of the epochs of one call, or of several."""
    make(one_cycle(3), False).run(3, batches())
    several = make(one_cycle(5), False)
    several.run(2, batches())
    several.run(3, batches())
    again = make(one_cycle(3), False)
    again.run(3, batches())
    finished = make(one_cycle(3), False)
    finished.load_state_dict(again.state_dict())
    finished.progress_checker.run_calls.index = 0
    finished.run(3, batches())  # The finished script, started again.
    assert warned(caplog) == []


def warm_up(steps: int) -> Any:
    """Like Transformers' get_linear_schedule_with_warmup: a LambdaLR, whose length nobody can ask for."""
    return lambda optimizer: of_torch.LambdaLR(optimizer, lambda step: min(1.0, step / steps))


def test_a_first_epoch_without_a_rate_is_warned_of(caplog: Any) -> None:
    """Stepped by epochs it trains with the rate 0; stepped by batches, a warm-up may well be longer than the epoch."""
    make(warm_up(10)).run(1, batches())
    assert len(warned(caplog)) == 1
    assert "under a tenth of its base rate through the whole first epoch (it begins at 0)" in warned(caplog)[0]
    assert warned(caplog)[0].endswith("write scheduler_step_on_batch=True")
    caplog.clear()
    for scheduler, on_batch in ((warm_up(1000), True), (warm_up(10), True), (one_cycle(7), True), (None, None)):
        make(scheduler, on_batch).run(1, batches())
    first = make(lambda o: of_torch.StepLR(o, 1, 0.01))
    first.run(1, batches())
    first.run(1, batches())  # Only the first epoch is judged.
    assert warned(caplog) == []


def test_looking_at_the_first_epoch_changes_nothing() -> None:
    """The schedule, its optimizer and every stream are as without it; so it is after plan()."""

    class Drawing(of_torch.LRScheduler):
        def get_lr(self) -> Any:
            return [0.001 * float(torch.rand(())) * base for base in self.base_lrs]

    ends = []
    for way in ("by hand", "run", "plan and run"):
        trainer = make(lambda o: Drawing(o), True)
        torch.manual_seed(3)
        if way == "plan and run":
            trainer.plan(1, batches())
        if way == "by hand":
            for batch in batches():
                trainer.run_batch(batch)
        else:
            trainer.run(1, batches())
        ends.append((digest(trainer.model), trainer.optimizer.param_groups[0]["lr"], torch.rand(1).item()))
    assert ends[0] == ends[1] == ends[2]


# --- factories that take the planned number of steps


def cosine(optimizer: Any, total_steps: int | None) -> Any:
    return of_torch.CosineAnnealingLR(optimizer, -1 if total_steps is None else total_steps)


def asking(found: list[Any]) -> Any:
    def factory(optimizer: Any, total_steps: Any) -> Any:
        found.append(total_steps)
        return of_torch.LambdaLR(optimizer, lambda step: 1.0)

    return factory


@pytest.mark.parametrize(
    ("arguments", "accumulate", "total"),
    [
        ({"n_epoch": 3}, 1, 21),
        ({"n_epoch": 3}, 4, 6),
        ({"n_epoch": 3, "max_steps": 17}, 1, 17),
        ({"n_epoch": 3, "max_steps": 99}, 1, 21),
        ({"n_epoch": None, "max_steps": 50}, 1, 50),
        ({"n_epoch": 4, "steps_per_epoch": 5}, 1, 20),
        ({"n_epoch": 4, "steps_per_epoch": 50}, 1, 28),
        ({"n_epoch": 1, "length": False}, 1, None),
        ({"n_epoch": 2, "length": False, "steps_per_epoch": 3}, 1, 6),
        ({"n_epoch": 9, "length": False, "max_steps": 6}, 1, 6),
    ],
)
def test_a_factory_gets_the_planned_number_of_steps(arguments: Any, accumulate: int, total: int | None) -> None:
    """Of run() and of plan() alike, which takes nothing from a stream."""
    found: list[Any] = []
    given = {key: value for key, value in arguments.items() if key != "length"}
    trainer = make(asking(found), True, add_ons=(GradientAccumulationAddon,), gradient_accumulation_steps=accumulate)

    def stream() -> Any:
        return batches() if arguments.get("length", True) else iter(batches(2 * IN_EPOCH))

    trainer.plan(loader=stream(), **given)
    assert found == [total]
    trainer.run(loader=stream(), **given)
    assert found == [total, total]


def test_what_asks_for_the_number_of_steps() -> None:
    """A second parameter of that name, or one without a default; what a partial has set stays as it is."""

    class Own(of_torch.LRScheduler):
        def __init__(self, optimizer: Any, total_steps: int) -> None:
            self.total = total_steps
            super().__init__(optimizer)

        def get_lr(self) -> Any:
            return [base * (1 - self.last_epoch / self.total) for base in self.base_lrs]

    def with_default(optimizer: Any, total_steps: int = 5) -> Any:
        return Own(optimizer, total_steps)

    def by_name(optimizer: Any, *, floor: float = 0.0, total_steps: int) -> Any:
        return Own(optimizer, total_steps)

    for factory in (Own, with_default, by_name, functools.partial(by_name, floor=0.1)):
        trainer = make(factory, True)
        trainer.run(2, batches())
        assert trainer.scheduler.total == 14
    kept = make(functools.partial(with_default, total_steps=99), True)
    kept.run(2, batches())
    assert kept.scheduler.total == 99
    plain = make(functools.partial(of_torch.OneCycleLR, max_lr=0.1, epochs=2, steps_per_epoch=7), True)
    assert plain.run(2, batches())["step"] == 14


def test_a_second_run_keeps_the_schedule_and_a_resume_builds_the_same(tmp_path: Any) -> None:
    """In the first call and in a later one, in the middle of an epoch and at its end."""

    def script(folder: str, stop: int | None = None) -> Any:
        found: list[Any] = []

        def factory(optimizer: Any, total_steps: int) -> Any:
            found.append(total_steps)
            return of_torch.CosineAnnealingLR(optimizer, total_steps)

        class Stopping(Task):
            def train_step(self, batch: Any) -> Any:
                if self.progress_checker.step == stop:
                    raise InterruptedError
                return super().train_step(batch)

        trainer = make(factory, True, Stopping, [StateManagerAddon], save_path=tmp_path / folder, resume="auto",
                       save_every=1)  # fmt: skip
        try:
            trainer.run(2, batches())
            trainer.run(1, batches())
        except InterruptedError:
            return None
        assert found == [14]
        assert trainer.scheduler.T_max == 14
        return digest(trainer.model), trainer.scheduler.last_epoch

    straight = script("straight")
    for stop in (3, 7, 14, 17):
        assert script(f"stopped-{stop}", stop) is None
        assert script(f"stopped-{stop}") == straight


@pytest.mark.parametrize("call", ["run_batch", "run_epoch", "evaluate", "inference", "load_state_dict", "test"])
def test_such_a_factory_needs_a_run(call: str) -> None:
    trainer = make(cosine)
    arguments: dict[str, Any] = {
        "run_batch": batches()[0],
        "load_state_dict": make(of_length("cosine", 5)).state_dict(),
    }
    method, given = getattr(trainer, call, trainer.run_epoch), arguments.get(call, batches())
    if call == "test":
        trainer.toggle()
    with pytest.raises(ConfigError, match=r"takes total_steps.*call run\(n_epoch, loader\) first"):
        method(given)
    trainer.toggle("train")
    trainer.scheduler_step_on_batch = True
    assert trainer.run(2, batches())["step"] == 14
    assert trainer.scheduler.T_max == 14
    assert "loss" in trainer.evaluate(batches())


def test_ranks_plan_their_own_steps(tmp_path: Any) -> None:
    """Each makes half of them; what the caller has afterwards is the schedule of the ranks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    trainer = OnRanks(model, ["cpu", "cpu"], optimizer=AdamW(model.parameters()), scheduler=cosine,
                      scheduler_step_on_batch=True)  # fmt: skip
    with forks():
        assert trainer.run(2, torch.utils.data.DataLoader(torch.randn(32, 3), batch_size=4))["step"] == 8
    assert (trainer.scheduler.T_max, trainer.scheduler.last_epoch) == (8, 8)


OnRanks = Task.add_on(MultiGPUAddon)


@pytest.mark.parametrize("is_made", [False, True], ids=["object", "factory"])
def test_a_scheduler_of_an_optimizer_that_does_not_train_is_refused(is_made: bool) -> None:
    """Beside a factory of the optimizer too, whose rate it would not change."""
    other = SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
    scheduler = of_torch.StepLR(other, 2)
    trainer = Untouched(
        torch.nn.Linear(3, 1), "cpu", optimizer=SGD, scheduler=(lambda _: scheduler) if is_made else scheduler
    )
    said = r"scheduler 0 \(StepLR\) was made for another optimizer .*scheduler=lambda optimizer: StepLR\(optimizer"
    with pytest.raises(ConfigError, match=said):
        trainer.run(1, batches())


def test_a_scheduler_of_the_optimizer_that_a_factory_returns_is_taken() -> None:
    """It may be there before the trainer."""
    model = torch.nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = Task(model, "cpu", optimizer=lambda _: optimizer, scheduler=of_torch.ExponentialLR(optimizer, 0.5))
    trainer.run(2, batches())
    assert optimizer.param_groups[0]["lr"] == 0.025
