"""A network learns features of digits without labels, by finding the two views of an
image in a batch (SimCLR).

A linear probe on these features then needs fewer labels than one on the pixels: both
are given the same hundred.
"""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import EMAAddon, JSONLLoggerAddon
from zae.schedulers import cosine


def view(images):
    """Turn, scale and shift each image by a random amount, and add noise."""
    n = len(images)
    angle, scale = 0.25 * torch.randn(n), 1 + 0.15 * torch.randn(n)
    matrix = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(
        n, 2, 2
    ) * scale.view(n, 1, 1)
    matrix = torch.cat([matrix, 0.15 * torch.randn(n, 2, 1)], 2)
    grid = F.affine_grid(matrix, images.shape, align_corners=False)
    return F.grid_sample(images, grid, align_corners=False) + 0.1 * torch.randn_like(
        images
    )


class Contrast(Trainer):
    def train_step(self, batch):
        (images,) = batch
        both = F.normalize(self.model(torch.cat([view(images), view(images)])))
        # NT-Xent, with a temperature of 0.2.
        similar = (both @ both.T / 0.2).fill_diagonal_(-torch.inf)
        partner = torch.arange(len(both)).roll(len(images))
        return {
            "loss": F.cross_entropy(similar, partner),
            "found": (similar.argmax(1) == partner).float().mean(),
        }

    test_step = train_step

    def predict_step(self, batch):
        return self.model[0](batch[0])  # The features below the projection.


def network():
    body = (
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
    )
    body = nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU())
    return nn.Sequential(body, nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    # The rest is the test.
    train, valid = TensorDataset(images[:1200]), TensorDataset(images[1200:1400])
    trainer = Contrast.add_on(EMAAddon, JSONLLoggerAddon)(
        network,
        "cpu",
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        scheduler=cosine(warmup=0.1),
        seed=0,
        decay=0.98,
        jsonl_path="runs/contrastive.jsonl",
    )
    trainer.run(30, DataLoader(train, 200, shuffle=True), DataLoader(valid, 200))
    features = {
        "pixels": pixels / 16,
        "features": trainer.predict(DataLoader(TensorDataset(images), 500))["output"],
    }
    for name, x in features.items():
        probe = LogisticRegression(max_iter=1000).fit(x[:100], labels[:100])
        print(
            f"a linear probe of {name}, with 100 labels: test accuracy "
            f"{probe.score(x[1400:], labels[1400:]):.3f}"
        )


if __name__ == "__main__":
    main()
