"""Mistakes that people make with the arguments of `run` and with what their steps return."""

from __future__ import annotations

import numpy as np
import pandas
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

import zae
from kit.mistakes import Stream, Task, dataset, loader, mistake, mistakes, trainer_of, with_step
from zae.addons import (
    ActivationOffloadAddon,
    AnomalyAddon,
    CompileAddon,
    EarlyStoppingAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    ProfilerAddon,
    SpikeGuardAddon,
    StateManagerAddon,
    TorchMetricsAddon,
)
from zae.metrics import Sum

# ---------------------------------------------------------------------------------------------- arguments of run


mistakes({
    "time_as_text": (zae.ConfigError, lambda: trainer_of().run(1, loader(), max_time="2 hours"), "max_time='2 hours'",
        "it must be a number of at least 0"),
    "time_limit_by_a_common_name": (zae.OptionError, lambda: trainer_of().run(1, loader(), time_limit=60),
        "got an unexpected keyword argument 'time_limit'", "here it is max_time of run(n_epoch, loader)"),
    "limit_of_training_by_the_name_of_lightning": (zae.OptionError,
        lambda: trainer_of().run(1, loader(), limit_train_batches=5),
        "got an unexpected keyword argument 'limit_train_batches'", "run(n_epoch, loader, limit_batches=(..., None))"),
    "limits_that_contradict": (zae.ConfigError,
        lambda: trainer_of().run(1, loader(), limit_batches=5, overfit_batches=2),
        "limit_batches=5 and overfit_batches=2 both limit the training batches",
        "write limit_batches=(None, 5) to limit those of the validation alone"),
    "limit_of_a_generator": (zae.ConfigError,
        lambda: trainer_of().run(1, (batch for batch in loader()), limit_batches=2),
        "the first batches of a generator come once, so that limit_batches and",
        "give a list, a DataLoader or a class with __iter__, or write"),
    "predictions_to_a_table": (zae.ConfigError, lambda: trainer_of().predict(loader(), "out.csv"),
        "path='out.csv' has no suffix of a file of predictions", "write .npy, .safetensors or .pt"),
    "predictions_of_a_test_step_without_rows": (zae.StepError, lambda: trainer_of().predict(loader()),
        "predict_step returned no tensor with a row for each sample, only loss",
        "write def predict_step(self, batch): return {'output': self.model(batch[0])}"),
    "no_epochs": (zae.ConfigError, lambda: trainer_of().run(0, loader()), "n_epoch=0",
        "it must be a whole number of at least 1"),
    "half_an_epoch": (zae.ConfigError, lambda: trainer_of().run(1.5, loader()), "n_epoch=1.5",
        "it must be a whole number of at least 1"),
    "no_end": (zae.ConfigError, lambda: trainer_of().run(None, loader()), "n_epoch is None, so the run would not end",
        "give a number of epochs, max_steps=... or max_time=..."),
    "epochs_by_a_common_name": (zae.OptionError, lambda: trainer_of().run(epochs=3, loader=loader()),
        "got an unexpected keyword argument 'epochs'", "here it is n_epoch of run(n_epoch, loader)"),
    "epochs_by_the_name_of_lightning": (zae.OptionError, lambda: trainer_of().run(max_epochs=3, loader=loader()),
        "got an unexpected keyword argument 'max_epochs'", "here it is n_epoch of run(n_epoch, loader)"),
    "valid_loader_by_a_common_name": (zae.OptionError, lambda: trainer_of().run(3, loader(), val_loader=loader()),
        "got an unexpected keyword argument 'val_loader'", "here it is valid_loader of run(n_epoch, loader, valid"),
    "loader_without_epochs": (zae.OptionError, lambda: trainer_of().run(loader()),
        "run() missing 1 required positional argument", "write run(3, loader, valid_loader, max_steps=100)"),
    "loaders_without_epochs": (zae.ConfigError, lambda: trainer_of().run(loader(), loader()),
        "n_epoch=<torch.utils.data", "it must be a whole number of at least 1"),
    "epochs_without_a_loader": (zae.OptionError, lambda: trainer_of().run(3),
        "run() missing 1 required positional argument: 'loader'", "write run(3, loader, valid_loader"),
    "steps_by_position": (zae.OptionError, lambda: trainer_of().run(3, loader(), loader(), 100),
        "run() takes from 3 to 4 positional arguments but 5 were given",
        "write run(3, loader, valid_loader, max_steps=100)"),
    "constructor_option_in_run": (zae.OptionError, lambda: trainer_of().run(3, loader(), seed=1),
        "argument 'seed', which is an option of the constructor", "Task(model, ..., seed=...)"),
    "epochs_and_loader_swapped": (zae.ConfigError, lambda: trainer_of().run(loader(), 3),
        "n_epoch=<torch.utils.data", "it must be a whole number of at least 1"),
    "dataset_instead_of_loader": (zae.LoaderError, lambda: trainer_of().run(1, dataset()),
        "loader is a dataset (TensorDataset)",
        "give a DataLoader: torch.utils.data.DataLoader(loader, batch_size=32)"),
    "iterable_dataset_instead_of_loader": (zae.LoaderError, lambda: trainer_of().run(1, Stream()),
        "loader is a dataset (Stream)",
        "give a DataLoader: torch.utils.data.DataLoader(loader, batch_size=32), or with"),
    "dataset_instead_of_valid_loader": (zae.LoaderError, lambda: trainer_of().run(1, loader(), dataset()),
        "valid_loader is a dataset (TensorDataset)",
        "give a DataLoader: torch.utils.data.DataLoader(valid_loader, batch_size=32)"),
    "tensor_instead_of_loader": (zae.LoaderError, lambda: trainer_of().run(1, torch.randn(32, 4)),
        "loader is a Tensor, not batches", "DataLoader(TensorDataset(loader), batch_size=32), or a list of batches"),
    "model_instead_of_loader": (zae.LoaderError, lambda: trainer_of().run(1, torch.nn.Linear(4, 2)),
        "loader is not iterable (Linear)", "give a DataLoader or a list of batches"),
    "several_loaders_to_train_on": (zae.LoaderError,
        lambda: trainer_of().run(1, {"train": loader(), "more": loader()}),
        "loader is a dict (train, more), but only valid_loader may be a dict", "give one loader"),
    "several_valid_loaders_in_a_list": (zae.LoaderError, lambda: trainer_of().run(1, loader(), [loader(), loader()]),
        "valid_loader is a list of loaders", "give a dict: valid_loader={name: loader}"),
    "no_valid_loaders_in_a_dict": (zae.LoaderError, lambda: trainer_of().run(1, loader(), {}),
        "valid_loader is an empty dict", "give loaders by name, or None"),
    "empty_loader": (zae.LoaderError,
        lambda: trainer_of().run(1, DataLoader(dataset(4), batch_size=8, drop_last=True)),
        "loader has 0 batches (DataLoader, dataset TensorDataset of length 4", "use more data, or drop_last=False"),
    "loader_that_yields_nothing": (zae.LoaderError, lambda: trainer_of().run(1, (batch for batch in [])),
        "the loader yielded 0 batches in epoch 1 (generator)", "give it data"),
    "loader_that_yields_none": (zae.LoaderError, lambda: trainer_of().run(1, [None] * 4),
        "4 of 4 batches were None (list)", "fix the collate_fn"),
    "generator_for_two_epochs": (zae.LoaderError, lambda: trainer_of().run(2, (batch for batch in loader())),
        "loader is a generator, which can be read once, and this run reads it in 2 epochs",
        "give a list, a DataLoader, or a class with __iter__"),
    "valid_loader_that_is_used_up": (zae.LoaderError, lambda: trainer_of().run(2, loader(), iter(loader())),
        "valid_loader is a _SingleProcessDataLoaderIter, which can be read once, and this run reads it in 2 epochs",
        "give a list, a DataLoader, or a class with __iter__"),
    "zip_for_two_epochs": (zae.LoaderError,
        lambda: trainer_of().run(2, zip(torch.randn(3, 8, 4), torch.zeros(3, 8).long(), strict=True)),
        "loader is a zip, which can be read once", "or end the epochs of a stream by steps_per_epoch="),
})  # fmt: skip


