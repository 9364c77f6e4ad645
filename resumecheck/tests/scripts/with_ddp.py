"""Digits with DistributedDataParallel, started by torchrun: rank 0 saves after each epoch, every rank loads.

Each rank seeds the random numbers of an epoch anew, so that none has to be saved.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = "snapshot.pt"
EPOCHS = 4


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first_epoch = 0
    if os.path.exists(CHECKPOINT):
        snapshot = torch.load(CHECKPOINT)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first_epoch = snapshot["epoch"] + 1
    model = DistributedDataParallel(model)

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        torch.manual_seed(1000 * epoch + rank)
        for images, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
        if rank == 0:
            snapshot = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(snapshot, CHECKPOINT + ".new")
            os.replace(CHECKPOINT + ".new", CHECKPOINT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
