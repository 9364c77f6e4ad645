"""A loss or a gradient that is not finite: raised, skipped or warned of, and never saved."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import faults, hand
from kit.faults import build, everything
from zae.addons import (
    AMPAddon,
    EMAAddon,
    GradientAccumulationAddon,
    StateManagerAddon,
)
from zae.checkpoint.folder import list_checkpoints, verify
from zae.checkpoint.weights import load_weights
from zae.errors import ConfigError, NonFiniteError
from zae.loop.nonfinite import MAX_DELAY_STEPS, NonFiniteGuard


class Bad(faults.Task):
    """A task whose loss is not finite at some steps."""

    def __init__(self, *args: Any, bad: Any = (5,), value: float = math.nan, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bad, self.value = bad, value

    def train_step(self, batch: Any) -> dict[str, Any]:
        out = super().train_step(batch)
        if self.progress_checker.step + 1 in self.bad:
            out["loss"] = out["loss"] * self.value
        return {**out, "part": 0.25}


# --- not finite


@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon,), (AMPAddon,), (StateManagerAddon, EMAAddon)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_raise_before_the_step(folder: Path, value: float, add_ons: Any) -> None:
    """Step, epoch, loss, its parts and the learning rate are named; the weights are those of step 4."""
    options: dict[str, Any] = {"save_path": folder / "run", "save_every": 1, "decay": 0.9}
    options = options if StateManagerAddon in add_ons else {}
    accumulate = {"gradient_accumulation_steps": 2} if GradientAccumulationAddon in add_ons else {}
    plain = build(faults.Task, *add_ons, **options | ({"save_path": folder / "plain"} if options else {}), **accumulate)
    loader = hand.loader(40, batch_size=4)
    plain.run(None, loader, max_steps=4)
    made = build(Bad, *add_ons, value=value, **options, **accumulate)
    with pytest.raises(NonFiniteError) as caught:
        made.run(None, loader, max_steps=20)
    text = str(caught.value)
    assert all(
        word in text for word in ("step 5", "epoch 1", f"loss {value:g}", "part 0.25", "lr 0.01", "after step 4")
    )
    parameters = [{name: p.detach() for name, p in each.unwrap().named_parameters()} for each in (made, plain)]
    assert faults.fingerprint(parameters[0]) == faults.fingerprint(parameters[1])
    assert everything(made)["optimizer"] == everything(plain)["optimizer"]
    if options:
        assert made.last_path.name == "step-00000004"


def test_a_gradient_norm_that_is_not_finite(folder: Path) -> None:
    """A finite loss with a gradient that is not is caught where clipping computes the norm."""

    class Root(faults.Task):
        def train_step(self, batch: Any) -> dict[str, Any]:
            out = super().train_step(batch)
            if self.progress_checker.step == 2:  # sqrt(0) is 0, and its gradient is infinite.
                out["loss"] = out["loss"] + (self.model[0].weight * 0).square().sum().sqrt()
            return out

    made = build(Root, gradient_clip=1.0)
    with pytest.raises(NonFiniteError, match=r"step 3 .*gradient norm nan"):
        made.run(1, hand.loader())
    assert made.progress_checker.step == 2
    assert all(torch.isfinite(p).all() for p in made.unwrap().parameters())
    model = faults.classifier()
    body, head = list(model[:-1].parameters()), list(model[-1].parameters())
    two = Root(
        model, "cpu", gradient_clip=1.0, optimizer=[torch.optim.SGD(body, 0.1), torch.optim.SGD(head, 0.1)], seed=1
    )
    with pytest.raises(NonFiniteError, match="step 3 "):
        two.run(1, hand.loader())


@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon,), (AMPAddon,)])
def test_skip_leaves_the_step_out(add_ons: Any) -> None:
    """ "skip" is a step that never was for weights, optimizer, schedule and average; it is counted and logged."""
    options = {"gradient_accumulation_steps": 2} if GradientAccumulationAddon in add_ons else {}
    options |= {"precision": "fp16", "loss_scale": (8.0, 1.0)} if AMPAddon in add_ons else {}
    seen: dict[int, str] = {}

    class Watched(Bad):
        def on_step(self) -> None:
            seen[self.progress_checker.step] = everything(self)["optimizer"] + everything(self)["model"][:0]

        def checkpoint(self) -> None:
            super().checkpoint()
            weights = {
                key: value for key, value in self.model_state().items() if "running" not in key and "num" not in key
            }
            seen[self.progress_checker.step] = faults.fingerprint(weights) + everything(self)["optimizer"]

    made = build(
        Watched,
        EMAAddon,
        *add_ons,
        bad=(2, 3),
        decay=0.9,
        on_nonfinite="skip",
        log_every=1,
        gradient_clip=1.0,
        **options,
    )
    metrics = made.run(None, hand.loader(40, batch_size=4), max_steps=5)
    assert seen[1] == seen[2] == seen[3] != seen[4] != seen[5]
    assert metrics["nonfinite_steps"] == metrics["skipped_steps"] == 2
    assert made.log_history[-1]["nonfinite_steps"] == 2
    losses = [row["train/loss"] for row in made.log_history]
    assert [math.isnan(value) for value in losses] == [False, True, True, False, False], "never replaced in a log"


def test_warn_takes_the_step_and_never_saves_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ "warn" trains on; no checkpoint of weights that are not finite replaces one of finite ones."""
    made = build(
        Bad, StateManagerAddon, on_nonfinite="warn", save_path=folder / "run", save_every=1, keep_last=1, keep_best=0
    )
    metrics = made.run(2, hand.loader())
    assert metrics["nonfinite_steps"] == 8, "from step 5 on all are"
    assert "The step was taken all the same" in caplog.text
    assert "contains NaN or infinite values" in caplog.text
    assert made.last_path.name == "step-00000004"
    assert verify(made.last_path)["step"] == 4
    weights = load_weights(made.last_path)
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_weights_that_went_bad_unseen_are_not_saved(folder: Path) -> None:
    """Gradients that nobody looked at spoil the weights: the save refuses, the last good one stays."""

    class Spoiled(faults.Task):
        def optimizer_step(self) -> bool:
            stepped = super().optimizer_step()
            if self.progress_checker.step == 3:
                with torch.no_grad():
                    self.model[0].weight[0, 0] = math.inf
            return stepped

    made = build(Spoiled, StateManagerAddon, save_path=folder / "run", save_every=1, keep_last=1, keep_best=0)
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        made.run(1, hand.loader())
    assert [path.name for path in list_checkpoints(folder / "run")] == ["step-00000003"]


