"""Digits with zae: a checkpoint each 10 steps, and ``resume="auto"``."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zae import Trainer
from zae.addons import StateManagerAddon


class Digits(Trainer):
    def train_step(self, batch):
        images, labels = batch
        return {"loss": nn.functional.cross_entropy(self.model(images), labels)}

    test_step = train_step


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


if __name__ == "__main__":
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    Task = Digits.add_on(StateManagerAddon)
    trainer = Task(
        make_model, optimizer=torch.optim.AdamW, seed=0, save_path="checkpoints", save_every=10, resume="auto"
    )
    trainer.run(3, loader)
