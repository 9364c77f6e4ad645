"""The average of the weights: when it moves, where it is used, and what is saved. Its values: tests/test_trainer.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hand import digest, loader, network
from table import Task
from torch.optim import AdamW

from zae import ConfigError
from zae.addons import EMAAddon, StateManagerAddon
from zae.errors import CheckpointMismatch


def build(*more: Any, **options: Any) -> Any:
    model = network()
    options.setdefault("decay", 0.5)
    return Task.add_on(EMAAddon, *more)(model, "cpu", optimizer=AdamW(model.parameters(), lr=0.05), **options)


def valid() -> Any:
    return loader(10, seed=9, shuffle=False)


@pytest.mark.parametrize("decay", [1.0, -0.1, 2, "0.9", None, True, float("nan")])
def test_a_decay_that_cannot_be_meant(decay: Any) -> None:
    with pytest.raises(ConfigError, match=r"decay=.* in \[0, 1\)"):
        build(decay=decay)


def test_p18_the_model_file_holds_training_weights_and_the_average_beside_them(tmp_path: Any) -> None:
    """P-18: also at the moment of a validation, and in a checkpoint."""
    trainer = build(StateManagerAddon, save_path=tmp_path / "states", save_every=1)
    held: list[bool] = []
    checkpoint = trainer.checkpoint

    def look() -> None:
        checkpoint()
        plain = network()
        plain.load_state_dict(trainer.state_dict()["model"])
        held.append(digest(plain) == digest(trainer.model) and trainer.model.training)

    trainer.checkpoint = look
    trainer.run(2, loader(), valid(), valid_every=1)
    assert all(held)
    model, average = network(), network()
    other = Task(model, "cpu", mode="test")
    other.apply_weights(trainer.save_model(tmp_path / "model.safetensors"))
    assert digest(model) == digest(trainer.model)
    Task(average, "cpu", mode="test").apply_weights(trainer.save_average(tmp_path / "average.safetensors"))
    assert all(torch.equal(value, trainer.average[key]) for key, value in average.state_dict().items())
    assert digest(average) != digest(model)


def test_evaluation_uses_the_average_and_gives_the_weights_back() -> None:
    trainer = build()
    trainer.run(2, loader())
    averaged = network()
    averaged.load_state_dict(trainer.average)
    before = digest(trainer.model)
    assert trainer.evaluate(valid()) == Task(averaged, "cpu", mode="test").evaluate(valid())
    assert digest(trainer.model) == before


def test_buffers_are_copied() -> None:
    trainer = build(decay=0.9)
    trainer.run(1, loader())
    for name, buffer in trainer.model.named_buffers():
        assert torch.equal(trainer.average[name], buffer)


def test_a_second_run_goes_on_with_the_average() -> None:
    whole, pieces = build(), build()
    torch.manual_seed(1)
    whole.run(4, loader())
    torch.manual_seed(1)
    pieces.run(3, loader())
    pieces.run(1, loader())
    assert all(torch.equal(whole.average[key], pieces.average[key]) for key in whole.average)


def test_the_average_of_another_model_is_refused() -> None:
    trainer = build()
    trainer.run(1, loader())
    for own in (3, {}, {"average": 3}, {"average": {"x": torch.ones(1)}}, {"average": {"0.bias": torch.ones(3)}}):
        before = copy.deepcopy(trainer.average)
        with pytest.raises(CheckpointMismatch, match="EMAAddon holds no average of this model's weights"):
            trainer.load_state_dict({**trainer.state_dict(), "EMAAddon": own})
        assert all(torch.equal(before[key], trainer.average[key]) for key in before)