def test_an_overflow_of_the_loss_scale_is_no_error() -> None:
    """What GradScaler skips is its own business."""
    made = build(faults.Task, AMPAddon, precision="fp16", loss_scale=(2.0**30, 1.0), gradient_clip=1.0)
    metrics = made.run(3, hand.loader())
    assert metrics["skipped_steps"] > 5
    assert metrics["nonfinite_steps"] == 0


def test_the_late_look_of_an_accelerator(folder: Path) -> None:
    """Where a look waits for the device it comes after 64 steps at most, and before anything is saved."""

    class Far(NonFiniteGuard):
        """As if every loss were on an accelerator."""

        def should_step(self, outputs: Any, progress: Any, processes: Any) -> bool:
            for out, _ in outputs:
                self._pending.append((progress.step + 1, out["loss"].detach()))
            if len(self._pending) >= MAX_DELAY_STEPS:
                self.read_pending(progress, processes)
            return True

    loader = hand.loader(800, batch_size=4)
    made = build(Bad, StateManagerAddon, bad=(70,), save_path=folder / "run", save_every=50, keep_last=None)
    made.nonfinite = Far("raise", made.optimization)
    with pytest.raises(NonFiniteError, match="step 70 was nan"):
        made.run(1, loader)
    assert 70 <= made.progress_checker.step <= 70 + MAX_DELAY_STEPS
    assert made.last_path.name == "step-00000050"
    soon = build(Bad, StateManagerAddon, bad=(49,), save_path=folder / "soon", save_every=50, keep_last=None)
    soon.nonfinite = Far("raise", soon.optimization)
    with pytest.raises(NonFiniteError, match="step 49 was nan"):
        soon.run(1, loader)
    assert list_checkpoints(folder / "soon") == []


def test_on_nonfinite_is_checked() -> None:
    """The option says what it may be."""
    with pytest.raises(ConfigError, match="did you mean 'raise'"):
        build(faults.Task, on_nonfinite="rise")


def test_the_log_is_true(caplog: pytest.LogCaptureFixture) -> None:
    """A loss that is not finite is in the history as it was."""
    caplog.set_level(logging.WARNING)
    made = build(Bad, on_nonfinite="warn", bad=(2,), value=math.inf)
    metrics = made.run(1, hand.loader())
    assert not math.isfinite(metrics["train_metrics_history"][0]["train_loss"])


def test_a_mean_over_no_target_says_what_to_write() -> None:
    """A batch of a window without targets: the mean is NaN, and the sum by at least one target is 0."""

    class Counted(faults.Task):
        divides = True

        def train_step(self, batch: Any) -> dict[str, Any]:
            inputs, labels = batch
            labels = labels.masked_fill(torch.tensor(self.current_run.activity.micro_index == 1), -100)
            count, reduction = (labels != -100).sum(), "mean" if self.divides else "sum"
            loss = torch.nn.functional.cross_entropy(self.model(inputs), labels, reduction=reduction)
            return {"loss": loss if self.divides else loss / count.clamp(min=1), "num_targets": count}

    made = build(Counted, GradientAccumulationAddon, gradient_accumulation_steps=2)
    with pytest.raises(NonFiniteError, match=r"num_targets 0, and the mean over no target is NaN: .*clamp\(min=1\)"):
        made.run(1, hand.loader())
    made = build(Counted, GradientAccumulationAddon, gradient_accumulation_steps=2)
    made.divides = False
    assert math.isfinite(made.run(1, hand.loader())["train_metrics_history"][0]["train_loss"])
