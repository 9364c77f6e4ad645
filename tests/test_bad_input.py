"""Bad arguments, add-ons, monitors and replaced objects are refused at construction or at the first batch, in words."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from kit.refusals import InADict, Task, loader, make, mse, stepping, unchanged, whole
from zae import (
    AddOnBase,
    AddOnConflict,
    AddOnError,
    AddOnOrder,
    ConfigError,
    Every,
    MonitorError,
    OptionError,
    TaskError,
    Trainer,
)
from zae.addons import (
    AMPAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    StateManagerAddon,
)
from zae.schedulers import CosineAnnealingScheduler

ADAMW = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    ("add_ons", "option", "meant"),
    [
        ((), "gradient_clp", "gradient_clip"),
        ((AMPAddon, StateManagerAddon), "gradient_clp", "gradient_clip"),
        ((AMPAddon, StateManagerAddon), "precison", "precision"),
        ((AMPAddon, StateManagerAddon), "save_formt", "save_format"),
        ((EMAAddon,), "decai", "decay"),
    ],
)
def test_a_misspelt_option(add_ons, option, meant):
    """Whichever add-on owns it; never swallowed by ``**kwargs``."""
    made = Task.add_on(*add_ons)
    with pytest.raises(
        TypeError, match=re.escape(f"unknown argument {option!r} for {made.__name__}; did you mean {meant!r}?")
    ):
        make(made, **{option: 1})
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("option", "owner"),
    [
        ("save_path", "StateManagerAddon"),
        ("precision", "AMPAddon"),
        ("decay", "EMAAddon"),
        ("patience", "EarlyStoppingAddon"),
        ("gradient_accumulation_steps", "GradientAccumulationAddon"),
    ],
)
def test_an_option_of_an_absent_add_on(option, owner):
    with pytest.raises(OptionError, match=rf"it is an option of {owner}; add it with .add_on\({owner}\)"):
        make(**{option: 1})


def test_add_ons_that_do_not_go_together():
    """In add_on, both named; the class and its cache are as before."""

    class Rival(EMAAddon):
        """Another average."""

        slot = "precision"

    before = dict(Task.__dict__)
    assert Task.add_on(AMPAddon, AMPAddon) is Task.add_on(AMPAddon)
    with pytest.raises(AddOnConflict, match="AMPAddon and Rival both fill the slot 'precision'"):
        Task.add_on(AMPAddon, Rival)
    with pytest.raises(
        AddOnOrder, match=r"put all add-ons in one place: class Wrong\(StateManagerAddon, AMPAddon, Task\)"
    ):
        type(Task)("Wrong", (AMPAddon, StateManagerAddon, Task), {})
    with pytest.raises(AddOnError, match="TensorDataset is not an add-on"):
        Task.add_on(TensorDataset)
    assert {k for k in Task.__dict__ if k != "_compositions"} == {k for k in before if k != "_compositions"}


def test_unknown_arguments_of_run():
    """Each is refused with the call to write, before anything happens."""
    trainer = make()
    before = whole(trainer)
    with pytest.raises(
        OptionError, match=r"keyword argument 'epochs'; here it is n_epoch of run.*; write run\(3, loader"
    ):
        trainer.run(1, loader(), epochs=3)
    with pytest.raises(OptionError, match=r"'resume', which is an option of StateManagerAddon; add it with .add_on"):
        trainer.run(1, loader(), resume="auto")
    with pytest.raises(
        OptionError, match=r"run\(\) missing 1 required positional argument: 'loader'; write run\(3, loader"
    ):
        trainer.run(3)
    assert whole(trainer) == before


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({}, "missing 2 required positional arguments: 'n_epoch' and 'loader'"),
        ({"n_epoch": 3, "loader": "loader", "valid_loder": "loader"}, "did you mean 'valid_loader'"),
        ({"n_epoch": 3, "loader": "loader", "valid": "loader"}, "here it is valid_loader of run"),
        ({"n_epoch": 3, "loader": "loader", "steps": 5}, "here it is max_steps of run"),
    ],
    ids=str,
)
def test_arguments_that_run_does_not_take(arguments, cause):
    with pytest.raises(OptionError) as caught:
        make().run(**{name: loader() if value == "loader" else value for name, value in arguments.items()})
    assert cause in str(caught.value)
    assert "; write run(3, loader, valid_loader, max_steps=100)" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"optimizer": [torch.optim.SGD, {"lr": 0.1}]},
         "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"),
        ({"optimizer": lambda: None}, "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"),
        ({"scheduler": torch.optim.lr_scheduler.OneCycleLR},
         "scheduler=lambda optimizer, total_steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=..., "
         "total_steps=total_steps)"),
        ({"scheduler": CosineAnnealingScheduler},
         "scheduler=lambda optimizer: CosineAnnealingScheduler(optimizer, total_iters=...)"),
        ({"scheduler": lambda optimizer, length: None}, "scheduler=lambda optimizer: make(optimizer, length=...)"),
    ],
)  # fmt: skip
def test_a_factory_that_cannot_be_called(options, line):
    """It is refused when the trainer is made, not in the run."""
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert str(caught.value).endswith(line)


@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("cuda:99", "device='cuda:99', but 0 CUDA devices are available; write device='cpu'"),
        ("cuda", "device='cuda', but 0 CUDA devices are available; write device='cpu'"),
        (99, "device=99, but|device='cuda:99'"),
        (-1, "is not the index of a CUDA device"),
        ("cpuu", "is not a device; write 'auto', 'cpu', 'cuda:0' or 'mps'"),
        (1.5, "is a float, not a device"),
        (torch.nn.Linear(2, 1), "device is a model .*Linear.*; the first argument is the model"),
        ([], "names no device"),
        (["cpu", "cuda"], "mixes cpu and cuda"),
    ],
    ids=str,
)
def test_devices(device, match, monkeypatch):
    """Several devices are never used, and never ignored, without an add-on for them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=match):
        make(device=device)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), ["cpu"], ("cpu",), "auto", None], ids=str)
