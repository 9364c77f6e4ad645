"""Predict how diabetes progresses from ten measurements, with the mean of the weights
of thirty epochs (SWA).

Each patient is predicted by a network that has not seen them (five folds), and by a
ridge regression in the same way.
"""

from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold, train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Every, Trainer
from zae.addons import EMAAddon, JSONLLoggerAddon


class Regression(Trainer):
    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": nn.functional.mse_loss(self.model(inputs), targets)}

    test_step = train_step

    def predict_step(self, batch):
        return self.model(batch[0])


def network():
    return nn.Sequential(
        nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
    )


def fit(data, train, valid, weight_decay, fold):
    sets = (TensorDataset(*(each[part] for each in data)) for part in (train, valid))
    trainer = Regression.add_on(EMAAddon, JSONLLoggerAddon)(
        network,
        "cpu",
        optimizer=partial(torch.optim.SGD, lr=0.05, weight_decay=weight_decay),
        seed=fold,
        averaging="uniform",
        average_start=10,
        jsonl_path=f"runs/fold-{fold}-{weight_decay:g}.jsonl",
    )
    train_loader, valid_loader = (DataLoader(each, 64, shuffle=True) for each in sets)
    best = trainer.run(40, train_loader, valid_loader, valid_every=Every(epochs=40))[
        "best_valid"
    ]
    return best["loss"], trainer


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    inputs, targets = load_diabetes(return_X_y=True, scaled=False)
    guesses = {
        "network": np.zeros(len(targets)),
        "ridge regression": np.zeros(len(targets)),
    }
    for fold, (rest, test) in enumerate(
        KFold(5, shuffle=True, random_state=0).split(inputs)
    ):
        train, valid = train_test_split(rest, test_size=0.2, random_state=0)
        x, y = (
            (each - each[train].mean(0)) / each[train].std(0)
            for each in (inputs, targets)
        )
        data = (
            torch.tensor(x, dtype=torch.float32),
            torch.tensor(y, dtype=torch.float32)[:, None],
        )
        # Both choose how much they are held back by the same patients of the
        # validation.
        _, trainer = min(
            (fit(data, train, valid, decay, fold) for decay in (0.01, 0.1)),
            key=lambda pair: pair[0],
        )
        ridges = [
            Ridge(alpha).fit(x[train], y[train]) for alpha in (1, 3, 10, 30, 100, 300)
        ]
        ridge = max(ridges, key=lambda each: each.score(x[valid], y[valid]))
        outputs = trainer.predict(DataLoader(TensorDataset(data[0][test]), 100))[
            "output"
        ]
        for name, each in (
            ("network", np.asarray(outputs)[:, 0]),
            ("ridge regression", ridge.predict(x[test])),
        ):
            guesses[name][test] = each * targets[train].std() + targets[train].mean()
    for name, each in guesses.items():
        print(f"{name}: R2 {r2_score(targets, each):.3f} over {len(targets)} patients")


if __name__ == "__main__":
    main()
