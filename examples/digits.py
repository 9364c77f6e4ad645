"""Handwritten digits: mixed precision, early stopping, a log, and checkpoints that a
second start resumes from."""

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import AMPAddon, EarlyStoppingAddon, JSONLLoggerAddon, StateManagerAddon

FOLDER = "runs/digits"


class Digits(Trainer):
    def train_step(self, batch):
        images, labels = batch
        logits = self.model(images)
        return {
            "loss": cross_entropy(logits, labels),
            "accuracy": (logits.argmax(1) == labels).float().mean(),
        }

    # The same numbers, without gradients and in evaluation mode.
    test_step = train_step


def loaders():
    """60 % of 1797 images of 8 x 8 pixels to train, 20 % to validate, 20 % to test."""
    pixels, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    train, valid = train_test_split(
        rest, test_size=0.25, stratify=labels[rest], random_state=0
    )
    images, labels = (
        torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8),
        torch.tensor(labels),
    )
    sets = [TensorDataset(images[part], labels[part]) for part in (train, valid, test)]
    return [DataLoader(each, batch_size=32, shuffle=each is sets[0]) for each in sets]


def draw_curves(metrics, path):
    figure, best = (
        Figure(figsize=(10, 3.8), layout="constrained"),
        metrics["best_valid"],
    )
    for axis, name, scale in zip(
        figure.subplots(1, 2), ("loss", "accuracy"), ("log", "linear")
    ):
        for split, color in (("train", "#0072b2"), ("valid", "#d55e00")):
            rows = metrics[f"{split}_metrics_history"]
            axis.plot(
                [r["epoch"] for r in rows],
                [r[f"{split}_{name}"] for r in rows],
                color=color,
                lw=2,
                label=split,
            )
        axis.axvline(best["epoch"], color="0.75", lw=1, ls="--", zorder=0)
        axis.plot(
            best["epoch"],
            best[name],
            "o",
            color=color,
            label=f"best: epoch {best['epoch']}, {best[name]:.3f}",
        )
        axis.set(xlabel="epoch", title=name, yscale=scale)
        axis.grid(alpha=0.25)
        axis.legend(edgecolor="none", framealpha=1)
    figure.savefig(path, dpi=120)


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, valid, test = loaders()
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    model = nn.Sequential(
        *layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(32 * 16, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    options = {
        "precision": "auto",
        "patience": 5,
        "save_path": FOLDER,
        "resume": "auto",
    }
    Task = Digits.add_on(  # noqa: N806
        AMPAddon, EarlyStoppingAddon, JSONLLoggerAddon, StateManagerAddon
    )
    trainer = Task(
        model, optimizer=optimizer, seed=0, jsonl_path=f"{FOLDER}/log.jsonl", **options
    )
    metrics = trainer.run(40, train, valid)
    trainer.restore_best()
    draw_curves(metrics, f"{FOLDER}/curves.png")
    print(
        f"test accuracy {trainer.evaluate(test)['accuracy']:.4f}; the curves are in "
        f"{FOLDER}/curves.png"
    )
    print(f"to retrain from scratch, delete {FOLDER}")


if __name__ == "__main__":
    main()