def test_devices_that_are_there(device, monkeypatch):
    """Strings work, and "auto" is one device, however many are visible."""
    trainer = make(device=device)
    assert len(trainer.devices) == 1
    if torch.device(trainer.device).type == "cpu":
        trainer.run(1, loader())
    assert not isinstance(trainer.model, torch.nn.DataParallel)


def test_auto_is_one_device_however_many_are_visible(monkeypatch):
    from zae.device import parse_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert parse_device("auto") == [torch.device("cuda:0")]
    assert parse_device("cuda") == [torch.device("cuda:0")]


def other_parameters():
    return torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"optimizer": other_parameters()},
            "has 2 parameters, none of which is among the 2 of the model; make it from",
        ),
        ({"optimizer": [other_parameters()]}, "has 2 parameters, none of which is among the 2 of the model"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR(other_parameters(), 1)},
            "was made for another optimizer than the one g",
        ),
    ],
)
def test_optimizers_and_schedulers(options, match):
    with pytest.raises(ConfigError, match=match):
        make(**options)


@pytest.mark.parametrize(
    ("factory", "match"),
    [
        (lambda parameters: other_parameters(), "has 2 parameters, none of which is among the 2 of the model"),
        (
            lambda parameters: {"a": torch.optim.SGD(parameters)},
            "returned a dict; for several, give a dict of functions: optimizer={'name': lambda parameters: ...}",
        ),
        (lambda parameters: [torch.optim.SGD(parameters)], "returned a list; for several, give a dict of functions"),
    ],
)
def test_what_a_factory_must_not_return(factory, match):
    """It is refused before the first step."""
    trainer = make(optimizer=factory)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ConfigError, match=re.escape(match)):
        trainer.run(1, loader())
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_none_is_fine_where_it_can_be_meant():
    """No scheduler; no optimizer in mode "test"."""
    assert make(scheduler=None).run(1, loader())["step"] == 3
    trainer = make(optimizer=None, mode="test")
    assert set(trainer.evaluate(loader())) == {"loss"}


