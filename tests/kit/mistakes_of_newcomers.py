"""Mistakes of the first day: the wrong object in a place, a part of a file, a name that is nearly right."""

from __future__ import annotations

from pathlib import Path

import torch

from kit.mistakes import Task, dataset, loader, mistake, trainer_of
from zae.addons import StateManagerAddon
from zae.search.result import TrialResult


@mistake
def class_as_model():
    Task(torch.nn.Linear, "cpu", optimizer=torch.optim.SGD)


@mistake
def optimizer_in_place_of_the_device():
    model = torch.nn.Linear(4, 2)
    Task(model, torch.optim.SGD(model.parameters(), lr=0.1))


@mistake
def model_on_the_meta_device():
    trainer_of(model=torch.nn.Linear(4, 2, device="meta")).run(1, loader())


@mistake
def call_of_the_trainer():
    class Calling(Task):
        def train_step(self, batch):
            return {"loss": self(batch[0]).sum()}

    trainer_of(Calling).run(1, loader())


@mistake
def prediction_as_a_tuple():
    class Pair(Task):
        def predict_step(self, batch):
            return self.model(batch[0]), batch[1]

    trainer_of(Pair).predict(loader())


@mistake
def pair_of_tensors_as_loader():
    trainer_of().run(1, dataset().tensors)


@mistake
def generator_function_as_loader():
    def batches():
        yield from loader()

    trainer_of().run(1, batches)


@mistake
def misspelt_resume():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs", resume="aut")


@mistake
def folder_of_a_run_as_weights():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs").run(2, loader())
    trainer_of().apply_weights("runs")


@mistake
def weights_within_a_dict():
    torch.save({"model": torch.nn.Linear(4, 2).state_dict(), "epoch": 3}, "own.pt")
    trainer_of().apply_weights("own.pt")


@mistake
def whole_module_as_weights():
    torch.save(torch.nn.Linear(4, 2), "whole.pt")
    trainer_of().apply_weights("whole.pt")


@mistake
def trial_as_its_parameters():
    def make_trainer(params):
        return trainer_of(gradient_clip=params["gradient_clip"])

    make_trainer(TrialResult(0, "complete", {"gradient_clip": 1.0}, [0.5], folder=Path()))
