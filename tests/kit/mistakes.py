"""Mistakes that people make with options, and what all mistakes are made with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import zae.addons
from zae import Every, Trainer
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    StateManagerAddon,
)

ADD_ONS = [getattr(zae.addons, name) for name in zae.addons.__all__]
"""All of them, imported: errors name the add-on that has an option."""


class Mistake(NamedTuple):
    """What somebody does, the type of the error, and phrases of its text: the cause, and what to write instead."""

    make: Callable[[], object]
    error: type[Exception]
    phrases: tuple[str, ...]


CATALOGUE: dict[str, Mistake] = {}


def mistake(error: type[Exception], *phrases: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Put a mistake into the catalogue, under its function's name."""

    def add(function: Callable[[], object]) -> Callable[[], object]:
        CATALOGUE[function.__name__] = Mistake(function, error, phrases)
        return function

    return add


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


@mistake(zae.OptionError, "unknown argument 'gradient_clp' for Task", "did you mean 'gradient_clip'?")
def misspelt_option():
    trainer_of(gradient_clp=1.0)


@mistake(
    zae.OptionError, "unknown argument 'gradient_acumulation_steps' for", "did you mean 'gradient_accumulation_steps'?"
)
def misspelt_option_of_an_add_on():
    trainer_of(Task.add_on(GradientAccumulationAddon), gradient_acumulation_steps=4)


@mistake(
    zae.OptionError,
    "unknown argument 'save_path' for Task",
    "it is an option of StateManagerAddon; add it with .add_on(StateManagerAddon)",
)
def option_of_an_absent_add_on():
    trainer_of(save_path="runs")


@mistake(
    zae.OptionError,
    "unknown argument 'patiense' for Task",
    "did you mean 'patience', an option of EarlyStoppingAddon? Add it with .add_on(EarlyStoppingAddon)",
)
def misspelt_option_of_an_absent_add_on():
    trainer_of(patiense=3)


@mistake(
    zae.OptionError,
    "unknown argument 'accumulate_grad_batches' for Task",
    "here it is gradient_accumulation_steps (GradientAccumulationAddon)",
)
def option_of_lightning():
    trainer_of(accumulate_grad_batches=4)


@mistake(
    zae.OptionError,
    "unknown argument 'num_train_epochs' for Task",
    "here it is n_epoch of run(n_epoch, loader), or the same option of HuggingFaceAddon",
)
def option_of_transformers():
    trainer_of(num_train_epochs=3)


@mistake(zae.OptionError, "unknown argument 'split_spec' for Task", "here it is split (PipelineAddon)")
def option_without_a_counterpart():
    trainer_of(split_spec={})


@mistake(
    zae.OptionError,
    "unknown argument 'web_logger' for Task",
    "it is an option of WandBLoggerAddon; add it with .add_on(WandBLoggerAddon)",
)
def logging_into_nothing():
    trainer_of(web_logger={"wandb": {"project": "mine"}})


@mistake(
    zae.OptionError,
    "Task[StateManagerAddon] needs 'save_path' (StateManagerAddon)",
    "write Task[StateManagerAddon](..., save_path=...)",
)
def missing_option():
    trainer_of(Task.add_on(StateManagerAddon))


@mistake(
    zae.OptionError,
    "Task[JSONLLoggerAddon, StateManagerAddon] needs 'jsonl_path'",
    "write Task[JSONLLoggerAddon, StateManagerAddon](..., jsonl_path=...",
)
def several_missing_options():
    trainer_of(Task.add_on(JSONLLoggerAddon, StateManagerAddon))


@mistake(
    zae.OptionError,
    "Task takes 5 positional arguments (model, device, mode, optimizer",
    "name the others: log_bar, scheduler_step_on_batch, gradient_clip, monitor",
)
def too_many_positions():
    Task(torch.nn.Linear(4, 2), "cpu", "train", None, None, False)


@mistake(zae.OptionError, "Task got 'model' twice: by position and by name", "keep one")
def option_given_twice():
    Task(torch.nn.Linear(4, 2), model=torch.nn.Linear(4, 2))


@mistake(
    zae.OptionError,
    "unknown argument 'sharpness' for Own",
    "if Own.__init__ takes it out of its **kwargs, write def __init__(self, *args, sharpness=..., **kwargs) there",
)
def option_not_declared():
    class Own(Task):
        def __init__(self, *args, **kwargs):
            self.sharpness = kwargs.pop("sharpness", 1.0)
            super().__init__(*args, **kwargs)

    trainer_of(Own, sharpness=2.0)


