"""Mistakes of the first day: the wrong object in a place, a part of a file, a name that is nearly right."""

from __future__ import annotations

from pathlib import Path

import torch

import zae
from kit.mistakes import Task, dataset, loader, mistake, mistakes, trainer_of
from zae.addons import AMPAddon, StateManagerAddon


@mistake(
    zae.ConfigError,
    "model is the class Linear, and Linear() fails (Linear.__init__() missing 2",
    "give a module: Linear(...), or a function that makes one: lambda: Linear(...)",
)
def class_as_model():
    Task(torch.nn.Linear, "cpu", optimizer=torch.optim.SGD)


@mistake(
    zae.ConfigError,
    "device is an optimizer (SGD); the second argument is the device, so",
    "give it by its name: optimizer=...",
)
def optimizer_in_place_of_the_device():
    model = torch.nn.Linear(4, 2)
    Task(model, torch.optim.SGD(model.parameters(), lr=0.1))


@mistake(zae.TaskError, "Calling is called, and the trainer is not the model", "call self.model(...)")
def call_of_the_trainer():
    class Calling(Task):
        def train_step(self, batch):
            return {"loss": self(batch[0]).sum()}

    trainer_of(Calling).run(1, loader())


@mistake(zae.StepError, "returned tuple of 2 entries", "return a dict: return {'output': output}")
def prediction_as_a_tuple():
    class Pair(Task):
        def predict_step(self, batch):
            return self.model(batch[0]), batch[1]

    trainer_of(Pair).predict(loader())


@mistake(
    zae.LoaderError,
    "loader is a pair of tensors or arrays, which would be two batches; to tr",
    "write torch.utils.data.DataLoader(TensorDataset(*map(torch.as_tensor, loader)), batch_size=32",
)
def pair_of_tensors_as_loader():
    trainer_of().run(1, dataset().tensors)


@mistake(zae.LoaderError, "loader is not iterable (function)", "call it, or give a DataLoader or a list of batches")
def generator_function_as_loader():
    def batches():
        yield from loader()

    trainer_of().run(1, batches)


mistakes({
    "misspelt_resume": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(StateManagerAddon), save_path="runs", resume="aut"),
        "resume='aut' is not the path of a checkpoint", "did you mean 'auto'?"),
    "resume_from_the_latest": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(StateManagerAddon), save_path="runs", resume="latest"),
        "resume='latest' is not the path of", "write resume=True for the newest checkpoint in save_p"),
    "resume_from_the_best": (zae.ConfigError,
        lambda: trainer_of(Task.add_on(StateManagerAddon), save_path="runs", resume="best"),
        "resume='best' is not the path of", "restore_best() loads the weights of the best"),
})  # fmt: skip


@mistake(zae.CheckpointNotFound, "has a score: no validation has been made", "valid_every=Every(steps=...)")
def best_before_the_first_validation():
    trainer = trainer_of(Task.add_on(StateManagerAddon), save_path="runs")
    trainer.run(2, loader(), loader(), max_steps=2)
    trainer.restore_best()


@mistake(zae.MonitorError, "the history of a run has no 'best'", "write metrics['best_valid'] or metrics['best_train']")
def best_of_the_history():
    trainer_of().run(1, loader())["best"]


@mistake(zae.TaskError, "Own.state_dict overrides a hook without calling super()", "call super().state_dict(...)")
def state_without_that_of_the_loop():
    class Own(Task):
        def state_dict(self):
            return {"own": 1}

    trainer_of(Own.add_on(StateManagerAddon), save_path="runs").run(1, loader())


@mistake(zae.CheckpointMismatch, "the state has no model", "or load weights alone with apply_weights(...)")
def state_of_an_own_form():
    trainer_of().load_state_dict({"own": 1})


@mistake(
    zae.CheckpointNotFound,
    "runs is a folder of checkpoints",
    "give one of them, for instance the newest: 'runs/step-00000008'.",
)
def folder_of_a_run_as_weights():
    trainer_of(Task.add_on(StateManagerAddon), save_path="runs").run(2, loader())
    trainer_of().apply_weights("runs")


@mistake(
    zae.CheckpointDamaged,
    "contains a dict with the keys ['model', 'epoch']",
    "apply_weights(torch.load(path)['model'])",
)
def weights_within_a_dict():
    torch.save({"model": torch.nn.Linear(4, 2).state_dict(), "epoch": 3}, "own.pt")
    trainer_of().apply_weights("own.pt")


@mistake(
    zae.CheckpointDamaged,
    "not loaded: contains code, or is cut short (it names '__builtin__ set'",
    "Get the weights as .safetensors, or as .ckpt with a dict of tensors",
)
def whole_module_as_weights():
    torch.save(torch.nn.Linear(4, 2), "whole.pt")
    trainer_of().apply_weights("whole.pt")


mistakes({
    "evaluate_without_a_loader": (zae.OptionError, lambda: trainer_of().evaluate(),
        "evaluate() missing 1 required positional argument: 'loader'", "write evaluate(loader)"),
    "predict_with_a_batch_size": (zae.OptionError, lambda: trainer_of().predict(loader(), batch_size=3),
        "predict() got an unexpected keyword argument 'batch_size'", "write predict(loader)"),
    "log_without_a_step": (zae.OptionError, lambda: trainer_of().log({"accuracy": 0.5}),
        "log() missing 1 required positional argument: 'step'", "return a number of a batch from the"),
    "option_given_to_add_on": (zae.OptionError, lambda: Task.add_on(AMPAddon, precision="bf16"),
        "add_on() got an unexpected keyword argument 'precision'", "(model, ..., precision='bf16')"),
    "plan_of_a_loader": (zae.OptionError, lambda: trainer_of().plan(loader()),
        "plan() missing 1 required positional argument: 'loader'", "write plan(20, loader"),
    "validate_with_a_loader": (zae.OptionError, lambda: trainer_of().validate(loader()),
        "validate() takes 1 positional argument but 2 were given", "write evaluate(loader)"),
    "loop_by_hand_in_the_constructor": (zae.OptionError,
        lambda: trainer_of(criterion=torch.nn.MSELoss(), train_loader=loader()),
        "'criterion'; here it is train_step(batch), which returns {'loss': ...}",
        "'train_loader'; here it is loader of run(n_epoch, loader)"),
})  # fmt: skip


@mistake(zae.CheckpointNotFound, "is a folder without a checkpoint", "give the file of weights in it")
def folder_of_weights():
    folder = Path("saved")
    folder.mkdir()
    trainer_of().save_model(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    trainer_of().apply_weights(folder)
