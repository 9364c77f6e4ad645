"""The loop against loops written by hand: windows, counters, schedules, several optimizers, runs in pieces."""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from kit import hand
from kit.hand import digest, loader, network
from kit.scripts import Script
from kit.table import Task, core_of, fingerprint
from zae import AddOnBase, CheckpointMismatch, ConfigError, Every, LoaderError, MonitorError, StepError, Trainer
from zae.addons import AMPAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon


def build(*add_ons: Any, task: type[Trainer] = Task, **options: Any) -> Any:
    model = options.pop("model", None) or network()
    options.setdefault("optimizer", AdamW(model.parameters(), lr=0.05))
    return task.add_on(*add_ons)(model, "cpu", **options)


def valid() -> Any:
    return loader(10, seed=9, shuffle=False)


class Regression(Trainer):
    """The mean squared error of a linear model."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    def test_step(self, batch: Any) -> Any:
        return self.train_step(batch)


class Counted(Regression):
    """The same, with the number of targets."""

    def train_step(self, batch: Any) -> Any:
        return {**super().train_step(batch), "num_targets": len(batch[0])}


def line(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, 1, dtype=dtype)


def pairs(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 3, generator=generator, dtype=dtype), torch.randn(n, 1, generator=generator, dtype=dtype))
        for n in sizes
    ]


class Unsized:
    """A loader without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


# --- windows


@pytest.mark.parametrize("wrap", [list, Unsized])
def test_p01_the_last_short_window_is_divided_by_its_own_length(wrap: Any) -> None:
    """P-01: 5 batches, accumulation 4: two updates, the second of one batch; no gradient survives."""
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


def test_p01_batches_are_held_one_at_a_time_when_the_loader_has_a_length() -> None:
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
def test_p02_every_target_weighs_alike(accumulate: int, clip: float) -> None:
    """P-02: micro-batches of unequal counts are one big batch (relative 1e-6 in float32)."""
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


def test_p02_counts_that_come_and_go_or_are_zero_are_refused() -> None:
    """P-02."""

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


def test_p03_one_step_counter_whatever_the_number_of_optimizers() -> None:
    """P-03: both counters in every record, in the checkpoint and in what run returns."""
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


def test_p04_the_learning_rate_is_a_function_of_the_update() -> None:
    """P-04: for accumulation 1 and 4 of the same number of updates."""
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
def test_p05_a_skipped_step_leaves_everything_alone(fused: bool) -> None:
    """P-05: infinite gradients at update 0; parameters, optimizer, scheduler and average wait; torch has no warning."""
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


def test_p05_one_of_two_optimizers_has_no_gradient_in_a_step() -> None:
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
def test_p06_scale_and_clip_and_accumulate_in_every_order(precision: str, scale: float) -> None:
    """P-06: unscale, clip, step, update; the optimizer never sees more than the norm, at any scale."""
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


class Untouched(Task):
    """A task whose step may not be reached."""

    def train_step(self, batch: Any) -> Any:
        raise AssertionError("batch 1 was reached")


def test_p07_a_plateau_without_its_metric_is_refused_before_batch_1() -> None:
    """P-07."""
    trainer = build(task=Untouched, scheduler=lambda o: ReduceLROnPlateau(o))
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau\) needs a metric .* valid_loader"):
        trainer.run(1, loader())


@pytest.mark.parametrize(("monitor", "every"), [("loss", None), ("loss", 2), ("train/loss", None), ("train/loss", 2)])
def test_p07_a_plateau_is_stepped_with_the_monitored_metric(monitor: str, every: Any) -> None:
    """P-07: after each validation, or after each epoch when it watches training; scheduler_step_on_batch or not."""
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


def test_p08_a_schedule_too_short_for_the_run_is_refused_before_batch_1() -> None:
    """P-08: 6 batches, accumulation 4, 3 epochs: 6 updates."""
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
            with pytest.raises(ConfigError, match="ends after 6 steps, but this run takes it to 8"):
                trainer.run(1, loader())
        else:
            with pytest.raises(ConfigError, match=r"ends after 5 steps, but this run takes it to 6 \(6 optimizer"):
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
    """P-04: by step and by epoch, given or made by a function; no warning of torch."""
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
def test_p11_two_optimizers_under_clip_and_accumulation_and_precision(by_loss: bool, precision: str) -> None:
    """P-11: a GAN with no flag is the hand loop, bitwise."""
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
    assert [group["lr"] for o in trainer._optimizers.values() for group in o.param_groups] == [0.1, 0.05]


