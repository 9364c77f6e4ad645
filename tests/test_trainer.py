"""Steps against loops written by hand: windows, counters, mixed precision, schedules, several optimizers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from kit import hand
from kit.hand import digest, loader, network
from kit.regression import Regression, Unsized, Untouched, build, line, pairs, valid
from kit.table import Task
from zae import AddOnBase, ConfigError, StepError, Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon


class Counted(Regression):
    """The same, with the number of targets."""

    def train_step(self, batch: Any) -> Any:
        return {**super().train_step(batch), "num_targets": len(batch[0])}


# --- windows


@pytest.mark.parametrize("wrap", [list, Unsized])
def test_the_last_short_window_is_divided_by_its_own_length(wrap: Any) -> None:
    """5 batches, accumulation 4: two updates, the second of one batch; no gradient survives."""
    batches = pairs(4, 4, 4, 4, 4)
    model, by_hand = line(), line()
    trainer = build(
        GradientAccumulationAddon, task=Regression, model=model,
        optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9), gradient_accumulation_steps=4,
    )  # fmt: skip
    metrics = trainer.run(1, wrap(batches))
    optimizer = SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    for window in (batches[:4], batches[4:]):
        for inputs, targets in window:
            (nn.functional.mse_loss(by_hand(inputs), targets) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert digest(model) == digest(by_hand)
    assert (metrics["step"], trainer.progress_checker.batch) == (2, 5)
    assert [p.grad for p in model.parameters()] == [None, None]


def test_batches_are_held_one_at_a_time_when_the_loader_has_a_length() -> None:
    """Of a loader with a length no batch is fetched before the one before it was used."""
    events: list[str] = []

    class Noting(Regression):
        def train_step(self, batch: Any) -> Any:
            events.append("use")
            return super().train_step(batch)

    class Source(Unsized):
        def __len__(self) -> int:
            return len(self.batches)

        def __iter__(self) -> Iterator[Any]:
            for batch in self.batches:
                events.append("fetch")
                yield batch

    model = line()
    options = {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "gradient_accumulation_steps": 3}
    build(GradientAccumulationAddon, task=Noting, **options).run(1, Source(pairs(2, 2, 2, 2)))
    assert events == ["fetch", "use"] * 4


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_every_target_weighs_alike(accumulate: int, clip: float) -> None:
    """Micro-batches of unequal counts are one big batch (relative 1e-6 in float32)."""
    sizes = (1, 5, 2, 7)
    batches = pairs(*sizes)
    windows = [batches[i : i + accumulate] for i in range(0, 4, accumulate)]
    model, by_hand = line(), line()
    trainer = build(
        GradientAccumulationAddon, task=Counted, model=model, optimizer=SGD(model.parameters(), lr=0.1),
        gradient_accumulation_steps=accumulate, gradient_clip=clip,
    )  # fmt: skip
    trainer.run(3, batches)
    optimizer = SGD(by_hand.parameters(), lr=0.1)
    for window in windows * 3:
        inputs, targets = torch.cat([b[0] for b in window]), torch.cat([b[1] for b in window])
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(by_hand.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    for found, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    losses, means = trainer.log_train["loss"], trainer.train_history[-1]["train_loss"]
    assert means == pytest.approx(sum(x * n for x, n in zip(losses, sizes, strict=True)) / sum(sizes), rel=1e-12)


def test_counts_that_come_and_go_or_are_zero_are_refused() -> None:

    class Sometimes(Counted):
        def train_step(self, batch: Any) -> Any:
            out = super().train_step(batch)
            return out if len(batch[0]) > 2 else {"loss": out["loss"]}

    class Never(Counted):
        def train_step(self, batch: Any) -> Any:
            return {**super().train_step(batch), "num_targets": 0}

    for task, text in ((Sometimes, "for 1 of the 2 batches of a window"), (Never, "counted 0 targets")):
        model = line()
        trainer = build(
            GradientAccumulationAddon, task=task, model=model, optimizer=SGD(model.parameters(), lr=0.1),
            gradient_accumulation_steps=2,
        )  # fmt: skip
        with pytest.raises(StepError, match=text):
            trainer.run(1, pairs(2, 4))
        assert digest(model) == digest(line())


# --- counters


def test_one_step_counter_whatever_the_number_of_optimizers() -> None:
    """Both counters in every record, in the checkpoint and in what run returns."""
    gan = hand.Gan()
    trainer = GanTask.add_on(GradientAccumulationAddon)(
        gan, "cpu", optimizer=gan.optimizers(), gradient_accumulation_steps=2, log_every=1
    )
    real = [torch.randn(4, 4) for _ in range(12)]
    metrics = trainer.run(None, real, max_steps=5)
    assert (metrics["step"], trainer.progress_checker.batch, metrics["epoch"]) == (5, 10, 0)
    assert [(row["step"], row["batch"]) for row in trainer.log_history] == [(i, 2 * i) for i in range(1, 6)]
    state = trainer.state_dict()["progress"]
    assert (state["step"], state["batch"], state["epoch_step"], state["epoch_batch"]) == (5, 10, 5, 10)
    metrics = trainer.run(None, real, max_steps=2)  # One step is left of this epoch, and one is of the next.
    assert (metrics["step"], trainer.progress_checker.batch, metrics["epoch"]) == (7, 14, 1)


def test_the_learning_rate_is_a_function_of_the_update() -> None:
    """For accumulation 1 and 4 of the same number of updates."""
    rates = []
    for accumulate, count in ((1, 6), (4, 24)):
        trainer = build(GradientAccumulationAddon, gradient_accumulation_steps=accumulate, log_every=1,
                        scheduler=lambda o: CosineAnnealingLR(o, 12), scheduler_step_on_batch=True)  # fmt: skip
        trainer.run(2, [(torch.randn(4, 4), torch.ones(4).long())] * count)
        rates.append([row["lr"] for row in trainer.log_history if "lr" in row])
    assert len(rates[0]) == 12
    assert rates[0] == rates[1]


# --- mixed precision


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_everything_alone(fused: bool) -> None:
    """Infinite gradients at update 0; parameters, optimizer, scheduler and average wait; torch has no warning."""
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.05, fused=fused)
    scheduler = StepLR(optimizer, 1, 0.5)
    trainer = build(AMPAddon, EMAAddon, model=model, optimizer=optimizer, scheduler=scheduler, log_every=1, decay=0.5,
                    precision="fp16", scheduler_step_on_batch=True, loss_scale=(1024.0, 1.0))  # fmt: skip
    model[0].weight.register_hook(lambda g: g + float("inf") if trainer.progress_checker.step == 0 else g)
    weights = [p.detach().clone() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    seen: list[Any] = []

    trainer.checkpoint = lambda: seen.append(
        (
            all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)),
            all(torch.equal(trainer.average[n], w) for n, w in zip(names, weights, strict=True)),
            scheduler.last_epoch,
            {int(s["step"]) for s in optimizer.state.values()} if optimizer.state else {0},
            trainer.scaler.get_scale(),
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = trainer.run(1, loader())
    assert seen[0] == (True, True, 0, {0}, 512.0)
    assert seen[1] == (False, False, 1, {1}, 512.0)
    assert (metrics["step"], metrics["skipped_steps"], scheduler.last_epoch) == (6, 1, 5)
    assert trainer.log_history[0]["skipped_steps"] == 1


def test_one_of_two_optimizers_has_no_gradient_in_a_step() -> None:
    """With fp16: a step that trains one network only."""

    class Alternating(Trainer):
        def train_step(self, batch: Any) -> Any:
            losses = self.model.losses(batch)
            name = ("generator", "critic")[self.progress_checker.step % 2]
            other = self.model.critic if name == "generator" else self.model.generator
            for p in other.parameters():
                p.requires_grad_(False)
            for p in getattr(self.model, name).parameters():
                p.requires_grad_(True)
            return {"loss": self.model.losses(batch)[name] + 0 * losses["critic"].detach()}

        def test_step(self, batch: Any) -> Any:
            return {}

    gan = hand.Gan()
    before = digest(gan.generator), digest(gan.critic)
    trainer = Alternating.add_on(AMPAddon)(gan, "cpu", optimizer=gan.optimizers(), precision="fp16",
                                           loss_scale=(64.0, 1.0))  # fmt: skip
    metrics = trainer.run(1, [torch.randn(4, 4)])
    assert (digest(gan.generator) != before[0], digest(gan.critic) == before[1]) == (True, True)
    assert metrics["skipped_steps"] == 0
    trainer.run(1, [torch.randn(4, 4)] * 3)
    assert digest(gan.critic) != before[1]


def test_a_step_left_out_as_not_finite_does_not_disturb_the_loss_scale() -> None:
    class Sometimes(Task):
        def train_step(self, batch: Any) -> Any:
            out = super().train_step(batch)
            return {"loss": out["loss"] * (float("nan") if self.progress_checker.step == 1 else 1.0)}

    trainer = build(AMPAddon, task=Sometimes, precision="fp16", loss_scale=(64.0, 1.0), on_nonfinite="skip")
    metrics = trainer.run(2, loader())
    assert (metrics["step"], metrics["nonfinite_steps"]) == (12, 1)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


class NormAddon(AddOnBase):
    """Note the norm that the optimizer gets."""

    layer = "loop"

    def optimizer_step(self) -> bool:
        self.norms.append(float(nn.utils.get_total_norm(p.grad for p in self.model.parameters())))
        return super().optimizer_step()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("scale", [4.0, 2.0**12, 2.0**19])
def test_scale_and_clip_and_accumulate_in_every_order(precision: str, scale: float) -> None:
    """Unscale, clip, step, update; the optimizer never sees more than the norm, at any scale."""
    by_hand, norms = network(), []
    torch.manual_seed(7)
    hand.train(
        by_hand, AdamW(by_hand.parameters(), lr=0.05), loader(), 2, clip=0.1, accumulate=4, precision=precision,
        scale=scale, watch=lambda: norms.append(float(nn.utils.get_total_norm(p.grad for p in by_hand.parameters()))),
    )  # fmt: skip
    classes = set()
    for order in itertools.permutations([AMPAddon, GradientAccumulationAddon, NormAddon]):
        trainer = build(*order, precision=precision, loss_scale=(scale, 1.0), gradient_accumulation_steps=4,
                        gradient_clip=0.1)  # fmt: skip
        trainer.norms = []
        torch.manual_seed(7)
        trainer.run(2, loader())
        classes.add(type(trainer))
        assert digest(trainer.model) == digest(by_hand)
        finite = [norm for norm in trainer.norms if np.isfinite(norm)]
        assert len(finite) == 4 - trainer.progress_checker.skipped_steps
        assert max(finite) <= 0.1 * (1 + 1e-5)
        assert np.array_equal(trainer.norms, norms, equal_nan=True)
    assert len(classes) == 1


# --- schedules


def test_a_plateau_without_its_metric_is_refused_before_batch_1() -> None:
    trainer = build(task=Untouched, scheduler=lambda o: ReduceLROnPlateau(o))
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau\) needs a metric .* valid_loader"):
        trainer.run(1, loader())


@pytest.mark.parametrize(("monitor", "every"), [("loss", None), ("loss", 2), ("train/loss", None), ("train/loss", 2)])
def test_a_plateau_is_stepped_with_the_monitored_metric(monitor: str, every: Any) -> None:
    """After each validation, or after each epoch when it watches training; scheduler_step_on_batch or not."""
    for on_batch in (False, True):
        given: list[float] = []

        class Noting(ReduceLROnPlateau):
            def step(self, metrics: Any, epoch: Any = None) -> None:
                given.append(float(metrics))  # noqa: B023
                super().step(metrics)

        trainer = build(scheduler=lambda o: Noting(o), monitor=monitor, scheduler_step_on_batch=on_batch)
        metrics = trainer.run(2, loader(), valid(), valid_every=every)
        rows = metrics["train_metrics_history" if monitor == "train/loss" else "valid_metrics_history"]
        assert given == [row["train_loss" if monitor == "train/loss" else "valid_loss"] for row in rows]
        assert len(given) == (2 if monitor == "train/loss" or not every else 6)
        assert trainer.best["score"] == min(given)


def test_a_schedule_too_short_for_the_run_is_refused_before_batch_1() -> None:
    """6 batches, accumulation 4, 3 epochs: 6 updates."""
    options = {"gradient_accumulation_steps": 4, "scheduler_step_on_batch": True}
    for total, fits in ((5, False), (6, True)):
        trainer = build(
            GradientAccumulationAddon,
            task=Task if fits else Untouched,
            scheduler=lambda o, total=total: OneCycleLR(o, 0.1, total_steps=total),
            **options,
        )
        if fits:
            trainer.run(2, loader())
            trainer.run(1, loader())
            with pytest.raises(ConfigError, match=r"ends after 6 steps, but this run has .*a length of 8 steps"):
                trainer.run(1, loader())
        else:
            with pytest.raises(ConfigError, match=r"ends after 5 steps, but this run has 6 optimizer"):
                trainer.run(3, loader())
    unsized = build(task=Untouched, scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=9), scheduler_step_on_batch=True)
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        unsized.run(1, Unsized(list(loader())))


SCHEDULES = {
    "step": lambda o: StepLR(o, 2, 0.5),
    "lambda": lambda o: LambdaLR(o, lambda n: 1 / (1 + n)),
    "cosine": lambda o: CosineAnnealingLR(o, 18),
    "onecycle": lambda o: OneCycleLR(o, 0.1, total_steps=18),
    "sequential": lambda o: SequentialLR(o, [LambdaLR(o, lambda n: (n + 1) / 4), CosineAnnealingLR(o, 15)], [3]),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("on_batch", [True, False])
@pytest.mark.parametrize("factory", [True, False])
def test_schedulers_are_the_hand_loop(name: str, on_batch: bool, factory: bool) -> None:
    """By step and by epoch, given or made by a function; no warning of torch."""
    by_hand, model = network(), network()
    made = SCHEDULES[name]
    if name == "onecycle" and not on_batch:  # As many steps as optimizer steps would be refused.
        made = lambda o: OneCycleLR(o, 0.1, total_steps=3)  # noqa: E731
    ours, theirs = (AdamW(m.parameters(), lr=0.05) for m in (model, by_hand))
    torch.manual_seed(7)
    hand.train(by_hand, theirs, loader(), 3, scheduler=made(theirs), every_step=on_batch)
    scheduler = made if factory else made(ours)
    trainer = build(model=model, optimizer=ours, scheduler=scheduler, scheduler_step_on_batch=on_batch)
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        trainer.run(3, loader())
    assert digest(model) == digest(by_hand)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


# --- several optimizers


class GanTask(Trainer):
    """One scalar for two optimizers."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model.sum_of_losses(batch)}

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


