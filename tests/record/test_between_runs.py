"""A run and its resume: what differs is named with both values, and which counts; other data are refused mid-epoch."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import zae
from kit import hand
from zae import CheckpointMismatch, Every, Trainer
from zae.addons import EMAAddon, GradientAccumulationAddon, StateManagerAddon, ThroughputAddon
from zae.record import parts
from zae.values.plain_values import content_digest, plain_value


class Task(Trainer):
    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(self.model(inputs), targets)}

    test_step = train_step


class Scaled(Task):
    """A task with an option of its own."""

    def __init__(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale


def network(dropout: float = 0.25) -> nn.Module:
    model = hand.network()
    next(each for each in model if isinstance(each, nn.Dropout)).p = dropout
    return model


def sgd(lr: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def train(folder: Path, n_epoch: int = 2, loader: Any = None, cls: Any = Scaled, **options: Any) -> Any:
    run = {key: options.pop(key) for key in ("max_steps", "limit_batches", "steps_per_epoch") if key in options}
    trainer = cls.add_on(StateManagerAddon, EMAAddon, GradientAccumulationAddon)(
        options.pop("model", network), "cpu",
        **{"optimizer": sgd(0.05), "seed": 0, "decay": 0.9, "save_path": folder, "resume": "auto", "log_bar": False,
           "save_every": Every(steps=1), **options},
    )  # fmt: skip
    trainer.run(n_epoch, hand.loader() if loader is None else loader, **run)
    return trainer


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    caplog.clear()
    return texts


CHANGED: dict[str, tuple[dict[str, Any], str, str]] = {
    "average": ({"decay": 0.5}, "decay=0.5 in the script and 0.9 in the checkpoint", "script"),
    "clip": ({"gradient_clip": 0.1}, "gradient_clip=0.1 in the script and 0.0 in the checkpoint", "script"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 in the script and 1", "script"),
    "dropout": ({"model": functools.partial(network, 0.5)}, "Dropout.p of the model=0.5 in the script and", "script"),
    "an option of the class": ({"scale": 2.0}, "scale=2.0 in the script and 1.0 in the checkpoint", "script"),
    "seed": ({"seed": 7}, "seed=7 in the script and 0 in the checkpoint", "checkpoint"),
    "rate": ({"optimizer": sgd(0.5)}, "optimizer 0: lr=0.5 in the script and 0.05 in the checkpoint", "checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_setting_is_named_once_with_both_values_and_which_counts(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 1)
    assert said(caplog) == []
    options, text, counts = CHANGED[what]
    train(tmp_path, 2, **options)
    (warning,) = said(caplog)
    assert text in warning
    assert ("The script's values are used" in warning) == (counts == "script")
    assert ("The checkpoint's values are used" in warning) == (counts == "checkpoint")
    train(tmp_path, 3, **options)
    again = said(caplog)
    assert bool(again) == (counts == "checkpoint"), "what the script has brought is that of the run now"


class OnTop(Task.add_on(ThroughputAddon)):
    """A task that derives from a composed class, with an option of its own."""

    def __init__(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale


def test_an_option_of_a_task_that_derives_from_a_composed_class_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 1, cls=OnTop)
    said(caplog)
    train(tmp_path, 2, cls=OnTop, scale=2.0)
    (warning,) = said(caplog)
    assert "scale=2.0 in the script and 1.0 in the checkpoint" in warning


def test_what_is_said_to_count_counts(tmp_path: Path) -> None:
    train(tmp_path, 1)
    resumed = train(tmp_path, 2, decay=0.5, optimizer=sgd(0.5), gradient_clip=0.1)
    assert resumed.decay == 0.5
    assert resumed.optimization.gradient_clip == 0.1
    assert resumed.optimizer.param_groups[0]["lr"] == 0.05


def test_an_unchanged_script_is_told_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it is killed within an epoch, made longer, and finished."""
    for n_epoch, limits in ((2, {"max_steps": 4}), (2, {}), (2, {}), (3, {})):
        train(tmp_path, n_epoch, **limits)
    assert said(caplog) == []


# ----------------------------------------------------------------------------------------------------------- the data


def flipped() -> TensorDataset:
    inputs, targets = hand.data().tensors
    return TensorDataset(inputs.flip(0), targets)