# --- runs in pieces


PIECES = {
    "epochs": [{"n_epoch": 2}, {"n_epoch": 3}],
    "ones": [{"n_epoch": 1}] * 5,
    "steps": [{"n_epoch": None, "max_steps": n} for n in (1, 4, 2, 6, 7, 10)],
    "mixed": [{"n_epoch": None, "max_steps": 9}, {"n_epoch": 4}],
}


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", ["loader", "generator", "list", "unsized"])
def test_p55_pieces_are_the_whole_run(pieces: str, kind: str) -> None:
    """P-55: weights, optimizer, random streams, counters, history and records; not how often run was called."""
    ends = []
    for parts in ([{"n_epoch": 5}], PIECES[pieces]):
        torch.manual_seed(7)
        batches: Any = loader()
        if kind == "generator":
            batches = loader(generator=torch.Generator().manual_seed(1))
        elif kind != "loader":
            batches = list(loader()) if kind == "list" else Unsized(list(loader()))
        trainer = build(AMPAddon, EMAAddon, precision="bf16", decay=0.5, log_every=4, gradient_clip=0.5,
                        scheduler=lambda o: StepLR(o, 2, 0.5))  # fmt: skip
        watched = valid()
        if kind == "unsized" and len(parts) > 1 and "max_steps" in parts[-1]:
            parts = [*parts, {"n_epoch": 1}]  # Nobody knew that the last epoch was at its end.
        for part in parts:
            trainer.run(loader=batches, valid_loader=watched, valid_every=Every(epochs=1), **part)
        ends.append((fingerprint(core_of(trainer)), trainer.progress_checker.step, len(trainer.train_history)))
    assert ends[0][1:] == ends[1][1:] == (30, 5)
    assert ends[0][0] == ends[1][0]


def test_p55_an_endless_stream_in_pieces() -> None:
    """P-55: a generator goes on where it was left, and steps_per_epoch ends its epochs."""

    def endless() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(4, 4, generator=generator), torch.randint(2, (4,), generator=generator)

    ends = []
    for parts in ([12], [3, 4, 1, 4], [4, 8], [5, 7]):
        trainer, stream = build(), endless()
        torch.manual_seed(1)
        for steps in parts:
            trainer.run(None, stream, max_steps=steps, steps_per_epoch=4)
        ends.append((digest(trainer.model), trainer.progress_checker.epoch, len(trainer.train_history)))
    assert set(ends) == {(ends[0][0], 3, 3)}
    trainer = build()
    torch.manual_seed(1)
    assert trainer.run(3, endless(), steps_per_epoch=4)["step"] == 12
    assert digest(trainer.model) == ends[0][0]


def test_a_gradient_that_an_exception_left_behind_is_not_added_to_the_next() -> None:
    class Once(Regression):
        failing = True

        def train_step(self, batch: Any) -> Any:
            if self.failing and len(batch[0]) == 3:
                raise RuntimeError("once")
            return super().train_step(batch)

    model, fresh = line(), line()
    options = {"task": Once, "gradient_accumulation_steps": 2}
    trainer = build(GradientAccumulationAddon, model=model, optimizer=SGD(model.parameters(), lr=0.1), **options)
    with pytest.raises(RuntimeError, match="once"):
        trainer.run(1, pairs(2, 3))
    assert digest(model) == digest(fresh)
    trainer.failing = False
    trainer.run(1, pairs(2, 3))
    other = build(GradientAccumulationAddon, model=fresh, optimizer=SGD(fresh.parameters(), lr=0.1), **options)
    other.failing = False
    other.run(1, pairs(2, 3))
    assert digest(model) == digest(fresh)


# --- watching


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from every global stream for each sample."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return torch.full((4,), index / 20) + noise, index % 2


