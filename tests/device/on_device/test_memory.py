"""The peak of the device's memory is that of the loop by hand."""

from __future__ import annotations

import gc

import torch
from torch import nn

from device.on_device.tasks import DEVICE, Task
from emulation import core
from zae.addons import EMAAddon, StateManagerAddon


class Deep(nn.Module):
    """Sixteen layers: weights of 74 MiB, activations of next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1100, 1100) for _ in range(16))

    def forward(self, values):
        for layer in self.layers:
            values = torch.relu(layer(values))
        return values


class Squares(Task):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


WEIGHTS = sum(parameter.numel() * 4 for parameter in Deep().parameters())
BATCHES = [torch.ones(2, 1100)] * 4


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def peak(train):
    """Return the peak of memory while a function trains, in units of the weights."""
    gc.collect()
    core().reset_peak(0)
    before = core().allocated(0)
    train()
    return (core().peak(0) - before) / WEIGHTS


def by_hand():
    model = Deep().to(DEVICE)
    optimizer = adamw(model.parameters())
    for batch in BATCHES:
        model(batch.to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_zae(*addons, **options):
    Squares.add_on(*addons)(Deep, DEVICE, optimizer=adamw, seed=0, **options).run(1, BATCHES)


def test_peak_is_that_of_the_loop_by_hand(tmp_path):
    """With a save as well; the average of EMAAddon takes as much as the weights."""
    allowed = peak(by_hand) + 0.02
    assert peak(by_zae) < allowed
    assert peak(lambda: by_zae(StateManagerAddon, save_path=tmp_path / "run")) < allowed
    assert peak(lambda: by_zae(EMAAddon)) < allowed + 1
