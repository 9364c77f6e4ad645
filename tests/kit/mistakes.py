"""Mistakes that people make with options, and what all mistakes are made with; error_catalogue.py has their texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import zae.addons
from zae import Every, Trainer
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    FSDPAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    StateManagerAddon,
)

ADD_ONS = [getattr(zae.addons, name) for name in zae.addons.__all__]
"""All of them, imported: errors name the add-on that has an option."""

CATALOGUE: dict[str, Callable[[], object]] = {}


def mistake(function: Callable[[], object]) -> Callable[[], object]:
    """Put a mistake into the catalogue, under its function's name."""
    CATALOGUE[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------- what the mistakes are made with


class Task(Trainer):
    """Tell two kinds of points apart."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs), targets)}

    def test_step(self, batch):
        return self.train_step(batch)


def dataset(count=32):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def loader(count=32):
    return DataLoader(dataset(count), batch_size=8)


def trainer_of(cls=Task, **options):
    options.setdefault("model", torch.nn.Linear(4, 2))
    options.setdefault("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return cls(options.pop("model"), options.pop("device", "cpu"), log_bar=False, **options)


def with_step(step, **options):
    """A trainer whose train_step is this function."""
    return trainer_of(type(Task)("Task", (Task,), {"train_step": step, "__module__": __name__}), **options)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset())


# --------------------------------------------------------------------------------------------------------- options


@mistake
def misspelt_option():
    trainer_of(gradient_clp=1.0)


@mistake
def misspelt_option_of_an_add_on():
    trainer_of(Task.add_on(GradientAccumulationAddon), gradient_acumulation_steps=4)


@mistake
def option_of_an_absent_add_on():
    trainer_of(save_path="runs")


@mistake
def misspelt_option_of_an_absent_add_on():
    trainer_of(patiense=3)


@mistake
def option_of_lightning():
    trainer_of(accumulate_grad_batches=4)


@mistake
def option_of_transformers():
    trainer_of(num_train_epochs=3)


@mistake
def option_without_a_counterpart():
    trainer_of(split_spec={})


@mistake
def logging_into_nothing():
    trainer_of(web_logger={"wandb": {"project": "mine"}})


@mistake
def missing_option():
    trainer_of(Task.add_on(StateManagerAddon))


@mistake
def several_missing_options():
    trainer_of(Task.add_on(JSONLLoggerAddon, StateManagerAddon))


@mistake
def too_many_positions():
    Task(torch.nn.Linear(4, 2), "cpu", "train", None, None, False)


@mistake
def option_given_twice():
    Task(torch.nn.Linear(4, 2), model=torch.nn.Linear(4, 2))


@mistake
def option_not_declared():
    class Own(Task):
        def __init__(self, *args, **kwargs):
            self.alpha = kwargs.pop("alpha", 1.0)
            super().__init__(*args, **kwargs)

    trainer_of(Own, alpha=2.0)


@mistake
def option_not_handed_on():
    class Own(Task):
        def __init__(self, model, optimizer):
            super().__init__(model, optimizer=optimizer)

    trainer_of(Own, gradient_clip=1.0)


# ---------------------------------------------------------------------------------------- arguments of the trainer


@mistake
def no_optimizer():
    trainer_of(optimizer=None)


@mistake
def optimizer_of_another_model():
    trainer_of(optimizer=torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1))


@mistake
def optimizer_by_name():
    trainer_of(optimizer="adam")


@mistake
def optimizer_factory_without_return():
    trainer_of(optimizer=lambda parameters: None).run(1, loader())


@mistake
def optimizer_as_class_and_arguments():
    trainer_of(optimizer=(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}))


@mistake
def optimizer_settings_in_a_dict():
    trainer_of(optimizer={"name": "AdamW", "lr": 1e-3})


@mistake
def scheduler_class_instead_of_factory():
    trainer_of(scheduler=torch.optim.lr_scheduler.CosineAnnealingLR)


@mistake
def scheduler_of_another_optimizer():
    model = torch.nn.Linear(4, 2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    trainer_of(model=model, optimizer=first, scheduler=torch.optim.lr_scheduler.StepLR(second, 1))


@mistake
def scheduler_by_name():
    trainer_of(scheduler="cosine")


@mistake
def schedulers_without_their_optimizers():
    trainer_of(scheduler={"d": lambda optimizer: None}).run(1, loader())


@mistake
def loader_instead_of_model():
    trainer_of(model=loader())


@mistake
def model_factory_without_return():
    trainer_of(model=lambda: None)


@mistake
def misspelt_mode():
    trainer_of(mode="trian")


@mistake
def misspelt_device():
    trainer_of(device="gpu")


@mistake
def device_that_is_not_there():
    trainer_of(device="cuda:77")


@mistake
def several_devices_for_one_process():
    trainer_of(device=["cpu", "cpu"])


@mistake
def negative_clip():
    trainer_of(gradient_clip=-1.0)


@mistake
def clip_as_text():
    trainer_of(gradient_clip="1.0")


@mistake
def monitor_of_three_letters():
    trainer_of(monitor="valid/los")


@mistake
def monitor_without_direction():
    trainer_of(monitor="valid/height")


@mistake
def monitor_that_is_no_name():
    trainer_of(monitor=None)


@mistake
def misspelt_monitor_mode():
    trainer_of(monitor="accuracy", monitor_mode="maximum")


@mistake
def seed_as_text():
    trainer_of(seed="1234")


@mistake
def cadence_as_text():
    trainer_of(log_every="epoch")


@mistake
def cadence_of_nothing():
    Every()


@mistake
def cadence_of_both():
    Every(steps=100, epochs=1)


@mistake
def cadence_of_zero():
    Every(steps=0)


# ------------------------------------------------------------------------------------------- options of the add-ons


@mistake
def accumulation_of_zero():
    trainer_of(Task.add_on(GradientAccumulationAddon), gradient_accumulation_steps=0)


@mistake
def misspelt_precision():
    trainer_of(Task.add_on(AMPAddon), precision="bfloat16")


@mistake
def loss_scales_the_wrong_way_round():
    trainer_of(Task.add_on(AMPAddon), precision="fp16", loss_scale=(1.0, 65536.0))


@mistake
def precision_of_another_trainer():
    trainer_of(Task.add_on(AMPAddon), precision="bf16-true")


@mistake
def weights_in_float16():
    trainer_of(Task.add_on(AMPAddon), dtype="fp16")


@mistake
def weights_in_bfloat16_in_shards():
    trainer_of(Task.add_on(AMPAddon, FSDPAddon), dtype="bf16")


@mistake
def decay_of_one():
    trainer_of(Task.add_on(EMAAddon), decay=1.0)


@mistake
def patience_of_zero():
    trainer_of(Task.add_on(EarlyStoppingAddon), patience=0)


@mistake
def misspelt_save_format():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs", save_format="pickle")


@mistake
def save_path_that_is_a_file():
    Path("notes.txt").write_text("mine")
    trainer_of(Task.add_on(StateManagerAddon), save_path="notes.txt")


@mistake
def resume_from_nothing():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs", resume=True).run(1, loader())


@mistake
def second_run_in_one_folder():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs").run(1, loader())
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs").run(1, loader())
