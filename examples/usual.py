"""A usual run: three sets, mixed precision, averaged weights, accumulation, a schedule,
a log, and a resume."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import zae
from zae.addons import (
    AMPAddon,
    EMAAddon,
    GradientAccumulationAddon,
    JSONLLoggerAddon,
    StateManagerAddon,
)


class Digits(zae.Trainer):
    def train_step(self, batch):
        images, labels = batch
        logits = self.model(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

    test_step = train_step


def make_model():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
sets = random_split(digits, [0.7, 0.15, 0.15], torch.Generator().manual_seed(0))
train = DataLoader(sets[0], batch_size=32, shuffle=True)
valid, test = DataLoader(sets[1], batch_size=32), DataLoader(sets[2], batch_size=32)

Task = Digits.add_on(
    AMPAddon, EMAAddon, GradientAccumulationAddon, JSONLLoggerAddon, StateManagerAddon
)
trainer = Task(
    make_model,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=4e-3),
    scheduler=zae.schedulers.cosine(warmup=0.05),  # as long as the run
    gradient_clip=1.0,
    seed=0,
    monitor="accuracy",  # the metric of `valid` that decides which epoch is best
    precision="auto",  # AMPAddon: bfloat16 where the processor has it
    decay=0.98,  # EMAAddon: validation uses averaged weights
    gradient_accumulation_steps=2,  # GradientAccumulationAddon
    jsonl_path="runs/usual/log.jsonl",  # JSONLLoggerAddon
    save_path="runs/usual",  # StateManagerAddon: a checkpoint after each epoch
    resume="auto",  # StateManagerAddon: continue from the newest one
)
metrics = trainer.run(20, train, valid)
trainer.restore_best()
print(metrics["best_valid"]["epoch"], trainer.evaluate(test)["accuracy"])