def test_an_optimizer_at_the_place_of_the_device():
    """The device is the second argument; with ``device=`` beside it, that name is what stands twice."""
    with pytest.raises(OptionError, match=r"got 'device' twice: .* it is an optimizer \(AdamW\), so name that"):
        Task(torch.nn.Linear(1, 1), ADAMW, device="cpu")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": None}, "mode=None; it must be 'train' or 'test'"),
        ({"mode": ADAMW}, r"mode is an optimizer \(AdamW\); the third argument is the mode, so name it: optimizer="),
        ({"gradient_clip": float("nan")}, "gradient_clip=nan"),
        ({"gradient_clip": True}, "gradient_clip=True"),
        ({"monitor_mode": "minimum"}, "monitor_mode='minimum'; it must be 'auto', 'min' or 'max'"),
        ({"seed": -1}, "seed=-1; it must be a whole number of at least 0"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": 2**64}, r"seed=18446744073709551616; it must be .* below 2\*\*64"),
        ({"log_every": 0}, r"log_every=0; write Every\(steps=...\)"),
        ({"log_every": "epoch"}, "log_every='epoch'"),
        ({"log_bar": "False"}, "log_bar='False'; it must be 'auto', 'bar', 'lines', True or False"),
        ({"model": torch.zeros(3)}, "model is a Tensor; give a torch.nn.Module, or a function"),
    ],
    ids=str,
)
def test_arguments_of_the_constructor(options, match):
    if "model" in options:
        options = {**options, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
        with pytest.raises(ConfigError, match=match):
            Task(options.pop("model"), "cpu", **options)
        return
    with pytest.raises(ConfigError, match=match):
        make(**options)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((-1,), "n_epoch=-1"),
        ((1.5,), "n_epoch=1.5"),
        (("3",), "n_epoch='3'"),
        ((True,), "n_epoch=True"),
        ((1, {"max_steps": 0}), "max_steps=0"),
        ((1, {"steps_per_epoch": -3}), "steps_per_epoch=-3"),
        ((1, {"valid_every": "epoch"}), "valid_every='epoch'"),
        ((1, {"valid_every": 0}), "valid_every=0"),
    ],
    ids=str,
)
def test_arguments_of_run(arguments, match):
    """At the call, before anything is set up."""
    trainer = make()
    epochs, options = arguments[0], arguments[1] if len(arguments) > 1 else {}
    with pytest.raises(ConfigError, match=match), unchanged(trainer):
        trainer.run(epochs, loader(), **options)
    assert trainer.run(1, loader())["step"] == 3


def test_numbers_of_numpy_are_numbers():
    """A count or a number that comes out of an array is as good as Python's."""
    one, half = np.int64(1), np.float32(0.5)
    composed = Task.add_on(EarlyStoppingAddon, EMAAddon, GradientAccumulationAddon)
    trainer = make(
        composed, gradient_clip=half, seed=one, log_every=one, fast_data=np.bool_(False), patience=one, delta=half,
        decay=half, gradient_accumulation_steps=one,
    )  # fmt: skip
    assert trainer.run(one, loader(), loader(), valid_every=Every(steps=one), max_steps=one)["step"] == 1
    assert [type(value) for value in (trainer.gradient_clip, trainer.loader_position.is_fast)] == [float, bool]


def test_swapped_arguments():
    trainer = make()
    with pytest.raises(ConfigError, match=r"n_epoch=<.*DataLoader.*it must be a whole number"), unchanged(trainer):
        trainer.run(loader(), 3)
    with pytest.raises(ConfigError, match="mode='eval'"), unchanged(trainer):
        trainer.toggle("eval")


