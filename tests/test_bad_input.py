"""Bad input, E1 to E17: refused at construction or at the first batch, in words, with nothing half done."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import multiprocessing
import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from kit.hand import digest
from zae import (
    AddOnBase,
    AddOnConflict,
    AddOnError,
    AddOnOrder,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
    Every,
    LoaderError,
    MonitorError,
    OptionError,
    StepError,
    TaskError,
    Trainer,
    ZaeError,
)
from zae.addons import (
    AMPAddon,
    CompileAddon,
    EarlyStoppingAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    MultiGPUAddon,
    StateManagerAddon,
)


class Task(Trainer):
    """Fit a line."""

    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": mse_loss(self.model(inputs), targets)}

    def test_step(self, batch):
        return self.train_step(batch)


def data(count=24):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator))


def loader(count=24, **options):
    return DataLoader(data(count), batch_size=8, **options)


def make(cls=Task, **options):
    torch.manual_seed(0)
    model = options.pop("model", None) or torch.nn.Linear(3, 1)
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return cls(model, options.pop("device", "cpu"), **{"log_bar": False, **options})


def stepping(step, name="train_step"):
    return type(Task)("Task", (Task,), {name: step})


def whole(trainer):
    """All that must be as it was: weights, optimizer, counters, history, and every file around."""
    tensors = [*trainer.unwrap().state_dict().values()]
    for optimizer in (trainer.optimizer,) if isinstance(trainer.optimizer, torch.optim.Optimizer) else ():
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    weights = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
    progress = trainer.progress_checker.state_dict()
    files = {str(p): p.stat().st_size for p in Path.cwd().rglob("*")}
    return weights, progress, trainer.mode, len(trainer.train_history), len(trainer.log_history), files


@contextlib.contextmanager
def refused(trainer, error, match):
    """The block raises this error of ours, and the trainer is what it was; afterwards it still trains."""
    before = whole(trainer)
    with pytest.raises(error, match=match) as caught:
        yield
    assert isinstance(caught.value, ZaeError)
    after = whole(trainer)
    assert after[0] == before[0], "weights or optimizer moved"
    assert after[2:] == before[2:]
    for counter in ("epoch", "step", "batch", "epoch_step", "epoch_batch"):
        assert after[1][counter] == before[1][counter], counter


# -------------------------------------------------------------------------------------------------- E1, E2, E3, E14


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
def test_e1_a_misspelt_option(add_ons, option, meant):
    """E1: whichever add-on owns it; never swallowed by ``**kwargs``."""
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
def test_e2_an_option_of_an_absent_add_on(option, owner):
    """E2"""
    with pytest.raises(OptionError, match=rf"it is an option of {owner}; add it with .add_on\({owner}\)"):
        make(**{option: 1})


def test_e3_add_ons_that_do_not_go_together():
    """E3: in add_on, both named; the class and its cache are as before."""

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


def test_e14_unknown_arguments_of_run():
    """E14: Python's own TypeError names the method and the argument."""
    trainer = make()
    before = whole(trainer)
    with pytest.raises(TypeError, match=r"Trainer.run\(\) got an unexpected keyword argument 'epochs'"):
        trainer.run(1, loader(), epochs=3)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'loader'"):
        trainer.run(3)
    assert whole(trainer) == before


# ----------------------------------------------------------------------------------------------------------- E4, E5


def _loss(self, batch):
    return mse_loss(self.model(batch[0]), batch[1])


OUTPUTS = {
    "None": (lambda self, b: None, r"returned NoneType \(is a return missing\?\); return a dict"),
    "a vector alone": (lambda self, b: self.model(b[0]), r"returned Tensor of shape \(8, 1\)"),
    "a tuple": (lambda self, b: (_loss(self, b), 1), "returned tuple of 2 entries; return a dict"),
    "no loss": (lambda self, b: {"output": 1, "acc": 2}, r"without 'loss'; it holds 'output', 'acc'; return"),
    "an empty dict": (lambda self, b: {}, "it holds no key"),
    "los": (lambda self, b: {"los": _loss(self, b)}, "rename 'los' to 'loss'"),
    "a float": (lambda self, b: {"loss": _loss(self, b).item()}, r"loss of type float; return the tensor, with"),
    "None as loss": (lambda self, b: {"loss": None}, "loss of type NoneType"),
    "a vector": (lambda self, b: {"loss": self.model(b[0])}, r"loss of shape \(8, 1\); reduce it to a scalar: l"),
    "detached": (lambda self, b: {"loss": _loss(self, b).detach()}, "no gradient; was it detached, or computed"),
    "an array": (lambda self, b: {"loss": _loss(self, b).detach().numpy()}, "a loss of type (ndarray|float32)"),
    "several": (lambda self, b: {"loss": {"a": _loss(self, b)}}, r"losses for \['a'\], and the optimizers are \['0'\]"),
    "text targets": (lambda self, b: {"loss": _loss(self, b), "num_targets": "eight"}, "num_targets 'eight'; return"),
    "all targets": (lambda self, b: {"loss": _loss(self, b), "num_targets": b[1]}, r"num_targets of shape \(8, 1\)"),
}  # fmt: skip


