"""Tracebacks end where the user can act: few frames, none of the loop between the user's own, and no second error."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import zae
from kit.error_catalogue import meet
from kit.mistakes import Task, dataset, loader, trainer_of
from zae.addons import AMPAddon, EarlyStoppingAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon
from zae.errors import shorten_traceback

ZAE = Path(zae.__file__).parent
ADD_ONS = (AMPAddon, EarlyStoppingAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon)
OPTIONS = {"precision": "bf16", "patience": 3, "decay": 0.9, "gradient_accumulation_steps": 2, "save_path": "runs"}


class Broken(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {}["missing"]


def broken_collate(samples):
    return samples["missing"]


def wrong_shape(self, batch):
    return {"loss": cross_entropy(self.model(batch[0].T), batch[1])}


def missing_key(self, batch):
    return {"loss": batch["loss"]}


def wrong_dtype(self, batch):
    return {"loss": cross_entropy(self.model(batch[0].long()), batch[1])}


def loss_of_text(self, batch):
    return {"loss": "0.5"}


class FailingCallback(Task):
    def on_epoch_end(self):
        super().on_epoch_end()
        raise ValueError("mine")


class FailingValidation(Task):
    def test_step(self, batch):
        return {"loss": batch["loss"]}


def failing_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_sise=3)


# What fails, and the last of the user's frames. In a worker torch puts the user's frame into the message.
MISTAKES = {
    "wrong shape": (lambda make: make(with_class(wrong_shape)).run(1, loader()), "wrong_shape"),
    "missing key": (lambda make: make(with_class(missing_key)).run(1, loader()), "missing_key"),
    "wrong dtype": (lambda make: make(with_class(wrong_dtype)).run(1, loader()), "wrong_dtype"),
    "loss of text": (lambda make: make(with_class(loss_of_text)).run(1, loader()), "<lambda>"),
    "collate": (lambda make: make(Task).run(1, loader_of(collate_fn=broken_collate)), "broken_collate"),
    "collate in a worker": (
        lambda make: make(Task).run(1, loader_of(collate_fn=broken_collate, num_workers=1)),
        "<lambda>",
    ),
    "dataset": (lambda make: make(Task).run(1, DataLoader(Broken())), "__getitem__"),
    "callback": (lambda make: make(FailingCallback).run(1, loader()), "on_epoch_end"),
    "validation": (lambda make: make(FailingValidation).run(1, loader(), loader()), "test_step"),
    "scheduler": (lambda make: make(Task, scheduler=failing_scheduler).run(1, loader()), "failing_scheduler"),
}


def with_class(step, name="train_step"):
    return type("Task", (Task,), {name: step, "__module__": __name__})


def loader_of(**options):
    return DataLoader(dataset(), batch_size=8, **options)


@pytest.mark.parametrize("add_ons", [(), ADD_ONS], ids=["", "five add-ons"])
@pytest.mark.parametrize("name", MISTAKES)
def test_the_frames_of_a_mistake(name, add_ons, tmp_path, monkeypatch):
    """The frames of the loop are left out, however many add-ons are around a step."""
    monkeypatch.chdir(tmp_path)
    mistake, last = MISTAKES[name]

    def make(cls, **options):
        return trainer_of(cls.add_on(*add_ons), **options, **(OPTIONS if add_ons else {}))

    with pytest.raises(Exception) as caught:
        mistake(make)
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]  # From the script's line on.
    assert len(frames) <= 12
    assert [frame.name for frame in frames if frame.filename == __file__][-1] == last
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ZAE)]
    assert len(ours) <= 1, "the call of the user's code, and nothing else"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


class MisspeltSetup(Task):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, device="gpu", **kwargs)


def make_class_with_a_wrong_signature():
    class Indexed(Task):
        def train_step(self, batch, batch_idx):
            pass


# What fails outside of `run`, and the last of the user's frames.
CALLS = {
    "evaluate": (lambda cls: trainer_of(with_class(missing_key, "test_step")).evaluate(loader()), "missing_key"),
    "evaluate without batches": (lambda cls: trainer_of(cls).evaluate(loader(0)), "<lambda>"),
    "inference": (lambda cls: trainer_of(with_class(missing_key, "test_step")).inference(loader()), "missing_key"),
    "run_epoch": (lambda cls: trainer_of(with_class(missing_key)).run_epoch(loader()), "missing_key"),
    "run_epoch without a return": (
        lambda cls: trainer_of(with_class(lambda self, batch: None)).run_epoch(loader()),
        "<lambda>",
    ),
    "plan": (lambda cls: trainer_of(cls).plan(None, loader()), "<lambda>"),
    "save_model": (lambda cls: trainer_of(cls).save_model("weights.h5"), "<lambda>"),
    "apply_weights": (lambda cls: trainer_of(cls).apply_weights("absent.ckpt"), "<lambda>"),
    "construction": (lambda cls: trainer_of(cls, gradient_clip="1"), "trainer_of"),
    "construction by super()": (lambda cls: MisspeltSetup(torch.nn.Linear(4, 2)), "__init__"),
    "add_on": (lambda cls: cls.add_on("AMPAdon"), "<lambda>"),
    "class": (lambda cls: make_class_with_a_wrong_signature(), "make_class_with_a_wrong_signature"),
    "load_state": (
        lambda cls: trainer_of(cls.add_on(StateManagerAddon), save_path="runs").load_state("absent"),
        "<lambda>",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_frames_outside_of_run(name, tmp_path, monkeypatch):
    """Every method that a user calls ends in the user's frame."""
    monkeypatch.chdir(tmp_path)
    mistake, last = CALLS[name]
    with pytest.raises(Exception) as caught:
        mistake(Task)
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert len(frames) <= 12
    assert frames[-1].name == last
    assert sum(Path(frame.filename).is_relative_to(ZAE) for frame in frames) <= 1


def raised(kind):
    """Let two functions of zae raise an error, and name the frames that are left of its traceback."""
    namespace = {"__name__": "zae.loop.anything", "kind": kind}
    exec("def outer(): inner()\n\ndef inner(): raise kind('no')", namespace)
    try:
        namespace["outer"]()
    except Exception as error:
        shorten_traceback(error)
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_unexpected_error_keeps_its_traceback():
    """What zae does not raise on purpose may be a bug of zae."""
    assert raised(RuntimeError) == ["raised", "outer", "inner"]
    assert raised(zae.ConfigError) == ["raised"]


def test_an_error_on_purpose_ends_in_the_script():
    error = meet("step_without_return")
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["meet", "step_without_return"]