@mistake(zae.LoaderError, "loader is a generator that has ended, and yields nothing any more", "give a list")
def generator_in_a_second_run():
    batches = (batch for batch in loader())
    trainer = trainer_of()
    trainer.run(1, batches)
    trainer.run(1, batches)


mistakes({
    "array_as_loader": (zae.LoaderError, lambda: trainer_of().run(1, np.zeros((32, 4))),
        "loader is a ndarray, not batches", "DataLoader(TensorDataset(torch.as_tensor(loader))"),
    "table_as_valid_loader": (zae.LoaderError,
        lambda: trainer_of().run(1, loader(), pandas.DataFrame({"a": [1.0, 2.0]})),
        "valid_loader is a DataFrame, not batches",
        "DataLoader(TensorDataset(torch.as_tensor(valid_loader.to_numpy()))"),
})  # fmt: skip


@mistake(
    zae.TaskError, "Own.run_batch has made no step in epoch 1", "call super().run_batch(batch), which makes the op"
)
def step_by_hand_in_run_batch():
    class Own(Task):
        def run_batch(self, batch):
            self.train_step(batch)["loss"].backward()
            self.optimizers["0"].step()

    trainer_of(Own).run(1, loader())


@mistake(
    RuntimeError,
    "depends on a tensor whose graph is freed: one that was kept from a batch before, in self for instance",
    "is to be kept with .detach()",
)
def loss_kept_with_its_graph():
    class Smoothed(Task):
        kept = 0.0

        def train_step(self, batch):
            loss = super().train_step(batch)["loss"]
            loss, self.kept = loss + 0.1 * self.kept, loss
            return {"loss": loss}

    trainer_of(Smoothed).run(1, loader())


