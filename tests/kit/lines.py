"""A trainer that fits a line, with what its tests build it of."""

from __future__ import annotations

import torch

from zae import (
    AddOnBase,
    Trainer,
)
from zae.addons import AMPAddon, EarlyStoppingAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon


class Task(Trainer):
    """Fit a line."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": torch.nn.functional.mse_loss(self.model(inputs), targets)}

    def test_step(self, batch):
        return self.train_step(batch)


class InnerAddon(AddOnBase):
    """Write its name around the clip, near the loop."""

    layer = "loop"

    def __init__(self, *args, inner_mark="inner", **kwargs):
        super().__init__(*args, **kwargs)
        self.inner_mark = inner_mark
        self.trace = []

    def clip(self):
        self.trace.append("inner")
        super().clip()


class MiddleAddon(AddOnBase):
    """Write its name around the clip, in the middle."""

    layer = "precision"

    def clip(self):
        self.trace.append("middle")
        super().clip()


class OuterAddon(AddOnBase):
    """Write its name around the clip, far out."""

    layer = "observe"

    def clip(self):
        self.trace.append("outer")
        super().clip()


class WrappingAddon(AddOnBase):
    """Build the class by itself."""

    layer = "control"

    @classmethod
    def apply(cls, base_cls):
        class Wrapped(base_cls):
            def clip(self):
                self.trace.append("wrapping")
                super().clip()

        return Wrapped


TRACED = (InnerAddon, MiddleAddon, OuterAddon)

LOCAL = (AMPAddon, EMAAddon, EarlyStoppingAddon, GradientAccumulationAddon, StateManagerAddon)


def make(cls, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cls(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(count)]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.unwrap().parameters()])
