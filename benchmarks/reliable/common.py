"""The model, the data and what a contestant reports; a contestant is a function ``train(folder, epochs, poison)``.

It saves into ``folder`` after each epoch, goes on from what it finds there, by the means that its library offers for
that, and returns a `Report`. ``poison`` is the step whose loss is made NaN.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, STEPS = 3, 5
"""Epochs of a run, and optimizer steps in each."""


class Report(NamedTuple):
    """What a run ended with."""

    began: int  # The step it went on from.
    ended: int
    weights: str  # SHA-256 of all parameters.


def model() -> nn.Module:
    """A classifier with dropout, of a size that every library saves in several files or records."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))


def data() -> TensorDataset:
    """20 samples."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(4 * STEPS, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def loader() -> DataLoader:
    """Shuffled batches of 4."""
    return DataLoader(data(), batch_size=4, shuffle=True)


def loss_of(module: nn.Module, batch: tuple[Tensor, Tensor], poisoned: bool = False) -> Tensor:
    """The cross entropy; NaN where it is poisoned."""
    loss = nn.functional.cross_entropy(module(batch[0]), batch[1])
    return loss * math.nan if poisoned else loss


def digest(module: nn.Module) -> str:
    """SHA-256 of the parameters."""
    sha = hashlib.sha256()
    for parameter in module.parameters():
        sha.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()