mistakes({
    "batch_without_a_collate_fn": (ValueError,
        lambda: trainer_of().run(1, [[{"image": torch.zeros(4), "label": 1}] * 16] * 2),
        "the batch was list(16 times {image: Tensor[4] float32, label: int})"),
    "valid_every_as_text": (zae.ConfigError, lambda: trainer_of().run(1, loader(), loader(), valid_every="epoch"),
        "valid_every='epoch'", "write Every(steps=...) or Every(epochs=...), or a number of steps"),
    "plateau_without_validation": (zae.ConfigError,
        lambda: trainer_of(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau).run(1, loader()),
        "scheduler 0 (ReduceLROnPlateau) needs a metric after each validation, and",
        "give run(..., valid_loader=...), or monitor='train/loss'"),
})  # fmt: skip


@mistake(
    zae.ConfigError,
    "scheduler 0 (OneCycleLR) ends after 7 steps, but this run has 8 optimizer",
    "create it with a length of 8 steps, or end the run earlier: run(...",
)
def one_cycle_that_is_too_short():
    trainer_of(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7),
        scheduler_step_on_batch=True,
    ).run(2, loader())


@mistake(
    zae.ConfigError,
    "scheduler 0 (OneCycleLR) ends after 7 steps, and the loader has no length",
    "give run(..., steps_per_epoch=...) or run(..., max_steps=...)",
)
def one_cycle_without_a_length():
    trainer_of(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7),
        scheduler_step_on_batch=True,
    ).run(1, (batch for batch in loader()))


@mistake(zae.ConfigError, "mode='eval'", "it must be 'train' or 'test'")
def misspelt_toggle():
    trainer_of().toggle("eval")


# -------------------------------------------------------------------------------------------- what the steps return