@pytest.mark.parametrize("add_ons", [(), (AMPAddon, GradientAccumulationAddon, EMAAddon)], ids=["plain", "composed"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_e4_what_train_step_returns(kind, add_ons):
    """E4: at that step, with the batch's shapes, and the weights of before."""
    step, match = OUTPUTS[kind]
    trainer = make(stepping(step).add_on(*add_ons))
    with refused(trainer, StepError, match):
        trainer.run(1, loader())


@pytest.mark.parametrize("count", ["eight", -1, float("nan"), float("inf"), torch.ones(2), torch.tensor(-3)], ids=str)
@pytest.mark.parametrize("add_ons", [(), (GradientAccumulationAddon,)], ids=["plain", "composed"])
def test_e4_a_count_of_targets_that_is_none(count, add_ons):
    """E4: in training and in evaluation, before a mean is made of it."""
    step = lambda self, batch: {"loss": _loss(self, batch), "num_targets": count}  # noqa: E731
    trainer = make(stepping(step).add_on(*add_ons))
    with refused(
        trainer, StepError, r"Task.*\.train_step \(batch: .*\) returned num_targets .*; return how many targets"
    ):
        trainer.run(1, loader())
    trainer = make(stepping(step, "test_step").add_on(*add_ons))
    with refused(trainer, StepError, r"Task.*\.test_step returned num_targets .*; return how many targets"):
        trainer.evaluate(loader())


def test_e4_names_the_batch_and_the_place():
    """E4: shapes and types in the text, the place in a note, and later steps are no different from the first."""

    def late(self, batch):
        return {"loss": _loss(self, batch)} if self.progress_checker.step < 2 else None

    trainer = make(stepping(late))
    with pytest.raises(
        StepError, match=r"Task.train_step \(batch: list\(Tensor\[8, 3\] float32, Tensor\[8, 1\] flo"
    ) as caught:
        trainer.run(1, loader())
    assert caught.value.__notes__ == [
        "zae: in epoch 1, step 3 (batch 3), on cpu; the batch was list(Tensor[8, 3] float32, Tensor[8, 1] float32)"
    ]
    assert trainer.progress_checker.step == 2


@pytest.mark.parametrize("out", [None, "0.5", torch.zeros(2), (1, 2), [{}]], ids=str)
def test_e4_what_test_step_returns(out):
    trainer = make(stepping(lambda self, batch: out, "test_step"))
    for call in (trainer.evaluate, trainer.inference):
        with refused(trainer, StepError, r"Task.test_step \(batch: .*\) returned .*; return a dict"):
            call(loader())


def test_e5_extra_outputs():
    """E5: numbers are averaged, all else is kept; nothing fails at the end of the epoch."""
    seen = {}

    def step(self, batch):
        return {
            "loss": _loss(self, batch),
            "text": "hello",
            "array": np.ones(3),
            "number": np.float32(2.0),
            "nested": {"a": 1, "b": {"c": torch.tensor(3.0)}},
            "output": self.model(batch[0]),
            "none": None,
            "list": [1, 2],
            "flag": True,
            "object": object(),
            7: 1.0,
        }

    def metric_on_epoch_end(self):
        log = self.log_train if self.mode == "train" else self.log_test
        seen[self.mode] = {key: list(log[key]) for key in log}
        return {"outputs": float(torch.cat(log["output"]).numel())}

    cls = type(Task)(
        "Task", (Task,), {"train_step": step, "test_step": step, "metric_on_epoch_end": metric_on_epoch_end}
    )
    trainer = make(cls, keep_train_outputs=True)
    metrics = trainer.run(2, loader(), loader())
    row = metrics["train_metrics_history"][-1]
    assert (row["train_number"], row["train_nested/a"], row["train_nested/b/c"], row["train_flag"]) == (2, 1, 3, 1)
    assert row["train_outputs"] == 24
    assert seen["train"]["text"] == ["hello"] * 3
    assert seen["test"]["array"][0].tolist() == [1, 1, 1]
    assert not any(o.requires_grad for o in seen["train"]["output"])


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (0.5, r"metric_on_epoch_end returned float 0.5; return a dict of numbers"),
        ([("a", 1)], r"metric_on_epoch_end returned list of 1 entries; return a dict of numbers"),
        ({"confusion": torch.eye(2)}, r"returned 'confusion' of type Tensor of shape \(2, 2\); return a number"),
        ({"name": "best"}, "returned 'name' of type str 'best'; return a number"),
    ],
)
def test_e5_what_metric_on_epoch_end_returns(returned, match):
    trainer = make(stepping(lambda self: returned, "metric_on_epoch_end"))
    with pytest.raises(StepError, match=match):
        trainer.run(1, loader())
    assert make(stepping(lambda self: None, "metric_on_epoch_end")).run(1, loader())["epoch"] == 1


# ----------------------------------------------------------------------------------------------------- E6, E7, E8


@pytest.mark.parametrize(
    ("empty", "match"),
    [
        (list, r"loader has 0 batches \(list\); give it data"),
        (
            lambda: loader(4, drop_last=True),
            r"length 4, batch_size=8, drop_last=True\); give it data, or drop_last=False",
        ),
        (lambda: iter([]), "the loader gave 0 batches in epoch 1"),
        (lambda: (b for b in ()), r"the loader gave 0 batches in epoch 1 \(generator\); give it data"),
        (lambda: [None] * 3, r"3 of 3 batches were None \(list\); mend the collate_fn"),
        (lambda: (None for _ in range(3)), r"3 of 3 batches were None"),
    ],
    ids=["list", "drop_last", "iterator", "generator", "Nones", "Nones unsized"],
)
def test_e6_an_empty_loader(empty, match):
    """E6: never "finished" at 0 steps."""
    for add_ons in ((), (GradientAccumulationAddon,)):
        trainer = make(Task.add_on(*add_ons))
        with refused(trainer, LoaderError, match):
            trainer.run(1, empty())


