"""Mistakes that people make with the arguments of `run` and with what their steps return."""

from __future__ import annotations

import schedulefree
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from kit.mistakes import Stream, Task, dataset, loader, mistake, trainer_of, with_step
from zae import find_batch_size
from zae.addons import (
    ActivationOffloadAddon,
    AnomalyAddon,
    AutoBatchAddon,
    CompileAddon,
    EarlyStoppingAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    ProfilerAddon,
    SilentFaultGuardAddon,
    SpikeGuardAddon,
    StateManagerAddon,
    StepInBackwardAddon,
    TorchMetricsAddon,
)
from zae.metrics import Sum

# ---------------------------------------------------------------------------------------------- arguments of run


@mistake
def time_as_text():
    trainer_of().run(1, loader(), max_time="2 hours")


@mistake
def time_limit_by_a_common_name():
    trainer_of().run(1, loader(), time_limit=60)


@mistake
def limit_of_training_by_the_name_of_lightning():
    trainer_of().run(1, loader(), limit_train_batches=5)


@mistake
def limits_that_contradict():
    trainer_of().run(1, loader(), limit_batches=5, overfit_batches=2)


@mistake
def limit_of_a_generator():
    trainer_of().run(1, (batch for batch in loader()), limit_batches=2)


@mistake
def validation_that_fails_in_the_rehearsal():
    def test_step(self, batch):
        raise KeyError("labels")

    trainer_of(type("Task", (Task,), {"test_step": test_step})).run(3, loader(), loader(), rehearse=True)


@mistake
def predictions_to_a_table():
    trainer_of().predict(loader(), "out.csv")


@mistake
def predictions_of_a_test_step_without_rows():
    trainer_of().predict(loader())


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
def evaluation_without_return():
    cls = type(Task)("Task", (Task,), {"test_step": lambda self, batch: None})
    trainer_of(cls).evaluate(loader())


@mistake
def evaluation_that_fails():
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
def sum_of_several_numbers():
    def train_step(self, batch):
        return {"loss": cross_entropy(self.model(batch[0]), batch[1]), "correct": Sum(batch[1])}

    with_step(train_step).run(1, loader())


@mistake
def input_of_a_metric_that_no_step_returns():
    options = {"torch_metrics": {"f1": MulticlassF1Score(num_classes=3)}}
    trainer_of(Task.add_on(TorchMetricsAddon), **options).evaluate(loader())


@mistake
def metric_that_is_not_one_of_torchmetrics():
    trainer_of(Task.add_on(TorchMetricsAddon), torch_metrics={"f1": lambda output, targets: 0.5})


@mistake
def checkpointing_of_a_model_without_blocks():
    trainer_of(Task.add_on(GradientCheckpointingAddon)).run(1, loader())


@mistake
def offloading_within_what_is_computed_again():
    cls, names = Task.add_on(ActivationOffloadAddon, GradientCheckpointingAddon), {"checkpoint_modules": ["0"]}
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 2))
    trainer_of(cls, model=model, offload_modules=["0.0"], **names).run(1, loader())


@mistake
def schedule_of_the_profiler_that_is_too_short():
    trainer_of(Task.add_on(ProfilerAddon), profile_dir="profile", profile_schedule=(1, 3))


@mistake
def watching_compiled_code():
    Task.add_on(AnomalyAddon, CompileAddon)


@mistake
def watching_steps_in_the_wrong_order():
    trainer_of(Task.add_on(AnomalyAddon), anomaly_steps=(820, 800))


@mistake
def derivative_that_is_nan():
    class Root(Task):
        def train_step(self, batch):
            return {"loss": (super().train_step(batch)["loss"] * 0).sqrt()}

    trainer_of(Root.add_on(AnomalyAddon)).run(1, loader())


@mistake
def parts_of_a_model_that_mixes_samples():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
    trainer_of(Task.add_on(AutoBatchAddon), model=model).run(1, loader())


@mistake
def search_for_what_fits_with_parts():
    find_batch_size(trainer_of(Task.add_on(AutoBatchAddon)), loader())


@mistake
def unknown_answer_to_a_fault():
    trainer_of(Task.add_on(SilentFaultGuardAddon), on_fault="again")


@mistake
def step_that_computes_something_else_each_time():
    class Counting(Task):
        calls = 0

        def train_step(self, batch):
            self.calls += 1
            return {"loss": super().train_step(batch)["loss"] * self.calls}

    trainer_of(Counting.add_on(SilentFaultGuardAddon), fault_check_every=1).run(1, loader())


@mistake
def clipping_of_gradients_that_are_freed():
    trainer_of(Task.add_on(StepInBackwardAddon), gradient_clip=1.0)


@mistake
def optimizer_whose_parameters_depend_on_each_other():
    def schedule_free(parameters):
        return schedulefree.AdamWScheduleFree(parameters, lr=0.01)

    trainer_of(Task.add_on(StepInBackwardAddon), optimizer=schedule_free).run(1, loader())


@mistake
def step_in_backward_with_accumulation():
    Task.add_on(StepInBackwardAddon, GradientAccumulationAddon)


@mistake
def rollback_without_checkpoints():
    trainer_of(Task.add_on(SpikeGuardAddon), on_spike="rollback")


@mistake
def threshold_of_an_unknown_value():
    trainer_of(Task.add_on(SpikeGuardAddon), spike_threshold={"norm": 8.0})


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
