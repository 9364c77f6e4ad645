"""Train two convolutional networks against each other: the program of
pytorch/examples/dcgan, written anew for digits, by hand and with zae."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from zae import Trainer
from zae.addons import StateManagerAddon

EPOCHS = 4


def make_loader():
    images = torch.tensor(load_digits().images / 8 - 1).float()[:, None]
    return DataLoader(images, batch_size=64, shuffle=True)


def make_model():
    torch.manual_seed(1)
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 32, 4),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4),
        nn.Flatten(0),
    )
    return nn.ModuleDict({"discriminator": discriminator, "generator": generator})


def make_optimizers(model):
    return {
        name: torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999))
        for name, part in model.items()
    }


def loss_of(scores, is_real):
    targets = torch.full_like(scores, float(is_real))
    return binary_cross_entropy_with_logits(scores, targets)


def by_hand():
    model = make_model()
    discriminator, generator = model["discriminator"], model["generator"]
    optimizers = make_optimizers(model)
    train = make_loader()
    for epoch in range(EPOCHS):
        for step, real in enumerate(train):
            optimizers["discriminator"].zero_grad()
            fake = generator(torch.randn(len(real), 32, 1, 1))
            loss = loss_of(discriminator(real), True)
            loss = loss + loss_of(discriminator(fake.detach()), False)
            loss.backward()
            optimizers["discriminator"].step()
            optimizers["generator"].zero_grad()
            loss_of(discriminator(fake), True).backward()
            optimizers["generator"].step()
            if step % 10 == 0:
                print(f"epoch {epoch}, step {step}, loss {loss.item():.4f}")
    return model


class Dcgan(Trainer):
    def train_step(self, real):
        discriminator = self.model["discriminator"]
        self.fake = self.model["generator"](torch.randn(len(real), 32, 1, 1))
        loss = loss_of(discriminator(real), True)
        loss = loss + loss_of(discriminator(self.fake.detach()), False)
        return {"loss": {"discriminator": loss}}

    def step_one(self, optimizer):
        if optimizer is self.optimizers["generator"]:
            optimizer.zero_grad()
            loss_of(self.model["discriminator"](self.fake), True).backward()
        return super().step_one(optimizer)


def with_zae(folder):
    model = make_model()
    trainer = Dcgan.add_on(StateManagerAddon)(
        model,
        "cpu",
        optimizer=make_optimizers(model),
        save_path=folder,
        save_every=5,
        resume="auto",
    )
    trainer.run(EPOCHS, make_loader())
    return model


if __name__ == "__main__":
    torch.save(with_zae(sys.argv[1]).state_dict(), sys.argv[2])
