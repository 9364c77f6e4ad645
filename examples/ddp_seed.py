"""A linear model on a made-up dataset, one rank a GPU; without GPUs two ranks on the
CPU.

python examples/ddp_seed.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

from zae import Trainer
from zae.addons.mpu import MultiGPUAddon
from zae.schedulers import CosineAnnealingScheduler


class DummyDataset(Dataset):
    def __init__(self, size):
        self.data = torch.rand(size, 10)
        self.labels = (self.data.mean(dim=1) > 0.5).long()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        return self.data[idx], self.labels[idx]


class MultiGPUTrainer(Trainer.add_on(MultiGPUAddon)):
    def train_step(self, batch):
        data, labels = batch
        outputs = self.model(data)
        loss = nn.CrossEntropyLoss()(outputs, labels)
        return {"loss": loss}

    def test_step(self, batch):
        return self.train_step(batch)


def main():
    device_list = [torch.device(f"cuda:{i}") for i in range(torch.cuda.device_count())]
    if len(device_list) < 2:
        device_list = ["cpu", "cpu"]

    dataset = DummyDataset(1000)
    train_loader = DataLoader(dataset, batch_size=32, shuffle=True)

    model = nn.Linear(10, 2)
    optimizer = optim.Adam(model.parameters(), lr=0.001)
    scheduler = CosineAnnealingScheduler(optimizer=optimizer, total_iters=100)

    trainer = MultiGPUTrainer(
        model=model,
        device=device_list,
        mode="train",
        optimizer=optimizer,
        scheduler=scheduler,
        init_method="tcp://localhost:12355",
    )

    trainer.run(n_epoch=10, loader=train_loader)
    path = Path("runs/dummy_model_mgpu.pth")
    path.parent.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path)
    print(f"Model saved as '{path}'.")


if __name__ == "__main__":
    main()
