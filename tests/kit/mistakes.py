"""Mistakes that people make with options, and what all mistakes are made with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


def mistakes(rows: dict[str, tuple[Any, ...]]) -> None:
    """Put mistakes that are one call into the catalogue: the error, the call and the phrases, by name."""
    for name, (error, make, *phrases) in rows.items():
        CATALOGUE[name] = Mistake(make, error, tuple(phrases))


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


mistakes({
    "misspelt_option": (zae.OptionError, lambda: trainer_of(gradient_clp=1.0),
        "unknown argument 'gradient_clp' for Task", "did you mean 'gradient_clip'?"),
    "misspelt_option_of_an_add_on": (zae.OptionError,
        lambda: trainer_of(Task.add_on(GradientAccumulationAddon), gradient_acumulation_steps=4),
        "unknown argument 'gradient_acumulation_steps' for", "did you mean 'gradient_accumulation_steps'?"),
    "option_of_an_absent_add_on": (zae.OptionError, lambda: trainer_of(save_path="runs"),
        "unknown argument 'save_path' for Task",
        "it is an option of StateManagerAddon; add it with .add_on(StateManagerAddon)"),
    "misspelt_option_of_an_absent_add_on": (zae.OptionError, lambda: trainer_of(patiense=3),
        "unknown argument 'patiense' for Task",
        "did you mean 'patience', an option of EarlyStoppingAddon? Add it with .add_on(EarlyStoppingAddon)"),
    "option_of_lightning": (zae.OptionError, lambda: trainer_of(accumulate_grad_batches=4),
        "unknown argument 'accumulate_grad_batches' for Task",
        "here it is gradient_accumulation_steps (GradientAccumulationAddon)"),
    "option_of_transformers": (zae.OptionError, lambda: trainer_of(num_train_epochs=3),
        "unknown argument 'num_train_epochs' for Task",
        "here it is n_epoch of run(n_epoch, loader), or the same option of HuggingFaceAddon"),
    "option_without_a_counterpart": (zae.OptionError, lambda: trainer_of(split_spec={}),
        "unknown argument 'split_spec' for Task", "here it is split (PipelineAddon)"),
    "logging_into_nothing": (zae.OptionError, lambda: trainer_of(web_logger={"wandb": {"project": "mine"}}),
        "unknown argument 'web_logger' for Task",
        "it is an option of WandBLoggerAddon; add it with .add_on(WandBLoggerAddon)"),
    "missing_option": (zae.OptionError, lambda: trainer_of(Task.add_on(StateManagerAddon)),
        "Task[StateManagerAddon] needs 'save_path' (StateManagerAddon)",
        "write Task[StateManagerAddon](..., save_path=...)"),
    "several_missing_options": (zae.OptionError, lambda: trainer_of(Task.add_on(JSONLLoggerAddon, StateManagerAddon)),
        "Task[JSONLLoggerAddon, StateManagerAddon] needs 'jsonl_path'",
        "write Task[JSONLLoggerAddon, StateManagerAddon](..., jsonl_path=..."),
    "too_many_positions": (zae.OptionError, lambda: Task(torch.nn.Linear(4, 2), "cpu", "train", None, None, False),
        "Task takes 5 positional arguments (model, device, mode, optimizer",
        "name the others: log_bar, scheduler_step_on_batch, gradient_clip, monitor"),
    "option_given_twice": (zae.OptionError, lambda: Task(torch.nn.Linear(4, 2), model=torch.nn.Linear(4, 2)),
        "Task got 'model' twice: by position and by name", "keep one"),
})  # fmt: skip


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


mistakes({
    "no_optimizer": (zae.ConfigError, lambda: trainer_of(optimizer=None),
        "optimizer is None, and mode='train' needs one",
        "write optimizer=torch.optim.AdamW(model.parameters()), or mode='test'"),
    "optimizer_of_another_model": (zae.ConfigError,
        lambda: trainer_of(optimizer=torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)),
        "optimizer (SGD) has 2 parameters, none of which is among the 2 of the model",
        "make it from the same model: SGD(model.parameters(), ...)"),
    "optimizer_by_name": (zae.ConfigError, lambda: trainer_of(optimizer="adam"), "optimizer is a str",
        "give a torch.optim.Optimizer, or a function that makes one: optimizer=lambda"),
    "optimizer_factory_without_return": (zae.ConfigError,
        lambda: trainer_of(optimizer=lambda parameters: None).run(1, loader()),
        "the function given as optimizer returned None", "return a torch Optimizer"),
    "optimizer_as_class_and_arguments": (zae.ConfigError,
        lambda: trainer_of(optimizer=(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1})),
        "optimizer is a class and a dict of its arguments",
        "give a function that makes it: optimizer=lambda parameters"),
    "optimizer_settings_in_a_dict": (zae.ConfigError, lambda: trainer_of(optimizer={"name": "AdamW", "lr": 1e-3}),
        "optimizer['name'] is a str", "give a torch.optim.Optimizer, or a function that makes one: optimizer=lambda"),
    "scheduler_class_instead_of_factory": (zae.ConfigError,
        lambda: trainer_of(scheduler=torch.optim.lr_scheduler.CosineAnnealingLR),
        "scheduler is the class CosineAnnealingLR, which needs T_max",
        "write scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max"),
})  # fmt: skip


@mistake(
    zae.ConfigError,
    "scheduler (StepLR) was made for another optimizer than the one given",
    "make it from the same object: StepLR(optimizer, ...)",
)
def scheduler_of_another_optimizer():
    model = torch.nn.Linear(4, 2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    trainer_of(model=model, optimizer=first, scheduler=torch.optim.lr_scheduler.StepLR(second, 1))


mistakes({
    "scheduler_by_name": (zae.ConfigError, lambda: trainer_of(scheduler="cosine"), "scheduler is a str",
        "give a torch.optim.lr_scheduler.LRScheduler, or a function that makes one"),
    "schedulers_without_their_optimizers": (zae.ConfigError,
        lambda: trainer_of(scheduler={"d": lambda optimizer: None}).run(1, loader()),
        "scheduler 'd' has no optimizer of that name", "give both as dicts with the same keys"),
    "loader_instead_of_model": (zae.ConfigError, lambda: trainer_of(model=loader()), "model is a DataLoader",
        "give a torch.nn.Module, or a function that returns one"),
    "model_factory_without_return": (zae.ConfigError, lambda: trainer_of(model=lambda: None), "model is None",
        "give a torch.nn.Module, or a function that returns one"),
    "misspelt_mode": (zae.ConfigError, lambda: trainer_of(mode="trian"), "mode='trian'", "did you mean 'train'?"),
    "misspelt_device": (zae.ConfigError, lambda: trainer_of(device="gpu"), "device='gpu' is not a device",
        "write 'auto', 'cpu', 'cuda:0' or 'mps'"),
    "device_that_is_not_there": (zae.ConfigError, lambda: trainer_of(device="cuda:77"),
        "device='cuda:77', but 0 CUDA devices are available", "write device='cpu'"),
    "several_devices_for_one_process": (zae.ConfigError, lambda: trainer_of(device=["cpu", "cpu"]),
        "device is a list of 2, but Task trains on one device; to train on several", "write .add_on(MultiGPUAddon)"),
    "negative_clip": (zae.ConfigError, lambda: trainer_of(gradient_clip=-1.0), "gradient_clip=-1.0",
        "it must be a number of at least 0"),
    "clip_as_text": (zae.ConfigError, lambda: trainer_of(gradient_clip="1.0"), "gradient_clip='1.0'",
        "it must be a number of at least 0"),
    "monitor_of_three_letters": (zae.ConfigError, lambda: trainer_of(monitor="valid/los"), "monitor='valid/los'",
        "did you mean 'loss'?"),
    "monitor_without_direction": (zae.ConfigError, lambda: trainer_of(monitor="valid/height"),
        "monitor='valid/height': its name does not say whether smaller or larger is",
        "write monitor_mode='min' or monitor_mode='max'"),
    "monitor_that_is_no_name": (zae.ConfigError, lambda: trainer_of(monitor=None), "monitor=None",
        "it must be the name of a metric, for instance 'loss'"),
    "misspelt_monitor_mode": (zae.ConfigError, lambda: trainer_of(monitor="accuracy", monitor_mode="maximum"),
        "monitor_mode='maximum'", "it must be 'auto', 'min' or 'max'"),
    "seed_as_text": (zae.ConfigError, lambda: trainer_of(seed="1234"), "seed='1234'",
        "it must be a whole number of at least 0"),
    "cadence_as_text": (zae.ConfigError, lambda: trainer_of(log_every="epoch"), "log_every='epoch'",
        "write Every(steps=...) or Every(epochs=...), or a number of steps"),
    "cadence_of_nothing": (zae.ConfigError, lambda: Every(), "Every() must have either steps or epochs",
        "write Every(steps=100) or Every(epochs=1)"),
    "cadence_of_both": (zae.ConfigError, lambda: Every(steps=100, epochs=1),
        "Every(steps=100, epochs=1) must have either steps or epochs", "write Every(steps=100) or Every(epochs=1)"),
    "cadence_of_zero": (zae.ConfigError, lambda: Every(steps=0), "Every: steps=0",
        "it must be a whole number of at least 1"),
})  # fmt: skip


# ------------------------------------------------------------------------------------------- options of the add-ons


mistakes({
    "accumulation_of_zero": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(GradientAccumulationAddon), gradient_accumulation_steps=0),
        "gradient_accumulation_steps=0", "it must be a whole number of at least 1"),
    "misspelt_precision": (zae.ConfigError, lambda: trainer_of(Task.add_on(AMPAddon), precision="bfloat16"),
        "precision='bfloat16'", "did you mean 'bf16'?"),
    "loss_scales_the_wrong_way_round": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(AMPAddon), precision="fp16", loss_scale=(1.0, 65536.0)),
        "loss_scale=(1.0, 65536.0)", "it must be a pair of the first scale and the smallest one, for instance"),
    "precision_of_another_trainer": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(AMPAddon), precision="bf16-true"), "precision='bf16-true'",
        "write dtype='bf16'"),
    "weights_in_float16": (zae.ConfigError, lambda: trainer_of(Task.add_on(AMPAddon), dtype="fp16"),
        "dtype='fp16': gradients of weights in float16 underflow, and torch's",
        "write precision='fp16', which keeps the weights in float32, or dtype='bf16'"),
    "decay_of_one": (zae.ConfigError, lambda: trainer_of(Task.add_on(EMAAddon), decay=1.0), "decay=1.0",
        "it must be a number in [0, 1), for instance 0.999"),
    "patience_of_zero": (zae.ConfigError, lambda: trainer_of(Task.add_on(EarlyStoppingAddon), patience=0),
        "patience=0", "it must be a whole number of at least 1"),
    "misspelt_save_format": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(StateManagerAddon), save_path="runs", save_format="pickle"),
        "save_format='pickle': unknown model format 'pickle'", "write 'safetensors' or 'ckpt'"),
})  # fmt: skip


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
