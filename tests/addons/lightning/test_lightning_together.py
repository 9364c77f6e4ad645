"""A LightningModule with each add-on: the weights of a plain task with the same add-on and options."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F

from kit import hand
from kit.table import TABLE, Task
from zae.addons import (
    HuggingFaceAddon,
    MLflowLoggerAddon,
    NeptuneLoggerAddon,
    TorchMetricsAddon,
    TrackioLoggerAddon,
    WandBLoggerAddon,
)
from zae.addons.lightning import task_of

# Clients of loggers see a record alike, whatever makes it; a HuggingFaceAddon makes the steps itself.
ELSEWHERE = (HuggingFaceAddon, MLflowLoggerAddon, NeptuneLoggerAddon, TrackioLoggerAddon, WandBLoggerAddon)


class Wrapped(pl.LightningModule):
    """The network of the table, with the optimizer and the metric of its task."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.mark.sample(count=8)
@pytest.mark.parametrize("entry", [each for each in TABLE if each.add_on not in ELSEWHERE], ids=lambda entry: entry.id)
def test_the_weights_are_those_of_a_task(entry, tmp_path):
    """Two epochs, with clipping and a validation; what the averages of an EMA or the best epoch are too."""
    kept = []
    for kind in ("task", "module"):
        network = hand.network(1)
        options = {**entry.biting(tmp_path / kind), "gradient_clip": 0.5, "seed": 0, "log_bar": False}
        if entry.add_on is TorchMetricsAddon:  # In an evaluation the module returns nothing, and logs by itself.
            options["torch_metrics_splits"] = ("train",)
        (tmp_path / kind).mkdir(exist_ok=True)
        if kind == "task":
            made = torch.optim.AdamW(network.parameters(), lr=0.05)
            trainer = Task.add_on(entry.add_on)(network, "cpu", optimizer=made, **options)
        else:
            trainer = task_of(Wrapped).add_on(entry.add_on)(Wrapped(network), "cpu", **options)
        metrics = trainer.run(2, hand.loader(), hand.loader(seed=9, shuffle=False))
        steps = metrics["step"], metrics["stop_reason"]
        kept.append((network.state_dict(), [row["valid_loss"] for row in metrics["valid_metrics_history"]], steps))
    (weights, losses, steps), (found, found_losses, found_steps) = kept
    assert found_steps == steps
    assert found_losses == pytest.approx(losses, abs=1e-6)
    for name, value in weights.items():
        assert torch.equal(value, found[name]), name
