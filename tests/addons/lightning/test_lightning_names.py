"""Each public name of Lightning's module and trainer: it is there with Lightning's value, or refused before a run."""

from __future__ import annotations

import inspect

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kit.lightning_modules import Classifier, batches, build, fit
from zae.addons.lightning import task_of
from zae.addons.lightning.view import LoggerView, TrainerView
from zae.errors import MissingError, TaskError

QUIET = {"device": "cpu", "log_bar": False}


def public_names(*owners):
    return {name for owner in owners for name in dir(owner) if name[0] != "_" and not name.isupper()}


QUIETLY = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
OF_TRAINER = public_names(pl.Trainer, pl.Trainer(accelerator="cpu", **QUIETLY))
CARRIED = sorted(OF_TRAINER & public_names(TrainerView))
OF_MODULE = public_names(pl.LightningModule) - public_names(nn.Module) | {"forward"}
_REFUSED = """configure_callbacks configure_sharded_model on_predict_model_eval on_test_model_eval on_test_model_train
    on_validation_model_eval on_validation_model_train on_validation_model_zero_grad"""
REFUSED = _REFUSED.split()
_IN_A_STEP = """automatic_optimization current_epoch device device_mesh dtype example_input_array fabric global_rank
    global_step hparams hparams_initial local_rank logger loggers on_gpu strict_loading"""
IN_A_STEP = _IN_A_STEP.split()
CALLS = {
    "all_gather": lambda self: self.all_gather(torch.ones(2)),
    "clip_gradients": lambda self: self.clip_gradients(self.optimizers()),
    "freeze": lambda self: self.train_acc.requires_grad_(False),
    "log": lambda self: self.log("value", 1.0),
    "log_dict": lambda self: self.log_dict({"one": 1.0, "two": 2.0}, on_step=True, on_epoch=True),
    "lr_schedulers": lambda self: self.lr_schedulers().get_last_lr(),
    "optimizers": lambda self: len(self.optimizers().param_groups),
    "print": lambda self: self.print("hello"),
    "toggle_optimizer": lambda self: self.toggle_optimizer(self.optimizers()),
    "untoggle_optimizer": lambda self: self.untoggle_optimizer(self.optimizers()),
    "trainer": lambda self: self.trainer.is_global_zero,
}
_OUTSIDE = """load_from_checkpoint manual_backward remove_ignored_hparams save_hyperparameters to_onnx to_tensorrt
    to_torchscript toggled_optimizer unfreeze from_datasets name"""
OUTSIDE = _OUTSIDE.split()  # Of Lightning alone, or refused elsewhere.
HOOKS = sorted(OF_MODULE - {*REFUSED, *IN_A_STEP, *CALLS, *OUTSIDE})


def lit(**members):
    return type("Lit", (Classifier,), members)


def reading(text):
    """Return a module whose training step has this line."""
    names = {}
    exec(f"def training_step(self, batch, batch_idx):\n    {text}\n    return self(batch[0]).mean()", names)
    return lit(training_step=names["training_step"])