@pytest.mark.parametrize(
    ("add_on", "options", "match"),
    [
        (AMPAddon, {"precision": "bf61"}, "precision='bf61'; it must be .*; did you mean 'bf16'"),
        (AMPAddon, {"precision": ["fp16", "int8"]}, r"precision=\['fp16', 'int8'\]"),
        (EarlyStoppingAddon, {"early_stopper": 3}, r"early_stopper=3; it must be a function \(step, score\) -> bool"),
        (StateManagerAddon, {"save_path": 3}, "save_path=3; it must be the path of a folder"),
        (StateManagerAddon, {"save_path": "a", "save_every": "epoch"}, "save_every='epoch'"),
        (StateManagerAddon, {"save_path": "a", "resume": 3}, "resume=3; it must be"),
        (StateManagerAddon, {"save_path": "a", "allow_partial": None}, "allow_partial=None; it must be a list"),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_add_ons(add_on, options, match):
    """At construction, and nothing is written."""
    with pytest.raises(ConfigError, match=match):
        make(Task.add_on(add_on), **options)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [{}, {"steps": 1, "epochs": 1}, {"steps": 0}, {"epochs": 1.5}, {"steps": True}], ids=str
)
def test_cadences(arguments):
    with pytest.raises(ConfigError, match=r"Every[:(]"):
        Every(**arguments)


@pytest.mark.parametrize("monitor", ["acuracy", "valid/acuracy", "val_acuracy"])
@pytest.mark.parametrize("add_ons", [(), (EarlyStoppingAddon,), (StateManagerAddon,)], ids=str)
def test_fault_a_metric_that_nothing_records(monitor, add_ons):
    """At the first validation, with the names there are."""
    cls = stepping(lambda self, batch: {"loss": mse(self, batch), "accuracy": 0.5}, "test_step")
    options = {"save_path": "runs"} if StateManagerAddon in add_ons else {}
    trainer = make(cls.add_on(*add_ons), monitor=monitor, monitor_mode="max", **options)
    with pytest.raises(
        MonitorError, match=r"^\W*unknown metric .*; did you mean 'accuracy'\? Available: loss, accuracy"
    ):
        trainer.run(5, loader(), loader())
    assert trainer.progress_checker.epoch == 1


def test_fault_a_nan_is_never_the_best():
    scores = iter([float("nan"), 0.5, float("nan"), 0.25])

    def metric_on_epoch_end(self):
        return {} if self.mode == "train" else {"score": next(scores)}

    cls = type(Task)("Task", (Task,), {"metric_on_epoch_end": metric_on_epoch_end})
    trainer = make(cls, monitor="score")
    trainer.run(4, loader(), loader())
    assert (trainer.best["score"], trainer.best["epoch"]) == (0.5, 2)


def test_what_cannot_travel_to_another_process():
    """What it is and of which class, before any process is started."""
    from zae.addons.mpu import MultiGPUAddon

    trainer = make(Task.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    message = r"trainer, a .*Task.*, cannot be sent to another process: .*TextIOWrapper.* open files.*torchrun"
    with open("notes.txt", "w") as notes:
        trainer.settings = {"open": [notes]}
        with pytest.raises(ConfigError, match=message), unchanged(trainer):
            trainer.run(1, loader())
    trainer.settings = {"augment": lambda batch: batch}
    message = r"trainer, a .*Task.*, cannot be sent to another process: .*lambda.*functions at the top level of a file"
    with pytest.raises(ConfigError, match=message), unchanged(trainer):
        trainer.run(1, loader())
    assert multiprocessing.active_children() == []


def test_a_missing_step():
    """The seed's own first example, which lacks its steps, shows the lines to write."""
    made = Trainer.add_on(StateManagerAddon, AMPAddon)
    with pytest.raises(
        TypeError, match=r"Trainer\[StateManagerAddon, AMPAddon\] cannot be instantiated: it has no train"
    ) as e:
        made(model=torch.nn.Linear(3, 1), device="cpu", mode="train", optimizer=None, scheduler=None, save_path="runs")
    assert isinstance(e.value, TaskError)
    written = str(e.value).split("Write:\n\n")[1]
    written = written.replace("cross_entropy", "mse_loss")
    written = written.replace(
        "(model, optimizer=optimizer, ...)", "(model, 'cpu', optimizer=optimizer, save_path='runs')"
    )
    model = torch.nn.Linear(3, 1)
    names = {
        "Trainer": Trainer,
        "torch": torch,
        "StateManagerAddon": StateManagerAddon,
        "AMPAddon": AMPAddon,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(written, names)
    assert names["trainer"].run(1, loader())["step"] == 3

    class Half(Trainer):
        def train_step(self, batch):
            return {"loss": torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])}

    half = Half(model, "cpu", optimizer=torch.optim.SGD)
    taken = []
    asks = (
        lambda: half.run(1, map(taken.append, loader()), loader()),
        lambda: half.plan(1, loader(), loader()),
        lambda: half.evaluate(loader()),
        lambda: half.predict(loader()),
    )
    for ask in asks:
        with pytest.raises(TaskError, match=r"Half has no test_step, .*; write test_step = train_step into the class"):
            ask()
    assert taken == [], "before the first batch"
    assert half.run(1, loader())["step"] == 3


def test_the_seeds_spellings_run():
    """Device as a string, no scheduler, AMP on the CPU."""
    for composed in (Task, Task.add_on(AMPAddon), Task.add_on(AMPAddon, StateManagerAddon)):
        model = torch.nn.Linear(3, 1)
        options = {"save_path": "./checkpoints"} if StateManagerAddon in composed.__mro__ else {}
        trainer = composed(
            model=model,
            device="cpu",
            mode="train",
            optimizer=torch.optim.Adam(model.parameters(), lr=0.001),
            scheduler=None,
            **options,
        )
        assert trainer.run(n_epoch=2, loader=loader(), valid_loader=loader())["epoch"] == 2


def test_plateau_without_its_metric():
    """Before the first batch, whatever is composed."""
    for add_ons in ((), (AMPAddon, GradientAccumulationAddon)):
        trainer = make(Task.add_on(*add_ons), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
        asked = []
        watched = (asked.append(1) or batch for batch in loader())
        message = r"needs a metric after each validation, .*; give run\(..., valid_loader=...\)"
        with pytest.raises(ConfigError, match=message), unchanged(trainer):
            trainer.run(1, watched)
        assert asked == []


def test_one_cycle_that_is_too_short():
    """Planned in optimizer steps, windows and not batches; refused before the first batch, with the numbers."""

    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)

    trainer = make(scheduler=cycle, scheduler_step_on_batch=True)
    message = (
        r"ends after 5 steps, but this run has 6 optimizer steps; create it with a length of 6 steps, or end the run "
        r"earlier: run\(..., max_steps=5\)"
    )
    with pytest.raises(ConfigError, match=message), unchanged(trainer):
        trainer.run(2, loader())
    assert trainer.run(2, loader(), max_steps=5)["step"] == 5
    accumulating = make(
        Task.add_on(GradientAccumulationAddon),
        gradient_accumulation_steps=2,
        scheduler=cycle,
        scheduler_step_on_batch=True,
    )
    assert accumulating.run(2, loader())["step"] == 4
    with (
        pytest.raises(ConfigError, match="this run has 2 optimizer steps after 4; create it with a length of 6 steps"),
        unchanged(accumulating),
    ):
        accumulating.run(1, loader())


@pytest.mark.parametrize("files", ["state.json", None, 3])
def test_files_that_may_be_absent_are_a_list(files):
    """A text would be taken for a list of its letters."""
    trainer = make(Task.add_on(StateManagerAddon), save_path="a")
    with pytest.raises(ConfigError, match=rf"allow_partial={files!r}; it must be a list of files: \['state.json'\]"):
        trainer.load_state("a", allow_partial=files)


@pytest.mark.parametrize("nothing", [[], (), {}])
def test_a_list_of_no_optimizers(nothing):
    """Nothing would be trained, and no word said."""
    model = torch.nn.Linear(3, 1)
    with pytest.raises(ConfigError, match="and mode='train' needs one; write optimizer="):
        Task(model, "cpu", optimizer=nothing)
    assert "loss" in Task(model, "cpu", "test", optimizer=nothing).evaluate(loader())


@pytest.mark.parametrize("monitor", ["valid/loss", "val_loss", "test/loss"])
@pytest.mark.parametrize("add_ons", [(), (EarlyStoppingAddon,)])
def test_a_metric_of_a_validation_that_is_not_made(monitor, add_ons):
    """Training's own loss decided which epoch is best, and when to stop, under the name of the validation's."""
    trainer = make(Task.add_on(*add_ons), monitor=monitor)
    with pytest.raises(MonitorError, match=f"{monitor}' is a metric of the validation.*give run.. a valid_loader"):
        trainer.run(2, loader())
    assert trainer.best == {}
    assert make(Task.add_on(*add_ons), monitor=monitor).run(1, loader(), loader())["best_valid"]["epoch"] == 1


def test_a_metric_of_training_that_is_called_like_one_of_the_validation():
    class Named(Task):
        def train_step(self, batch):
            return {**super().train_step(batch), "valid_loss": 2.0}

    assert make(Named, monitor="valid_loss").run(1, loader())["best_train"]["score"] == 2.0


@pytest.mark.parametrize("use", [lambda each: each.run(1, loader()), lambda each: each.evaluate(loader())])
def test_another_model_in_the_place_of_the_one_that_is_trained(use):
    """It was put back without a word, and the first one trained."""

    class Wrapping(Task):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model = torch.nn.Sequential(self.model)

    replaced = make()
    replaced.model = torch.nn.Linear(3, 1)
    for trainer, kind in ((replaced, "Linear"), (make(Wrapping), "Sequential")):
        with pytest.raises(ConfigError, match=f"trainer.model was set to a {kind}, .* new trainer .* wrap_model"):
            use(trainer)


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_what_is_replaced_within_a_run(name):
    """The one before went on stepping; between two calls of run it is taken."""
    made = {
        "optimizer": lambda trainer: torch.optim.SGD(trainer.unwrap().parameters(), lr=0.0),
        "scheduler": lambda trainer: torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda epoch: 0.0),
    }[name]

    class Replacing(Task):
        def on_epoch_end(self):
            super().on_epoch_end()
            if self.progress_checker.epoch == 1:
                setattr(self, name, made(self))

    trainer = make(Replacing)
    with pytest.raises(ConfigError, match=f"trainer.{name} was replaced within a run.*between two calls of run"):
        trainer.run(2, loader())
    assert trainer.progress_checker.step == 3
    before = trainer.model.weight.clone()
    trainer.run(1, loader())
    assert torch.equal(trainer.model.weight, before)


