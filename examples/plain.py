"""No add-on: the trainer beside the manual loop, whose weights are bitwise the same."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer


class Digits(Trainer):
    def train_step(self, batch):
        images, labels = batch
        return {"loss": F.cross_entropy(self.model(images), labels)}

    def test_step(self, batch):
        images, labels = batch
        return {"accuracy": (self.model(images).argmax(1) == labels).float().mean()}


def parts():
    """The same loaders, model, optimizer and scheduler each time."""
    pixels, labels = load_digits(return_X_y=True)
    images, labels = (
        torch.tensor(pixels / 16, dtype=torch.float32),
        torch.tensor(labels),
    )
    torch.manual_seed(0)
    train = DataLoader(
        TensorDataset(images[:1400], labels[:1400]), batch_size=32, shuffle=True
    )
    test = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=200)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return (
        train,
        test,
        model,
        optimizer,
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    )


def by_hand():
    train, _, model, optimizer, scheduler = parts()
    torch.manual_seed(1)
    model.train()
    for _ in range(10):
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return model


def by_trainer():
    train, test, model, optimizer, scheduler = parts()
    trainer = Digits(
        model,
        "cpu",
        optimizer=optimizer,
        scheduler=scheduler,
        gradient_clip=1.0,
        seed=1,
    )
    trainer.run(10, train, test)  # It validates each epoch, which changes nothing.
    return model


def main():
    # Bitwise for any number of threads, as long as it stays the same.
    torch.set_num_threads(1)
    hand, model = by_hand(), by_trainer()
    for (name, a), b in zip(hand.state_dict().items(), model.state_dict().values()):
        assert torch.equal(a, b), f"{name} differs"
    print(
        f"{sum(p.numel() for p in model.parameters())} weights, bitwise equal to those "
        "of the hand-written loop"
    )


if __name__ == "__main__":
    main()
