"""Classify images with two convolutions: the program of pytorch/examples/mnist, written
anew for the digits of scikit-learn, by hand and with zae."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import nll_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import StateManagerAddon

EPOCHS = 6


def make_loaders():
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().view(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    train = TensorDataset(images[:1400], labels[:1400])
    held_out = [(images[1400:], labels[1400:])]
    return DataLoader(train, batch_size=64, shuffle=True), held_out


def make_model():
    torch.manual_seed(1)
    features = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
    )
    head = nn.Sequential(
        nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(256, 128), nn.ReLU()
    )
    return nn.Sequential(
        features, head, nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1)
    )


def by_hand():
    model = make_model()
    train, held_out = make_loaders()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(EPOCHS):
        model.train()
        for step, (images, labels) in enumerate(train):
            optimizer.zero_grad()
            loss = nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch}, step {step}, loss {loss.item():.4f}")
        model.eval()
        loss = right = count = 0
        with torch.no_grad():
            for images, labels in held_out:
                scores = model(images)
                loss += nll_loss(scores, labels, reduction="sum").item()
                right += (scores.argmax(1) == labels).sum().item()
                count += len(labels)
        print(f"epoch {epoch}: loss {loss / count:.4f}, accuracy {right / count:.4f}")
        schedule.step()
    return model


class Mnist(Trainer):
    def train_step(self, batch):
        images, labels = batch
        return {"loss": nll_loss(self.model(images), labels)}

    def test_step(self, batch):
        images, labels = batch
        scores = self.model(images)
        accuracy = (scores.argmax(1) == labels).float().mean()
        return {"loss": nll_loss(scores, labels), "accuracy": accuracy}


def with_zae(folder):
    model = make_model()
    train, held_out = make_loaders()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    trainer = Mnist.add_on(StateManagerAddon)(
        model,
        "cpu",
        optimizer=optimizer,
        scheduler=StepLR(optimizer, step_size=1, gamma=0.7),
        save_path=folder,
        save_every=5,
        resume="auto",
    )
    trainer.run(EPOCHS, train, held_out)
    return model


if __name__ == "__main__":
    torch.save(with_zae(sys.argv[1]).state_dict(), sys.argv[2])