def test_e6_an_empty_valid_loader():
    trainer = make()
    with refused(trainer, LoaderError, "valid_loader has 0 batches"):
        trainer.run(1, loader(), [])
    with refused(trainer, LoaderError, "valid_loader is an empty dict; give loaders by name, or None"):
        trainer.run(1, loader(), {})
    with refused(trainer, LoaderError, r"valid_loader\['b'\] has 0 batches"):
        trainer.run(1, loader(), {"a": loader(), "b": []})
    with pytest.raises(LoaderError, match=r"gave 0 batches .* nothing to evaluate"):
        trainer.run(1, loader(), iter([]))


def test_e6_some_batches_of_none_are_passed_over_and_counted(caplog):
    batches = list(loader())
    trainer = make()
    trainer.run(1, [batches[0], None, batches[1], batches[2]])
    assert trainer.progress_checker.step == 3
    assert "1 of 4 batches were None and passed over" in caplog.text
    with pytest.raises(LoaderError, match="3 of 4 batches were None"):
        make().run(1, [batches[0], None, None, None])


class Unsized:
    def __iter__(self):
        return iter(loader())


@pytest.mark.parametrize("kind", ["list", "tuple", "unsized", "generator", "iterator", "map"])
def test_e7_loaders_of_every_kind(kind):
    """E7: with and without a length, once or again and again; a used-up one is an error in epoch 2."""
    make_loader = {
        "list": lambda: list(loader()),
        "tuple": lambda: tuple(loader()),
        "unsized": Unsized,
        "generator": lambda: (b for b in loader()),
        "iterator": lambda: iter(list(loader())),
        "map": lambda: map(tuple, loader()),
    }[kind]
    reference, trainer = make(), make()
    reference.run(1, loader())
    assert trainer.run(1, make_loader())["step"] == 3
    assert whole(trainer)[0] == whole(reference)[0]
    if kind in ("list", "tuple", "unsized"):
        assert make().run(2, make_loader())["step"] == 6
    else:
        with pytest.raises(
            LoaderError, match=r"gave 0 batches in epoch 2 .*used up after one epoch: give a list, or a cla"
        ):
            make().run(2, make_loader())


def test_e7_a_schedule_that_needs_the_length():
    """E7, P-08: a stream has none; the message names steps_per_epoch."""

    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)

    trainer = make(scheduler=cycle, scheduler_step_on_batch=True)
    with refused(trainer, ConfigError, r"the loader has no length to plan with; give run\(..., steps_per_epoch=...\)"):
        trainer.run(2, Unsized())
    assert trainer.run(2, Unsized(), steps_per_epoch=3)["step"] == 6


Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass
class Sample:
    inputs: torch.Tensor
    targets: torch.Tensor
    note: str = "kept"


class Mover:
    """Something that can move itself."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.moved_to = inputs, targets, None

    def to(self, device, **kwargs):
        self.moved_to = torch.device(device)
        return self


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "namedtuple", "dataclass", "to", "nested"])
def test_e8_batches_of_every_kind(kind):
    """E8: the type is kept, what is no tensor is untouched, and the weights are those of a plain tuple."""
    wrap = {
        "tuple": lambda x, y: (x, y),
        "list": lambda x, y: [x, y],
        "dict": lambda x, y: {"inputs": x, "targets": y, "name": "kept", "number": 3},
        "namedtuple": Pair,
        "dataclass": Sample,
        "to": Mover,
        "nested": lambda x, y: {"pair": ([x], {"targets": (y, "kept")})},
    }[kind]
    seen = []

    def train_step(self, batch):
        seen.append(batch)
        if isinstance(batch, dict) and "pair" in batch:
            (inputs,), inner = batch["pair"]
            targets = inner["targets"][0]
            assert inner["targets"][1] == "kept"
        elif isinstance(batch, dict):
            inputs, targets = batch["inputs"], batch["targets"]
            assert (batch["name"], batch["number"]) == ("kept", 3)
        elif isinstance(batch, (Sample, Mover)):
            inputs, targets = batch.inputs, batch.targets
        else:
            inputs, targets = batch
        return {"loss": mse_loss(self.model(inputs), targets)}

    reference, trainer = make(), make(stepping(train_step))
    reference.run(1, loader())
    batches = [wrap(x, y) for x, y in loader()]
    trainer.run(1, batches)
    assert whole(trainer)[0] == whole(reference)[0]
    assert all(type(b) is type(batches[0]) for b in seen)
    if kind == "to":
        assert {b.moved_to for b in seen} == {torch.device("cpu")}
    if kind == "dataclass":
        assert seen[0].note == "kept"


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (
            data(),
            r"loader is a dataset \(TensorDataset\); give a DataLoader: torch.utils.data.DataLoader\(loader, batc",
        ),
        (torch.nn.Linear(3, 1), r"loader is not iterable \(Linear\); give a DataLoader or a list of batches"),
        (torch.randn(8, 3), "loader is a Tensor, not batches"),
        ("data/train", "loader is a str, not batches"),
        (None, "loader is not iterable"),
        ({"a": [1]}, r"loader is a dict \(a\), and only valid_loader can be several; give one loader"),
        ([loader(), loader()], r"loader is a list of loaders; give valid_loader a dict: \{name: loader\}"),
    ],
    ids=["dataset", "model", "tensor", "path", "None", "dict", "list of loaders"],
)
def test_e8_what_is_no_loader(wrong, match):
    """E8, X-12: dataset for loader, and its kin, in every method that takes one."""
    trainer = make()
    with refused(trainer, LoaderError, match):
        trainer.run(1, wrong)
    if wrong is not None:
        with refused(trainer, LoaderError, r"valid_loader\['a'\] is "):
            trainer.run(1, loader(), {"a": wrong})
    with refused(trainer, LoaderError, match):
        trainer.inference(wrong)


# ------------------------------------------------------------------------------------------------- E9, E10, E11, P-44


@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("cuda:99", "device='cuda:99' was asked for, but 0 CUDA devices are available; write device='cpu'"),
        ("cuda", "device='cuda' was asked for, but 0 CUDA devices are available; write device='cpu'"),
        (99, "device=99 was asked for|device='cuda:99'"),
        (-1, "is not the index of a CUDA device"),
        ("gpu", "is not a device; did you mean 'cuda'"),
        ("cpuu", "is not a device; did you mean 'cpu'"),
        (1.5, "is a float, not a device"),
        ([], "names no device"),
        (["cpu", "cuda"], "mixes cpu and cuda"),
        (["cpu", "cpu"], r"device is a list of 2, and Task trains on one; .* .add_on\(MultiGPUAddon\)"),
    ],
    ids=str,
)
def test_e9_devices(device, match, monkeypatch):
    """E9; P-44: several devices are never used, and never ignored, without an add-on for them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=match):
        make(device=device)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), ["cpu"], ("cpu",), "auto", None], ids=str)