mistakes({
    "add_on_of_an_instance": (zae.AddOnError, lambda: trainer_of().add_on(StateManagerAddon),
        "add_on() makes a class, and this Task exists already", "write Task.add_on(StateManagerAddon)(model, ...)"),
    "logging_a_number_by_name": (zae.StepError,
        lambda: with_step(lambda self, batch: self.log("accuracy", 0.5)).run(1, loader()),
        "self.log('accuracy', ...) takes a dict of metrics and a step; to record a",
        "return {'loss': loss, 'accuracy': value}"),
})  # fmt: skip


@mistake(
    zae.ConfigError,
    "scheduler 0 (CosineAnnealingLR) lasts 8 steps, as many as this run has",
    "write scheduler_step_on_batch=True (or scheduler_step_on_batch=False, if 8",
)
def schedule_by_epochs_of_as_many_steps():
    trainer_of(scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)).run(2, loader())


@mistake(
    zae.ConfigError,
    "scheduler 0 (OneCycleLR) has total_steps=8 and would be stepped once an",
    "write scheduler_step_on_batch=True (for a cycle that is counted in epochs",
)
def one_cycle_by_epochs():
    trainer_of(scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)).run(
        2, loader()
    )


mistakes({
    "schedule_of_total_steps_without_a_run": (zae.ConfigError,
        lambda: trainer_of(scheduler=lambda optimizer, total_steps: None).evaluate(loader()),
        "the scheduler's factory takes total_steps, the number of optimizer steps",
        "call run(n_epoch, loader) first (resume=... loads a state within it), or give a"),
    "step_without_return": (zae.StepError, lambda: with_step(lambda self, batch: None).run(1, loader()),
        "returned None", "return a dict: return {'loss': loss}"),
})  # fmt: skip


@mistake(zae.StepError, "returned Tensor of shape (8,)", "return a dict: return {'loss': loss}")
def step_that_returns_the_losses():
    with_step(lambda self, batch: cross_entropy(self.model(batch[0]), batch[1], reduction="none")).run(1, loader())


mistakes({
    "step_that_returns_a_tuple": (zae.StepError,
        lambda: with_step(lambda self, batch: (cross_entropy(self.model(batch[0]), batch[1]), 0.5)).run(1, loader()),
        "returned tuple of 2 entries", "return a dict: return {'loss': loss}"),
    "step_without_loss": (zae.StepError,
        lambda: with_step(lambda self, batch: {"output": self.model(batch[0]), "accuracy": 0.5}).run(1, loader()),
        "returned a dict without 'loss'; its keys are 'output', 'accuracy'", "return {'loss': loss, ...}"),
})  # fmt: skip


@mistake(zae.StepError, "returned a dict without 'loss'; its keys are 'los'", "rename 'los' to 'loss'")
def step_with_a_misspelt_loss():
    with_step(lambda self, batch: {"los": cross_entropy(self.model(batch[0]), batch[1])}).run(1, loader())


@mistake(zae.StepError, "returned a loss of shape (8,)", "reduce it to a scalar: loss.mean()")
def loss_of_every_sample():
    with_step(lambda self, batch: {"loss": cross_entropy(self.model(batch[0]), batch[1], reduction="none")}).run(
        1, loader()
    )


@mistake(
    zae.StepError,
    "returned a loss with requires_grad=False",
    "compute it from self.model(...), without .detach(), torch.no_grad() and torch.inf",
)
def detached_loss():
    with_step(lambda self, batch: {"loss": cross_entropy(self.model(batch[0]), batch[1]).detach()}).run(1, loader())


@mistake(zae.StepError, "returned a loss of type float", "return the tensor, without .item() or float()")
def loss_as_a_number():
    with_step(lambda self, batch: {"loss": cross_entropy(self.model(batch[0]), batch[1]).item()}).run(1, loader())


@mistake(
    zae.StepError,
    "returned a loss with requires_grad=False",
    "compute it from self.model(...), without .detach(), torch.no_grad() and torch.inf",
)
def frozen_model():
    model = torch.nn.Linear(4, 2).requires_grad_(False)
    trainer_of(model=model).run(1, loader())


