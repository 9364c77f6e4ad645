"""Numbers that lie in a buffer which the next step overwrites, as the outputs of a CUDA graph do, are recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from device.on_device.tasks import DEVICE, Task, data, dense
from zae.errors import NonFiniteError


class StaticOutput(torch.autograd.Function):
    """Return a value in a buffer that each call overwrites, with a gradient."""

    buffer = None

    @staticmethod
    def forward(ctx, value):
        if StaticOutput.buffer is None:
            StaticOutput.buffer = torch.zeros((), device=value.device)
        StaticOutput.buffer.copy_(value.detach())
        return StaticOutput.buffer.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


class Graphed(Task):
    nan_in = -1

    def train_step(self, batch):
        inputs, target = batch
        loss = nn.functional.mse_loss(self.model(inputs), target)
        if self.progress_checker.step == self.nan_in:
            loss = loss * float("nan")
        return {"loss": StaticOutput.apply(loss)}

    test_step = train_step


@pytest.fixture(autouse=True)
def _new_buffer():
    StaticOutput.buffer = None


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def batches():
    inputs, target = data(samples=160)
    return [(inputs[i : i + 16].to(DEVICE), target[i : i + 16].to(DEVICE)) for i in range(0, 160, 16)]


def losses(task):
    torch.manual_seed(0)
    trainer = task(dense(0.0), DEVICE, optimizer=sgd)
    trainer.run(1, batches(), batches())
    return trainer.log_train["loss"], trainer.log_test["loss"]


def test_each_loss_is_that_of_its_step():
    assert losses(Graphed) == losses(Task)


def test_a_nan_is_found_in_its_step():
    class Bad(Graphed):
        nan_in = 4

    with pytest.raises(NonFiniteError, match=r"of step 5 was nan"):
        losses(Bad)
