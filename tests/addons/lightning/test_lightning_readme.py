"""Modules as their users publish them: the README of the installed Lightning, and a classifier of images."""

from __future__ import annotations

import importlib.metadata
import re

import lightning as L
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from kit.lightning_modules import Classifier, batches, build, fit
from zae import Trainer
from zae.addons.lightning import task_of
from zae.errors import CheckpointDamaged, TaskError

QUIET = {"device": "cpu", "log_bar": False}


def same(theirs, ours):
    return all(torch.equal(a, b) for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True))


def test_the_autoencoder_of_the_readme_of_lightning(caplog):
    """It has no validation_step, and gets a loader for it."""
    text = importlib.metadata.distribution("lightning").read_text("METADATA")
    code = re.search(r"```python\n# main.py\n(.*?# -+\n# Step 1.*?)# -+\n# Step 2", text, re.S)[1]
    names = {}
    exec(code.replace(", torchvision as tv", ""), names)
    images = TensorDataset(torch.rand(24, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.zeros(24))
    theirs, ours = build(names["LitAutoEncoder"]), build(names["LitAutoEncoder"])
    loaders = DataLoader(images), DataLoader(images)
    trainer = fit(theirs, *loaders, max_epochs=2)
    zae = task_of(ours)(ours, **QUIET)
    zae.run(2, *loaders)
    assert same(theirs, ours)
    assert caplog.text.count("no validation_step: the valid_loader is not used") == 1
    assert float(zae.callback_metrics["train_loss"]) == float(trainer.callback_metrics["train_loss"])
    with pytest.raises(TaskError, match="has no validation_step, which this evaluation calls"):
        zae.evaluate(loaders[1])


class ImageClassifier(L.LightningModule):
    """The usual shape of one: save_hyperparameters, torchmetrics, a schedule that waits for a metric."""

    def __init__(self, num_classes: int = 10, lr: float = 2e-2, hidden_dim: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, 1, 8, 8)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, self.hparams.hidden_dim),
            nn.ReLU(),
            nn.Linear(self.hparams.hidden_dim, num_classes),
        )
        self.train_acc = MulticlassAccuracy(num_classes)
        self.val_acc = MulticlassAccuracy(num_classes)

    def forward(self, x):
        return self.net(x)

    def _shared_step(self, batch, stage):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        metric = getattr(self, f"{stage}_acc")
        metric(logits, y)
        self.log(f"{stage}_loss", loss, prog_bar=True)
        self.log(f"{stage}_acc", metric, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self._shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._shared_step(batch, "val")

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.print(f"epoch {self.current_epoch} of {self.trainer.max_epochs}: {self.val_acc.compute():.4f}")

    def test_step(self, batch, batch_idx):
        self._shared_step(batch, "val")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.1, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_acc", "interval": "epoch", "frequency": 1},
        }


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        load_digits()

    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images[:600] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        full = TensorDataset(images, torch.tensor(labels[:600]))
        self.train_set, self.val_set = random_split(full, [500, 100], generator=torch.Generator().manual_seed(42))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


def test_a_classifier_of_images_with_its_data_module(capsys, tmp_path):
    """Weights bitwise, metrics, what it prints, predictions; then the weights of its .ckpt file, here."""
    theirs, ours = build(ImageClassifier), build(ImageClassifier)
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(theirs, datamodule=DigitsData())
    expected = {name: float(value) for name, value in trainer.callback_metrics.items()}
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    zae = task_of(ours)(ours, **QUIET, datamodule=DigitsData())
    zae.run(3, *zae.loaders())
    assert same(theirs, ours)
    assert {name: float(value) for name, value in zae.callback_metrics.items()} == pytest.approx(expected, abs=1e-6)
    assert [line for line in capsys.readouterr().out.splitlines() if line] == printed
    assert len(printed) == 3
    predicted = zae.predict(zae.loaders("predict"))["output"]
    assert torch.equal(predicted, torch.cat(trainer.predict(theirs, datamodule=DigitsData())))
    (found,) = tmp_path.rglob("*.ckpt")
    fresh = task_of(ImageClassifier)(ImageClassifier(), **QUIET, mode="test")
    assert fresh.apply_weights(found) == ([], [])
    assert fresh.test(zae.loaders("test"))["acc"] == pytest.approx(expected["val_acc"])


class Payload:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


@pytest.mark.parametrize("where", ["state_dict", "hyper_parameters", "callbacks", "whole"])
def test_code_in_a_ckpt_file_is_refused_and_not_run(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    state = {
        "state_dict": model.state_dict(),
        "hyper_parameters": {},
        "callbacks": {},
        "pytorch-lightning_version": "2",
    }
    torch.save(Payload() if where == "whole" else {**state, where: {**state[where], "weight": Payload()}}, "x.ckpt")

    class Task(Trainer):
        def train_step(self, batch):
            return {"loss": self.model(batch).mean()}

        test_step = train_step

    before = model.weight.detach().clone()
    with pytest.raises(CheckpointDamaged, match="weights_only=False"):
        Task(model, "cpu", mode="test").apply_weights("x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
    assert torch.equal(model.weight, before)


def test_a_compiled_module_trains_to_the_same_weights():
    """Its forward is compiled; hooks, metrics and what it notes in a step are as with Lightning's trainer."""

    class Smooth(Classifier):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    theirs, ours = build(Smooth), build(Smooth)
    trainer = fit(theirs, batches(), batches(24), max_epochs=2)
    options = {"compile_backend": "aot_eager"}
    zae = task_of(ours).add_on("CompileAddon")(ours, **QUIET, **options)
    zae.run(2, batches(), batches(24))
    assert zae.compile_report["graphs"] > 0
    for (name, value), other in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.allclose(value, other, rtol=0, atol=1e-6), name
    expected = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {name: float(value) for name, value in zae.callback_metrics.items()} == pytest.approx(expected, abs=1e-6)
    assert ours.rates == theirs.rates
    assert ours.seen == theirs.seen