class Named(Dataset[Any]):
    """Has a list of files, and a folder."""

    def __init__(self, names: list[str], root: str = "train") -> None:
        self.names = names
        self.root = root
        self.data = hand.data(len(names))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


NAMES = [f"{index}.png" for index in range(22)]
OTHER_DATA = {
    "other numbers": (hand.data(), flipped(), "loader.dataset.tensors[0]"),
    "another part": (Subset(hand.data(44), range(22)), Subset(hand.data(44), range(22, 44)), "loader.dataset.indices"),
    "another name in the middle": (Named(NAMES), Named([*NAMES[:9], "x.png", *NAMES[10:]]), "loader.dataset.names"),
}


@pytest.mark.parametrize("what", OTHER_DATA)
def test_other_data_of_the_same_length(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within an epoch they are refused, between two epochs named, and of a finished run too."""
    before, after, name = OTHER_DATA[what]

    def loader(dataset: Any) -> Any:
        return DataLoader(dataset, 4, shuffle=True)

    train(tmp_path / "mid", loader=loader(before), max_steps=4)
    with pytest.raises(CheckpointMismatch) as caught:
        train(tmp_path / "mid", loader=loader(after))
    assert name in str(caught.value)
    assert "mid_epoch='restart'" in str(caught.value)
    assert train(tmp_path / "mid", loader=loader(before)).progress_checker.step == 12
    train(tmp_path / "end", 1, loader(before))
    assert said(caplog) == []
    train(tmp_path / "end", 2, loader(after))
    (warning,) = said(caplog)
    assert name in warning
    assert "goes on with those of this script" in warning
    train(tmp_path / "done", 2, loader(before))
    for _ in range(2):  # It is said each time.
        train(tmp_path / "done", 2, loader(after))
        (warning,) = said(caplog)
        assert f"already finished, and was given something else: {name}" in warning
        assert "its own save_path" in warning


def test_restarting_the_epoch_takes_other_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, loader=DataLoader(hand.data(), 4, shuffle=True), max_steps=4)
    train(tmp_path, loader=DataLoader(flipped(), 4, shuffle=True), mid_epoch="restart")
    assert any("goes on with those of this script" in text for text in said(caplog))


class Level:
    """A transform."""

    def __init__(self, level: float) -> None:
        self.level = level


class Described(Named):
    """Has settings in itself, in a transform and in a dict, and is marked as the library datasets marks its own."""

    rate = 0.5

    def __init__(self, root: str = "train", level: float = 0.1, mark: str = "a", rate: float = 0.5) -> None:
        super().__init__(NAMES, root)
        self.transforms = [Level(level)]
        self.options = {"crop": level}
        self._fingerprint = mark
        type(self).rate = rate
        # What each process has anew is no setting.
        self.began = time.time()
        self.process = os.getpid()
        self.encoder = network()


SETTINGS = {
    "an attribute": ({"root": "other"}, ["loader.dataset.root='other' in the script and 'train' in the checkpoint"]),
    "within a transform": (
        {"level": 0.2},
        ["loader.dataset.transforms[0].level=0.2 in the script and 0.1 in", "loader.dataset.options.crop=0.2 in the"],
    ),
    "of the class": ({"rate": 0.7}, ["loader.dataset.rate=0.7 in the script and 0.5 in the checkpoint"]),
    "the mark of a library": ({"mark": "b"}, ["loader.dataset.fingerprint='b' in the script and 'a' in the check"]),
    "none": ({}, []),
}


@pytest.mark.sample(covering=1)
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(22))], ids=["itself", "subset"])
@pytest.mark.parametrize("what", SETTINGS)
def test_a_setting_of_the_dataset_is_named(
    what: str, wrap: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed, expected = SETTINGS[what]
    train(tmp_path, 1, DataLoader(wrap(Described()), 4))
    said(caplog)
    train(tmp_path, 2, DataLoader(wrap(Described(**changed)), 4))
    texts = said(caplog)
    assert len(texts) == bool(expected), texts
    for text in expected:
        assert text.replace("dataset.", "dataset.dataset." if wrap(NAMES) is not NAMES else "dataset.") in texts[0]


def test_another_loss_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Halved(Task):
        def train_step(self, batch: Any) -> Any:
            return {"loss": super().train_step(batch)["loss"] / 2}

    class Doubled(Task):
        def train_step(self, batch: Any) -> Any:
            return {"loss": super().train_step(batch)["loss"] * 2}

    Doubled.__name__ = Halved.__name__
    Doubled.__qualname__ = Halved.__qualname__
    train(tmp_path, 1, cls=Halved)
    train(tmp_path, 2, cls=Doubled)
    (warning,) = said(caplog)
    assert "Halved has changed since the checkpoint was saved" in warning


def test_the_manifest_has_the_record_without_secrets(tmp_path: Path) -> None:
    class Keyed(Scaled):
        def __init__(self, *args: Any, api_key: str = "", **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.api_key = api_key

    trainer = train(tmp_path, 1, cls=Keyed, api_key="canary-c7-secret", scale=2.0)
    for path in trainer.last_path.iterdir():
        assert b"canary-c7-secret" not in path.read_bytes(), path.name
    info = json.loads((trainer.last_path / "manifest.json").read_text())["info"]
    assert info["run"]["script"]["scale"] == 2.0


# ------------------------------------------------------------------------------------------- streams and their length


class Episode:
    """A batch of a class of the user."""

    def __init__(self, values: torch.Tensor, ended: bool) -> None:
        self.values = values
        self.ended = ended


def collect(model: nn.Module, kind: str) -> Any:
    """Batches that a policy makes: of what it computes, or of what it draws from torch's stream."""
    for index in range(100):
        action = float(model[-1].weight[0].detach().sum())  # type: ignore[index]
        if kind == "drawn":
            action += float(torch.rand(()))
        inputs = torch.full((4, 4), action if kind != "object" else 1.0)
        batch = (inputs, torch.zeros(4, dtype=torch.long))
        yield Episode(torch.full((1,), action), index % 2 == 0), batch


class Collects(Task):
    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch[1])


