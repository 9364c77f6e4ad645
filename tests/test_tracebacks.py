"""An error of the user's code is raised as it is, with the user's frame in its traceback and no second error."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from kit.mistakes import Task, dataset, loader, trainer_of
from zae.addons import AMPAddon, EarlyStoppingAddon, EMAAddon, GradientAccumulationAddon, StateManagerAddon

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
def test_the_last_frame_of_the_user_is_where_the_mistake_is(name, add_ons, tmp_path, monkeypatch):
    """However many add-ons are around a step."""
    monkeypatch.chdir(tmp_path)
    mistake, last = MISTAKES[name]

    def make(cls, **options):
        return trainer_of(cls.add_on(*add_ons), **options, **(OPTIONS if add_ons else {}))

    with pytest.raises(Exception) as caught:
        mistake(make)
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]  # From the script's line on.
    assert [frame.name for frame in frames if frame.filename == __file__][-1] == last
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