def test_e9_devices_that_are_there(device, monkeypatch):
    """E9, P-44, P-57: strings work, and "auto" is one device, however many are visible."""
    trainer = make(device=device)
    assert len(trainer.devices) == 1
    if torch.device(trainer.device).type == "cpu":
        trainer.run(1, loader())
    assert not isinstance(trainer.model, torch.nn.DataParallel)


def test_p44_auto_is_one_device_however_many_are_visible(monkeypatch):
    """P-44"""
    from zae.common.device import parse_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert parse_device("auto") == [torch.device("cuda:0")]
    assert parse_device("cuda") == [torch.device("cuda:0")]


def other_parameters():
    return torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": None}, "optimizer is None, and mode='train' needs one; write optimizer=torch.optim.AdamW"),
        (
            {"optimizer": other_parameters()},
            "holds 2 parameters, and none of them is one of the model's 2; build it from",
        ),
        ({"optimizer": [other_parameters()]}, "holds 2 parameters, and none of them"),
        ({"optimizer": "adam"}, "optimizer 0 is a str; give a torch.optim.Optimizer, or a function"),
        ({"scheduler": "cosine"}, "scheduler 0 is a str; give a torch.optim.lr_scheduler.LRScheduler, or a function"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR(other_parameters(), 1)},
            "drives another optimizer than the one g",
        ),
    ],
)
def test_e10_optimizers_and_schedulers(options, match):
    """E10"""
    with pytest.raises(ConfigError, match=match):
        make(**options)


def test_e10_none_is_fine_where_it_can_be_meant():
    """E10, P-57: no scheduler; no optimizer in mode "test"."""
    assert make(scheduler=None).run(1, loader())["step"] == 3
    trainer = make(optimizer=None, mode="test")
    assert set(trainer.evaluate(loader())) == {"loss"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "trian"}, "mode='trian'; it must be 'train' or 'test'; did you mean 'train'"),
        ({"mode": None}, "mode=None; it must be 'train' or 'test'"),
        ({"gradient_clip": -1}, "gradient_clip=-1; it must be a number of at least 0"),
        ({"gradient_clip": float("nan")}, "gradient_clip=nan"),
        ({"gradient_clip": "1"}, "gradient_clip='1'"),
        ({"gradient_clip": True}, "gradient_clip=True"),
        ({"monitor": None}, "monitor=None; it must be the name of a metric"),
        ({"monitor": "height"}, "give monitor_mode='min' or monitor_mode='max'"),
        ({"monitor_mode": "minimum"}, "monitor_mode='minimum'; it must be 'auto', 'min' or 'max'"),
        ({"seed": -1}, "seed=-1; it must be a whole number of at least 0"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": 2**64}, r"seed=18446744073709551616; it must be a whole number below 2\*\*64"),
        ({"log_every": 0}, r"log_every=0; write Every\(steps=...\)"),
        ({"log_every": "epoch"}, "log_every='epoch'"),
        ({"log_bar": "False"}, "log_bar='False'; it must be True or False"),
        ({"scheduler_step_on_batch": "epoch"}, "scheduler_step_on_batch='epoch'"),
        ({"fast_data": "off"}, "fast_data='off'"),
        ({"fast_data": None}, "fast_data=None"),
        ({"model": torch.zeros(3)}, "model is a Tensor; give a torch.nn.Module, or a function"),
    ],
    ids=str,
)
def test_e11_arguments_of_the_constructor(options, match):
    """E11"""
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
        ((0,), "n_epoch=0; it must be a whole number of at least 1"),
        ((-1,), "n_epoch=-1"),
        ((1.5,), "n_epoch=1.5"),
        (("3",), "n_epoch='3'"),
        ((True,), "n_epoch=True"),
        ((None,), "n_epoch is None, so the run would not end; give a number of epochs, or max_steps=..."),
        ((1, {"max_steps": 0}), "max_steps=0"),
        ((1, {"steps_per_epoch": -3}), "steps_per_epoch=-3"),
        ((1, {"valid_every": "epoch"}), "valid_every='epoch'"),
        ((1, {"valid_every": 0}), "valid_every=0"),
    ],
    ids=str,
)
def test_e11_arguments_of_run(arguments, match):
    """E11: at the call, before anything is set up."""
    trainer = make()
    epochs, options = arguments[0], arguments[1] if len(arguments) > 1 else {}
    with refused(trainer, ConfigError, match):
        trainer.run(epochs, loader(), **options)
    assert trainer.run(1, loader())["step"] == 3