@pytest.mark.parametrize("kind", ["computed", "drawn", "object"])
def test_batches_that_the_model_makes_are_refused_within_an_epoch(kind: str, tmp_path: Path) -> None:
    def start(limit: int) -> None:
        model = network()
        options = {"model": model, "cls": Collects, "steps_per_epoch": 6, "max_steps": limit}
        train(tmp_path, 3, collect(model, kind), optimizer=torch.optim.SGD(model.parameters(), 0.1), **options)

    start(4)
    with pytest.raises(CheckpointMismatch, match=r"depend on the model, .* a class with state_dict"):
        start(18)


class SaysAnother:
    """A loader with another length than batches."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.batches = list(hand.loader())

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize("length", [1, 6, 10])
def test_a_length_that_is_not_the_number_of_batches_is_named_once(
    length: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 3, SaysAnother(length), scheduler=zae.schedulers.cosine())
    texts = [text for text in said(caplog) if "has a length of" in text]
    assert len(texts) == (length != 6)
    if texts:
        assert f"has a length of {length}, by which schedules are made, and yielded 6 batches in the first" in texts[0]


# ------------------------------------------------------------------------------------- equal texts in two processes


class Holder:
    def __init__(self) -> None:
        self.names = {"b", "a", "c"}
        self.rule = functools.partial(max, 3)
        self.stream = np.random.default_rng()
        self.nested = {"x": [1, 2.5, None], "y": (torch.ones(3), np.arange(4))}


def described() -> list[Any]:
    rate = 0.5
    words = [{"text": f"word {index}", "n": index} for index in range(100)]
    return [
        plain_value(Holder()),
        plain_value(lambda step: rate**step),
        content_digest([f"{index}.png" for index in range(1000)]),
        content_digest([(f"{index}.png", index) for index in range(1000)]),
        content_digest(words),
        content_digest(torch.arange(100)),
        content_digest(np.array(["a", "b"], dtype=object)),
        parts.of_model(network()),
    ]


def test_descriptions_are_equal_in_two_processes() -> None:
    """No addresses and no seeds of hashes."""
    code = "import json, sys; sys.path.insert(0, 'tests'); sys.path.insert(0, 'tests/record'); "
    code += "import test_between_runs as t; print(json.dumps(t.described()))"
    root = Path(__file__).resolve().parents[2]
    env = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1"}
    text = subprocess.check_output([sys.executable, "-c", code], cwd=root, env=env, text=True)
    assert json.loads(text) == json.loads(json.dumps(described()))
