"""Mistakes that people make with weights, states and classes."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import zae
from kit.mistakes import Task, loader, mistake, mistakes, trainer_of
from zae import AddOnBase, Trainer
from zae.addons import (
    AMPAddon,
    EMAAddon,
    StateManagerAddon,
)

# ------------------------------------------------------------------------------------------------ weights and states


mistakes({
    "weights_of_another_model": (zae.CheckpointMismatch,
        lambda: trainer_of().apply_weights(torch.nn.Linear(3, 2).state_dict()),
        "the weights do not fit Linear: 1 of another shape (weight is (2, 3) and", "Build the model as it was saved"),
    "weights_with_other_names": (zae.CheckpointMismatch,
        lambda: trainer_of().apply_weights(torch.nn.Sequential(torch.nn.Linear(4, 2)).state_dict()),
        "the weights do not fit Linear: 2 missing (weight, bias); 2 unexpected",
        "Build the model as it was saved, or load what fits with strict=False"),
    "weights_that_are_not_there": (zae.CheckpointNotFound, lambda: trainer_of().apply_weights("best.safetensors"),
        "there is no file best.safetensors", "give one that save_model wrote, or a checkpoint"),
    "weights_in_an_unknown_format": (zae.ConfigError, lambda: trainer_of().save_model("best.h5"),
        "unknown suffix '.h5' for weights", "write .safetensors, .safetensor, .ckpt, .pt or .pth"),
    "weights_without_a_file": (zae.ConfigError, lambda: trainer_of().save_model(), "save_model() needs a file",
        "write save_model('weights.safetensors')"),
})  # fmt: skip


@mistake(
    zae.CheckpointMismatch,
    "this trainer has no add-on for the state of EMAAddon",
    "add it with .add_on(EMAAddon), or load with strict=False to ignore it",
)
def state_of_another_composition():
    state = trainer_of(Task.add_on(EMAAddon)).state_dict()
    trainer_of().load_state_dict(state)


@mistake(
    zae.CheckpointMismatch,
    "the state has no entry of EMAAddon: it was saved without this add-on (its",
    "load it with strict=False to start EMAAddon from its initial state",
)
def state_without_an_add_on():
    state = trainer_of().state_dict()
    trainer_of(Task.add_on(EMAAddon)).load_state_dict(state)


@mistake(
    zae.CheckpointMismatch,
    "optimizer 0 (SGD) has parameter groups of [1, 1] parameters, but the state",
    "build it as it was, or load only the weights: apply_weights(path)",
)
def state_of_other_parameter_groups():
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    state = trainer_of(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).state_dict()
    groups = [{"params": [other.weight]}, {"params": [other.bias]}]
    trainer_of(model=other, optimizer=torch.optim.SGD(groups, lr=0.1)).load_state_dict(state)


@mistake(
    zae.CheckpointMismatch,
    "the state has no model, optimizer, outside, scheduler, progress, records",
    "give what state_dict() returned, or load weights alone with apply_weights(...)",
)
def state_that_is_a_model():
    trainer_of().load_state_dict(torch.nn.Linear(4, 2).state_dict())


# ------------------------------------------------------------------------------------------------- classes


@mistake(zae.TaskError, "cannot be instantiated: it has no train_step", "class MyTask(Trainer):")
def trainer_without_steps():
    Trainer.add_on(StateManagerAddon)(torch.nn.Linear(4, 2), save_path="runs")


@mistake(UserWarning, "Misspelt.trian_step is not called by the loop", "did you mean 'train_step'?")
def misspelt_step():
    class Misspelt(Trainer):
        def trian_step(self, batch): ...


@mistake(UserWarning, "Misspelt.on_epoch_ends is not called by the loop", "did you mean 'on_epoch_end'?")
def misspelt_hook():
    class Misspelt(Task):
        def on_epoch_ends(self): ...


@mistake(UserWarning, "Lightning.validation_step is not called by the loop", "here it is test_step(batch)")
def hook_of_lightning():
    class Lightning(Task):
        def validation_step(self, batch): ...


@mistake(
    UserWarning,
    "OmniGenBench._train_epoch is not called by the loop",
    "here it is run_epoch(loader), or train_step(batch) for what is done with one",
)
def hook_of_omnigenbench():
    class OmniGenBench(Task):
        def _train_epoch(self, epoch): ...


@mistake(
    zae.TaskError,
    "Indexed.train_step(self, batch, batch_idx) does not fit the call in the",
    "write def train_step(self, batch)",
)
def step_with_a_batch_index():
    class Indexed(Task):
        def train_step(self, batch, batch_idx): ...


@mistake(
    zae.TaskError,
    "Hiding.__init__ sets self.log = list, which hides the method log()",
    "give the attribute another name",
)
def attribute_that_hides_a_method():
    class Hiding(Task):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.log = []

    trainer_of(Hiding)


@mistake(
    zae.TaskError,
    "Forgetful.__init__ does not call super().__init__, and so the trainer has",
    "write super().__init__(*args, **kwargs) in it",
)
def forgotten_super_init():
    class Forgetful(Task):
        def __init__(self, model):
            self.net = model

    Forgetful(torch.nn.Linear(4, 2))


@mistake(zae.AddOnError, "LossyAddon.backward overrides", "call super().backward(...)")
def add_on_without_super():
    class LossyAddon(AddOnBase):
        def backward(self, loss):
            loss.backward()

    trainer_of(Task.add_on(LossyAddon)).run(1, loader())


@mistake(
    zae.AddOnError,
    "CountAddon.optimizer_step returned None, and the loop needs its return value",
    "write return super().optimizer_step(...), or store it and return it at the end",
)
def add_on_without_return():
    class CountAddon(AddOnBase):
        def optimizer_step(self):
            super().optimizer_step()

    trainer_of(Task.add_on(CountAddon)).run(1, loader())


@mistake(zae.AddOnError, "overrides run_batch, which is the loop itself", "inside it, for instance gradients")
def add_on_that_replaces_the_loop():
    class LoopAddon(AddOnBase):
        def run_batch(self, batch): ...


mistakes({
    "add_on_that_is_none": (zae.AddOnError, lambda: Task.add_on(dict), "dict is not an add-on",
        "write class MyAddon(AddOnBase): ..., and Task.add_on(MyAddon)"),
    "add_on_by_a_misspelt_name": (zae.AddOnError, lambda: Task.add_on("AMPAdon"), "no add-on is called 'AMPAdon'",
        "did you mean 'AMPAddon'?"),
    "add_on_alone": (zae.AddOnError, lambda: AMPAddon(torch.nn.Linear(4, 2)),
        "AMPAddon is an add-on and does not run alone",
        "write Task.add_on(AMPAddon)(...), or class MyTrainer(AMPAddon, Task), with your"),
})  # fmt: skip


@mistake(
    zae.AddOnOrder,
    "Wrong puts AMPAddon outside of StateManagerAddon, but AMPAddon belongs",
    "put all add-ons in one place: class Wrong(StateManagerAddon, AMPAddon, Task)",
)
def add_ons_in_the_wrong_order():
    class Wrong(AMPAddon, StateManagerAddon, Task): ...


@mistake(
    zae.AddOnOrder,
    "Late has Task outside of AMPAddon, where it would see the loop before the",
    "write class Late(AMPAddon, Task)",
)
def add_ons_after_the_task():
    class Late(Task, AMPAddon): ...


@mistake(zae.AddOnConflict, "AMPAddon and OtherAMPAddon both fill the slot 'precision'", "keep one")
def two_fillers_of_a_slot():
    class OtherAMPAddon(AddOnBase):
        slot = "precision"

    Task.add_on(AMPAddon, OtherAMPAddon)


@mistake(
    zae.AddOnRequirement,
    "NeedyAddon needs StateManagerAddon, which is missing",
    "write .add_on(NeedyAddon, StateManagerAddon)",
)
def add_on_without_what_it_needs():
    class NeedyAddon(AddOnBase):
        requires = ("StateManagerAddon",)

    Task.add_on(NeedyAddon)


@mistake(AttributeError, "did you mean 'class_weights'?")
def attribute_that_nobody_set():
    class Weighted(Task):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.class_weights = torch.ones(2)

        def train_step(self, batch):
            return {"loss": cross_entropy(self.model(batch[0]), batch[1], self.clas_weights)}

    trainer_of(Weighted).run(1, loader())


mistakes({
    "method_of_lightning": (zae.MissingError, lambda: trainer_of().fit(loader()), "Task has no attribute 'fit'",
        "here it is run(n_epoch, loader, valid_loader)"),
    "method_of_accelerate": (zae.MissingError, lambda: trainer_of().prepare(), "Task has no attribute 'prepare'",
        "here it is the loop itself: train_step, test_step and loaders are all that it"),
    "method_of_an_absent_add_on": (zae.MissingError, lambda: trainer_of().save_state(),
        "has no attribute 'save_state'", "add it with .add_on(StateManagerAddon)"),
})  # fmt: skip
