"""LightningModules as their users write them, and the run of each by Lightning's own Trainer."""

from __future__ import annotations

import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    """Metrics of torchmetrics, batch norm, and a cosine schedule over the steps of the run."""

    def __init__(self, width=8, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
        self.train_acc, self.val_acc = MulticlassAccuracy(3), MulticlassAccuracy(3)
        self.rates, self.seen = [], []

    def forward(self, inputs):
        return self.model(inputs)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits, targets)
        self.train_acc(logits, targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        self.log("largest", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        self.seen.append((batch_idx, self.global_step, self.current_epoch))
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        logits = self(inputs)
        self.val_acc(logits, targets)
        self.log_dict({"val_loss": F.cross_entropy(logits, targets), "val_acc": self.val_acc}, prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch):
        return self(batch[0]).softmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Autoencoder(pl.LightningModule):
    """A step that returns a dict, and a schedule that waits for a metric."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
        self.decoder = nn.Linear(2, 6)
        self.rates, self.ends = [], []

    def training_step(self, batch, batch_idx):
        inputs, _ = batch
        encoded = self.encoder(inputs)
        loss = F.mse_loss(self.decoder(encoded), inputs)
        self.log("train_loss", loss)
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return {"loss": loss, "encoded": encoded.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ends.append((sorted(outputs), float(outputs["loss"]), batch_idx))

    def validation_step(self, batch, batch_idx):
        inputs, _ = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(inputs)), inputs), batch_size=len(inputs) + batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


class LanguageModel(pl.LightningModule):
    """A small transformer that reads the classes of the data as tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)
        self.rates = []

    def training_step(self, batch, batch_idx):
        tokens = batch[1].reshape(1, -1)
        logits = self.head(self.layer(self.embed(tokens[:, :-1])))
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
        self.log("loss", loss, on_epoch=True)
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}, {"scheduler": decay, "frequency": 2}]


class Hooked(pl.LightningModule):
    """Each hook that is carried over, noted as it is called, and batch norm."""

    HOOKS = """
    prepare_data on_fit_start on_train_start on_train_epoch_start on_train_batch_start on_before_zero_grad
    on_before_backward on_after_backward on_before_optimizer_step on_train_batch_end on_validation_start
    on_validation_epoch_start on_validation_batch_start on_validation_batch_end on_validation_epoch_end
    on_validation_end on_train_epoch_end on_train_end on_fit_end
    """

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.calls, self.rates = [], []

    def setup(self, stage):
        self.calls.append("setup " + stage)

    def teardown(self, stage):
        self.calls.append("teardown " + stage)

    def training_step(self, batch, batch_idx):
        self.calls.append("training_step")
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.calls.append("validation_step")
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_epoch_end(self):
        self.calls.append("on_train_epoch_end")
        self.log("weight", self.net[0].weight.sum())

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.calls.append(f"optimizer_step {epoch} {batch_idx}")
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.calls.append("clip")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler, metric):
        self.calls.append("lr_scheduler_step")
        scheduler.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def _noting(name):
    def hook(self, *args):
        self.calls.append(name)

    return hook


for each in Hooked.HOOKS.split():
    if each not in vars(Hooked):
        setattr(Hooked, each, _noting(each))


def batches(size=8, samples=48):
    """Return a loader in a fixed order."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator)), batch_size=size)


def build(module, *args, **kwargs):
    """Return a module with the same weights each time."""
    torch.manual_seed(1)
    return module(*args, **kwargs)


def fit(module, train, valid=None, **options):
    """Train a module with Lightning's own Trainer, and return the trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        trainer = pl.Trainer(**{"accelerator": "cpu", "num_sanity_val_steps": 0, "devices": 1, **quiet, **options})
        trainer.fit(module, train, valid)
    return trainer
