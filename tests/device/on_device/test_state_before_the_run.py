"""What is in an optimizer before its model is on the device, loaded or trained on the host, goes there with it."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from device.on_device.tasks import DEVICE, Task, adamw, assert_same, dense, loader, weights


class Momentum(torch.optim.Optimizer):
    """Keeps its moments in a dict, in lists or in a deque, beside no tensor that is not in one."""

    def __init__(self, parameters, kind):
        super().__init__(parameters, {"lr": 0.05})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    first = torch.zeros_like(parameter)
                    state["moments"] = {"dict": {"first": first}, "list": [[first]], "deque": deque([first])}[self.kind]
                held = state["moments"]
                while not isinstance(held, torch.Tensor):
                    held = next(iter(held.values() if isinstance(held, dict) else held))
                held.mul_(0.9).add_(parameter.grad)
                parameter.sub_(held, alpha=group["lr"])


OPTIMIZERS = {
    "flat": adamw,
    "dict": lambda parameters: Momentum(parameters, "dict"),
    "list": lambda parameters: Momentum(parameters, "list"),
    "deque": lambda parameters: Momentum(parameters, "deque"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_state_goes_to_the_device(name):
    def make():
        torch.manual_seed(0)
        return Task(dense(0.0), DEVICE, optimizer=OPTIMIZERS[name], log_bar=False)

    batches = list(loader())
    whole = make()
    whole.run(2, batches)
    first = make()
    first.run(1, batches)
    resumed = make()
    resumed.load_state_dict(first.state_dict())
    resumed.run(1, batches)
    assert_same(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_the_host_has_begun_goes_on_on_the_device(name):
    torch.manual_seed(0)
    model = dense(0.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    Task(model, "cpu", optimizer=optimizer, log_bar=False).run(1, loader())
    before = weights(model)
    trainer = Task(model, DEVICE, optimizer=optimizer, log_bar=False)
    trainer.run(1, loader())
    after = weights(trainer.unwrap())
    assert all(not torch.equal(before[key], after[key]) for key in before)
