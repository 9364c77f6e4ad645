"""A model that the trainer moves to its device is the one that the script's optimizers, tied weights and names hold."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from device.on_device.tasks import DEVICE, Task, adamw, data, dense
from kit.hand import digest
from zae import ConfigError
from zae.addons import EMAAddon, FSDPAddon, MultiGPUAddon


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.out = nn.Linear(8, 8, bias=False)
        self.out.weight = self.embed.weight
        self.last = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.last(self.out(torch.tanh(self.embed(inputs))))


def make(kind=dense):
    torch.manual_seed(0)
    return kind()


def trained(model, optimizer, *add_ons, runs=1, device=DEVICE, **options):
    trainer = Task.add_on(*add_ons)(model, device, optimizer=optimizer, seed=3, log_bar=False, **options)
    for _ in range(runs):
        trainer.run(1, [data()] * 3)
    return digest(trainer.unwrap())


def step_on_host(model, optimizer):
    """Make a step before the trainer has the model."""
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [dense, Tied])
@pytest.mark.parametrize("add_ons", [(), (EMAAddon,)])
def test_an_optimizer_that_the_script_has_made(kind, add_ons):
    model = make(kind)
    expected = trained(model, adamw, *add_ons)
    model = make(kind)
    assert trained(model, adamw(model.parameters()), *add_ons) == expected


@pytest.mark.parametrize("what", ["no shape yet", "a hook is registered on 0.weight"])
def test_what_would_be_lost_in_the_move(what):
    """A device that torch has no name for refuses it; any other one trains as the host does."""

    def run(device):
        torch.manual_seed(0)
        first = nn.LazyLinear(8) if what == "no shape yet" else nn.Linear(8, 8)
        model = nn.Sequential(first, nn.Linear(8, 1))
        if what != "no shape yet":
            first.weight.register_hook(lambda gradient: 2 * gradient)
        return trained(model, adamw, device=device)

    if DEVICE == "cuda":
        assert run(DEVICE) == run("cpu")
    else:
        with pytest.raises(ConfigError, match=what):
            run(DEVICE)


def test_tied_weights_stay_tied():
    model = make(Tied)
    before = model.embed.weight
    trained(model, adamw)
    assert model.embed.weight is model.out.weight is before


def test_an_optimizer_that_has_made_steps():
    """Its state goes to the device with the parameters."""
    found = []
    for moves_first in (True, False):
        model = make()
        optimizer = adamw(model.parameters())
        step_on_host(model, optimizer)
        if moves_first:
            state, model = optimizer.state_dict(), model.to(DEVICE)
            optimizer = adamw(model.parameters())
            optimizer.load_state_dict(state)
        found.append(trained(model, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("hold", [lambda model: model(torch.ones(4, 8)), lambda model: weakref.ref(model[1].weight)])
def test_a_parameter_that_something_else_holds(hold):
    """A graph of the script, or a weak reference; on CUDA, torch sets the data of such a parameter."""
    model = make()
    held = hold(model)
    optimizer = adamw(model.parameters())
    if DEVICE == "cuda":
        assert trained(model, optimizer) == trained(make(), adamw)
    else:
        with pytest.raises(RuntimeError, match="swap") as raised:
            trained(model, optimizer)
        assert f"model.to('{DEVICE}:0') where the model is made" in "\n".join(raised.value.__notes__)
    assert held is not None


@pytest.mark.exhaustive
@pytest.mark.parametrize("add_on", [MultiGPUAddon, FSDPAddon])
def test_a_second_run_of_ranks_goes_on_with_the_optimizer(add_on):
    one = trained(make(), adamw, add_on, runs=2, device=[f"{DEVICE}:0", f"{DEVICE}:1"])
    model = make()
    again = trained(model, adamw(model.parameters()), add_on, runs=2, device=[f"{DEVICE}:0", f"{DEVICE}:1"])
    assert one == again
