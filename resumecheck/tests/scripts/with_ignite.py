"""Digits with ignite: ``Checkpoint`` after each epoch, and ``Checkpoint.load_objects``.

``--deterministic`` takes ``DeterministicEngine`` instead of ``Engine``.
"""

import argparse
from pathlib import Path

import torch
from ignite.engine import DeterministicEngine, Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.utils import manual_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()

    manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))

    def train_step(engine, batch):
        images, targets = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        return loss.item()

    trainer = DeterministicEngine(train_step) if args.deterministic else Engine(train_step)
    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    handler = Checkpoint(to_save, DiskSaver("checkpoints", require_empty=False), n_saved=2)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)

    found = sorted(Path("checkpoints").glob("checkpoint_*.pt"), key=lambda path: int(path.stem.split("_")[-1]))
    if found:
        checkpoint = torch.load(found[-1], weights_only=False)
        Checkpoint.load_objects(to_load=to_save, checkpoint=checkpoint)
    trainer.run(loader, max_epochs=3)


if __name__ == "__main__":
    main()