@pytest.mark.parametrize("every", [None, 1, 2, 7, Every(epochs=2)])
@pytest.mark.parametrize("shared", [False, True])
def test_p48_validation_at_any_cadence_changes_nothing(every: Any, shared: bool, tmp_path: Any) -> None:
    """P-48: dropout, BatchNorm, shuffling without a generator, and a dataset that draws from three streams."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        generator = torch.Generator().manual_seed(3) if shared else None
        batches = torch.utils.data.DataLoader(Noisy(), 4, shuffle=True, generator=generator)
        watch = torch.utils.data.DataLoader(Noisy(), 4, shuffle=True, generator=generator)
        add_ons = [EMAAddon, StateManagerAddon] if watched else []
        options = {"decay": 0.9, "save_path": tmp_path, "save_every": 2, "log_every": 1} if watched else {}
        trainer = build(*add_ons, **options)
        trainer.run(4, batches, watch if watched else None, valid_every=every)
        streams = torch.rand(1).item(), float(np.random.rand()), random.random()
        ends.append((digest(trainer.model), fingerprint(trainer.state_dict()["optimizer"]), streams))
    assert ends[0] == ends[1]


def test_p48_calls_between_the_steps_change_nothing() -> None:
    """P-48: evaluate, inference, state_dict, printing and pickling in the middle of an epoch."""
    ends = []
    for watched in (False, True):
        trainer = build(EMAAddon, decay=0.5)

        def look(trainer: Any = trainer) -> None:
            trainer.evaluate(valid())
            trainer.inference(valid())
            trainer.state_dict()
            str(trainer.metrics), repr(trainer), trainer.explain()
            trainer.save_model("model.safetensors")

        if watched:
            trainer.checkpoint = look
        torch.manual_seed(5)
        trainer.run(2, loader())
        ends.append((digest(trainer.model), torch.rand(1).item()))
    assert ends[0] == ends[1]


def test_p49_nothing_of_the_run_is_validated_before_training() -> None:
    """P-49: a trial of one batch, on copies, is all that comes before the first training batch."""
    calls: list[str] = []

    class Noting(Task):
        def train_step(self, batch: Any) -> Any:
            calls.append("train")
            return super().train_step(batch)

        def test_step(self, batch: Any) -> Any:
            calls.append("test" if self.model is trainer.model else "test of a copy")
            return super().test_step(batch)

    for trial in (["test of a copy"], []):
        trainer = build(task=Noting, try_validation=bool(trial))
        trainer.run(2, loader(8), loader(4, shuffle=False))
        assert calls == trial + ["train", "train", "test"] * 2
        calls.clear()


def test_p35_an_unknown_monitor_fails_at_the_first_validation() -> None:
    """P-35, F-E16: with the names there are; one whose direction is unknown fails at construction."""
    trainer = build(monitor="acuracy", monitor_mode="max", try_validation=False)
    with pytest.raises(MonitorError, match=r"did you mean 'accuracy'\?; there are loss, accuracy"):
        trainer.run(5, loader(), valid())
    assert trainer.progress_checker.epoch == 1
    for misspelt, meant in (("acuracy", "accuracy"), ("valid/acuracy", "valid/accuracy"), ("val_losss", "val_loss")):
        with pytest.raises(ConfigError, match=f"^monitor='{misspelt}'; did you mean '{meant}'.*monitor_mode='min' or"):
            build(monitor=misspelt)
    with pytest.raises(ConfigError, match=r"its name does not tell whether .*monitor_mode='min' or monitor_mode='max'"):
        build(monitor="wheel")
    assert build(monitor="valid/accuracy").run(1, loader(), valid())["best_valid"]["score"] >= 0


# --- odd models, losses and optimizers


def run_like(step: Any, model: nn.Module, batches: list[Any], by_hand: nn.Module, **options: Any) -> Any:
    """Train one model by zae and its twin by hand, with SGD."""

    class Odd(Trainer):
        def train_step(self, batch: Any) -> Any:
            return step(self.model, batch)

        def test_step(self, batch: Any) -> Any:
            return step(self.model, batch)

    trainer = Odd(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), **options)
    trainer.run(2, batches)
    optimizer = SGD(by_hand.parameters(), lr=0.1)
    for batch in batches * 2:
        step(by_hand, batch)["loss"].backward()
        if options.get("gradient_clip"):
            nn.utils.clip_grad_norm_(by_hand.parameters(), options["gradient_clip"])
        optimizer.step()
        optimizer.zero_grad()
    assert digest(model) == digest(by_hand)
    return trainer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = line(), line()
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x)) * self.scale


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = line(), line(1, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) + self.high(x.double())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1 + 1j], [2 - 1j], [0.5 + 0j]]))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = line(), line(1)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.body(x))


@pytest.mark.parametrize("kind", [Tied, Mixed, Complex, Frozen])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_odd_models(kind: Any, clip: float, tmp_path: Any) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return {"loss": (model(batch[0]) - batch[1]).square().mean()}

    trainer = run_like(step, kind(), pairs(4, 2), kind(), gradient_clip=clip if kind is not Complex else 0.0)
    twin = kind()
    twin.load_state_dict(trainer.model.state_dict())
    trainer.apply_weights(trainer.save_model(tmp_path / "odd.safetensors"))
    assert digest(trainer.model) == digest(twin)


def thaw(model: Any, optimizer: Any) -> None:
    model.body.requires_grad_(True)


def thaw_and_add(model: Any, optimizer: Any) -> None:
    model.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.3})


def grow(model: Any, optimizer: Any) -> None:
    model.head = nn.Sequential(model.head, nn.PReLU())
    optimizer.add_param_group({"params": list(model.head[1].parameters())})


@pytest.mark.parametrize("change", [thaw, thaw_and_add, grow])
@pytest.mark.parametrize("clip", [0.0, 0.02])
def test_p06_what_is_thawed_or_added_between_epochs_is_trained_and_clipped(change: Any, clip: float) -> None:
    """P-06: the parameters are those that the model and the optimizer have as an epoch begins, as by hand."""

    class Changing(Regression):
        def on_epoch_begin(self) -> None:
            super().on_epoch_begin()
            if self.progress_checker.epoch == 1:
                change(self.unwrap(), self.optimizer)

    def trained(model: Any) -> Any:
        return SGD((model if change is thaw else model.head).parameters(), lr=0.1, momentum=0.9)

    model, by_hand, batches = Frozen(), Frozen(), pairs(4, 2)
    Changing(model, "cpu", optimizer=trained(model), gradient_clip=clip).run(3, batches)
    optimizer = trained(by_hand)
    for epoch, (inputs, targets) in itertools.product(range(3), batches):
        if epoch == 1 and inputs is batches[0][0]:
            change(by_hand, optimizer)
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(by_hand.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    assert digest(model) == digest(by_hand)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_p06_what_is_added_between_two_steps_of_an_epoch_is_trained_and_clipped(several: bool, accumulate: int) -> None:
    """P-06: an optimizer that is given another group follows the hand loop from that step on; so does an average."""

    class Growing(Regression):
        def train_step(self, batch: Any) -> Any:
            if self.progress_checker.step == 1 and not hasattr(self.model.head, "1"):
                grow(self.model, list(self._optimizers.values())[-1])
            return {**super().train_step(batch), "num_targets": len(batch[0])}

    def trained(model: Any) -> list[Any]:
        body = [SGD(model.body.parameters(), lr=0.1)] if several else []
        return [*body, SGD(model.head.parameters(), lr=0.1, momentum=0.9)]

    model, by_hand, batches = Frozen(), Frozen(), pairs(2, 4, 3, 3)
    trainer = build(GradientAccumulationAddon, EMAAddon, task=Growing, model=model, optimizer=trained(model),
                    gradient_clip=0.02, gradient_accumulation_steps=accumulate, decay=0.5)  # fmt: skip
    trainer.run(2, batches)
    optimizers, average = trained(by_hand), {}
    windows = [batches[start : start + accumulate] for start in range(0, 4, accumulate)]
    for step, window in enumerate(windows * 2):
        if step == 1:
            grow(by_hand, optimizers[-1])
        targets = sum(len(inputs) for inputs, _ in window)
        for inputs, wanted in window:
            loss = nn.functional.mse_loss(by_hand(inputs), wanted)
            (loss if accumulate == 1 else loss * len(inputs)).backward()
        held = [p for p in by_hand.parameters() if p.grad is not None]
        for parameter in held if accumulate > 1 else ():
            parameter.grad.div_(targets)
        for p in by_hand.head.parameters():
            average.setdefault(p, p.detach().clone())
        nn.utils.clip_grad_norm_(held, 0.02)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, mean in average.items():
            mean.mul_(0.5).add_(p.detach(), alpha=0.5)
    assert digest(model) == digest(by_hand)
    assert digest(*(trainer.average[name] for name, _ in model.head.named_parameters(prefix="head"))) == digest(
        *(average[p] for p in by_hand.head.parameters())
    )
    assert not any("add_param_group" in vars(each) for each in trainer._optimizers.values())
    trainer.run(1, batches)


def test_p12_a_lazy_model_is_planned_saved_and_resumed(tmp_path: Any) -> None:
    """P-12, F-E12: its shapes are known after its first batch, or after a load; a shape that differs is refused."""

    def make(width: int = 8, **options: Any) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.LazyLinear(width), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Dropout(0.2), nn.LazyLinear(2))
        return build(StateManagerAddon, model=model, save_every=1, optimizer=AdamW(model.parameters()), **options)

    whole, first = make(save_path=tmp_path / "whole"), make(save_path=tmp_path / "s")
    plan = first.plan(2, loader(), valid())
    assert plan.last_step == 12
    assert any("the model is lazy" in note for note in plan.notes)
    torch.manual_seed(4)
    whole.run(2, loader())
    torch.manual_seed(4)
    first.run(2, loader(), max_steps=4)
    second = make(save_path=tmp_path / "s", resume=True)
    data = loader()
    second.run(2, data, max_steps=4)  # The call that was made already.
    second.run(2, data)
    assert digest(whole.model) == digest(second.model)
    assert digest(whole.model) != digest(first.model)
    for weights in (whole.save_model(tmp_path / "w.safetensors"), whole.model.state_dict()):
        fresh = make(save_path=tmp_path / "fresh")
        fresh.apply_weights(weights)
        assert digest(fresh.model) == digest(whole.model)
    grown = make(width=9, save_path=tmp_path / "grown")
    grown.evaluate(valid())
    with pytest.raises(CheckpointMismatch, match=r"0.weight is \(8, 4\) and must be \(9, 4\)"):
        grown.apply_weights(whole.model.state_dict())


class Observer(nn.Module):
    """Knows its shape after its first batch, and loads another one itself, as those of quantization-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            low = inputs.detach().amin(0)
            low = torch.minimum(low, self.low) if len(self.low) else low
            self.low.resize_(low.shape).copy_(low)
        return inputs - self.low if len(self.low) else inputs

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if prefix + "low" in state and state[prefix + "low"].dim() == 1:
            self.low.resize_(state[prefix + "low"].shape)
        super()._load_from_state_dict(state, prefix, *args)


