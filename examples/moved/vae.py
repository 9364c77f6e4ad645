"""Train a variational autoencoder and draw samples after each epoch: the program of
pytorch/examples/vae, written anew for digits, by hand and with zae."""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import StateManagerAddon

EPOCHS = 10


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 200), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(200, 20), nn.Linear(200, 20)
        self.decoder = nn.Sequential(
            nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 64), nn.Sigmoid()
        )

    def forward(self, images):
        hidden = self.encoder(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = torch.randn_like(mean)
        drawn = self.decoder(mean + noise * (0.5 * log_variance).exp())
        return drawn, mean, log_variance


def loss_of(images, drawn, mean, log_variance):
    error = binary_cross_entropy(drawn, images, reduction="sum")
    distance = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    return error + distance


def make_loader():
    pixels = torch.tensor(load_digits().data / 16).float()
    return DataLoader(TensorDataset(pixels), batch_size=128, shuffle=True)


def make_model():
    torch.manual_seed(1)
    return VAE()


def draw(model, path):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 20, generator=generator)
    torch.save(model.decoder(noise), path)


def by_hand(folder="runs/moved"):
    model = make_model()
    train = make_loader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for epoch in range(EPOCHS):
        model.train()
        total = count = 0
        for (images,) in train:
            optimizer.zero_grad()
            loss = loss_of(images, *model(images))
            loss.backward()
            optimizer.step()
            total += loss.item()
            count += len(images)
        print(f"epoch {epoch}: loss {total / count:.4f}")
        model.eval()
        with torch.no_grad():
            draw(model, Path(folder, f"sample-{epoch + 1}.pt"))
    return model


class Vae(Trainer):
    def train_step(self, batch):
        (images,) = batch
        return {"loss": loss_of(images, *self.model(images))}

    def on_epoch_end(self):
        super().on_epoch_end()
        with self.averaged():
            path = Path(self.save_path, f"sample-{self.progress_checker.epoch}.pt")
            draw(self.model, path)


def with_zae(folder):
    model = make_model()
    trainer = Vae.add_on(StateManagerAddon)(
        model,
        "cpu",
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        save_path=folder,
        save_every=5,
        resume="auto",
    )
    trainer.run(EPOCHS, make_loader())
    return model


if __name__ == "__main__":
    torch.save(with_zae(sys.argv[1]).state_dict(), sys.argv[2])