def test_a_trainer_that_its_user_sets_up_may_have_a_wrapper_by_then():
    """The loop sets it up itself again, and a copy made in the run is set up from the beginning."""

    class WrapAddon(AddOnBase):
        """Put the model into another module."""

        layer = "model"
        copied = None

        def wrap_model(self, model):
            return torch.nn.Sequential(super().wrap_model(model))

        def on_epoch_end(self):
            super().on_epoch_end()
            self.copied = self.copied or copy.deepcopy(self)

    trainer = make(Task.add_on(WrapAddon))
    trainer.setup()
    assert isinstance(trainer.run_epoch(loader()), dict)
    trainer.teardown()
    assert trainer.run(2, loader())["step"] == 9
    copied = trainer.copied
    assert copied.progress_checker.step == 6
    assert copied.run(1, loader())["step"] == 9
    assert torch.equal(copied.model.weight, trainer.model.weight)


def test_add_on_of_an_instance_is_refused():
    """It would make a class, and leave the instance as it is; asked for as an attribute it stays a method."""
    trainer = make(InADict.add_on(AMPAddon))
    with pytest.raises(AddOnError, match=r"write InADict.add_on\(EMAAddon, 'x'\)\(model, ...\)"):
        trainer.add_on(EMAAddon, "x")
    assert callable(trainer.add_on)
    assert type(trainer).add_on(EMAAddon) is InADict.add_on(AMPAddon, EMAAddon)
    assert list(inspect.signature(InADict.add_on).parameters) == ["add_ons"]


