"""A step does not wait for the device: what waits is the end of an epoch, as often as there are epochs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from device.on_device.compositions import COMPOSITIONS, DECIDES_ON_THE_HOST, WithMetric
from device.on_device.tasks import DEVICE, Task, adamw, data, dense
from emulation.record import record
from zae.addons import GradientAccumulationAddon, PrefetchAddon

SHORT, LONG = 12, 32
"""Numbers of steps below the 64 after which the losses are looked at for NaN, which waits once."""


def on_device(steps):
    """Return batches that lie on the device."""
    inputs, target = data(samples=16)
    return [(inputs.to(DEVICE), target.to(DEVICE))] * steps


def waits(trainer, batches):
    """Return the lines that wait in an epoch, with how often."""
    record.clear()
    record.counts_waits = True
    try:
        trainer.run(1, batches)
    finally:
        record.counts_waits = False
    assert not record.violations
    return record.waits.copy()


def assert_no_step_waits(trainer, batches, allowed=0):
    """Compare an epoch with one that is longer: a wait in a step happens more often there."""
    trainer.run(1, batches(2))  # What a first step waits for.
    more = waits(trainer, batches(LONG)) - waits(trainer, batches(SHORT))
    assert more.total() <= allowed * (LONG - SHORT), f"waits in {LONG - SHORT} steps: {dict(more)}"


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_no_step_waits(name):
    addons, options = COMPOSITIONS[name]
    model = options.get("model", dense)
    options = {key: value for key, value in options.items() if key != "model"}
    trainer = WithMetric.add_on(*addons)(model(), DEVICE, optimizer=adamw, **options)
    assert_no_step_waits(trainer, on_device, DECIDES_ON_THE_HOST.get(name, 0))


def test_pinned_batches_of_workers_are_not_waited_for_with_prefetch():
    def batches(steps):
        return DataLoader(TensorDataset(*data(samples=16 * steps)), 16, pin_memory=True, num_workers=1)

    assert_no_step_waits(Task.add_on(PrefetchAddon)(dense(), DEVICE, optimizer=adamw), batches)


@pytest.mark.parametrize("pins", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_the_host_are_not_waited_for(pins, workers):
    def batches(steps):
        return DataLoader(TensorDataset(*data(samples=16 * steps)), 16, pin_memory=pins, num_workers=workers)

    assert_no_step_waits(Task(dense(), DEVICE, optimizer=adamw), batches)


def test_a_buffer_that_its_owner_fills_again_is_waited_for():
    """Pinned memory that is no loader's may be written to after the step: the copy has to be over by then."""
    inputs, target = (tensor.pin_memory() for tensor in data(samples=16))

    class Refilled:
        def __iter__(self):
            for step in range(4):
                inputs.fill_(step)
                yield inputs, target

    record.clear()
    Task(dense(), DEVICE, optimizer=adamw).run(1, Refilled())
    assert not record.violations


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_a_window_waits_once_for_its_targets(dtype):
    class Counting(Task):
        def train_step(self, batch):
            inputs, target = batch
            mask = target > 0
            count = mask.sum().to(dtype)
            squares = (self.model(inputs) - target).square() * mask
            return {"loss": squares.sum() / count, "num_targets": count}

    cls = Counting.add_on(GradientAccumulationAddon)
    trainer = cls(dense(), DEVICE, optimizer=adamw, gradient_accumulation_steps=4)
    assert_no_step_waits(trainer, on_device, allowed=1 / 4)


def test_a_wait_in_a_step_is_found():
    """The check can fail: `.item()` in train_step waits in each step, and its line is named."""

    class Waiting(Task):
        def train_step(self, batch):
            outputs = super().train_step(batch)
            return {**outputs, "loss_now": outputs["loss"].item()}

    trainer = Waiting(dense(), DEVICE, optimizer=adamw)
    with pytest.raises(AssertionError, match=r"item: test_waits\.py:\d+ train_step"):
        assert_no_step_waits(trainer, on_device)