class Asking(Classifier):
    """Notes what it finds in its hooks."""

    def note(self, where):
        found = {name: getattr(self.trainer, name) for name in CARRIED if name != "should_stop"}
        found |= {f"self.{name}": getattr(self, name) for name in IN_A_STEP}
        kinds = (int, float, str, torch.device, torch.dtype, type(None))
        self.notes.append((where, {name: value for name, value in found.items() if isinstance(value, kinds)}))

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        self.notes += [(name, call(self)) for name, call in CALLS.items()]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("on_train_batch_end")

    def on_train_epoch_end(self):
        self.note("on_train_epoch_end")

    def validation_step(self, batch, batch_idx):
        self.note("validation_step")
        assert self.trainer.num_val_batches == [1 if self.trainer.sanity_checking else 3]
        return super().validation_step(batch, batch_idx)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        """Warm up, as Lightning's documentation shows it."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.note("optimizer_step")
        if self.trainer.global_step < 5:
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, (self.trainer.global_step + 1) / 5) * self.hparams.lr


def test_each_name_has_the_value_of_lightning():
    """In five hooks of two epochs; what methods return in a step; the same weights and metrics in the end."""
    theirs, ours = build(Asking), build(Asking)
    theirs.notes, ours.notes = [], []
    trainer = fit(theirs, batches(), batches(20), max_epochs=2, gradient_clip_val=0.5)
    zae = task_of(ours)(ours, **QUIET, gradient_clip=0.5)
    zae.run(2, batches(), batches(20))
    assert [where for where, _ in theirs.notes] == [where for where, _ in ours.notes]
    for (where, there), (_, here) in zip(theirs.notes, ours.notes, strict=True):
        if isinstance(there, dict):
            both = there.keys() & here.keys()
            assert len(both) > 30
            assert {name: there[name] for name in both} == {name: here[name] for name in both}, where
        else:
            assert torch.equal(there, here) if isinstance(there, torch.Tensor) else there == here or where == "freeze"
    assert theirs.rates == ours.rates
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))
    expected = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {name: float(value) for name, value in zae.callback_metrics.items()} == pytest.approx(expected, abs=1e-6)


def test_each_name_of_the_trainer_is_carried_or_answered_with_what_to_write():
    assert len(OF_TRAINER) > 80
    refused = OF_TRAINER - {*CARRIED}
    assert len(refused) < 65
    for name in refused:
        with pytest.raises(MissingError, match=rf"reads self.trainer.{name}, which is not here; \w"):
            getattr(TrainerView(), name)
        with pytest.raises(MissingError, match=rf"sets self.trainer.{name}, which cannot be set; \w"):
            setattr(TrainerView(), name, 1)


def test_a_name_that_is_not_there_ends_the_first_step_with_its_remedy():
    module = build(reading("self.trainer.strategy"))
    with pytest.raises(MissingError, match=r"reads self.trainer.strategy, which is not.*MultiGPUAddon"):
        task_of(module)(module, **QUIET).run(1, batches())


@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_is_not_carried_is_refused(name):
    with pytest.raises(TaskError, match=f"Lit.{name} cannot be carried over: ..."):
        task_of(lit(**{name: lambda self: None}))


def test_each_other_hook_is_called():
    """In a run with validation, a test and a prediction, with loaders and transfers; each as often as by Lightning."""
    counts = []

    def counting(name, base):
        def hook(self, *args, **kwargs):
            counts[-1][name] = counts[-1].get(name, 0) + 1
            return base(self, *args, **kwargs)

        hook.__signature__ = inspect.signature(base)
        return hook

    loaders = {f"{kind}_dataloader": lambda self: batches() for kind in ("train", "val", "test", "predict")}
    base = lit(**loaders, on_load_checkpoint=lambda self, checkpoint: None)
    kind = type("Lit", (base,), {name: counting(name, getattr(base, name)) for name in HOOKS})
    counts.append({})
    module = build(kind)
    trainer = fit(module, None, max_epochs=2)
    assert trainer.test(module, verbose=False)
    assert trainer.predict(module)
    counts.append({})
    module = build(kind)
    zae = task_of(kind)(module, **QUIET)
    zae.run(2, *zae.loaders())
    assert zae.test(zae.loaders("test"))
    assert zae.predict(zae.loaders("predict"))
    theirs, ours = counts
    assert set(theirs) == set(HOOKS) - {"on_load_checkpoint", "on_save_checkpoint"}
    assert ours == theirs


class Logging(Classifier):
    """Writes to the logger itself."""

    def on_train_epoch_end(self):
        self.logger.log_metrics({"weight": self.model[0].weight.sum()}, step=self.global_step)
        self.logger.experiment.add_scalar("beside", self.current_epoch, self.global_step)

    def on_fit_start(self):
        self.logger.log_hyperparams(self.hparams)

    def test_step(self, batch, batch_idx):
        self.logger.experiment.add_scalar("outside", batch_idx)

    def validation_step(self, batch, batch_idx):
        self.logger.log_image(key="sample", images=[batch[0][0].reshape(1, 2, 3).sigmoid()])


def test_what_a_module_writes_to_its_logger_is_in_the_log(tmp_path, caplog):
    """Of TensorBoard, read back; there is no client outside of run()."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module = build(Logging)
    trainer = task_of(module).add_on("TensorBoardLoggerAddon")(module, **QUIET, log_dir=tmp_path)
    trainer.run(2, batches(), batches(48))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    tags = read.Tags()
    assert [each.value for each in read.Scalars("beside")] == [0.0, 1.0]
    assert [each.step for each in read.Scalars("weight")] == [6, 12]
    assert read.Scalars("hparams/lr")[0].value == pytest.approx(0.01)
    assert [each.step for each in read.Images(tags["images"][0])] == [6, 12]
    assert trainer.test(batches(24)) == {}
    assert caplog.text.count("self.logger.experiment has no client") == 1
    task_of(module)(module, **QUIET, mode="test")
    with pytest.raises(MissingError, match=r"self.logger.version"):
        LoggerView(None).version  # noqa: B018


def test_a_module_that_asks_first_whether_there_is_a_logger_trains():
    """Or whether the trainer has a name. A name that is set, or that a data module reads, is answered too."""
    guards = (
        "if self.logger is not None and self.logger.experiment or hasattr(self.trainer, 'x') and self.trainer.x: 1/0"
    )
    module = build(reading(guards))
    assert task_of(module)(module, **QUIET).run(1, batches())["step"] == 6
    setting = build(reading("self.trainer.limit_val_batches = 1"))
    with pytest.raises(MissingError, match=r"sets self.trainer.limit_val_batches, which cannot.*limit_batches="):
        task_of(setting)(setting, **QUIET).run(1, batches())
    stopping = build(reading("self.trainer.should_stop = True"))
    assert task_of(stopping)(stopping, **QUIET).run(2, batches())["step"] == 1
    data = type("Data", (pl.LightningDataModule,), {"setup": lambda self, stage: self.trainer.strategy})
    with pytest.raises(MissingError, match=r"reads self.trainer.strategy.*MultiGPUAddon"):
        task_of(Classifier)(Classifier(), **QUIET, datamodule=data()).run(1, batches())


def test_a_data_module_sees_the_error_that_ends_a_run():
    seen = []
    data = type("Data", (pl.LightningDataModule,), {"on_exception": lambda self, error: seen.append(error)})()
    broken = lit(training_step=lambda self, batch, batch_idx: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        task_of(broken)(broken(), **QUIET, datamodule=data).run(1, batches())
    assert seen == [caught.value]


def test_modules_of_the_other_package_train():
    """pytorch_lightning is the same code under another name, with classes of its own."""
    import pytorch_lightning as other

    def loss(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def make(package):
        members = {"training_step": loss, "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), 0.1)}
        made = type("Lit", (package.LightningModule,), members)()
        torch.manual_seed(0)
        made.net = nn.Linear(6, 3)
        return made

    theirs, ours = make(pl), make(other)
    assert not isinstance(ours, pl.LightningModule)
    fit(theirs, batches(), max_epochs=2)
    data = type("Data", (other.LightningDataModule,), {"train_dataloader": lambda self: batches()})()
    trainer = task_of(ours)(ours, **QUIET, datamodule=data)
    trainer.run(2, *trainer.loaders())
    assert torch.equal(theirs.net.weight, ours.net.weight)