@mistake(
    zae.OptionError,
    "unknown arguments for Own:",
    "'log_bar': Own.__init__ does not pass it on to",
    "'gradient_clip': Own.__init__ does not pass it on to",
    "write def __init__(self, ..., **kwargs) there, and super().__init__(...",
)
def option_not_handed_on():
    class Own(Task):
        def __init__(self, model, optimizer):
            super().__init__(model, optimizer=optimizer)

    trainer_of(Own, gradient_clip=1.0)


# ---------------------------------------------------------------------------------------- arguments of the trainer


@mistake(
    zae.ConfigError,
    "optimizer is None, and mode='train' needs one",
    "write optimizer=torch.optim.AdamW(model.parameters()), or mode='test'",
)
def no_optimizer():
    trainer_of(optimizer=None)


@mistake(
    zae.ConfigError,
    "optimizer (SGD) has 2 parameters, none of which is among the 2 of the model",
    "make it from the same model: SGD(model.parameters(), ...)",
)
def optimizer_of_another_model():
    trainer_of(optimizer=torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1))


@mistake(
    zae.ConfigError,
    "optimizer is a str",
    "give a torch.optim.Optimizer, or a function that makes one: optimizer=lambda",
)
def optimizer_by_name():
    trainer_of(optimizer="adam")


@mistake(zae.ConfigError, "the function given as optimizer returned None", "return a torch Optimizer")
def optimizer_factory_without_return():
    trainer_of(optimizer=lambda parameters: None).run(1, loader())


@mistake(
    zae.ConfigError,
    "optimizer is a class and a dict of its arguments",
    "give a function that makes it: optimizer=lambda parameters",
)
def optimizer_as_class_and_arguments():
    trainer_of(optimizer=(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}))


@mistake(
    zae.ConfigError,
    "optimizer['name'] is a str",
    "give a torch.optim.Optimizer, or a function that makes one: optimizer=lambda",
)
def optimizer_settings_in_a_dict():
    trainer_of(optimizer={"name": "AdamW", "lr": 1e-3})


@mistake(
    zae.ConfigError,
    "scheduler is the class CosineAnnealingLR, which needs T_max",
    "write scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max",
)
def scheduler_class_instead_of_factory():
    trainer_of(scheduler=torch.optim.lr_scheduler.CosineAnnealingLR)


