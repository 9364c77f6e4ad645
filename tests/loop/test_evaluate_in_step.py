"""An evaluation that a training step calls, within its autocast, changes no number of either of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kit.hand import digest, loader, network
from zae import Trainer
from zae.addons import AMPAddon, EMAAddon


def nothing(trainer: Any) -> None:
    """Evaluate nothing."""


def evaluate(trainer: Any) -> None:
    trainer.evaluate(loader(20, 10, seed=9, shuffle=False))


def predict(trainer: Any) -> None:
    trainer.predict(loader(20, 10, seed=9, shuffle=False))


def inference(trainer: Any) -> None:
    trainer.inference(loader(20, 10, seed=9, shuffle=False))


def by_hand(trainer: Any) -> None:
    with trainer.evaluation_context(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        trainer.model.eval()
        trainer.model(torch.ones(3, 4))
        trainer.model.train()


def averaged(trainer: Any) -> None:
    with trainer.averaged(), torch.autocast("cpu", dtype=torch.bfloat16):
        trainer.model(torch.ones(3, 4))


class Probing(Trainer):
    """Evaluates before, between and after two forwards of a step."""

    probe: Callable[[Any], None] = staticmethod(nothing)
    looks_after_a_forward = True

    def look(self) -> None:
        if self.mode == "train":
            self.probe(self)

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        self.look()
        loss = cross_entropy(self.model(inputs), targets)
        if self.looks_after_a_forward:
            self.look()
        loss = loss + 0.5 * cross_entropy(self.model(inputs * 2), targets)
        if self.looks_after_a_forward:
            self.look()
        return {"loss": loss}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": cross_entropy(self.model(batch[0]), batch[1])}

    def predict_step(self, batch: Any) -> Any:
        return self.model(batch[0])


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "schedule-free": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.05),
}


def train(probe: Callable[[Any], None], optimizer: str, precision: str, *add_ons: Any, **options: Any) -> str:
    trainer = Probing.add_on(AMPAddon, *add_ons)(
        network(), "cpu", optimizer=OPTIMIZERS[optimizer], seed=0, log_bar=False, precision=precision, **options
    )
    trainer.probe = probe
    # Optimizers with modes write to the weights themselves, and torch refuses a backward after that.
    trainer.looks_after_a_forward = optimizer == "AdamW"
    trainer.run(2, loader(16))
    return digest(trainer.unwrap())


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_is_left_as_it_is(optimizer: str, precision: str) -> None:
    plain = train(nothing, optimizer, precision, EMAAddon, decay=0.5)
    for probe in (evaluate, predict, inference, by_hand, averaged):
        assert train(probe, optimizer, precision, EMAAddon, decay=0.5) == plain, probe.__name__


def test_the_evaluation_has_its_own_weights() -> None:
    """It returns what it returns between two steps: with the average, in the same precision."""
    found: list[Any] = []

    class Asking(Probing):
        def train_step(self, batch: Any) -> dict[str, Any]:
            self.model(batch[0])  # The autocast of the step holds casts of the training weights from here on.
            found.append(self.evaluate(valid)["loss"])
            return super().train_step(batch)

        def on_step_begin(self, batch: Any) -> None:
            super().on_step_begin(batch)
            found.append(self.evaluate(valid)["loss"])

    valid = loader(20, 10, seed=9, shuffle=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    trainer = Asking.add_on(AMPAddon, EMAAddon)(
        model, "cpu", optimizer=OPTIMIZERS["AdamW"], seed=0, log_bar=False, precision="bf16", decay=0.5
    )
    trainer.run(1, loader(16))
    assert found[::2] == found[1::2]
    assert len(set(found[::2])) == 4
