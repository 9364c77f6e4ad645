"""Digits with Transformers' Trainer: a checkpoint each 10 steps, and ``resume_from_checkpoint=True``."""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Digits(Dataset):
    def __init__(self):
        pixels, self.labels = load_digits(return_X_y=True)
        self.pixels = torch.tensor(pixels / 16, dtype=torch.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixels": self.pixels[index], "labels": int(self.labels[index])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, pixels, labels):
        logits = self.net(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main():
    torch.manual_seed(0)
    args = TrainingArguments(
        "checkpoints",
        num_train_epochs=3,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        save_steps=10,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(Net(), args, train_dataset=Digits())
    has_checkpoint = os.path.isdir("checkpoints") and get_last_checkpoint("checkpoints") is not None
    trainer.train(resume_from_checkpoint=has_checkpoint)


if __name__ == "__main__":
    main()