@mistake(
    zae.StepError,
    "returned losses for ['g', 'd'], but the optimizers are ['0']",
    "return one scalar loss, or a dict with one loss for each optimizer",
)
def several_losses_for_one_optimizer():
    with_step(lambda self, batch: {"loss": {"g": torch.zeros(()), "d": torch.zeros(())}}).run(1, loader())


@mistake(
    zae.StepError,
    "Task.train_step computes the loss, and backward(), optimizer.step() and zero_grad() are done for you",
    "take them out of it",
)
def backward_in_the_step():
    def train_step(self, batch):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        return {"loss": loss}

    with_step(train_step).run(1, loader())


@mistake(
    zae.StepError,
    "train_step returned 'num_targets' for 1 of the 2 batches of a window",
    "return it in all of them, or in none",
)
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


@mistake(
    zae.StepError,
    "returned num_targets of shape (8,)",
    "return the number of targets that the loss is averaged over, for instance",
)
def targets_that_are_no_number():
    with_step(lambda self, batch: {"loss": cross_entropy(self.model(batch[0]), batch[1]), "num_targets": batch[1]}).run(
        1, loader()
    )


@mistake(
    zae.NonFiniteError,
    "step 1 (epoch 1, batch 1) is not finite: loss nan",
    "lower the learning rate, or clip with gradient_clip",
)
def loss_that_is_nan():
    with_step(lambda self, batch: {"loss": self.model(batch[0]).mean() * float("nan")}).run(1, loader())


@mistake(RuntimeError, "the batch was")
def float_labels():
    batches = [(inputs, targets.float()) for inputs, targets in loader()]
    trainer_of().run(1, batches)


@mistake(RuntimeError, "the batch was")
def double_inputs():
    batches = [(inputs.double(), targets) for inputs, targets in loader()]
    trainer_of().run(1, batches)


@mistake(zae.StepError, "returned None", "return a dict: return {'loss': loss}")
def evaluation_without_return():
    cls = type(Task)("Task", (Task,), {"test_step": lambda self, batch: None})
    trainer_of(cls).evaluate(loader())


@mistake(ValueError, "the batch was")
def evaluation_that_fails():
    cls = type(Task)("Task", (Task,), {"test_step": lambda self, batch: {"loss": cross_entropy(*batch)}})
    batches = [(inputs, targets[:4]) for inputs, targets in loader()]
    trainer_of(cls).run(1, loader(), batches)


@mistake(
    zae.MonitorError,
    "log_train has no entry 'acuracy'; available: loss",
    "use one of these, or return it from the step",
)
def metric_of_an_unknown_entry():
    cls = type(Task)("Task", (Task,), {"metric_on_epoch_end": lambda self: {"accuracy": self.log_train["acuracy"]}})
    trainer_of(cls).run(1, loader())


@mistake(zae.StepError, "Task.metric_on_epoch_end returned float 0.5", "return a dict of numbers")
def metric_that_is_no_mapping():
    cls = type(Task)("Task", (Task,), {"metric_on_epoch_end": lambda self: 0.5})
    trainer_of(cls).run(1, loader())


@mistake(
    zae.StepError,
    "the step returned 'correct' as Sum of a Tensor of shape (8,)",
    "give it one number, for instance Sum(x.sum())",
)
def sum_of_several_numbers():
    def train_step(self, batch):
        return {"loss": cross_entropy(self.model(batch[0]), batch[1]), "correct": Sum(batch[1])}

    with_step(train_step).run(1, loader())


@mistake(
    zae.StepError,
    "Task[TorchMetricsAddon].test_step returned no 'output', which the metric",
    "Return it, for instance {'loss': loss, 'output': logits, 'targets': labels}, or",
)
def input_of_a_metric_that_no_step_returns():
    options = {"torch_metrics": {"f1": MulticlassF1Score(num_classes=3)}}
    trainer_of(Task.add_on(TorchMetricsAddon), **options).evaluate(loader())


