"""Mistakes that people make, each a few lines; what they meet is kept in golden/errors.txt.

``python tests/kit/error_catalogue.py`` writes that file again: read the difference before it is committed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from zae import AddOnBase, Every, Trainer, ZaeError
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    StateManagerAddon,
)

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "errors.txt"
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


# ---------------------------------------------------------------------------------------------- arguments of run


@mistake
def no_epochs():
    trainer_of().run(0, loader())


@mistake
def half_an_epoch():
    trainer_of().run(1.5, loader())


@mistake
def no_end():
    trainer_of().run(None, loader())


@mistake
def epochs_by_a_common_name():
    trainer_of().run(epochs=3, loader=loader())


@mistake
def epochs_by_the_name_of_lightning():
    trainer_of().run(max_epochs=3, loader=loader())


@mistake
def valid_loader_by_a_common_name():
    trainer_of().run(3, loader(), val_loader=loader())


@mistake
def loader_without_epochs():
    trainer_of().run(loader())


@mistake
def loaders_without_epochs():
    trainer_of().run(loader(), loader())


@mistake
def epochs_without_a_loader():
    trainer_of().run(3)


@mistake
def steps_by_position():
    trainer_of().run(3, loader(), loader(), 100)


@mistake
def constructor_option_in_run():
    trainer_of().run(3, loader(), seed=1)


@mistake
def epochs_and_loader_swapped():
    trainer_of().run(loader(), 3)


@mistake
def dataset_instead_of_loader():
    trainer_of().run(1, dataset())


@mistake
def iterable_dataset_instead_of_loader():
    trainer_of().run(1, Stream())


@mistake
def dataset_instead_of_valid_loader():
    trainer_of().run(1, loader(), dataset())


@mistake
def tensor_instead_of_loader():
    trainer_of().run(1, torch.randn(32, 4))


@mistake
def model_instead_of_loader():
    trainer_of().run(1, torch.nn.Linear(4, 2))


@mistake
def several_loaders_to_train_on():
    trainer_of().run(1, {"train": loader(), "more": loader()})


@mistake
def several_valid_loaders_in_a_list():
    trainer_of().run(1, loader(), [loader(), loader()])


@mistake
def no_valid_loaders_in_a_dict():
    trainer_of().run(1, loader(), {})


@mistake
def empty_loader():
    trainer_of().run(1, DataLoader(dataset(4), batch_size=8, drop_last=True))


@mistake
def loader_that_yields_nothing():
    trainer_of().run(1, (batch for batch in []))


@mistake
def loader_that_yields_none():
    trainer_of().run(1, [None] * 4)


@mistake
def generator_for_two_epochs():
    trainer_of().run(2, (batch for batch in loader()))


@mistake
def valid_loader_that_is_used_up():
    trainer_of().run(2, loader(), iter(loader()))


@mistake
def valid_every_as_text():
    trainer_of().run(1, loader(), loader(), valid_every="epoch")


@mistake
def plateau_without_validation():
    trainer_of(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau).run(1, loader())


@mistake
def one_cycle_that_is_too_short():
    trainer_of(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7),
        scheduler_step_on_batch=True,
    ).run(2, loader())


@mistake
def one_cycle_without_a_length():
    trainer_of(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7),
        scheduler_step_on_batch=True,
    ).run(1, (batch for batch in loader()))


@mistake
def misspelt_toggle():
    trainer_of().toggle("eval")


# -------------------------------------------------------------------------------------------- what the steps return


@mistake
def add_on_of_an_instance():
    trainer_of().add_on(StateManagerAddon)


@mistake
def logging_a_number_by_name():
    with_step(lambda self, batch: self.log("accuracy", 0.5)).run(1, loader())


@mistake
def schedule_by_epochs_of_as_many_steps():
    trainer_of(scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)).run(2, loader())


@mistake
def one_cycle_by_epochs():
    trainer_of(scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)).run(
        2, loader()
    )


@mistake
def schedule_of_total_steps_without_a_run():
    trainer_of(scheduler=lambda optimizer, total_steps: None).evaluate(loader())


@mistake
def step_without_return():
    with_step(lambda self, batch: None).run(1, loader())


@mistake
def step_that_returns_the_losses():
    with_step(lambda self, batch: cross_entropy(self.model(batch[0]), batch[1], reduction="none")).run(1, loader())


@mistake
def step_that_returns_a_tuple():
    with_step(lambda self, batch: (cross_entropy(self.model(batch[0]), batch[1]), 0.5)).run(1, loader())


@mistake
def step_without_loss():
    with_step(lambda self, batch: {"output": self.model(batch[0]), "accuracy": 0.5}).run(1, loader())


@mistake
def step_with_a_misspelt_loss():
    with_step(lambda self, batch: {"los": cross_entropy(self.model(batch[0]), batch[1])}).run(1, loader())


@mistake
def loss_of_every_sample():
    with_step(lambda self, batch: {"loss": cross_entropy(self.model(batch[0]), batch[1], reduction="none")}).run(
        1, loader()
    )


@mistake
def detached_loss():
    with_step(lambda self, batch: {"loss": cross_entropy(self.model(batch[0]), batch[1]).detach()}).run(1, loader())


@mistake
def loss_as_a_number():
    with_step(lambda self, batch: {"loss": cross_entropy(self.model(batch[0]), batch[1]).item()}).run(1, loader())


@mistake
def frozen_model():
    model = torch.nn.Linear(4, 2).requires_grad_(False)
    trainer_of(model=model).run(1, loader())


@mistake
def several_losses_for_one_optimizer():
    with_step(lambda self, batch: {"loss": {"g": torch.zeros(()), "d": torch.zeros(())}}).run(1, loader())


@mistake
def backward_in_the_step():
    def train_step(self, batch):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        return {"loss": loss}

    with_step(train_step).run(1, loader())


@mistake
def targets_counted_now_and_then():
    def train_step(self, batch):
        counted = {"num_targets": 8} if self.progress_checker.step or len(self.seen) else {}
        self.seen.append(1)
        return {"loss": cross_entropy(self.model(batch[0]), batch[1]), **counted}

    trainer = with_step(train_step)
    composed = type(trainer).add_on(GradientAccumulationAddon)
    trainer = trainer_of(composed, gradient_accumulation_steps=2)
    trainer.seen = []
    trainer.run(1, loader())


@mistake
def targets_that_are_no_number():
    with_step(lambda self, batch: {"loss": cross_entropy(self.model(batch[0]), batch[1]), "num_targets": batch[1]}).run(
        1, loader()
    )


@mistake
def loss_that_is_nan():
    with_step(lambda self, batch: {"loss": self.model(batch[0]).mean() * float("nan")}).run(1, loader())


@mistake
def float_labels():
    batches = [(inputs, targets.float()) for inputs, targets in loader()]
    trainer_of().run(1, batches)


@mistake
def double_inputs():
    batches = [(inputs.double(), targets) for inputs, targets in loader()]
    trainer_of().run(1, batches)


@mistake
def test_step_without_return():
    cls = type(Task)("Task", (Task,), {"test_step": lambda self, batch: None})
    trainer_of(cls).evaluate(loader())


@mistake
def test_step_that_fails():
    cls = type(Task)("Task", (Task,), {"test_step": lambda self, batch: {"loss": cross_entropy(*batch)}})
    batches = [(inputs, targets[:4]) for inputs, targets in loader()]
    trainer_of(cls).run(1, loader(), batches)


@mistake
def metric_of_an_unknown_entry():
    cls = type(Task)("Task", (Task,), {"metric_on_epoch_end": lambda self: {"accuracy": self.log_train["acuracy"]}})
    trainer_of(cls).run(1, loader())


@mistake
def metric_that_is_no_mapping():
    cls = type(Task)("Task", (Task,), {"metric_on_epoch_end": lambda self: 0.5})
    trainer_of(cls).run(1, loader())


@mistake
def metric_that_is_no_number():
    cls = type(Task)("Task", (Task,), {"metric_on_epoch_end": lambda self: {"confusion": torch.eye(2)}})
    trainer_of(cls).run(1, loader())


@mistake
def misspelt_monitor():
    trainer_of(monitor="valid/acuracy", monitor_mode="max").run(1, loader(), loader())


@mistake
def misspelt_monitor_of_early_stopping():
    trainer_of(Task.add_on(EarlyStoppingAddon), monitor="val_los", monitor_mode="min").run(1, loader(), loader())


@mistake
def early_stopping_on_nothing():
    cls = type(Task)("Task", (Task,), {"test_step": lambda self, batch: {"accuracy": 0.5}})
    trainer_of(cls.add_on(EarlyStoppingAddon)).run(1, loader(), loader())


@mistake
def metric_that_is_not_in_the_result():
    trainer_of().run(1, loader())["train_metrics_history"][-1]["train_acuracy"]


# ------------------------------------------------------------------------------------------------ weights and states


@mistake
def weights_of_another_model():
    trainer_of().apply_weights(torch.nn.Linear(3, 2).state_dict())


@mistake
def weights_with_other_names():
    trainer_of().apply_weights(torch.nn.Sequential(torch.nn.Linear(4, 2)).state_dict())


@mistake
def weights_that_are_not_there():
    trainer_of().apply_weights("best.safetensors")


@mistake
def weights_in_an_unknown_format():
    trainer_of().save_model("best.h5")


@mistake
def state_of_another_composition():
    state = trainer_of(Task.add_on(EMAAddon)).state_dict()
    trainer_of().load_state_dict(state)


@mistake
def state_without_an_add_on():
    state = trainer_of().state_dict()
    trainer_of(Task.add_on(EMAAddon)).load_state_dict(state)


@mistake
def state_of_other_parameter_groups():
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    state = trainer_of(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).state_dict()
    groups = [{"params": [other.weight]}, {"params": [other.bias]}]
    trainer_of(model=other, optimizer=torch.optim.SGD(groups, lr=0.1)).load_state_dict(state)


@mistake
def state_that_is_a_model():
    trainer_of().load_state_dict(torch.nn.Linear(4, 2).state_dict())


# ------------------------------------------------------------------------------------------------- classes


@mistake
def trainer_without_steps():
    Trainer.add_on(StateManagerAddon)(torch.nn.Linear(4, 2), save_path="runs")


@mistake
def misspelt_step():
    class Misspelt(Trainer):
        def trian_step(self, batch): ...


@mistake
def misspelt_hook():
    class Misspelt(Task):
        def on_epoch_ends(self): ...


@mistake
def hook_of_lightning():
    class Lightning(Task):
        def validation_step(self, batch): ...


@mistake
def step_with_a_batch_index():
    class Indexed(Task):
        def train_step(self, batch, batch_idx): ...


@mistake
def attribute_that_hides_a_method():
    class Hiding(Task):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.log = []

    trainer_of(Hiding)


@mistake
def forgotten_super_init():
    class Forgetful(Task):
        def __init__(self, model):
            self.net = model

    Forgetful(torch.nn.Linear(4, 2))


@mistake
def add_on_without_super():
    class LossyAddon(AddOnBase):
        def backward(self, loss):
            loss.backward()


@mistake
def add_on_without_return():
    class CountAddon(AddOnBase):
        def optimizer_step(self):
            super().optimizer_step()


@mistake
def add_on_that_replaces_the_loop():
    class LoopAddon(AddOnBase):
        def run_batch(self, batch): ...


@mistake
def add_on_that_is_none():
    Task.add_on(dict)


@mistake
def add_on_by_a_misspelt_name():
    Task.add_on("AMPAdon")


@mistake
def add_on_alone():
    AMPAddon(torch.nn.Linear(4, 2))


@mistake
def add_ons_in_the_wrong_order():
    class Wrong(AMPAddon, StateManagerAddon, Task): ...


@mistake
def add_ons_after_the_task():
    class Late(Task, AMPAddon): ...


@mistake
def two_fillers_of_a_slot():
    class OtherAMPAddon(AddOnBase):
        slot = "precision"

    Task.add_on(AMPAddon, OtherAMPAddon)


@mistake
def add_on_without_what_it_needs():
    class NeedyAddon(AddOnBase):
        requires = ("StateManagerAddon",)

    Task.add_on(NeedyAddon)


@mistake
def attribute_that_nobody_set():
    class Weighted(Task):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.class_weights = torch.ones(2)

        def train_step(self, batch):
            return {"loss": cross_entropy(self.model(batch[0]), batch[1], self.clas_weights)}

    trainer_of(Weighted).run(1, loader())


@mistake
def method_of_lightning():
    trainer_of().fit(loader())


@mistake
def method_of_an_absent_add_on():
    trainer_of().save_state()


# ------------------------------------------------------------------------------------------------------- the texts


def meet(name: str) -> Exception:
    """Make a mistake in an empty folder, and return what it raised: a warning, or nothing, is not enough."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        torch.manual_seed(0)
        try:
            CATALOGUE[name]()
        except Exception as error:
            return error
        finally:
            os.chdir(before)
    raise AssertionError(f"{name} passed without an error")


def text_of(error: Exception) -> str:
    """What a user reads, without what changes from machine to machine; of other packages' errors, our notes alone."""
    parents = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
    kind = type(error).__name__ if not isinstance(error, ZaeError) else f"{type(error).__name__} ({parents[0]})"
    message = str(error) if isinstance(error, ZaeError) else "(the message of torch)"
    notes = [f"  {note}" for note in getattr(error, "__notes__", [])]
    text = "\n".join([f"{kind}: {message}", *notes])
    text = re.sub(r"/[^ :'\"]*/tmp\w+", "<folder>", text)
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


def frames_of(error: Exception) -> int:
    """How many frames a user sees, from the line in their script on."""
    frames = traceback.extract_tb(error.__traceback__)
    return sum(1 for frame in frames if frame.name != "meet")


def all_texts() -> str:
    """The golden file."""
    texts = {name: text_of(meet(name)) for name in CATALOGUE}
    return "\n\n".join(f"== {name}\n{text}" for name, text in texts.items()) + "\n"


if __name__ == "__main__":
    with contextlib.redirect_stderr(sys.stdout):
        GOLDEN.write_text(all_texts())