def test_e11_numbers_of_numpy_are_numbers():
    """E11: a count or a number that comes out of an array is as good as Python's."""
    one, half = np.int64(1), np.float32(0.5)
    composed = Task.add_on(EarlyStoppingAddon, EMAAddon, GradientAccumulationAddon)
    trainer = make(
        composed, gradient_clip=half, seed=one, log_every=one, fast_data=np.bool_(False), patience=one, delta=half,
        decay=half, gradient_accumulation_steps=one,
    )  # fmt: skip
    assert trainer.run(one, loader(), loader(), valid_every=Every(steps=one), max_steps=one)["step"] == 1
    assert [type(value) for value in (trainer.gradient_clip, trainer.fast_data)] == [float, bool]


def test_e11_swapped_arguments():
    trainer = make()
    with refused(trainer, ConfigError, r"n_epoch is a DataLoader and loader is 3; write run\(3, loader\)"):
        trainer.run(loader(), 3)
    with refused(trainer, ConfigError, "mode='eval'"):
        trainer.toggle("eval")


@pytest.mark.parametrize(
    ("add_on", "options", "match"),
    [
        (GradientAccumulationAddon, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0; it must be a"),
        (GradientAccumulationAddon, {"gradient_accumulation_steps": 2.0}, "gradient_accumulation_steps=2.0"),
        (AMPAddon, {"precision": "bf61"}, "precision='bf61'; it must be .*; did you mean 'bf16'"),
        (AMPAddon, {"precision": ["fp16", "int8"]}, r"precision=\['fp16', 'int8'\]"),
        (AMPAddon, {"loss_scale": (1.0, 2.0)}, r"loss_scale=\(1.0, 2.0\); it must be \(first, least\)"),
        (EMAAddon, {"decay": 1.0}, r"decay=1.0; it must be a number in \[0, 1\)"),
        (EarlyStoppingAddon, {"patience": 0}, "patience=0"),
        (EarlyStoppingAddon, {"delta": -1}, "delta=-1"),
        (EarlyStoppingAddon, {"early_stopper": 3}, r"early_stopper=3; it must be a function \(step, score\) -> bool"),
        (StateManagerAddon, {"save_path": 3}, "save_path=3; it must be the path of a folder"),
        (StateManagerAddon, {"save_path": "a", "save_format": "pickle"}, "write 'safetensors' or 'ckpt'"),
        (StateManagerAddon, {"save_path": "a", "keep_last": 0}, "keep_last=0"),
        (StateManagerAddon, {"save_path": "a", "keep_best": -1}, "keep_best=-1"),
        (StateManagerAddon, {"save_path": "a", "save_every": "epoch"}, "save_every='epoch'"),
        (StateManagerAddon, {"save_path": "a", "resume": 3}, "resume=3; it must be"),
        (StateManagerAddon, {"save_path": "a", "allow_partial": None}, "allow_partial=None; it must be a list"),
        (StateManagerAddon, {"save_path": "a", "overwrite": "no"}, "overwrite='no'; it must be True or False"),
        (StateManagerAddon, {"save_path": "a", "reshard": "no"}, "reshard='no'"),
        (StateManagerAddon, {"save_path": "a", "save_async": 2}, "save_async=2"),
        (StateManagerAddon, {"save_path": "a", "save_on_signal": "SIGTERM"}, "save_on_signal='SIGTERM'"),
        (MultiGPUAddon, {"static_graph": "no"}, "static_graph='no'"),
        (MultiGPUAddon, {"find_unused_parameters": []}, r"find_unused_parameters=\[\]"),
        (CompileAddon, {"fallback_random": "yes"}, "fallback_random='yes'"),
    ],
    ids=str,
)  # fmt: skip
def test_e11_options_of_the_add_ons(add_on, options, match):
    """E11, P-21: at construction, and nothing is written."""
    with pytest.raises(ConfigError, match=match):
        make(Task.add_on(add_on), **options)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [{}, {"steps": 1, "epochs": 1}, {"steps": 0}, {"epochs": 1.5}, {"steps": True}], ids=str
)
def test_e11_cadences(arguments):
    with pytest.raises(ConfigError, match=r"Every\("):
        Every(**arguments)


# -------------------------------------------------------------------------------------------------------- E12, E13


