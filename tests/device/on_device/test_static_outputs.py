"""Numbers that lie in a buffer which the next step overwrites, as the outputs of a CUDA graph do, are recorded."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from device.on_device.tasks import DEVICE, Task, assert_same, data, dense, weights
from zae.addons import CompileAddon, GradientAccumulationAddon
from zae.errors import ConfigError, NonFiniteError


class StaticOutput(torch.autograd.Function):
    """Return a value in the buffer of its name, which each call overwrites, with a gradient."""

    buffers: ClassVar[dict[str, torch.Tensor]] = {}

    @staticmethod
    def forward(ctx, value, name):
        buffer = StaticOutput.buffers.setdefault(name, torch.zeros_like(value))
        buffer.copy_(value.detach())
        return buffer.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone(), None


class Graphed(Task):
    nan_in = -1

    def train_step(self, batch):
        inputs, target = batch
        loss = nn.functional.mse_loss(self.model(inputs), target)
        if self.progress_checker.step == self.nan_in:
            loss = loss * float("nan")
        return {"loss": StaticOutput.apply(loss, "loss")}

    test_step = train_step


@pytest.fixture(autouse=True)
def _new_buffer():
    StaticOutput.buffers.clear()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def batches():
    inputs, target = data(samples=160)
    return [(inputs[i : i + 16].to(DEVICE), target[i : i + 16].to(DEVICE)) for i in range(0, 160, 16)]


def trained(task, *addons, **options):
    torch.manual_seed(0)
    trainer = task.add_on(*addons)(dense(0.0), DEVICE, optimizer=sgd, **options)
    trainer.run(1, batches(), batches())
    return trainer


def losses(task, *addons, **options):
    trainer = trained(task, *addons, **options)
    return trainer.log_train["loss"], trainer.log_test["loss"]


def test_each_loss_is_that_of_its_step():
    assert losses(Graphed) == losses(Task)


def test_a_nan_is_found_in_its_step():
    class Bad(Graphed):
        nan_in = 4

    with pytest.raises(NonFiniteError, match=r"of step 5 was nan"):
        losses(Bad)


WINDOWS = (GradientAccumulationAddon,), {"gradient_accumulation_steps": 3}


def test_each_loss_of_a_window_is_that_of_its_batch():
    addons, options = WINDOWS
    assert losses(Graphed, *addons, **options) == losses(Task, *addons, **options)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_nan_of_the_first_batch_of_a_window_is_found(policy):
    """Though the losses of the batches after it are finite, and its gradient is not looked at."""

    class Bad(Task):
        def train_step(self, batch):
            inputs, target = batch
            loss = nn.functional.mse_loss(self.model(inputs), target)
            if self.progress_checker.batch == 3 and self.current_run.activity.micro_index == 0:
                loss = loss * float("nan")
            return {"loss": StaticOutput.apply(loss, "loss")}

    addons, options = WINDOWS
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"of step 2 was nan"):
            trained(Bad, *addons, on_nonfinite=policy, **options)
    else:
        trainer = trained(Bad, *addons, on_nonfinite=policy, **options)
        assert trainer.progress_checker.skipped_steps == 1
        assert all(value.isfinite().all() for value in weights(trainer.model).values())


class Counting(Task):
    """Its loss is the mean over targets, of which each batch has another number."""

    def out(self, value, name):
        return value

    def train_step(self, batch):
        inputs, target = batch
        mask = target > 0
        loss = ((self.model(inputs) - target).square() * mask).sum() / mask.sum()
        count = self.out(mask.sum(), "num_targets")
        outputs = (inputs * 2).detach()
        return {"loss": self.out(loss, "loss"), "num_targets": count, "outputs": self.out(outputs, "outputs")}

    test_step = train_step


class CountingGraphed(Counting):
    def out(self, value, name):
        return StaticOutput.apply(value, name)


def test_targets_and_outputs_of_a_window_are_those_of_their_batches():
    kept = []

    def seen(task):
        class Keeping(task):
            def metric_on_epoch_end(self):
                log = self.log_train if self.mode == "train" else self.log_test
                kept.append(list(log["outputs"]))
                return {}

        addons, options = WINDOWS
        trainer = trained(Keeping, *addons, keep_train_outputs=True, **options)
        return weights(trainer.model)

    assert_same(seen(CountingGraphed), seen(Counting))
    graphed, plain = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    assert all(torch.equal(*pair) for each in zip(graphed, plain, strict=True) for pair in zip(*each, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"compile_mode": "reduce-overhead"},
        {"compile_mode": "max-autotune"},
        {"compile_options": {"triton.cudagraphs": True}},
    ],
    ids=str,
)
def test_compiled_graphs_are_refused_where_gradients_add_up(options):
    """Their gradients lie in one memory as well, and torch adds them up wrongly."""
    addons, windows = WINDOWS
    with pytest.raises(ConfigError, match=r"a step of 3 batches wrongly; write compile_mode='max-autotune-no-cuda"):
        trained(Task, CompileAddon, *addons, **windows, **options)