def test_p12_f_e12_a_module_that_loads_another_shape_itself_is_resumed(tmp_path: Any) -> None:
    """P-12, F-E12: with its average; what neither it nor torch's own modules take is refused before anything loads."""

    def make(**options: Any) -> Any:
        model = nn.Sequential(Observer(), network())
        return build(EMAAddon, StateManagerAddon, model=model, save_every=1, decay=0.5, **options)

    torch.manual_seed(4)
    whole = make(save_path=tmp_path / "whole")
    whole.run(2, loader(), valid())
    torch.manual_seed(4)
    make(save_path=tmp_path / "s").run(2, loader(), valid(), max_steps=7)
    resumed = make(save_path=tmp_path / "s", resume=True)
    data = loader()
    resumed.run(2, data, valid(), max_steps=7)
    assert resumed.progress_checker.step == 7
    resumed.run(1, data, valid())
    assert digest(whole.model) == digest(resumed.model)
    assert digest(*whole.average.values()) == digest(*resumed.average.values())
    fresh, state = make(save_path=tmp_path / "fresh"), whole.model.state_dict()
    before = digest(fresh.model)
    for key, wrong in (("0.low", torch.zeros(2, 2)), ("1.1.running_mean", torch.zeros(9))):
        with pytest.raises(CheckpointMismatch, match=f"shapes differ .*{key} is"):
            fresh.apply_weights({**state, key: wrong})
    assert digest(fresh.model) == before