def test_a_parameter_that_no_optimizer_holds_is_named_once(caplog):
    """At the run's begin, and when it is thawed or added later; one that is frozen is meant."""

    def build(*held, frozen=()):
        model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 1), "head": torch.nn.Linear(3, 1)})
        model.forward = lambda x: model["body"](x)
        for name in frozen:
            model[name].requires_grad_(False)
        optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in held}
        return InADict(model, "cpu", optimizer=optimizers if len(held) > 1 else optimizers[held[0]])

    def warned():
        texts = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        caplog.clear()
        return texts

    missing = build("body")
    missing.run(2, loader())
    missing.run(1, loader())
    [text] = warned()
    assert text.startswith(
        "no optimizer of the trainer holds head.weight, head.bias (2 parameters with requires_grad=True)"
    )
    assert "add_param_group" in text
    assert "requires_grad_(False)" in text
    build("body", frozen=["head"]).run(1, loader())
    assert warned() == []
    thawed = build("body", frozen=["head"])
    thawed.on_epoch_end = lambda: thawed.model["head"].requires_grad_(True)
    thawed.run(3, loader())
    assert len(warned()) == 1
    many = build("body")
    many.model.update({str(n): torch.nn.Linear(1, 1) for n in range(9)})
    many.run(1, loader())
    [text] = warned()
    assert "head.weight, head.bias, 0.weight, 0.bias, 1.weight and 15 more (20 parameters" in text
    added = build("body", frozen=["head"])

    def grow():
        if "new" not in added.model:
            added.model.update({"new": torch.nn.Linear(1, 1)})
            added.optimizer.add_param_group({"params": added.model["new"].parameters()})

    added.on_epoch_end = grow
    added.run(2, loader())
    assert warned() == []


