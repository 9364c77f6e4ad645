"""A LightningModule on two ranks gets the weights and metrics of one process with the batches of both."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from kit.lightning_modules import Autoencoder, Classifier, batches, build, fit
from kit.ranks import each_rank
from zae.addons import FSDPAddon, MultiGPUAddon
from zae.addons.lightning import task_of


class Independent(Classifier):
    """Without batch norm, whose statistics would depend on the number of ranks."""

    def __init__(self):
        super().__init__()
        self.model[1] = nn.Identity()


class Plateau(Autoencoder):
    """Waits for a metric that each rank logs of its own batches."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0]), batch_size=len(batch[0]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


def train(kind, add_on):
    """Train on two ranks."""
    assert dist.get_world_size() == 2
    warnings.simplefilter("ignore")  # Torch's own of FSDP on CPUs.
    module = build(kind)
    trainer = task_of(kind).add_on(add_on)(module, ["cpu", "cpu"], log_bar=False)
    trainer.run(3, batches(8, samples=33), batches(20, samples=50))
    assert trainer.world_size == 2
    weights = {key: value.full_tensor() if hasattr(value, "full_tensor") else value
               for key, value in module.state_dict().items()}  # fmt: skip
    return {key: value.detach().clone() for key, value in weights.items()}, dict(trainer.callback_metrics)


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("add_on", [MultiGPUAddon, FSDPAddon])
@pytest.mark.parametrize("kind", [Independent, Plateau])
def test_two_ranks_are_one_process(kind, add_on):
    """The last batch leaves a rank without samples, and one of the validation's too."""
    theirs = build(kind)
    trainer = fit(theirs, batches(16, samples=33), batches(20, samples=50), max_epochs=3)
    for weights, metrics in each_rank(2, train, kind, add_on):
        for name, value in theirs.state_dict().items():
            assert torch.allclose(weights[name].float(), value.float(), rtol=0, atol=1e-6), name
        for name, value in trainer.callback_metrics.items():
            by_step = name.endswith("_step") or (name == "train_loss" and kind is Plateau)
            if not by_step:  # Else it is of the last batch of each rank.
                assert float(metrics[name]) == pytest.approx(float(value), abs=2e-6), name


class Synced(Independent):
    """Logs in each step what differs between the ranks."""

    def training_step(self, batch, batch_idx):
        own = float(self.global_rank + 1)
        self.log("mean", own, sync_dist=True)
        self.log("both", own, on_epoch=True, sync_dist=True)
        self.log("sum", own, sync_dist=True, reduce_fx="sum")
        self.log("most", own, sync_dist=True, reduce_fx="max")
        self.log("own", own)
        return super().training_step(batch, batch_idx)


def train_synced(add_on, samples):
    """Train on two ranks."""
    warnings.simplefilter("ignore")
    trainer = task_of(Synced).add_on(add_on)(build(Synced), ["cpu", "cpu"], log_bar=False)
    trainer.run(1, batches(8, samples=samples))
    found = trainer.callback_metrics
    return [float(found[name]) for name in ("mean", "both_step", "sum", "most", "own", "both")]


@pytest.mark.parametrize("add_on", [MultiGPUAddon, FSDPAddon])
def test_a_value_of_a_step_is_that_of_all_ranks_with_sync_dist(add_on):
    """The second rank has no samples in the last batch of 33."""
    first, second = each_rank(2, train_synced, add_on, 32)
    assert first[:5] == [1.5, 1.5, 3.0, 2.0, 1.0]
    assert second[:5] == [1.5, 1.5, 3.0, 2.0, 2.0]
    assert first[5] == second[5] == 1.5
    first, second = each_rank(2, train_synced, add_on, 33)
    assert first[:4] == second[:4] == [1.0, 1.0, 1.0, 1.0]
    assert first[5] == second[5] == pytest.approx((17 + 2 * 16) / 33)
