"""Loaders and batches of every kind, and what is refused in their place."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import mse_loss

from kit.refusals import Task, data, loader, make, stepping, unchanged, whole
from zae import ConfigError, LoaderError
from zae.addons import GradientAccumulationAddon


@pytest.mark.parametrize(
    ("empty", "match"),
    [
        (list, r"loader has 0 batches \(list\); give it data"),
        (
            lambda: loader(4, drop_last=True),
            r"length 4, batch_size=8, drop_last=True\); use more data, or drop_last=False",
        ),
        (lambda: iter([]), "the loader yielded 0 batches in epoch 1"),
        (lambda: (b for b in ()), r"the loader yielded 0 batches in epoch 1 \(generator\); give it data"),
        (lambda: [None] * 3, r"3 of 3 batches were None \(list\); fix the collate_fn"),
        (lambda: (None for _ in range(3)), r"3 of 3 batches were None"),
    ],
    ids=["list", "drop_last", "iterator", "generator", "Nones", "Nones unsized"],
)
def test_an_empty_loader(empty, match):
    """Never "finished" at 0 steps."""
    for add_ons in ((), (GradientAccumulationAddon,)):
        trainer = make(Task.add_on(*add_ons))
        with pytest.raises(LoaderError, match=match), unchanged(trainer):
            trainer.run(1, empty())


def test_an_empty_valid_loader():
    trainer = make()
    with pytest.raises(LoaderError, match="valid_loader has 0 batches"), unchanged(trainer):
        trainer.run(1, loader(), [])
    message = "valid_loader is an empty dict; give loaders by name, or None"
    with pytest.raises(LoaderError, match=message), unchanged(trainer):
        trainer.run(1, loader(), {})
    with pytest.raises(LoaderError, match=r"valid_loader\['b'\] has 0 batches"), unchanged(trainer):
        trainer.run(1, loader(), {"a": loader(), "b": []})
    with pytest.raises(LoaderError, match=r"yielded 0 batches .* nothing to evaluate"):
        trainer.run(1, loader(), iter([]))


def test_some_batches_of_none_are_passed_over_and_counted(caplog):
    batches = list(loader())
    trainer = make()
    trainer.run(1, [batches[0], None, batches[1], batches[2]])
    assert trainer.progress_checker.step == 3
    assert "1 of 4 batches were None and were skipped" in caplog.text
    with pytest.raises(LoaderError, match="3 of 4 batches were None"):
        make().run(1, [batches[0], None, None, None])


class Unsized:
    def __iter__(self):
        return iter(loader())


@pytest.mark.parametrize("kind", ["list", "tuple", "unsized", "generator", "iterator", "map"])
def test_loaders_of_every_kind(kind):
    """With and without a length, once or again and again; a used-up one is an error in epoch 2."""
    make_loader = {
        "list": lambda: list(loader()),
        "tuple": lambda: tuple(loader()),
        "unsized": Unsized,
        "generator": lambda: (b for b in loader()),
        "iterator": lambda: iter(list(loader())),
        "map": lambda: map(tuple, loader()),
    }[kind]
    reference, trainer = make(), make()
    reference.run(1, loader())
    assert trainer.run(1, make_loader())["step"] == 3
    assert whole(trainer)[0] == whole(reference)[0]
    if kind in ("list", "tuple", "unsized"):
        assert make().run(2, make_loader())["step"] == 6
    else:
        with pytest.raises(LoaderError, match=r"can be read once, and this run reads it in 2 epochs; give a list"):
            make().run(2, make_loader())


def test_a_schedule_that_needs_the_length():
    """A stream has none; the message names steps_per_epoch."""

    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)

    trainer = make(scheduler=cycle, scheduler_step_on_batch=True)
    message = r"the loader has no length to plan with; give run\(..., steps_per_epoch=...\)"
    with pytest.raises(ConfigError, match=message), unchanged(trainer):
        trainer.run(2, Unsized())
    assert trainer.run(2, Unsized(), steps_per_epoch=3)["step"] == 6


Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass
class Sample:
    inputs: torch.Tensor
    targets: torch.Tensor
    note: str = "kept"


class Mover:
    """Something that can move itself."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.moved_to = inputs, targets, None

    def to(self, device, **kwargs):
        self.moved_to = torch.device(device)
        return self


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "namedtuple", "dataclass", "to", "nested"])
def test_batches_of_every_kind(kind):
    """The type is kept, what is not a tensor is untouched, and the weights are those of a plain tuple."""
    wrap = {
        "tuple": lambda x, y: (x, y),
        "list": lambda x, y: [x, y],
        "dict": lambda x, y: {"inputs": x, "targets": y, "name": "kept", "number": 3},
        "namedtuple": Pair,
        "dataclass": Sample,
        "to": Mover,
        "nested": lambda x, y: {"pair": ([x], {"targets": (y, "kept")})},
    }[kind]
    seen = []

    def train_step(self, batch):
        seen.append(batch)
        if isinstance(batch, dict) and "pair" in batch:
            (inputs,), inner = batch["pair"]
            targets = inner["targets"][0]
            assert inner["targets"][1] == "kept"
        elif isinstance(batch, dict):
            inputs, targets = batch["inputs"], batch["targets"]
            assert (batch["name"], batch["number"]) == ("kept", 3)
        elif isinstance(batch, (Sample, Mover)):
            inputs, targets = batch.inputs, batch.targets
        else:
            inputs, targets = batch
        return {"loss": mse_loss(self.model(inputs), targets)}

    reference, trainer = make(), make(stepping(train_step))
    reference.run(1, loader())
    batches = [wrap(x, y) for x, y in loader()]
    trainer.run(1, batches)
    assert whole(trainer)[0] == whole(reference)[0]
    assert all(type(b) is type(batches[0]) for b in seen)
    if kind == "to":
        assert {b.moved_to for b in seen} == {torch.device("cpu")}
    if kind == "dataclass":
        assert seen[0].note == "kept"


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (
            data(),
            r"loader is a dataset \(TensorDataset\); give a DataLoader: torch.utils.data.DataLoader\(loader, batc",
        ),
        (torch.nn.Linear(3, 1), r"loader is not iterable \(Linear\); give a DataLoader or a list of batches"),
        (torch.randn(8, 3), "loader is a Tensor, not batches"),
        ("data/train", "loader is a str, not batches"),
        (None, "loader is not iterable"),
        ({"a": [1]}, r"loader is a dict \(a\), but only valid_loader may be a dict; give one loader"),
        ([loader(), loader()], r"loader is a list of loaders; give one loader: DataLoader\(torch\.utils\.data\.Conc"),
    ],
    ids=["dataset", "model", "tensor", "path", "None", "dict", "list of loaders"],
)
def test_what_is_no_loader(wrong, match):
    """Dataset for loader, and its kin, in every method that takes one."""
    trainer = make()
    with pytest.raises(LoaderError, match=match), unchanged(trainer):
        trainer.run(1, wrong)
    if wrong is not None:
        with pytest.raises(LoaderError, match=r"valid_loader\['a'\] is "), unchanged(trainer):
            trainer.run(1, loader(), {"a": wrong})
    with pytest.raises(LoaderError, match=match), unchanged(trainer):
        trainer.inference(wrong)


@pytest.mark.parametrize(("call", "name"), [("run", "valid_loader"), ("evaluate", "loader")])
def test_a_list_of_loaders_to_evaluate_is_a_dict(call, name):
    trainer = make()
    arguments = (1, loader()) if call == "run" else ()
    with pytest.raises(LoaderError, match=rf"^{name} is a list of loaders; give a dict: {name}={{name: loader}}$"):
        getattr(trainer, call)(*arguments, [loader(), loader()])
