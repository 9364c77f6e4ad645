"""The schedules against values worked out by hand, their resumption, and their length."""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler

from zae.errors import ConfigError
from zae.schedulers import (
    CosineAnnealingScheduler,
    SchedulerChain,
    WarmUpScheduler,
    is_plateau,
    planned_length,
    steps_taken,
)

Factory = Callable[[torch.optim.Optimizer], LRScheduler]


def sgd(*rates: float, momentum: float = 0.0) -> torch.optim.SGD:
    """Return an optimizer with one param group of two weights for each rate."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (1.0,)]
    return torch.optim.SGD(groups, lr=1.0, momentum=momentum)


def rates_over(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """Return the optimizer's rates before the first step and after each of ``steps`` steps."""
    optimizer = scheduler.optimizer
    seen = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == seen[-1]
    return seen


def make_chain(optimizer: torch.optim.Optimizer) -> SchedulerChain:
    """Return a warm-up over 3 steps, a cosine over 4 and a second warm-up over 2."""
    return SchedulerChain(
        WarmUpScheduler(optimizer, 3, eta_min=0.01),
        CosineAnnealingScheduler(optimizer, 4, eta_min=0.02),
        WarmUpScheduler(optimizer, 2, eta_min=0.05),
    )


def make_warm_up(optimizer: torch.optim.Optimizer) -> WarmUpScheduler:
    return WarmUpScheduler(optimizer, 5, eta_min=0.01)


def make_cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingScheduler:
    return CosineAnnealingScheduler(optimizer, 7, eta_min=0.01)


def make_nested(optimizer: torch.optim.Optimizer) -> SchedulerChain:
    return SchedulerChain(make_chain(optimizer), make_cosine(optimizer))


FACTORIES: list[Factory] = [make_warm_up, make_cosine, make_chain, make_nested]


# --- values -----------------------------------------------------------------------------------------------------------


def test_warm_up_is_a_line_from_zero_to_the_base_rate_and_stays() -> None:
    found = rates_over(WarmUpScheduler(sgd(0.5), total_iters=5), 8)
    wanted = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5]
    assert [rate for (rate,) in found] == pytest.approx(wanted, abs=1e-15)
    assert [rate for (rate,) in found[5:]] == [0.5, 0.5, 0.5, 0.5]


def test_warm_up_begins_at_eta_min() -> None:
    found = rates_over(WarmUpScheduler(sgd(1.0), total_iters=4, eta_min=0.2), 6)
    assert [rate for (rate,) in found] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0], abs=1e-15)


def test_warm_up_ends_at_the_base_rate_itself() -> None:
    # 0.2 + (0.9 - 0.2) is 0.8999999999999999 in floating point.
    assert rates_over(WarmUpScheduler(sgd(0.9), total_iters=2, eta_min=0.2), 3)[2:] == [[0.9], [0.9]]


def test_cosine_follows_its_closed_form_and_does_not_rise_again() -> None:
    # cos(pi/6) = sqrt(3)/2 and cos(pi/3) = 1/2.
    found = rates_over(CosineAnnealingScheduler(sgd(1.0), total_iters=6), 14)
    wanted = [1.0, 0.9330127018922193, 0.75, 0.5, 0.25, 0.0669872981077807, 0.0]
    assert [rate for (rate,) in found[:7]] == pytest.approx(wanted, abs=1e-15)
    assert [rate for (rate,) in found[6:]] == [0.0] * 9


def test_cosine_ends_at_eta_min() -> None:
    # cos(pi/4) = 0.7071067811865476, halved on an amplitude of 0.4, above 0.1.
    found = rates_over(CosineAnnealingScheduler(sgd(0.5), total_iters=4, eta_min=0.1), 7)
    wanted = [0.5, 0.4414213562373095, 0.3, 0.1585786437626905, 0.1, 0.1, 0.1, 0.1]
    assert [rate for (rate,) in found] == pytest.approx(wanted, abs=1e-15)
    assert found[0] == [0.5]
    assert found[4:] == [[0.1]] * 4


def test_param_groups_keep_their_proportions() -> None:
    warm_up = rates_over(WarmUpScheduler(sgd(1.0, 0.1), total_iters=2), 2)
    assert warm_up == [[0.0, 0.0], [0.5, 0.05], [1.0, 0.1]]
    cosine = rates_over(CosineAnnealingScheduler(sgd(1.0, 0.1), total_iters=2, eta_min=0.02), 3)
    assert cosine[0] == [1.0, 0.1]
    assert cosine[1] == pytest.approx([0.51, 0.06], abs=1e-15)
    assert cosine[2:] == [[0.02, 0.02], [0.02, 0.02]]