def _weights(**changes):
    state = torch.nn.Linear(3, 1).state_dict()
    state.update(changes)
    return {k: v for k, v in state.items() if v is not None}


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        (_weights(bias=None), r"1 missing \(bias\); nothing was loaded"),
        (_weights(extra=torch.ones(1)), r"1 unexpected \(extra\)"),
        (_weights(weight=torch.ones(2, 3)), r"1 shapes differ \(weight is \(2, 3\) and must be \(1, 3\)\)"),
        (
            {f"layer{i}.weight": torch.ones(1) for i in range(30)},
            r"2 missing \(weight, bias\); 30 unexpected \(lay.*\.\.\.\)",
        ),
    ],
    ids=["missing", "unexpected", "shape", "another model"],
)
def test_e12_weights_that_do_not_fit(weights, match, tmp_path):
    """E12: one error with all of them, and nothing loaded partly, from a dict and from a file."""
    trainer = make()
    trainer.run(1, loader())
    with refused(trainer, CheckpointMismatch, match):
        trainer.apply_weights(weights)
    torch.save(weights, tmp_path / "weights.ckpt")
    with refused(trainer, CheckpointMismatch, match):
        trainer.apply_weights(tmp_path / "weights.ckpt")
    state = {**trainer.state_dict(), "model": weights}
    with refused(trainer, CheckpointMismatch, match):
        trainer.load_state_dict(state)


def test_e12_lists_at_most_ten():
    with pytest.raises(CheckpointMismatch) as caught:
        make().apply_weights({f"layer{i}.weight": torch.ones(1) for i in range(30)})
    assert str(caught.value).count("layer") == 10


def test_e12_what_fits_can_be_loaded_and_the_rest_is_returned():
    """E12: strict=False gives the lists; a shape is refused all the same."""
    trainer = make()
    weights = _weights(bias=None, extra=torch.ones(1), weight=torch.full((1, 3), 2.0))
    assert trainer.apply_weights(weights, strict=False) == (["bias"], ["extra"])
    assert trainer.unwrap().weight.tolist() == [[2.0, 2.0, 2.0]]
    with refused(trainer, CheckpointMismatch, "1 shapes differ"):
        trainer.apply_weights(_weights(weight=torch.ones(2, 3)), strict=False)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_e12_the_prefixes_of_wrappers_are_taken_off(prefix):
    """E12, P-14"""
    trainer = make()
    weights = {f"{prefix}{key}": torch.full_like(value, 3.0) for key, value in trainer.unwrap().state_dict().items()}
    assert trainer.apply_weights(weights) == ([], [])
    assert trainer.unwrap().bias.item() == 3.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "optimizer"}, "the state has no optimizer; it holds model"),
        (lambda s: {**s, "AMPAddon": {}}, r"nobody here takes the state of AMPAddon; add it with .add_on\(AMPAddon\)"),
        (lambda s: {**s, "progress": {"step": "3"}}, "the progress in the state has no proper"),
        (lambda s: s["model"], r"load weights alone with apply_weights\(...\)"),
        (lambda s: {}, "it holds nothing"),
    ],
    ids=["no optimizer", "left over", "no counters", "weights", "nothing"],
)
def test_e12_states_that_are_not_whole(change, match):
    """E12"""
    trainer = make()
    trainer.run(1, loader())
    state = change(make().state_dict())
    with refused(trainer, CheckpointMismatch, match):
        trainer.load_state_dict(state)


def test_e13_optimizer_groups_that_differ():
    """E13: before the weights are touched."""
    saved = make().state_dict()
    model = torch.nn.Linear(3, 1)
    groups = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1, momentum=0.9)
    trainer = make(model=model, optimizer=groups)
    with refused(
        trainer, CheckpointMismatch, r"has parameter groups of \[1, 1\] parameters, and the state was saved with"
    ):
        trainer.load_state_dict(saved)
    model = torch.nn.Linear(3, 1)
    several = {"a": torch.optim.SGD([model.weight], lr=0.1), "b": torch.optim.SGD([model.bias], lr=0.1)}
    trainer = make(model=model, optimizer=several)
    with refused(trainer, CheckpointMismatch, r"of the optimizers \['0'\], and this trainer has \['a', 'b'\]"):
        trainer.load_state_dict(saved)


def test_e13_an_add_ons_state_that_is_wrong_changes_nothing():
    composed = Task.add_on(AMPAddon, EMAAddon, EarlyStoppingAddon)
    trainer = make(composed)
    trainer.run(1, loader(), loader())
    for name in ("AMPAddon", "EMAAddon", "EarlyStoppingAddon"):
        for wrong in ({}, None, {"average": {"weight": torch.ones(5)}}):
            state = {**make(composed).state_dict(), name: wrong}
            average = {k: v.clone() for k, v in trainer.average.items()}
            with refused(trainer, CheckpointMismatch, name):
                trainer.load_state_dict(state)
            assert all(torch.equal(v, trainer.average[k]) for k, v in average.items())


def test_a_file_that_is_not_there():
    trainer = make()
    with refused(trainer, CheckpointNotFound, "there is no file best.safetensors"):
        trainer.apply_weights("best.safetensors")
    with refused(trainer, ConfigError, r"the suffix '.h5' is no format of weights; write .safetensors"):
        trainer.save_model("best.h5")


# ------------------------------------------------------------------------------------------ E16, E17, P-35, P-07, P-57


