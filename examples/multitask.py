"""Several tasks with one body: the digit of one image, and whether another one is even; each task has a weight."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, StackDataset, TensorDataset

from zae import Trainer


class MultiTask(Trainer):
    def __init__(self, *args, task_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.task_weights = task_weights

    def train_step(self, batch):
        metrics = {"loss": 0.0}
        for task, (images, labels) in batch.items():
            logits = self.model[task](self.model["body"](images).relu())
            metrics[f"{task}_loss"] = cross_entropy(logits, labels)
            metrics[f"{task}_accuracy"] = (logits.argmax(1) == labels).float().mean()
            metrics["loss"] = metrics["loss"] + self.task_weights[task] * metrics[f"{task}_loss"]
        return metrics

    test_step = train_step


if __name__ == "__main__":
    torch.manual_seed(0)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, sets = pixels.float() / 16, []
    for rows in torch.randperm(len(labels)).split(1437):  # One part to train on, one to test.
        others = rows[torch.randperm(len(rows))]
        parity = TensorDataset(images[others], labels[others] % 2)
        sets.append(StackDataset(digit=TensorDataset(images[rows], labels[rows]), parity=parity))
    model = nn.ModuleDict({"body": nn.Linear(64, 256), "digit": nn.Linear(256, 10), "parity": nn.Linear(256, 2)})
    trainer = MultiTask(model, optimizer=torch.optim.AdamW, task_weights={"digit": 1.0, "parity": 0.5})
    best = trainer.run(20, DataLoader(sets[0], 64, shuffle=True), DataLoader(sets[1], 256))["best_valid"]
    print(f"digit: test accuracy {best['digit_accuracy']:.3f}\nparity: test accuracy {best['parity_accuracy']:.3f}")