@pytest.mark.parametrize("kind", [Tied, Mixed, Complex, Frozen])
def test_p10_averages_of_odd_models(kind: Any) -> None:
    """P-10: tied weights have one average, complex ones are averaged, and frozen ones stay."""
    model, first = kind(), kind()
    trainer = build(EMAAddon, task=Regression, model=model, optimizer=SGD(model.parameters(), lr=0.1), decay=0.75)
    expected = {name: p.detach().clone() for name, p in first.named_parameters()}
    optimizer_step = trainer.optimizer_step

    def noting() -> bool:
        stepped = optimizer_step()
        for name, p in model.named_parameters():
            expected[name].mul_(0.75).add_(p.detach(), alpha=0.25)
        return stepped

    trainer.optimizer_step = noting
    if kind is Mixed:
        trainer.train_step = lambda batch: {"loss": (model(batch[0]) - batch[1]).square().mean()}
    trainer.run(2, pairs(4, 2))
    for name, value in expected.items():
        assert torch.equal(trainer.average[name], value)
    if kind is Tied:
        assert trainer.average["a.weight"] is trainer.average["b.weight"]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_p10_the_average_counts_updates(accumulate: int) -> None:
    """P-10: for accumulation 1 and 4 on the same effective batches."""
    big = pairs(8, 8, 8, dtype=torch.float64)
    batches = big if accumulate == 1 else [(a, b) for x, y in big for a, b in zip(x.split(2), y.split(2), strict=True)]
    model = line(dtype=torch.float64)
    trainer = build(EMAAddon, GradientAccumulationAddon, task=Regression, model=model, decay=0.9,
                    optimizer=SGD(model.parameters(), lr=0.1), gradient_accumulation_steps=accumulate)  # fmt: skip
    trainer.run(3, batches)
    by_hand = line(dtype=torch.float64)
    average, optimizer = by_hand.weight.detach().clone(), SGD(by_hand.parameters(), lr=0.1)
    for inputs, targets in big * 3:
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.mul_(0.9).add_(by_hand.weight.detach(), alpha=1 - 0.9)
    torch.testing.assert_close(trainer.average["weight"], average, rtol=1e-12, atol=1e-14)