def test_chain_gives_each_part_its_own_steps() -> None:
    optimizer = sgd(1.0, 0.5)
    chain = SchedulerChain(
        WarmUpScheduler(optimizer, 2),
        CosineAnnealingScheduler(optimizer, 4, eta_min=0.1),
        WarmUpScheduler(optimizer, 2, eta_min=0.3),
    )
    wanted = [
        [0.0, 0.0],
        [0.5, 0.25],
        [1.0, 0.5],  # step 0 of the cosine
        [0.8681980515339464, 0.4414213562373095],
        [0.55, 0.3],
        [0.2318019484660536, 0.1585786437626905],
        [0.3, 0.3],  # step 0 of the second warm-up: the cosine's eta_min is never reached
        [0.65, 0.4],
        [1.0, 0.5],
        [1.0, 0.5],  # beyond the end the last rate stays
        [1.0, 0.5],
    ]
    assert chain.total_iters == 8
    assert rates_over(chain, 10) == [pytest.approx(row, abs=1e-15) for row in wanted]


def test_chain_of_one_is_that_schedule() -> None:
    chain = SchedulerChain(CosineAnnealingScheduler(sgd(0.3), 5))
    assert rates_over(chain, 7) == rates_over(CosineAnnealingScheduler(sgd(0.3), 5), 7)


def test_chain_in_a_chain_is_the_flat_chain() -> None:
    one, other = sgd(0.3), sgd(0.3)
    nested = SchedulerChain(
        SchedulerChain(WarmUpScheduler(one, 2), CosineAnnealingScheduler(one, 3)), CosineAnnealingScheduler(one, 4)
    )
    flat = SchedulerChain(
        WarmUpScheduler(other, 2), CosineAnnealingScheduler(other, 3), CosineAnnealingScheduler(other, 4)
    )
    assert nested.total_iters == flat.total_iters == 9
    assert rates_over(nested, 11) == rates_over(flat, 11)


def test_making_a_chain_leaves_the_first_rate_and_the_base_rates() -> None:
    optimizer = sgd(0.8, 0.4)
    make_chain(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.8, 0.4]
    # A cosine first: its step 0 is the base rate, although a warm-up was made after it and had set its own.
    optimizer = sgd(0.8)
    SchedulerChain(CosineAnnealingScheduler(optimizer, 3), WarmUpScheduler(optimizer, 3))
    assert optimizer.param_groups[0]["lr"] == 0.8
    assert optimizer.param_groups[0]["initial_lr"] == 0.8


def test_total_iters_of_one() -> None:
    assert rates_over(WarmUpScheduler(sgd(0.5), 1), 2) == [[0.0], [0.5], [0.5]]
    assert rates_over(CosineAnnealingScheduler(sgd(0.5), 1), 2) == [[0.5], [0.0], [0.0]]


def test_a_rate_held_in_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate)
    scheduler = WarmUpScheduler(optimizer, 4)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125
    assert [type(value) for value in scheduler.lr_at(1) + scheduler.lr_at(9)] == [float, float]
    other = make_warm_up(sgd(0.5))
    other.load_state_dict(scheduler.state_dict())
    assert other.get_last_lr() == [0.125]


# --- torch's own ground rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", FACTORIES)
def test_each_is_an_lr_scheduler_that_counts_steps_without_a_warning(factory: Factory) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = factory(sgd(0.8))
        assert isinstance(scheduler, LRScheduler)
        assert scheduler.last_epoch == 0
        rates_over(scheduler, 20)
        assert scheduler.last_epoch == 20
        scheduler.load_state_dict(scheduler.state_dict())


def test_stepping_before_the_optimizer_is_still_reported() -> None:
    scheduler = make_chain(sgd(0.8))
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()


@pytest.mark.parametrize("factory", FACTORIES)
def test_each_works_inside_of_torchs_sequential(factory: Factory) -> None:
    alone = rates_over(factory(sgd(0.8)), 10)
    optimizer = sgd(0.8)
    first = torch_schedulers.ConstantLR(optimizer, factor=0.5, total_iters=100)
    both = torch_schedulers.SequentialLR(optimizer, [first, factory(optimizer)], milestones=[3])
    found = []
    with warnings.catch_warnings():
        # torch's SequentialLR passes its own deprecated argument on: nothing that we could avoid.
        warnings.filterwarnings("ignore", message="The epoch parameter")
        for _ in range(13):
            optimizer.step()
            both.step()
            found.append(both.get_last_lr())
    assert found == [[0.4], [0.4], *alone[:11]]


