"""zae.summary: what it counts, what it shows, and a model that is as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zae
from kit.hand import digest, loader, network
from kit.table import Task
from zae import ConfigError
from zae.addons import AMPAddon, GradientAccumulationAddon


class Tied(nn.Module):
    """A language model with shared weights, a frozen layer, and one that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)
        self.drop = nn.Dropout(0.5)
        self.spare = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Identity()])
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        hidden = self.drop(self.norm(self.blocks[0](self.embed(tokens))))
        return {"logits": self.head(self.drop(hidden)) * scale}


def rows_of(text: str) -> dict[str, str]:
    return {line.split()[0]: re.sub(r"\s+", " ", line.strip()) for line in text.split("\n\n")[0].splitlines()}


def test_a_model_is_counted_and_shown_and_stays_as_it_was() -> None:
    model = Tied().train()
    model.drop.eval()
    before, modes, random = digest(model), [m.training for m in model.modules()], torch.get_rng_state()
    found = zae.summary(model, {"tokens": torch.arange(8), "scale": 2.0})
    assert digest(model) == before
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks for m in model.modules())

    assert found.parameters == sum(p.numel() for p in model.parameters()) == 60 + 12 + 42
    assert found.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad) == 102
    assert found.parameter_bytes == 4 * found.parameters
    assert found.buffer_bytes == sum(b.nbytes for b in model.buffers())
    assert rows_of(str(found)) == {
        "layer": "layer class output parameters",
        "Tied": "Tied [8, 10] -",
        "embed": "embed Embedding [8, 6] 60",
        "norm": "norm BatchNorm1d [8, 6] 12 frozen",
        "drop": "drop Dropout [8, 6] - called 2 times",
        "spare": "spare Linear - 42 not called",
        "blocks": "blocks ModuleList - -",
        "0": "0 Identity [8, 6] -",
        "head": "head Linear [8, 10] - shared with embed.weight",
    }
    without = zae.summary(model)
    assert without.activation_bytes is None
    assert "not called" not in str(without)
    assert without.parameters == found.parameters


def test_activations_are_what_autograd_keeps() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4))
    # The input of the first layer, and the output of the sigmoid, which the last layer keeps too.
    assert zae.summary(model, torch.ones(5, 8)).activation_bytes == 4 * (5 * 8 + 5 * 16)


def test_a_lazy_model_gets_its_shapes_in_the_copy_only() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    assert zae.summary(model).parameters == 4
    assert "4 without the lazy ones" in str(zae.summary(model))
    found = zae.summary(model, (torch.ones(2, 5),))
    assert found.parameters == 18 + 4
    assert isinstance(model[0], nn.LazyLinear)
    assert isinstance(model[0].weight, nn.UninitializedParameter)


@pytest.mark.parametrize("add_ons", [(), (AMPAddon, GradientAccumulationAddon)])
def test_a_trainer_shows_what_its_train_step_calls(add_ons: Any) -> None:
    model = network()
    options = {"precision": "bf16"} if add_ons else {}
    trainer = Task.add_on(*add_ons)(model, "cpu", optimizer=torch.optim.AdamW, log_bar=False, **options)
    before = digest(model)
    batches = loader()
    found = zae.summary(trainer, next(iter(batches)))
    assert found.name == "Sequential"
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert all(each.calls == 1 for each in found.layers)
    assert digest(model) == before
    assert trainer.progress_checker.step == 0
    trainer.run(1, batches)
    assert zae.summary(trainer).parameters == found.parameters


def test_what_cannot_be_summarized_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"summary takes a torch\.nn.Module or a trainer, found"):
        zae.summary(torch.ones(2))  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    model.generator = (each for each in "ab")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=re.escape("write summary(model), without one")):
        zae.summary(model, torch.ones(2))
