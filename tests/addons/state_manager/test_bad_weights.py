"""Weights and states that do not fit are refused in words, and change nothing."""

from __future__ import annotations

import pytest
import torch

from kit.refusals import Task, loader, make, unchanged
from zae import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, ConfigError
from zae.addons import AMPAddon, EarlyStoppingAddon, EMAAddon


def _weights(**changes):
    state = torch.nn.Linear(3, 1).state_dict()
    state.update(changes)
    return {k: v for k, v in state.items() if v is not None}


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        (_weights(bias=None), r"1 missing \(bias\); nothing was loaded"),
        (_weights(extra=torch.ones(1)), r"1 unexpected \(extra\)"),
        (_weights(weight=torch.ones(2, 3)), r"1 of another shape \(weight is \(2, 3\) and must be \(1, 3\)\)"),
        (
            {f"layer{i}.weight": torch.ones(1) for i in range(30)},
            r"2 missing \(weight, bias\); 30 unexpected \(lay.*\.\.\.\)",
        ),
    ],
    ids=["missing", "unexpected", "shape", "another model"],
)
def test_weights_that_do_not_fit(weights, match, tmp_path):
    """One error with all of them, and nothing loaded partly, from a dict and from a file."""
    trainer = make()
    trainer.run(1, loader())
    with pytest.raises(CheckpointMismatch, match=match), unchanged(trainer):
        trainer.apply_weights(weights)
    torch.save(weights, tmp_path / "weights.ckpt")
    with pytest.raises(CheckpointMismatch, match=match), unchanged(trainer):
        trainer.apply_weights(tmp_path / "weights.ckpt")
    state = {**trainer.state_dict(), "model": weights}
    with pytest.raises(CheckpointMismatch, match=match), unchanged(trainer):
        trainer.load_state_dict(state)


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


@pytest.mark.parametrize("where", ["state_dict", "hyper_parameters", "callbacks", "whole"])
def test_code_in_a_ckpt_file_is_refused_and_not_run(where, tmp_path, monkeypatch):
    """In the layout of Lightning, whose weights are one of several entries."""
    monkeypatch.chdir(tmp_path)
    state = {"state_dict": _weights(), "hyper_parameters": {}, "callbacks": {}, "pytorch-lightning_version": "2"}
    torch.save(Payload() if where == "whole" else {**state, where: {**state[where], "weight": Payload()}}, "x.ckpt")
    trainer = make()
    with pytest.raises(CheckpointDamaged, match="weights_only=False"), unchanged(trainer):
        trainer.apply_weights("x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


def test_lists_at_most_ten():
    with pytest.raises(CheckpointMismatch) as caught:
        make().apply_weights({f"layer{i}.weight": torch.ones(1) for i in range(30)})
    assert str(caught.value).count("layer") == 10


def test_what_fits_can_be_loaded_and_the_rest_is_returned():
    """Strict=False gives the lists; a shape is refused all the same."""
    trainer = make()
    weights = _weights(bias=None, extra=torch.ones(1), weight=torch.full((1, 3), 2.0))
    assert trainer.apply_weights(weights, strict=False) == (["bias"], ["extra"])
    assert trainer.unwrap().weight.tolist() == [[2.0, 2.0, 2.0]]
    with pytest.raises(CheckpointMismatch, match="1 of another shape"), unchanged(trainer):
        trainer.apply_weights(_weights(weight=torch.ones(2, 3)), strict=False)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_the_prefixes_of_wrappers_are_taken_off(prefix):
    trainer = make()
    weights = {f"{prefix}{key}": torch.full_like(value, 3.0) for key, value in trainer.unwrap().state_dict().items()}
    assert trainer.apply_weights(weights) == ([], [])
    assert trainer.unwrap().bias.item() == 3.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda s: {k: v for k, v in s.items() if k != "optimizer"},
            "the state has no optimizer; its entries are model",
        ),
        (
            lambda s: {**s, "AMPAddon": {}},
            r"this trainer has no add-on for the state of AMPAddon; add it with .add_on\(AMPAddon\)",
        ),
        (lambda s: {**s, "progress": {"step": "3"}}, "the progress in the state has no valid"),
        (lambda s: s["model"], r"load weights alone with apply_weights\(...\)"),
        (lambda s: {}, "its entries are none"),
    ],
    ids=["no optimizer", "left over", "no counters", "weights", "nothing"],
)
def test_states_that_are_not_whole(change, match):
    trainer = make()
    trainer.run(1, loader())
    state = change(make().state_dict())
    with pytest.raises(CheckpointMismatch, match=match), unchanged(trainer):
        trainer.load_state_dict(state)


def test_optimizer_groups_that_differ():
    """Before the weights are touched."""
    saved = make().state_dict()
    model = torch.nn.Linear(3, 1)
    groups = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1, momentum=0.9)
    trainer = make(model=model, optimizer=groups)
    message = r"has parameter groups of \[1, 1\] parameters, but the state was saved with"
    with pytest.raises(CheckpointMismatch, match=message), unchanged(trainer):
        trainer.load_state_dict(saved)
    model = torch.nn.Linear(3, 1)
    several = {"a": torch.optim.SGD([model.weight], lr=0.1), "b": torch.optim.SGD([model.bias], lr=0.1)}
    trainer = make(model=model, optimizer=several)
    message = r"with the optimizers \['0'\], and this trainer has \['a', 'b'\]"
    with pytest.raises(CheckpointMismatch, match=message), unchanged(trainer):
        trainer.load_state_dict(saved)


def test_an_add_ons_state_that_is_wrong_changes_nothing():
    composed = Task.add_on(AMPAddon, EMAAddon, EarlyStoppingAddon)
    trainer = make(composed)
    trainer.run(1, loader(), loader())
    for name in ("AMPAddon", "EMAAddon", "EarlyStoppingAddon"):
        for wrong in ({}, None, {"average": {"weight": torch.ones(5)}}):
            state = {**make(composed).state_dict(), name: wrong}
            average = {k: v.clone() for k, v in trainer.average.items()}
            with pytest.raises(CheckpointMismatch, match=name), unchanged(trainer):
                trainer.load_state_dict(state)
            assert all(torch.equal(v, trainer.average[k]) for k, v in average.items())


def test_a_file_that_is_not_there():
    trainer = make()
    with pytest.raises(CheckpointNotFound, match=r"there is no file best.safetensors"), unchanged(trainer):
        trainer.apply_weights("best.safetensors")
    with pytest.raises(ConfigError, match=r"unknown suffix '.h5' for weights; write .safetensors"), unchanged(trainer):
        trainer.save_model("best.h5")


@pytest.mark.parametrize("weights", [torch.nn.Linear(3, 1), None, 3])
def test_weights_that_are_neither_a_path_nor_a_state(weights):
    """A whole model, for instance."""
    with pytest.raises(ConfigError, match=f"weights is a {type(weights).__name__}; .* a state dict: model.state_dict"):
        make().apply_weights(weights)