mistakes({
    "metric_that_is_not_one_of_torchmetrics": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(TorchMetricsAddon), torch_metrics={"f1": lambda output, targets: 0.5}),
        "which is not a metric of torchmetrics", "write torch_metrics={'f1': torchmetrics"),
    "checkpointing_of_a_model_without_blocks": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(GradientCheckpointingAddon)).run(1, loader()),
        "no module of Linear is repeated, so none is checkpointed",
        "name them, for instance checkpoint_modules=['encoder', 'decoder']"),
})  # fmt: skip


@mistake(
    zae.ConfigError,
    "offload_modules: 0.0 is in 0, which is computed again: nothing of 0.0 is",
    "Name 0, whose inputs are kept, or a module around it",
)
def offloading_within_what_is_computed_again():
    cls, names = Task.add_on(ActivationOffloadAddon, GradientCheckpointingAddon), {"checkpoint_modules": ["0"]}
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 2))
    trainer_of(cls, model=model, offload_modules=["0.0"], **names).run(1, loader())


mistakes({
    "schedule_of_the_profiler_that_is_too_short": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(ProfilerAddon), profile_dir="profile", profile_schedule=(1, 3)),
        "profile_schedule=(1, 3)", "write (wait, warmup, active, repeat), for instance (2, 1, 3, 1)"),
    "watching_compiled_code": (zae.AddOnConflict, lambda: Task.add_on(AnomalyAddon, CompileAddon),
        "AnomalyAddon and CompileAddon do not go together: compiled code has no",
        "leave CompileAddon out until the cause is found"),
    "watching_steps_in_the_wrong_order": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(AnomalyAddon), anomaly_steps=(820, 800)), "the last of anomaly_steps=800",
        "it must be a whole number of at least 820"),
})  # fmt: skip


@mistake(
    zae.NonFiniteError,
    "step 1 (epoch 1, batch 1) is not finite",
    "in the backward, Function 'MulBackward0' returned nan",
)
def derivative_that_is_nan():
    class Root(Task):
        def train_step(self, batch):
            return {"loss": (super().train_step(batch)["loss"] * 0).sqrt()}

    trainer_of(Root.add_on(AnomalyAddon)).run(1, loader())


@mistake(zae.ConfigError, "spike_threshold has 'norm'; it may have 'loss' and 'grad_norm'", "did you mean 'grad_norm'?")
def threshold_of_an_unknown_value():
    trainer_of(Task.add_on(SpikeGuardAddon), spike_threshold={"norm": 8.0})


@mistake(
    zae.StepError,
    "Task.metric_on_epoch_end returned 'confusion' of type Tensor of shape (2",
    "return a number, for instance the mean",
)
def metric_that_is_no_number():
    cls = type(Task)("Task", (Task,), {"metric_on_epoch_end": lambda self: {"confusion": torch.eye(2)}})
    trainer_of(cls).run(1, loader())


@mistake(
    zae.MonitorError,
    "unknown metric 'valid/acuracy' in monitor; available: loss",
    "give one of these, or return it from the step",
)
def misspelt_monitor():
    trainer_of(monitor="valid/acuracy", monitor_mode="max").run(1, loader(), loader())


@mistake(zae.MonitorError, "unknown metric 'val_los' in monitor", "did you mean 'loss'?")
def misspelt_monitor_of_early_stopping():
    trainer_of(Task.add_on(EarlyStoppingAddon), monitor="val_los", monitor_mode="min").run(1, loader(), loader())


@mistake(
    zae.MonitorError, "early stopping monitors 'loss', which no step returns; available: accuracy", "give monitor=..."
)
def early_stopping_on_nothing():
    cls = type(Task)("Task", (Task,), {"test_step": lambda self, batch: {"accuracy": 0.5}})
    trainer_of(cls.add_on(EarlyStoppingAddon)).run(1, loader(), loader())


@mistake(zae.MonitorError, "unknown metric 'train_acuracy'; available: epoch, step, train_loss, lr", "use one of these")
def metric_that_is_not_in_the_result():
    trainer_of().run(1, loader())["train_metrics_history"][-1]["train_acuracy"]
