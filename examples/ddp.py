"""Digits on two ranks, started by this script or by torchrun.

python examples/ddp.py
torchrun --nproc_per_node 2 examples/ddp.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import MultiGPUAddon


class Digits(Trainer):
    """A classifier of digits of 8 by 8 points."""

    def train_step(self, batch):
        images, labels = batch
        return {"loss": nn.functional.cross_entropy(self.model(images), labels)}

    def test_step(self, batch):
        images, labels = batch
        output = self.model(images)
        return {
            "loss": nn.functional.cross_entropy(output, labels),
            "accuracy": accuracy(output, labels),
        }

    def on_run_begin(self):
        super().on_run_begin()
        if self.is_main:
            print(f"world size {self.world_size}", flush=True)


def accuracy(output, labels):
    return (output.argmax(dim=1) == labels).float().mean()


def main():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = torch.utils.data.random_split(
        data, [1437, 360], torch.Generator().manual_seed(0)
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    count = torch.cuda.device_count()
    devices = (
        [f"cuda:{index}" for index in range(count)] if count > 1 else ["cpu", "cpu"]
    )

    trainer = Digits.add_on(MultiGPUAddon)(model, devices, optimizer=optimizer, seed=0)
    loader = DataLoader(
        train, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    trainer.run(10, loader)

    # Under torchrun on all ranks, each sample once.
    metrics = trainer.evaluate(DataLoader(test, batch_size=120))
    if trainer.is_main:
        print(f"test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