@pytest.mark.parametrize("monitor", ["acuracy", "valid/acuracy", "val_acuracy"])
@pytest.mark.parametrize("add_ons", [(), (EarlyStoppingAddon,), (StateManagerAddon,)], ids=str)
def test_fault_e16_a_metric_that_nothing_records(monitor, add_ons):
    """E16, P-35: before the first step, with the names there are."""
    cls = stepping(lambda self, batch: {"loss": _loss(self, batch), "accuracy": 0.5}, "test_step")
    options = {"save_path": "runs"} if StateManagerAddon in add_ons else {}
    trainer = make(cls.add_on(*add_ons), monitor=monitor, monitor_mode="max", **options)
    with pytest.raises(MonitorError, match=r"is no metric; did you mean 'accuracy'\?; there are loss, accuracy"):
        trainer.run(5, loader(), loader())
    assert trainer.progress_checker.step == 0


def test_fault_e16_a_nan_is_never_the_best():
    """E16"""
    scores = iter([float("nan"), 0.5, float("nan"), 0.25])

    def metric_on_epoch_end(self):
        return {} if self.mode == "train" else {"score": next(scores)}

    cls = type(Task)("Task", (Task,), {"metric_on_epoch_end": metric_on_epoch_end})
    trainer = make(cls, monitor="score", try_validation=False)  # The trial would take a score.
    trainer.run(4, loader(), loader())
    assert (trainer.best["score"], trainer.best["epoch"]) == (0.5, 2)


