"""Mistakes that people make with weights, states and classes."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from kit.mistakes import Task, loader, mistake, trainer_of
from zae import AddOnBase, Trainer
from zae.addons import (
    AMPAddon,
    EMAAddon,
    StateManagerAddon,
)

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
def hook_of_omnigenbench():
    class OmniGenBench(Task):
        def _train_epoch(self, epoch): ...


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
def method_of_accelerate():
    trainer_of().prepare()


@mistake
def method_of_an_absent_add_on():
    trainer_of().save_state()
