"""A LightningModule trains here as Lightning's own Trainer trains it."""

from __future__ import annotations

import json

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from kit.lightning_modules import Autoencoder, Classifier, Hooked, LanguageModel, batches, build, fit
from zae import Trainer
from zae.addons import CallbackAddon
from zae.addons.lightning import task_of
from zae.errors import CheckpointDamaged, ConfigError, TaskError, ZaeError

QUIET = {"device": "cpu", "log_bar": False}


def train(module, epochs=2, valid=None, add_ons=(), loader=None, **options):
    """Train a module here; return the trainer."""
    trainer = task_of(module).add_on(*add_ons)(module, **QUIET, **options)
    trainer.run(epochs, batches() if loader is None else loader, valid)
    return trainer


def assert_same(one, other):
    """Assert that two modules have bitwise the same weights, and saw the same learning rates."""
    assert one.rates == other.rates
    for (name, left), right in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


def floats(metrics):
    return {name: float(value) for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------- equal to Lightning


def test_a_classifier_with_metrics():
    """Weights bitwise, the rates of each step, and each metric by Lightning's names."""
    theirs, ours = build(Classifier), build(Classifier)
    trainer = fit(theirs, batches(), batches(20), max_epochs=3, log_every_n_steps=1)
    zae = train(ours, 3, batches(20), monitor="val_loss")
    assert_same(theirs, ours)
    assert ours.seen == theirs.seen
    expected, found = floats(trainer.callback_metrics), floats(zae.callback_metrics)
    assert expected == pytest.approx(found, abs=1e-6)
    assert {"train_loss", "train_loss_step", "train_loss_epoch", "train_acc", "largest", "val_loss"} <= set(found)
    row, valid = zae.metrics["train_metrics_history"][-1], zae.metrics["valid_metrics_history"][-1]
    assert row["train_loss"] == row["train_loss_epoch"] == pytest.approx(expected["train_loss"], abs=1e-6)
    assert valid["valid_loss"] == pytest.approx(expected["val_loss"], abs=1e-6)
    assert row["train_acc"] == pytest.approx(expected["train_acc"])


def test_an_autoencoder_that_returns_a_dict():
    """The plateau waits for its own metric, weighted by batch_size; hooks get what the step returned."""
    theirs, ours = build(Autoencoder), build(Autoencoder)
    trainer = fit(theirs, batches(), batches(20), max_epochs=4)
    zae = train(ours, 4, batches(20))
    assert_same(theirs, ours)
    assert len(set(ours.rates)) > 1  # The plateau was reached.
    assert ours.ends == theirs.ends
    assert floats(trainer.callback_metrics) == pytest.approx(floats(zae.callback_metrics), abs=1e-6)


def test_a_transformer_with_accumulation_and_clipping():
    theirs, ours = build(LanguageModel), build(LanguageModel)
    fit(theirs, batches(), max_epochs=4, accumulate_grad_batches=2, gradient_clip_val=0.3)
    zae = train(ours, 4, add_ons=["GradientAccumulationAddon"], gradient_accumulation_steps=2, gradient_clip=0.3)
    assert_same(theirs, ours)
    assert zae.progress_checker.step == 12
    assert len(set(ours.rates)) == 4


def test_a_module_that_is_given_to_the_trainer_itself_has_steps():
    with pytest.raises(
        TaskError, match=r"Or take the steps of the Autoencoder, as task_of\(model\)\(model, ...\) of zae"
    ):
        Trainer(Autoencoder())
    with pytest.raises(TaskError, match=r"task_of\(model\)"):
        Trainer(model=Autoencoder(), max_epochs=3)


def test_hooks_are_called_in_the_order_of_lightning():
    """With batch norm, and averages beside, which change nothing."""
    theirs, ours = build(Hooked), build(Hooked)
    trainer = fit(theirs, batches(12), batches(24), max_epochs=2, gradient_clip_val=0.1)
    zae = train(ours, 2, batches(24), ["EMAAddon"], batches(12), decay=0.5, gradient_clip=0.1)
    # There the optimizer's is called around the whole step, and the scheduler's of an epoch before its last hook.
    kinds = ("optimizer_step", "lr_scheduler_step")
    placed = [[name for name in calls if not name.startswith(kinds)] for calls in (ours.calls, theirs.calls)]
    steps = [[name for name in calls if name.startswith(kinds)] for calls in (ours.calls, theirs.calls)]
    assert placed[0] == placed[1]
    assert steps[0] == steps[1]
    assert set(Hooked.HOOKS.split()) <= set(ours.calls)
    assert_same(theirs, ours)
    assert zae.callback_metrics["weight"] == trainer.callback_metrics["weight"]
    assert zae.metrics["train_metrics_history"][-1]["train_weight"] == pytest.approx(float(ours.net[0].weight.sum()))


# ------------------------------------------------------------------------------------------------- what is refused


class Plain(pl.LightningModule):
    """The least that trains; ``made`` is what configure_optimizers makes of the parameters."""

    made = staticmethod(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.made(self.parameters())


class Adversarial(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))


def of(**members):
    """Return a module class with these members."""
    return type("Lit", (Plain,), members)


@pytest.mark.parametrize(("given", "text"), [
    (Adversarial(), "manually"),
    (of(automatic_optimization=False), "manually"),
    (of(configure_callbacks=lambda self: []), "EarlyStoppingAddon"),
    (of(training_epoch_end=lambda self, outputs: None), "on_train_epoch_end"),
    (of(on_validation_model_eval=lambda self: None), "modes of all modules"),
    (nn.Linear(2, 2), "class Task"),
    (nn.Linear, "class Task"),
    (3, "takes a LightningModule"),
])  # fmt: skip
def test_what_cannot_be_carried_is_refused_by_name(given, text):
    with pytest.raises(TaskError, match=text):
        task_of(given)


def test_a_module_that_its_constructor_makes_manual_is_refused_with_the_trainer():
    with pytest.raises(TaskError, match="manually"):
        task_of(Adversarial)(Adversarial())


SGD, StepLR = torch.optim.SGD, torch.optim.lr_scheduler.StepLR


def _both(parameters, **more):
    optimizer = SGD(parameters, lr=0.1)
    return optimizer, StepLR(optimizer, 1, 0.5), more


@pytest.mark.parametrize("made", [
    lambda p: SGD(p, lr=0.1),
    lambda p: [SGD(p, lr=0.1)],
    lambda p: ([(both := _both(p))[0]], [both[1]]),
    lambda p: ([(both := _both(p))[0]], both[1]),
    lambda p: {"optimizer": (both := _both(p))[0], "lr_scheduler": both[1]},
    lambda p: {"optimizer": (both := _both(p))[0], "lr_scheduler": {"scheduler": both[1], "frequency": 2}},
    lambda p: [{"optimizer": (both := _both(p))[0], "lr_scheduler": {"scheduler": both[1], "interval": "step"}}],
    lambda p: {"optimizer": (both := _both(p))[0],
               "lr_scheduler": {"scheduler": both[1], "interval": "step", "frequency": 3, "name": "x"}},
])  # fmt: skip
def test_each_shape_of_configure_optimizers(made):
    kind = of(made=staticmethod(made))
    theirs, ours = build(kind), build(kind)
    trainer = fit(theirs, batches(), max_epochs=3)
    zae = train(ours, 3)
    assert torch.equal(theirs.net.weight, ours.net.weight)
    rates = [trainer.optimizers[0].param_groups[0]["lr"], zae.optimizers["0"].param_groups[0]["lr"]]
    assert rates[0] == rates[1]


@pytest.mark.parametrize(("made", "text"), [
    (lambda p: None, "returned None"),
    (lambda p: [SGD(p, lr=0.1), SGD([nn.Parameter(torch.ones(1))], lr=0.1)], "2 optimizers.*manual"),
    (lambda p: {"optimizer": (both := _both(p))[0], "lr_scheduler": {"scheduler": both[1], "interval": "batch"}},
     '"interval" key in lr scheduler dict must be "step" or "epoch"'),
    (lambda p: {"optimizer": (both := _both(p))[0], "lr_scheduler": {"schedule": both[1]}},
     'must have the key "scheduler"'),
    (lambda p: {"optimizer": (o := SGD(p, lr=0.1)),
                "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o)}, "must include a monitor"),
])  # fmt: skip
def test_other_shapes_of_configure_optimizers_are_refused(made, text):
    with pytest.raises((ConfigError, MisconfigurationException), match=text):
        train(of(made=staticmethod(made))())


@pytest.mark.parametrize(("step", "text"), [
    (lambda self, batch: self.log("x", torch.ones(3)), "shape .3,"),
    (lambda self, batch: self.log("x", "a"), "a str"),
    (lambda self, batch: self.log("x", 1.0, reduce_fx="median"), "'mean', 'sum'"),
    (lambda self, batch: self.trainer.strategy, "trainer.strategy, which is not here"),
    (lambda self, batch: setattr(self.trainer, "limit_val_batches", 3), "which cannot be set"),
    (lambda self, batch: {"accuracy": 1.0}, "without 'loss'"),
    (lambda self, batch: None, "write return loss"),
])  # fmt: skip
def test_faults_of_a_step_are_named(step, text):
    with pytest.raises((ZaeError, AttributeError), match=text):
        train(of(training_step=lambda self, batch, batch_idx: step(self, batch))())


def test_faults_of_the_constructor_are_named():
    with pytest.raises(ConfigError, match="configure_optimizers"):
        task_of(Plain)(Plain(), optimizer=SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(ConfigError, match="LightningDataModule"):
        task_of(Plain)(Plain(), "cpu", datamodule=batches())
    with pytest.raises(TaskError, match="LightningModule"):
        task_of(Plain)(nn.Linear(2, 2), "cpu")
    with pytest.raises(ConfigError, match="ModelSummary is a callback of Lightning, which are not called here"):
        task_of(Plain).add_on(CallbackAddon)(Plain(), "cpu", callbacks=[pl.callbacks.ModelSummary()])


# ----------------------------------------------------------------------------------------- checkpoints and weights


class Counting(Classifier):
    """Has a state of its own, freezes a layer for an epoch, and may be killed."""

    dies_at = None

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_epoch_start(self):
        self.model[0].requires_grad_(self.current_epoch > 0)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.count += 1
        if self.count == Counting.dies_at:
            raise KeyboardInterrupt

    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint):
        self.count = checkpoint["count"]


def test_a_killed_run_is_resumed_bitwise_within_an_epoch(tmp_path, monkeypatch, caplog):
    """Weights, metrics, records and the state of the module, with five add-ons."""
    add_ons = ["StateManagerAddon", "EMAAddon", "GradientAccumulationAddon", "JSONLLoggerAddon", "AMPAddon"]

    def go(name):
        options = {"save_path": tmp_path / name, "jsonl_path": tmp_path / f"{name}.jsonl", "resume": "auto"}
        options |= {"save_every": 1, "gradient_accumulation_steps": 2, "precision": "bf16", "decay": 0.9}
        return train(build(Counting), 3, batches(20), add_ons, **options)

    whole = go("whole")
    monkeypatch.setattr(Counting, "dies_at", 10)
    with pytest.raises(KeyboardInterrupt):
        go("killed")
    monkeypatch.setattr(Counting, "dies_at", None)
    resumed = go("killed")
    assert resumed.unwrap().count == whole.unwrap().count == 18
    for name, value in whole.unwrap().state_dict().items():
        assert torch.equal(value, resumed.unwrap().state_dict()[name]), name
    assert floats(whole.callback_metrics) == floats(resumed.callback_metrics)
    assert whole.metrics["train_metrics_history"] == resumed.metrics["train_metrics_history"]
    assert "lacks" not in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert any("train/loss_step" in row and "train/acc" in row for row in rows)
    assert any("valid/loss" in row and "valid/acc" in row for row in rows)


def test_weights_of_a_lightning_checkpoint_load(tmp_path):
    """Into the module, and into the model inside of it, without the prefix; code in the file is refused."""
    theirs = build(Classifier, width=5)
    trainer = fit(theirs, batches(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    ours = task_of(Classifier)(Classifier(width=5), **QUIET, mode="test")
    assert ours.apply_weights(tmp_path / "last.ckpt") == ([], [])
    assert torch.equal(ours.unwrap().model[0].weight, theirs.model[0].weight)
    found = ours.test(batches(20))
    assert floats(ours.callback_metrics)["val_loss"] == pytest.approx(found["loss"])

    class Inner(Trainer):
        def train_step(self, batch):
            return {"loss": self.model(batch[0]).mean()}

        test_step = train_step

    inner = Inner(Classifier(width=5).model, "cpu", mode="test")
    assert inner.apply_weights(tmp_path / "last.ckpt") == ([], [])
    assert torch.equal(inner.model[0].weight, theirs.model[0].weight)
    state = torch.load(tmp_path / "last.ckpt")
    torch.save({**state, "hyper_parameters": {"loss": nn.MSELoss()}}, tmp_path / "code.ckpt")
    with pytest.raises(CheckpointDamaged, match="weights_only=False"):
        inner.apply_weights(tmp_path / "code.ckpt")


def test_a_run_is_planned_before_it_begins():
    """The schedule asks for the length of the run."""
    module = build(Classifier)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = task_of(Classifier)(module, **QUIET)
    assert "12 in this run" in str(trainer.plan(2, batches(), batches(20)))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert vars(module).keys() == vars(build(Classifier)).keys()
    assert not trainer.callback_metrics


# ----------------------------------------------------------------------------------------------------- data


class Data(pl.LightningDataModule):
    """Two loaders to validate, and hooks of the transfer."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append("setup " + stage)

    def train_dataloader(self):
        return batches()

    def val_dataloader(self):
        return [batches(24), batches(16)]

    def test_dataloader(self):
        return batches(20)

    def predict_dataloader(self):
        return batches(20)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]

    def teardown(self, stage):
        self.calls.append("teardown " + stage)


class OfData(Classifier):
    """Collects what its steps found of each loader, for one hook after all of them."""

    def on_validation_start(self):
        self.found = [[] for _ in self.trainer.num_val_batches]

    on_test_start = on_validation_start

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.cross_entropy(self(batch[0]), batch[1]) * (1 + dataloader_idx)
        self.log("val_loss", loss)
        if not self.trainer.sanity_checking:
            self.found[dataloader_idx].append(float(loss))

    def on_validation_epoch_end(self):
        assert self.trainer.datamodule is not None
        assert [len(each) for each in self.found] == self.trainer.num_val_batches == [2, 3]
        self.log("val_worst", max(max(each) for each in self.found))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]) * (1 + dataloader_idx))

    def on_test_epoch_end(self):
        self.log("tests", 1.0)


def test_a_data_module_with_two_loaders():
    theirs, ours = build(OfData), build(OfData)
    data = Data()
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)  # fmt: skip
    trainer.fit(theirs, datamodule=data)
    expected = data.calls[:]
    data = Data()
    zae = task_of(OfData)(ours, **QUIET, datamodule=data)
    zae.run(2, *zae.loaders())
    assert_same(theirs, ours)
    assert data.calls == expected == ["prepare", "setup fit", "teardown fit"]
    assert floats(zae.callback_metrics) == pytest.approx(floats(trainer.callback_metrics), abs=1e-6)
    assert "val_loss/dataloader_idx_1" in zae.callback_metrics
    assert "valid_dataloader_idx_1/loss" in zae.metrics["valid_metrics_history"][-1]
    predicted = zae.predict(zae.loaders("predict"))["output"]
    assert torch.equal(predicted, torch.cat(trainer.predict(theirs, datamodule=data)))
    tested = trainer.test(theirs, datamodule=data, verbose=False)[0]
    assert zae.test(zae.loaders("test"))["loss"] == pytest.approx(tested["test_loss"], abs=1e-6)
    both = {"a": batches(20), "b": batches(12)}
    tested = trainer.test(theirs, [*both.values()], verbose=False)
    found = task_of(OfData)(ours, **QUIET, mode="test").test(both)
    assert found["a/loss"] == pytest.approx(tested[0]["test_loss/dataloader_idx_0"], abs=1e-6)
    assert found["b/loss"] == pytest.approx(tested[1]["test_loss/dataloader_idx_1"], abs=1e-6)
    assert found["b/tests"] == tested[1]["tests"] == 1.0
    assert "a/tests" not in found