@pytest.mark.parametrize(
    ("factory", "got"),
    [
        (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), r"model.parameters\(\), as the name 'net'"),
        (lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), r"model.parameters\(\), as the name 'named'"),
        (lambda model: torch.optim.SGD(model, lr=0.1), "the model, as the name 'model'"),
        (
            lambda named_parameters: torch.optim.SGD(named_parameters, lr=0.1),
            "model.named_parameters, a method, as the name 'named_parameters'",
        ),
    ],
)
def test_a_factory_that_fails_says_what_it_was_called_with(factory, got):
    with pytest.raises((AttributeError, TypeError, ValueError)) as raised:
        make(optimizer=factory).run(1, loader())
    assert re.search(f"the function given as optimizer was called with {got}", "\n".join(raised.value.__notes__))


@pytest.mark.parametrize("arguments", [{}, {"on_step": True}])
def test_log_in_a_step_where_an_add_on_overrides_it(arguments):
    class Logging(Task):
        def train_step(self, batch):
            self.log({"accuracy": 0.5}, **arguments)
            return super().train_step(batch)

    with pytest.raises(TypeError, match="log") as raised:
        make(Logging.add_on(JSONLLoggerAddon), jsonl_path="log.jsonl").run(1, loader())
    assert "to record a number of a batch, return it from the step" in "\n".join(raised.value.__notes__)