class GanTaskByLoss(GanTask):
    """A loss for each."""

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model.losses(batch)}


@pytest.mark.parametrize("by_loss", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_optimizers_under_clip_and_accumulation_and_precision(by_loss: bool, precision: str) -> None:
    """A GAN with no flag is the hand loop, bitwise."""
    real = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    by_hand, gan = hand.Gan(), hand.Gan()
    torch.manual_seed(4)
    hand.train_gan(by_hand, real, 4, by_loss=by_loss, clip=0.05, accumulate=2, precision=precision)
    trainer = (GanTaskByLoss if by_loss else GanTask).add_on(AMPAddon, GradientAccumulationAddon)(
        gan, "cpu", optimizer=gan.optimizers(), gradient_clip=0.05, gradient_accumulation_steps=2, precision=precision,
        loss_scale=(2.0**22, 1.0),
    )  # fmt: skip
    torch.manual_seed(4)
    trainer.run(4, real)
    assert digest(gan) == digest(by_hand)
    assert (trainer.progress_checker.skipped_steps > 0) == (precision == "fp16")
    if by_loss:
        assert set(trainer.log_train) == {"loss/generator", "loss/critic"}


@pytest.mark.parametrize("form", ["list", "dict", "factories"])
def test_several_optimizers_and_schedulers_in_any_form(form: str) -> None:
    """A scheduler that drives one of two optimizers leaves the other alone."""

    def split(gan: hand.Gan) -> Any:
        generator = SGD(gan.generator.parameters(), lr=0.1)
        critic = SGD(gan.critic.parameters(), lr=0.2)
        if form == "list":
            return {"optimizer": [generator, critic], "scheduler": [StepLR(critic, 1, 0.5)]}
        if form == "dict":
            return {"optimizer": {"g": generator, "c": critic}, "scheduler": {"c": StepLR(critic, 1, 0.5)}}
        made = {"g": lambda _: generator, "c": lambda _: critic}
        return {"optimizer": made, "scheduler": {"c": lambda o: StepLR(o, 1, 0.5)}}

    gan = hand.Gan()
    trainer = GanTask(gan, "cpu", **split(gan))
    trainer.run(2, [torch.randn(4, 4)] * 3)
    rates = {key: value for key, value in trainer.train_history[-1].items() if key.startswith("lr")}
    names = ("0", "1") if form == "list" else ("g", "c")
    assert rates == {f"lr/{names[0]}": 0.1, f"lr/{names[1]}": 0.1}
    assert [group["lr"] for o in trainer.optimizers.values() for group in o.param_groups] == [0.1, 0.05]