# --- state ------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> bool:
    """Tell whether a value is made of numbers, strings, lists and dicts alone."""
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) is list:
        return all(plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize("factory", FACTORIES)
def test_state_is_plain_and_survives_json_exactly(factory: Factory) -> None:
    scheduler = factory(sgd(0.7, 0.1))
    rates_over(scheduler, 4)
    state = scheduler.state_dict()
    assert plain(state)
    assert json.loads(json.dumps(state)) == state


def train(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: range) -> list[list[float]]:
    """Take steps with a gradient that depends on the step and the weights; return the rates used."""
    used = []
    for step in steps:
        for group in optimizer.param_groups:
            weight = group["params"][0]
            weight.grad = weight.detach() * math.sin(step + 1.0)
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.sample(count=25)
@pytest.mark.parametrize(("factory", "stop"), list(itertools.product(FACTORIES, range(19))))
def test_resume_at_any_step_is_bitwise_the_same(factory: Factory, stop: int) -> None:
    straight = sgd(0.7, 0.1, momentum=0.9)
    straight_rates = train(straight, factory(straight), range(19))

    before = sgd(0.7, 0.1, momentum=0.9)
    first = factory(before)
    rates = train(before, first, range(stop))
    saved = json.dumps(first.state_dict())

    after = sgd(0.7, 0.1, momentum=0.9)
    second = factory(after)
    with torch.no_grad():
        for old, new in zip(before.param_groups, after.param_groups, strict=True):
            new["params"][0].copy_(old["params"][0])
    after.load_state_dict(before.state_dict())
    second.load_state_dict(json.loads(saved))
    assert second.get_last_lr() == first.get_last_lr() == [group["lr"] for group in after.param_groups]
    assert second.last_epoch == stop
    rates += train(after, second, range(stop, 19))

    assert rates == straight_rates
    for one, other in zip(straight.param_groups, after.param_groups, strict=True):
        assert torch.equal(one["params"][0], other["params"][0])


def test_state_brings_the_base_rates_of_every_part() -> None:
    saved = make_nested(sgd(0.7))
    fresh = make_nested(sgd(0.2))
    fresh.load_state_dict(saved.state_dict())
    assert [fresh.lr_at(step) for step in range(20)] == [saved.lr_at(step) for step in range(20)]


def test_loading_does_not_change_or_keep_the_state_given() -> None:
    scheduler = make_chain(sgd(0.7))
    rates_over(scheduler, 3)
    state = scheduler.state_dict()
    kept = copy.deepcopy(state)
    other = make_chain(sgd(0.7))
    other.load_state_dict(state)
    rates_over(other, 3)
    assert state == kept


def test_a_chain_refuses_the_state_of_another_number_of_parts() -> None:
    with pytest.raises(ValueError, match="zip"):
        make_chain(sgd(0.7)).load_state_dict(SchedulerChain(WarmUpScheduler(sgd(0.7), 9)).state_dict())


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [WarmUpScheduler, CosineAnnealingScheduler])
class TestArguments:
    @pytest.mark.parametrize("total_iters", [0, -3, 2.0, "4", None, True, math.nan])
    def test_total_iters(self, kind: Any, total_iters: Any) -> None:
        with pytest.raises(ConfigError, match=rf"{kind.__name__}: total_iters=.*; it must be a whole number of at"):
            kind(sgd(), total_iters)

    @pytest.mark.parametrize("eta_min", [-0.1, math.nan, math.inf, "0", None, True])
    def test_eta_min(self, kind: Any, eta_min: Any) -> None:
        with pytest.raises(ConfigError, match=r"\(eta_min=...\) must be a finite number"):
            kind(sgd(), 4, eta_min=eta_min)

    def test_eta_min_above_a_base_rate(self, kind: Any) -> None:
        with pytest.raises(ConfigError, match=r"of the param groups, 0\.1, found 0\.2; write eta_min=0"):
            kind(sgd(1.0, 0.1), 4, eta_min=0.2)
        kind(sgd(1.0, 0.1), 4, eta_min=0.1)

    def test_optimizer(self, kind: Any) -> None:
        with pytest.raises(ConfigError, match=f"{kind.__name__}.*must be a torch.optim.Optimizer, found list"):
            kind([torch.nn.Parameter(torch.ones(1))], 4)

    def test_a_refusal_leaves_the_optimizer_alone(self, kind: Any) -> None:
        optimizer = sgd(0.4)
        with pytest.raises(ConfigError):
            kind(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.4
        assert "initial_lr" not in optimizer.param_groups[0]


def test_chain_arguments() -> None:
    optimizer = sgd(0.4)
    warm_up = WarmUpScheduler(optimizer, 2)
    for parts, found in (
        ((), "nothing"),
        (([warm_up],), "list"),
        ((warm_up, torch_schedulers.StepLR(optimizer, 3)), "WarmUpScheduler, StepLR"),
        ((3,), "int"),
    ):
        with pytest.raises(ConfigError, match=rf"one by one, and got {found}; write SchedulerChain\(W.*SequentialLR"):
            SchedulerChain(*parts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two optimizers; build every one on the same optimizer"):
        SchedulerChain(warm_up, CosineAnnealingScheduler(sgd(0.4), 3))


# --- what a trainer asks ----------------------------------------------------------------------------------------------


def test_planned_length_of_ours() -> None:
    assert planned_length(make_cosine(sgd())) == 7
    assert planned_length(make_chain(sgd())) == 9
    assert planned_length(make_nested(sgd())) == 16
    assert planned_length(make_warm_up(sgd())) is None
    assert planned_length(object()) is None


def test_planned_length_of_schedules_without_an_end() -> None:
    for make in (
        lambda o: torch_schedulers.StepLR(o, 3),
        lambda o: torch_schedulers.CosineAnnealingLR(o, 3),
        lambda o: torch_schedulers.LinearLR(o, total_iters=3),
        lambda o: torch_schedulers.LambdaLR(o, lambda step: 1.0),
        lambda o: torch_schedulers.ReduceLROnPlateau(o),
        lambda o: torch_schedulers.ChainedScheduler([torch_schedulers.StepLR(o, 3)]),
        lambda o: torch_schedulers.SequentialLR(
            o, [torch_schedulers.StepLR(o, 3), torch_schedulers.StepLR(o, 3)], milestones=[4]
        ),
    ):
        assert planned_length(make(sgd())) is None


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch_schedulers.OneCycleLR:
    return torch_schedulers.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)


def chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [torch_schedulers.ConstantLR(optimizer), one_cycle(optimizer, 9), one_cycle(optimizer, 6)]
    return torch_schedulers.ChainedScheduler(parts)


def sequential_last(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [torch_schedulers.ConstantLR(optimizer), one_cycle(optimizer, 5)]
    return torch_schedulers.SequentialLR(optimizer, parts, milestones=[4])


def sequential_early(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [one_cycle(optimizer, 5), torch_schedulers.ConstantLR(optimizer)]
    return torch_schedulers.SequentialLR(optimizer, parts, milestones=[9])


@pytest.mark.parametrize(
    ("factory", "length"),
    [(lambda o: one_cycle(o, 8), 8), (chained, 6), (sequential_last, 9), (sequential_early, 5)],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_planned_length_is_where_torch_raises(factory: Factory, length: int) -> None:
    scheduler = factory(sgd(momentum=0.9))
    assert planned_length(scheduler) == length
    for taken in range(length):
        assert steps_taken(scheduler) == taken
        scheduler.optimizer.step()
        scheduler.step()
    assert steps_taken(scheduler) == length
    with pytest.raises(ValueError, match="Tried to step"):
        scheduler.step()


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_one_cycle_that_hands_over_in_time_is_no_end() -> None:
    optimizer = sgd(momentum=0.9)
    parts = [one_cycle(optimizer, 5), torch_schedulers.ConstantLR(optimizer)]
    scheduler = torch_schedulers.SequentialLR(optimizer, parts, milestones=[6])
    assert planned_length(scheduler) is None
    for _ in range(12):
        optimizer.step()
        scheduler.step()


def test_steps_taken_counts_those_before_a_resume() -> None:
    scheduler = make_chain(sgd())
    assert steps_taken(scheduler) == 0
    rates_over(scheduler, 4)
    assert steps_taken(scheduler) == 4
    fresh = make_chain(sgd())
    fresh.load_state_dict(scheduler.state_dict())
    assert steps_taken(fresh) == 4


def test_steps_taken_of_a_scheduler_that_does_not_tell() -> None:
    with pytest.raises(ConfigError, match="object has no integer attribute last_epoch"):
        steps_taken(object())


def test_is_plateau() -> None:
    class Mine(torch_schedulers.ReduceLROnPlateau):
        pass

    assert is_plateau(torch_schedulers.ReduceLROnPlateau(sgd()))
    assert is_plateau(Mine(sgd()))
    assert not is_plateau(make_chain(sgd()))
    assert not is_plateau(torch_schedulers.StepLR(sgd(), 3))
    assert not is_plateau(None)
