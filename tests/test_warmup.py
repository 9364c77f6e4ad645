"""Schedules with a warm-up against the formulas of their sources, and in a trainer that is told nothing else."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

import zae
from zae import ConfigError, Trainer
from zae.addons import GradientAccumulationAddon, StateManagerAddon
from zae.schedulers import CosineAnnealingScheduler, SchedulerChain, WarmUpScheduler
from zae.schedulers import planned_length as length_of

PEAKS = (0.3, 0.02)
T, W, D = 40, 8, 12


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


def two_groups() -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in PEAKS]
    return torch.optim.SGD(groups, lr=1.0)


def rates_of(scheduler: Any, steps: int) -> np.ndarray:
    """Return the rates that each step of a plain loop uses, and those after the last one."""
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return np.array([*seen, scheduler.get_last_lr()])


def sgdr(t: int) -> float:
    """SGDR (Loshchilov & Hutter 2017), equation 5, in one period that begins after the warm-up."""
    low, high, now, period = 0.1, 1.0, t - W, T - W
    return t / W if t < W else low + 0.5 * (high - low) * (1 + math.cos(now / period * math.pi))


def bert(t: int) -> float:
    """BERT (Devlin et al. 2019), appendix A.2: a warm-up and a linear decay of the learning rate."""
    return min(t / W, (T - t) / (T - W))


def attention(t: int) -> float:
    """Attention Is All You Need (Vaswani et al. 2017), equation 3, as a part of its highest rate."""
    rate, highest = (512**-0.5 * min(s**-0.5, s * W**-1.5) if s else 0.0 for s in (t, W))
    return rate / highest


def stable(t: int) -> float:
    """Hägele et al. 2024, section 3: warm-up, constant, and the decay "1-sqrt"."""
    if t < W:
        return t / W
    return 1.0 if t <= T - D else 1 - math.sqrt((t - (T - D)) / D)


FORMULAS = {
    "cosine": (zae.schedulers.cosine(warmup=W, final=0.1), sgdr),
    "linear": (zae.schedulers.linear(warmup=0.2), bert),
    "inverse_sqrt": (zae.schedulers.inverse_sqrt(warmup=W), attention),
    "wsd": (zae.schedulers.wsd(warmup=W, decay=0.3), stable),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_rates_of_each_group_are_those_of_the_paper(name: str) -> None:
    factory, formula = FORMULAS[name]
    found = rates_of(factory(two_groups(), total_steps=T), T)
    wanted = np.array([formula(t) for t in range(T + 1)])
    assert np.allclose(found, wanted[:, None] * PEAKS, rtol=1e-12, atol=1e-16)
    assert found.max(axis=0).tolist() == [*PEAKS]  # Bitwise.


def test_cosine_is_the_chain_of_warm_up_and_cosine() -> None:
    optimizer = two_groups()
    chain = SchedulerChain(WarmUpScheduler(optimizer, W), CosineAnnealingScheduler(optimizer, T - W))
    found = rates_of(zae.schedulers.cosine(warmup=W, total_steps=T)(two_groups()), T)
    assert np.allclose(found, rates_of(chain, T), rtol=1e-12, atol=1e-17)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_resumes_bitwise_and_can_be_pickled_and_copied(name: str) -> None:
    factory = pickle.loads(pickle.dumps(FORMULAS[name][0]))
    whole = rates_of(factory(two_groups(), T), T)
    first = factory(two_groups(), T)
    rates_of(first, 13)
    optimizer = two_groups()
    resumed = factory(optimizer, T)
    resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    optimizer.load_state_dict(first.optimizer.state_dict())
    for scheduler in (resumed, copy.deepcopy(first)):
        assert (rates_of(scheduler, T - 13) == whole[13:]).all()


@pytest.mark.parametrize(
    ("factory", "length"),
    [
        (zae.schedulers.cosine(warmup=0), T),
        (zae.schedulers.wsd(decay=0), None),
        (zae.schedulers.inverse_sqrt(), None),
        (zae.schedulers.linear(warmup=1.0), T),
    ],
)
def test_a_schedule_without_a_decay_has_no_end(factory: Any, length: int | None) -> None:
    scheduler = factory(two_groups(), T)
    assert length_of(scheduler) == length
    assert max(scheduler.factor_at(t) for t in (T - 1, T, 10 * T)) <= 1


# --- in a trainer -----------------------------------------------------------------------------------------------------


def batches(count: int = 10) -> list[torch.Tensor]:
    return list(torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(1)))


def make(scheduler: Any, add_ons: Any = (), **options: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    made = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "scheduler": scheduler}
    return Task.add_on(*add_ons)(model, "cpu", **(made | options))


def used(trainer: Any, *arguments: Any, **limits: Any) -> list[float]:
    """Run, and return the rate that each step used."""
    seen: list[float] = []

    class Watched(type(trainer)):  # type: ignore[misc]
        def step_one(self, optimizer: Any) -> bool:
            seen.append(optimizer.param_groups[0]["lr"])
            return super().step_one(optimizer)  # type: ignore[no-any-return]

    trainer.__class__ = Watched
    trainer.run(*arguments, **limits)
    return seen


def test_a_trainer_gives_the_length_and_steps_after_each_optimizer_step() -> None:
    wanted = [0.1 * zae.schedulers.cosine(warmup=6, total_steps=30)(two_groups()).factor_at(t) for t in range(30)]
    trainer = make(zae.schedulers.cosine(warmup=0.2))
    plan = trainer.plan(3, batches())
    assert plan.learning_rates["lr"] == wanted
    assert "0.1 at step 7" in str(plan)  # The end of the warm-up.
    text = str(trainer.explain())
    assert re.search(r'scheduler_step\("batch"\) +# its schedule counts optimizer steps', text)
    assert 'scheduler_step("epoch")' not in text
    assert used(trainer, 3, batches()) == wanted
    with pytest.raises(ConfigError, match=re.escape("zae.schedulers.cosine(..., total_steps=60)")):
        trainer.run(3, batches())


def test_steps_are_those_of_accumulation_and_of_max_steps() -> None:
    accumulated = make(zae.schedulers.linear(warmup=0.5), [GradientAccumulationAddon], gradient_accumulation_steps=5)
    assert used(accumulated, 3, batches()) == pytest.approx([0, 0.1 / 3, 0.2 / 3, 0.1, 0.2 / 3, 0.1 / 3])
    endless = make(zae.schedulers.wsd(warmup=2, decay=2))
    assert used(endless, None, iter(batches()), max_steps=6)[:5] == pytest.approx([0, 0.05, 0.1, 0.1, 0.1])


def test_another_scheduler_beside_it_is_stepped_by_epochs() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}

    def halve(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    scheduler = {"weight": zae.schedulers.linear(warmup=0.0), "bias": halve}
    trainer = (
        make(scheduler, model=None, optimizer=None)
        if False
        else Task(model, "cpu", optimizer=optimizer, scheduler=scheduler)
    )
    text = str(trainer.explain())
    assert text.count("scheduler_step(") == 2
    planned = trainer.plan(2, batches()).learning_rates
    trainer.run(2, batches())
    rates = {name: each.param_groups[0]["lr"] for name, each in trainer.optimizers.items()}
    assert rates == {"weight": 0.0, "bias": 0.025}
    assert [values[-1] for values in planned.values()] == pytest.approx([0.005, 0.05])


def test_a_run_resumes_bitwise_within_the_warm_up(tmp_path: Any) -> None:
    class Killed(Exception):
        pass

    class Task7(Task):
        dies = False

        def on_step_begin(self, batch: Any) -> None:
            if self.dies and self.progress_checker.step == 7:
                raise Killed
            super().on_step_begin(batch)

    def make_one(folder: str) -> Any:
        torch.manual_seed(0)
        options = {"save_path": tmp_path / folder, "resume": "auto", "save_every": 3, "optimizer": torch.optim.AdamW}
        scheduler = zae.schedulers.cosine(warmup=0.5)
        return Task7.add_on(StateManagerAddon)(torch.nn.Linear(3, 1), "cpu", scheduler=scheduler, **options)

    whole, first, second = (make_one(folder) for folder in ("whole", "parts", "parts"))
    whole.run(2, batches())
    first.dies = True
    with pytest.raises(Killed):
        first.run(2, batches())
    second.run(2, batches())
    assert second.scheduler.state_dict() == whole.scheduler.state_dict()
    assert torch.equal(second.unwrap().weight, whole.unwrap().weight)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_factory", "text"),
    [
        (
            lambda: zae.schedulers.cosine(warmup=1.5),
            "it must be a number of optimizer steps, for instance 100, or a share of the run",
        ),
        (lambda: zae.schedulers.linear(warmup=-1), "linear: warmup=-1; it must be a number of optimizer steps"),
        (lambda: zae.schedulers.linear(warmup=True), "warmup=True"),
        (lambda: zae.schedulers.wsd(decay="0.2"), "wsd: decay='0.2'"),
        (lambda: zae.schedulers.wsd(warmup=float("nan")), "warmup=nan"),
        (lambda: zae.schedulers.cosine(final=1e-5j), "final=0.1"),
        (lambda: zae.schedulers.cosine(final=2), "the part of the base rate at the end"),
        (lambda: zae.schedulers.cosine(total_steps=0.5), "the number of optimizer steps, which a trainer knows"),
        (lambda: zae.schedulers.cosine(warmup=30)(two_groups(), 20), "a warm-up of 30 steps, and the run has 20"),
        (lambda: zae.schedulers.wsd(warmup=0.9)(two_groups(), 20), "a warm-up of 18 steps and a decay of 4"),
        (lambda: zae.schedulers.linear()(two_groups()), "zae.schedulers.linear(..., total_steps=1000)"),
    ],
)
def test_bad_input_is_refused_with_the_line_to_write(make_factory: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        make_factory()


def test_a_run_refuses_what_does_not_fit_before_its_first_batch() -> None:
    class Untouched(Task):
        def train_step(self, batch: Any) -> Any:
            raise AssertionError("a batch was taken")

    def refused(scheduler: Any, loader: Any, text: str, **options: Any) -> None:
        model = torch.nn.Linear(3, 1)
        given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "scheduler": scheduler, **options}
        trainer = Untouched(model, "cpu", **given)
        for call in (trainer.plan, trainer.run):
            with pytest.raises(ConfigError, match=re.escape(text)):
                call(1, loader)

    refused(zae.schedulers.cosine(warmup=11), batches(), "a warm-up of 11 steps, and the run has 10 optimizer steps")
    refused(zae.schedulers.cosine(), (each for each in batches()), "write run(..., max_steps=1000)")
    refused(zae.schedulers.linear(), batches(), "leave that option out", scheduler_step_on_batch=False)


def test_a_schedule_without_a_known_length_needs_none() -> None:
    assert used(make(zae.schedulers.inverse_sqrt(warmup=2)), 1, iter(batches(4))) == pytest.approx(
        [0, 0.05, 0.1, 0.1 * math.sqrt(2 / 3)]
    )
    by_hand = make(zae.schedulers.cosine(total_steps=4, warmup=1))
    with by_hand.ready():
        by_hand.run_batch(batches()[0])
        by_hand.run_batch(batches()[0])
        assert by_hand.optimizer.param_groups[0]["lr"] == pytest.approx(0.075)
