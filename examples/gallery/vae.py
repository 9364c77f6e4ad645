"""A variational autoencoder draws digits: an encoder says where in a space of eight
numbers an image may lie, and a decoder draws what lies there.

The score is the evidence lower bound (Kingma & Welling 2014, equation 3) of held-out
digits. After each epoch sixteen digits are drawn from the same noise.
"""

from functools import partial
from pathlib import Path

import torch
from matplotlib.image import imsave
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    pad,
)
from torch.utils.data import DataLoader, random_split

from zae import Trainer
from zae.addons import JSONLLoggerAddon, StateManagerAddon


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        place = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(place), mean, log_variance


class DrawDigits(Trainer):
    sheets = ()

    def train_step(self, images):
        logits, mean, log_variance = self.model(images)
        pixels = binary_cross_entropy_with_logits(logits, images, reduction="sum")
        latent = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        return {"loss": (pixels + latent) / len(images), "latent": latent / len(images)}

    test_step = train_step

    def on_validation_end(self, metrics):
        super().on_validation_end(metrics)
        # A generator of its own: training draws the same numbers without pictures.
        noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        digits = self.model.decoder(noise).sigmoid()
        tiles = pad(digits.view(16, 8, 8), (1, 1, 1, 1))
        sheet = tiles.transpose(0, 1).reshape(10, 160)
        # Saved in each checkpoint, as all that training changes.
        self.sheets += (sheet,)


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    images = torch.tensor(load_digits().data / 16).float()
    split = torch.Generator().manual_seed(0)
    train, valid, test = random_split(images, [0.7, 0.15, 0.15], generator=split)
    loaders = [
        DataLoader(part, 64, shuffle=part is train) for part in (train, valid, test)
    ]
    trainer = DrawDigits.add_on(StateManagerAddon, JSONLLoggerAddon)(
        VAE,
        "cpu",
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        seed=0,
        save_path="runs/vae",
        resume="auto",
        jsonl_path="runs/vae.jsonl",
    )
    trainer.run(60, *loaders[:2])
    bound = trainer.evaluate(loaders[2])["loss"]
    brightness = images[train.indices].mean(0).expand(len(test), 64)
    alone = binary_cross_entropy(
        brightness, images[test.indices], reduction="sum"
    ) / len(test)
    print(f"test: {bound:.2f} nats per digit; pixels one by one: {alone:.2f}")
    chosen = [trainer.sheets[epoch] for epoch in (0, 1, 3, 7, 15, 31, 59)]
    Path("runs").mkdir(exist_ok=True)
    sheet = torch.cat(chosen).kron(torch.ones(4, 4))
    imsave("runs/vae.png", sheet.detach().numpy(), cmap="gray_r", vmin=0, vmax=1)
    print("digits drawn after 1, 2, 4, 8, 16, 32 and 60 epochs: runs/vae.png")


if __name__ == "__main__":
    main()
