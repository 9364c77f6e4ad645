"""Search with optuna for the options of a classifier that has only 200 digits to learn
from.

Each of 12 trials is a run of its own, scored by its best validation; trials that fall
behind are given up early.
"""

from functools import partial

import optuna
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from zae import Trainer
from zae.addons import EMAAddon, JSONLLoggerAddon
from zae.search import PruningAddon, search


class Digits(Trainer):
    def train_step(self, batch):
        images, labels = batch
        logits = self.model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}

    test_step = train_step


def build(task, options, folder, **more):
    def network():
        convolution = (
            nn.Conv2d(1, options["width"], 3, padding=1),
            nn.BatchNorm2d(options["width"]),
            nn.ReLU(),
        )
        head = (
            nn.Flatten(),
            nn.Dropout(options["dropout"]),
            nn.Linear(options["width"] * 16, 10),
        )
        return nn.Sequential(*convolution, nn.MaxPool2d(2), *head)

    return task(
        network,
        "cpu",
        optimizer=partial(
            torch.optim.AdamW, lr=options["lr"], weight_decay=options["weight_decay"]
        ),
        seed=0,  # The same for all trials, so that they differ by their options alone.
        decay=0.95,
        jsonl_path=f"{folder}/log.jsonl",
        **more,
    )


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pixels, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(
        range(len(labels)), test_size=1000, stratify=labels, random_state=0
    )
    train, valid = train_test_split(
        rest, train_size=200, test_size=100, stratify=labels[rest], random_state=0
    )
    images, targets = (
        torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8),
        torch.tensor(labels),
    )
    sets = [TensorDataset(images[part], targets[part]) for part in (train, valid, test)]
    train_loader, valid_loader, test_loader = (
        DataLoader(each, 25, shuffle=each is sets[0]) for each in sets
    )

    def objective(trial):
        options = {
            "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-3, 1.0, log=True),
            "dropout": trial.suggest_float("dropout", 0.0, 0.6),
            "width": trial.suggest_categorical("width", [8, 16, 32]),
        }
        task = Digits.add_on(PruningAddon, EMAAddon, JSONLLoggerAddon)
        trainer = build(
            task, options, f"runs/search/{trial.number}", optuna_trial=trial
        )
        trainer.run(15, train_loader, valid_loader)
        return trainer.history.best["score"]

    study = search(
        objective,
        n_trials=12,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=24),
        folder="runs/search",
        seed=0,
    )
    for trial in study.trials:
        params = ", ".join(
            f"{name}={value:.4g}" for name, value in trial.params.items()
        )
        print(f"{trial.number:2} {trial.state.name:8} {trial.value:.4f}  {params}")
    print(f"best: trial {study.best_trial.number}")
    # The best options train once more, with the digits of the validation.
    both = ConcatDataset(sets[:2])
    task = Digits.add_on(EMAAddon, JSONLLoggerAddon)
    trainer = build(task, study.best_params, "runs/best")
    trainer.run(15, DataLoader(both, 25, shuffle=True))
    x, y = pixels[train + valid], labels[train + valid]
    baseline = (
        LogisticRegression(max_iter=1000).fit(x, y).score(pixels[test], labels[test])
    )
    accuracy = trainer.evaluate(test_loader)["accuracy"]
    print(
        f"test accuracy with the best options: {accuracy:.3f}; logistic regression: "
        f"{baseline:.3f}"
    )


if __name__ == "__main__":
    main()