@mistake(
    zae.ConfigError,
    "scheduler (StepLR) was made for another optimizer than the one given",
    "make it from the same object: StepLR(optimizer, ...)",
)
def scheduler_of_another_optimizer():
    model = torch.nn.Linear(4, 2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    trainer_of(model=model, optimizer=first, scheduler=torch.optim.lr_scheduler.StepLR(second, 1))


@mistake(
    zae.ConfigError, "scheduler is a str", "give a torch.optim.lr_scheduler.LRScheduler, or a function that makes one"
)
def scheduler_by_name():
    trainer_of(scheduler="cosine")


@mistake(zae.ConfigError, "scheduler 'd' has no optimizer of that name", "give both as dicts with the same keys")
def schedulers_without_their_optimizers():
    trainer_of(scheduler={"d": lambda optimizer: None}).run(1, loader())


@mistake(zae.ConfigError, "model is a DataLoader", "give a torch.nn.Module, or a function that returns one")
def loader_instead_of_model():
    trainer_of(model=loader())


@mistake(zae.ConfigError, "model is None", "give a torch.nn.Module, or a function that returns one")
def model_factory_without_return():
    trainer_of(model=lambda: None)


@mistake(zae.ConfigError, "mode='trian'", "did you mean 'train'?")
def misspelt_mode():
    trainer_of(mode="trian")


@mistake(zae.ConfigError, "device='gpu' is not a device", "write 'auto', 'cpu', 'cuda:0' or 'mps'")
def misspelt_device():
    trainer_of(device="gpu")


@mistake(zae.ConfigError, "device='cuda:77', but 0 CUDA devices are available", "write device='cpu'")
def device_that_is_not_there():
    trainer_of(device="cuda:77")


@mistake(
    zae.ConfigError,
    "device is a list of 2, but Task trains on one device; to train on several",
    "write .add_on(MultiGPUAddon)",
)
def several_devices_for_one_process():
    trainer_of(device=["cpu", "cpu"])


@mistake(zae.ConfigError, "gradient_clip=-1.0", "it must be a number of at least 0")
def negative_clip():
    trainer_of(gradient_clip=-1.0)


@mistake(zae.ConfigError, "gradient_clip='1.0'", "it must be a number of at least 0")
def clip_as_text():
    trainer_of(gradient_clip="1.0")


@mistake(zae.ConfigError, "monitor='valid/los'", "did you mean 'valid/loss'?")
def monitor_of_three_letters():
    trainer_of(monitor="valid/los")


@mistake(
    zae.ConfigError,
    "monitor='valid/height': its name does not say whether smaller or larger is",
    "write monitor_mode='min' or monitor_mode='max'",
)
def monitor_without_direction():
    trainer_of(monitor="valid/height")


@mistake(zae.ConfigError, "monitor=None", "it must be the name of a metric, for instance 'loss'")
def monitor_that_is_no_name():
    trainer_of(monitor=None)


@mistake(zae.ConfigError, "monitor_mode='maximum'", "it must be 'auto', 'min' or 'max'")
def misspelt_monitor_mode():
    trainer_of(monitor="accuracy", monitor_mode="maximum")


@mistake(zae.ConfigError, "seed='1234'", "it must be a whole number of at least 0")
def seed_as_text():
    trainer_of(seed="1234")


@mistake(zae.ConfigError, "log_every='epoch'", "write Every(steps=...) or Every(epochs=...), or a number of steps")
def cadence_as_text():
    trainer_of(log_every="epoch")


@mistake(zae.ConfigError, "Every() must have either steps or epochs", "write Every(steps=100) or Every(epochs=1)")
def cadence_of_nothing():
    Every()


@mistake(
    zae.ConfigError,
    "Every(steps=100, epochs=1) must have either steps or epochs",
    "write Every(steps=100) or Every(epochs=1)",
)
def cadence_of_both():
    Every(steps=100, epochs=1)


@mistake(zae.ConfigError, "Every(steps=0): steps", "must be a whole number of at least 1")
def cadence_of_zero():
    Every(steps=0)


# ------------------------------------------------------------------------------------------- options of the add-ons


@mistake(zae.ConfigError, "gradient_accumulation_steps=0", "it must be a whole number of at least 1")
def accumulation_of_zero():
    trainer_of(Task.add_on(GradientAccumulationAddon), gradient_accumulation_steps=0)


@mistake(zae.ConfigError, "precision='bfloat16'", "did you mean 'bf16'?")
def misspelt_precision():
    trainer_of(Task.add_on(AMPAddon), precision="bfloat16")


@mistake(
    zae.ConfigError,
    "loss_scale=(1.0, 65536.0)",
    "it must be a pair of the first scale and the smallest one, for instance",
)
def loss_scales_the_wrong_way_round():
    trainer_of(Task.add_on(AMPAddon), precision="fp16", loss_scale=(1.0, 65536.0))


@mistake(zae.ConfigError, "precision='bf16-true'", "write dtype='bf16'")
def precision_of_another_trainer():
    trainer_of(Task.add_on(AMPAddon), precision="bf16-true")


@mistake(
    zae.ConfigError,
    "dtype='fp16': gradients of weights in float16 underflow, and torch's",
    "write precision='fp16', which keeps the weights in float32, or dtype='bf16'",
)
def weights_in_float16():
    trainer_of(Task.add_on(AMPAddon), dtype="fp16")


@mistake(zae.ConfigError, "decay=1.0", "it must be a number in [0, 1), for instance 0.999")
def decay_of_one():
    trainer_of(Task.add_on(EMAAddon), decay=1.0)


@mistake(zae.ConfigError, "patience=0", "it must be a whole number of at least 1")
def patience_of_zero():
    trainer_of(Task.add_on(EarlyStoppingAddon), patience=0)


@mistake(zae.ConfigError, "save_format='pickle': unknown model format 'pickle'", "write 'safetensors' or 'ckpt'")
def misspelt_save_format():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs", save_format="pickle")


@mistake(zae.ConfigError, "is a file, not a folder", "give another path")
def save_path_that_is_a_file():
    Path("notes.txt").write_text("mine")
    trainer_of(Task.add_on(StateManagerAddon), save_path="notes.txt")


@mistake(zae.CheckpointNotFound, "contains no checkpoint", "write resume='auto' to start a new run")
def resume_from_nothing():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs", resume=True).run(1, loader())


@mistake(
    zae.ConfigError,
    "contains 1 checkpoint of another run or newer than this one",
    "write resume='auto' to resume from it, give another save_path, or write overwrite=True",
)
def second_run_in_one_folder():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs").run(1, loader())
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs").run(1, loader())