def test_e15_what_cannot_travel_to_another_process():
    """E15: the path of the attribute, before any process is started."""
    from zae.addons.mpu import MultiGPUAddon

    trainer = make(Task.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    is_open = refused(
        trainer, ConfigError, r"settings\['open'\]\[0\] cannot travel to another process: it is an open file"
    )
    with open("notes.txt", "w") as notes, is_open:
        trainer.settings = {"open": [notes]}
        trainer.run(1, loader())
    trainer.settings = {"augment": lambda batch: batch}
    with refused(
        trainer, ConfigError, r"settings\['augment'\] cannot travel to another process: it is the function .*lambda"
    ):
        trainer.run(1, loader())
    assert multiprocessing.active_children() == []


def test_e17_a_missing_step():
    """E17, P-57: the seed's own first example, which lacks its steps, shows the lines to write."""
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
        def train_step(self, batch): ...

    with pytest.raises(TypeError, match=r"Half cannot be instantiated: it has no test_step. Write:"):
        Half(model)


def test_p57_the_seeds_spellings_run():
    """P-57: device as a string, no scheduler, AMP on the CPU."""
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


def test_p07_plateau_without_its_metric():
    """P-07: before the first batch, whatever is composed."""
    for add_ons in ((), (AMPAddon, GradientAccumulationAddon)):
        trainer = make(Task.add_on(*add_ons), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
        asked = []
        watched = (asked.append(1) or batch for batch in loader())
        with refused(
            trainer, ConfigError, r"needs a metric after each validation, .*; give run\(..., valid_loader=...\)"
        ):
            trainer.run(2, watched)
        assert asked == []


def test_p08_one_cycle_that_is_too_short():
    """P-08: planned in optimizer steps, windows and not batches; refused before the first batch, with the numbers."""

    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)

    trainer = make(scheduler=cycle, scheduler_step_on_batch=True)
    with refused(
        trainer,
        ConfigError,
        r"ends after 5 steps, but this run takes it to 6 \(6 optimizer steps after 0\); make it that long, or end the "
        r"run there: run\(..., max_steps=5\)",
    ):
        trainer.run(2, loader())
    assert trainer.run(2, loader(), max_steps=5)["step"] == 5
    accumulating = make(
        Task.add_on(GradientAccumulationAddon),
        gradient_accumulation_steps=2,
        scheduler=cycle,
        scheduler_step_on_batch=True,
    )
    assert accumulating.run(2, loader())["step"] == 4
    with refused(accumulating, ConfigError, r"takes it to 6 \(2 optimizer steps after 4\)"):
        accumulating.run(1, loader())


@pytest.mark.parametrize("files", ["state.json", None, 3])
def test_e11_files_that_may_be_absent_are_a_list(files):
    """F-E11, P-16: a text would be taken for a list of its letters."""
    trainer = make(Task.add_on(StateManagerAddon), save_path="a")
    with pytest.raises(ConfigError, match=rf"allow_partial={files!r}; it must be a list of files: \['state.json'\]"):
        trainer.load_state("a", allow_partial=files)


@pytest.mark.parametrize("nothing", [[], (), {}])
def test_e10_a_list_of_no_optimizers(nothing):
    """E10: nothing would be trained, and no word said."""
    model = torch.nn.Linear(3, 1)
    with pytest.raises(ConfigError, match="and mode='train' needs one; write optimizer="):
        Task(model, "cpu", optimizer=nothing)
    assert "loss" in Task(model, "cpu", "test", optimizer=nothing).evaluate(loader())


@pytest.mark.parametrize("monitor", ["valid/loss", "val_loss", "test/loss"])
@pytest.mark.parametrize("add_ons", [(), (EarlyStoppingAddon,)])
def test_e16_a_metric_of_a_validation_that_is_not_made(monitor, add_ons):
    """E16: training's own loss decided which epoch is best, and when to stop, under the name of the validation's."""
    trainer = make(Task.add_on(*add_ons), monitor=monitor)
    with pytest.raises(MonitorError, match=f"{monitor}' is a metric of the validation.*give run.. a valid_loader"):
        trainer.run(2, loader())
    assert trainer.best == {}
    assert make(Task.add_on(*add_ons), monitor=monitor).run(1, loader(), loader())["best_valid"]["epoch"] == 1


def test_e16_a_metric_of_training_that_is_called_like_one_of_the_validation():
    class Named(Task):
        def train_step(self, batch):
            return {**super().train_step(batch), "valid_loss": 2.0}

    assert make(Named, monitor="valid_loss").run(1, loader())["best_train"]["score"] == 2.0


def test_e11_the_losses_of_a_misspelt_mode():
    """E11: they were those of the validations."""
    trainer = make()
    trainer.run(2, loader(), loader())
    assert trainer.get_loss_history() != trainer.get_loss_history("test") == trainer.get_loss_history("valid")
    with pytest.raises(ConfigError, match="mode='trian'; it must be 'train' or 'test'; did you mean 'train'"):
        trainer.get_loss_history("trian")


@pytest.mark.parametrize("weights", [torch.nn.Linear(3, 1), None, 3])
def test_e12_weights_that_are_neither_a_path_nor_a_state(weights):
    """E12: a whole model, for instance."""
    with pytest.raises(ConfigError, match=f"weights is a {type(weights).__name__}; .* a state dict: model.state_dict"):
        make().apply_weights(weights)


@pytest.mark.parametrize("use", [lambda each: each.run(1, loader()), lambda each: each.evaluate(loader())])
def test_another_model_in_the_place_of_the_one_that_is_trained(use):
    """P-51: it was put back without a word, and the first one trained."""

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
    """P-51: the one before went on stepping; between two calls of run it is taken."""
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
    """P-51: the loop sets it up itself once more, and a copy made in the run is set up from the beginning."""

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


class Bare(Trainer):
    """Returns the loss alone."""

    def train_step(self, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.model(inputs), targets)

    def test_step(self, batch):
        return self.train_step(batch)


class InADict(Bare):
    def train_step(self, batch):
        return {"loss": super().train_step(batch)}


@pytest.mark.parametrize(
    ("add_ons", "options"),
    [
        ((), {}),
        ((), {"gradient_clip": 0.1}),
        ((AMPAddon,), {"precision": "bf16"}),
        ((GradientAccumulationAddon,), {"gradient_accumulation_steps": 2}),
        ((CompileAddon,), {"compile_backend": "eager"}),
    ],
)
def test_e17_a_loss_alone_is_a_dict_with_it(add_ons, options):
    """In training, validation, inference and plan(), on every way through a step."""
    ends = []
    for task in (Bare, InADict):
        trainer = make(task.add_on(*add_ons), **options)
        metrics = trainer.run(2, loader(), loader())
        plan = trainer.plan(1, loader(), loader())
        ends.append((digest(trainer.model), str(metrics), trainer.inference(loader()), plan.metrics))
    assert str(ends[0]) == str(ends[1])


@pytest.mark.parametrize("number", [0.5, 1, np.float32(2.0), torch.tensor(3.0)])
def test_e17_a_number_alone_is_the_loss_of_a_test_step(number):
    class Counting(InADict):
        def test_step(self, batch):
            return number

    assert make(Counting).evaluate(loader()) == {"loss": float(number)}


@pytest.mark.parametrize("wrong", [None, "loss", [1.0], torch.ones(2), 0.5])
def test_e17_what_is_neither_is_refused(wrong):
    class Wrong(InADict):
        def train_step(self, batch):
            return wrong

        def test_step(self, batch):
            return None if isinstance(wrong, float) else wrong

    with pytest.raises(StepError, match=r"Wrong.train_step .*return a dict: return {'loss': loss}"):
        make(Wrong).run(1, loader())
    with pytest.raises(StepError, match=r"Wrong.test_step .*return a dict: return {'loss': loss}"):
        make(Wrong).evaluate(loader())


@pytest.mark.parametrize("add_ons", [(), (JSONLLoggerAddon,)])
def test_e17_logging_a_number_by_name(add_ons):
    """The most written line of Lightning, with and without its further arguments."""
    options = {"jsonl_path": "log.jsonl"} if add_ons else {}

    class ByName(InADict):
        more: dict[str, bool] = {}

        def train_step(self, batch):
            self.log("accuracy", 0.5, **self.more)
            return super().train_step(batch)

    with pytest.raises(StepError, match=r"return it from the step: return {'loss': loss, 'accuracy': value}"):
        make(ByName.add_on(*add_ons), **options).run(1, loader())
    ByName.more = {"prog_bar": True}
    with pytest.raises(TypeError) as caught:
        make(ByName.add_on(*add_ons), **options).run(1, loader())
    assert "return it from the step: return {'loss': loss, 'x': value}" in caught.value.__notes__[0]


def test_e15_add_on_of_an_instance_is_refused():
    """It would make a class, and leave the instance as it is; asked for as an attribute it stays a method."""
    trainer = make(InADict.add_on(AMPAddon))
    with pytest.raises(AddOnError, match=r"write InADict.add_on\(EMAAddon, 'x'\)\(model, ...\)"):
        trainer.add_on(EMAAddon, "x")
    assert callable(trainer.add_on)
    assert type(trainer).add_on(EMAAddon) is InADict.add_on(AMPAddon, EMAAddon)
    assert list(inspect.signature(InADict.add_on).parameters) == ["add_ons"]


def test_e15_a_parameter_that_no_optimizer_holds_is_named_once(caplog):
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
    assert text.startswith("no optimizer holds head.weight, head.bias (2 parameters with requires_grad=True)")
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
