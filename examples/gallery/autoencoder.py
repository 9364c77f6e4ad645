"""An autoencoder compresses digits of 64 pixels to 6 numbers, and loses less than
principal components do.

`trainer.predict` returns what is left of the test digits.
"""

from functools import partial
from pathlib import Path

import torch
from matplotlib.image import imsave
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from zae import Trainer
from zae.addons import JSONLLoggerAddon
from zae.schedulers import cosine

SIZE = 6  # Numbers in the code of a digit.


class Autoencoder(Trainer):
    def train_step(self, batch):
        (images,) = batch
        return {"loss": nn.functional.mse_loss(self.model(images), images)}

    test_step = train_step

    def predict_step(self, batch):
        return {"images": batch[0], "decoded": self.model(batch[0])}


def network():
    encoder = (
        nn.Linear(64, 256),
        nn.GELU(),
        nn.Linear(256, 128),
        nn.GELU(),
        nn.Linear(128, SIZE),
    )
    decoder = (
        nn.Linear(SIZE, 128),
        nn.GELU(),
        nn.Linear(128, 256),
        nn.GELU(),
        nn.Linear(256, 64),
        nn.Sigmoid(),
    )
    return nn.Sequential(nn.Sequential(*encoder), nn.Sequential(*decoder))


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    sets = random_split(
        TensorDataset(images), [1200, 200, 397], torch.Generator().manual_seed(0)
    )
    train, valid, test = (
        DataLoader(each, 64, shuffle=each is sets[0]) for each in sets
    )
    trainer = Autoencoder.add_on(JSONLLoggerAddon)(
        network,
        "cpu",
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        scheduler=cosine(warmup=0.1),
        seed=0,
        jsonl_path="runs/autoencoder.jsonl",
    )
    trainer.run(60, train, valid)
    shown = trainer.predict(test)
    originals, decoded = (
        torch.as_tensor(shown["images"]),
        torch.as_tensor(shown["decoded"]),
    )
    components = PCA(SIZE).fit(images[sets[0].indices])
    restored = torch.tensor(
        components.inverse_transform(components.transform(originals))
    )
    for name, guess in (("principal components", restored), ("autoencoder", decoded)):
        print(
            f"{name}: mean squared error {(guess - originals).square().mean():.4f} on "
            "the test digits"
        )
    rows = torch.stack([originals[:16], decoded[:16], restored[:16].float()]).view(
        3, 16, 8, 8
    )
    sheet = (
        nn.functional.pad(rows, (1, 1, 1, 1))
        .transpose(1, 2)
        .reshape(30, 160)
        .clamp(0, 1)
    )
    imsave("runs/autoencoder.png", sheet.kron(torch.ones(4, 4)).numpy(), cmap="gray_r")
    print(
        "digits, what the autoencoder and what the components make of them: "
        f"{Path('runs/autoencoder.png')}"
    )


if __name__ == "__main__":
    main()