def odd_loss(shape: str, model: nn.Module, batch: Any) -> Any:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.register_hook(lambda g: g * 2)
    return {"loss": {"one": loss.reshape(1), "two": loss.reshape(1, 1), "double": loss.double()}[shape]}


@pytest.mark.parametrize("shape", ["one", "two", "double"])
def test_odd_losses(shape: str) -> None:
    """Of shape [1], in float64, with a hook: differentiated as by hand, and recorded as a number."""
    trainer = run_like(lambda m, b: odd_loss(shape, m, b), line(), pairs(4, 2), line())
    history = trainer.metrics["train_metrics_history"]
    assert len(trainer.get_loss_history()) == 2
    assert trainer.best["score"] == min(row["train_loss"] for row in history)


def test_a_model_without_parameters_and_parameters_outside_of_the_model() -> None:
    """They are trained, clipped, saved and resumed."""
    factor = nn.Parameter(torch.tensor([2.0]))

    class Outside(Trainer):
        def train_step(self, batch: Any) -> Any:
            return {"loss": (self.model(batch[0]) * self.factor).square().mean()}

        def test_step(self, batch: Any) -> Any:
            return self.train_step(batch)

    def make() -> Any:
        own = nn.Parameter(factor.detach().clone())
        trainer = Outside(nn.Tanh(), "cpu", optimizer=SGD([own], lr=0.1, momentum=0.9), gradient_clip=0.5)
        trainer.factor = own
        return trainer

    whole, first, second = make(), make(), make()
    whole.run(4, pairs(4, 2))
    first.run(2, pairs(4, 2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.factor, first.factor)
    assert second.factor is not first.factor
    second.run(2, pairs(4, 2))
    assert torch.equal(whole.factor, second.factor)
    assert not torch.equal(whole.factor, factor)


def test_an_optimizer_that_wants_a_closure_is_refused_in_words_or_stepped_by_the_user() -> None:
    """LBFGS evaluates the loss itself."""
    model, by_hand = line(), line()
    trainer = build(task=Untouched, model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match=r"LBFGS\) evaluates the loss itself.*def step_one"):
        trainer.run(1, pairs(8))

    class ByClosure(Regression):
        def gradients(self, batch: Any) -> Any:
            self.batch = batch
            return super().gradients(batch)

        def step_one(self, optimizer: Any) -> bool:
            def closure() -> Any:
                self.zero_grad()
                return super(ByClosure, self).gradients(self.batch)[0][0]["loss"]

            optimizer.step(closure)
            return True

    trainer = build(task=ByClosure, model=model, optimizer=torch.optim.LBFGS(model.parameters(), max_iter=5))
    trainer.run(3, pairs(8))
    optimizer = torch.optim.LBFGS(by_hand.parameters(), max_iter=5)
    for inputs, targets in pairs(8) * 3:

        def loss(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            value = nn.functional.mse_loss(by_hand(inputs), targets)
            value.backward()
            return value

        optimizer.step(loss)
    assert digest(model) == digest(by_hand)


def test_parameter_groups_keep_their_rates() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[4].parameters(), "lr": 0.2}]
    trainer = build(model=model, optimizer=SGD(groups), scheduler=lambda o: StepLR(o, 1, 0.5))
    trainer.run(2, loader())
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.025, 0.05]
    assert (trainer.train_history[-1]["lr"], trainer.train_history[-1]["lr/1"]) == (0.05, 0.1)


