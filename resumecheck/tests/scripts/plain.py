"""Digits with a loop of one's own. Started again, it goes on from its last checkpoint, also within an epoch."""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, generator=order)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    scaler = torch.amp.GradScaler("cpu", growth_interval=10)

    first_epoch, first_batch = 0, 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        order.set_state(state["order"])
        torch.set_rng_state(state["random"])
        first_epoch, first_batch = state["epoch"], state["batch"]
        print(f"resumed from epoch {first_epoch}, batch {first_batch}")

    for epoch in range(first_epoch, args.epochs):
        order_of_epoch = order.get_state()
        for index, (images, targets) in enumerate(loader):
            if epoch == first_epoch and index < first_batch:
                continue
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if (index + 1) % 10 == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "scaler": scaler.state_dict(),
                    "order": order_of_epoch,
                    "random": torch.get_rng_state(),
                    "epoch": epoch,
                    "batch": index + 1,
                }
                torch.save(state, args.checkpoint + ".new")
                os.replace(args.checkpoint + ".new", args.checkpoint)
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