def test_training_without_an_optimizer_is_refused() -> None:
    """F-E10: also when a trainer for evaluation is toggled."""
    trainer = Task(network(), "cpu", mode="test")
    trainer.toggle("train")
    with pytest.raises(ConfigError, match="optimizer is None"):
        trainer.run(1, loader())


# --- what a run leaves behind


def test_x5_an_empty_folder_stays_empty_and_nothing_is_said(tmp_path: Any) -> None:
    """X-5, X-7: no add-on that writes, so no file, and no byte to either stream."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, zae\n"
        "from zae import Trainer\n"
        "from zae.addons import AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon\n"
        "class Task(Trainer):\n"
        "    def train_step(self, batch):\n"
        "        return {'loss': self.model(batch).square().mean()}\n"
        "    test_step = train_step\n"
        "model = torch.nn.Linear(2, 1)\n"
        "kind = Task.add_on(AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon)\n"
        "trainer = kind(model, 'cpu', optimizer=torch.optim.SGD(model.parameters(), lr=0.1), precision='bf16')\n"
        "trainer.run(3, [torch.ones(8, 2)] * 5, [torch.ones(8, 2)])\n"
    )
    folder = tmp_path / "empty"
    folder.mkdir()
    with contextlib.chdir(folder):
        assert Script(script).end() == (0, "", "")
    assert list(folder.iterdir()) == []


def test_loaders_that_lie_about_their_length() -> None:
    """The plain loop takes what it is given; a window that comes up short is refused in words."""

    class Lying(Unsized):
        def __init__(self, batches: list[Any], said: int) -> None:
            super().__init__(batches)
            self.said = said

        def __len__(self) -> int:
            return self.said

    for said in (3, 9):
        model = line()
        options = {"task": Regression, "model": model, "optimizer": SGD(model.parameters(), lr=0.1)}
        assert build(**options).run(2, Lying(pairs(2, 2, 2, 2, 2), said))["step"] == 10
        trainer = build(GradientAccumulationAddon, gradient_accumulation_steps=2, **options)
        with pytest.raises(LoaderError, match="mend its __len__"):
            trainer.run(2, Lying(pairs(2, 2, 2, 2, 2), said))


# --- seed 003


def test_p57_the_seed_s_basic_example(tmp_path: Any) -> None:
    """P-57: with its two methods added; device as text, a scheduler of zae's own, and none."""
    from zae.schedulers import CosineAnnealingScheduler

    for scheduled in (True, False):
        my_model = line()
        my_optimizer = torch.optim.Adam(my_model.parameters(), lr=0.001)
        my_scheduler = CosineAnnealingScheduler(optimizer=my_optimizer, total_iters=100) if scheduled else None
        trainer = Regression.add_on(StateManagerAddon)(
            model=my_model, device="cpu", mode="train", optimizer=my_optimizer, scheduler=my_scheduler,
            save_path=tmp_path / f"checkpoints{scheduled}",
        )  # fmt: skip
        trainer.run(n_epoch=10, loader=pairs(4, 4), valid_loader=pairs(3))
        assert trainer.progress_checker.epoch == 10
        assert trainer.best_path is not None
        assert trainer.best_path.is_dir()
        assert trainer.mode == "train"
        assert isinstance(trainer.device, torch.device)


def test_p57_f_e17_the_abstract_trainer_shows_what_to_write() -> None:
    """P-57, F-E17: class, methods and the lines."""
    model = line()
    with pytest.raises(TypeError, match=r"no train_step and no test_step[\s\S]*def train_step\(self, batch\)"):
        Trainer.add_on(StateManagerAddon)(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), save_path="x")
