"""Find the few malignant tumours among many benign ones, with a weighted loss and
metrics of torchmetrics.

Early stopping and the best checkpoint follow the balanced accuracy of the validation:
always "benign" is 0.5.
"""

from functools import partial

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryRecall, BinarySpecificity

from zae import Trainer
from zae.addons import EarlyStoppingAddon, JSONLLoggerAddon, StateManagerAddon


class Tumours(Trainer):
    def __init__(self, *args, positive_weight, **kwargs):
        super().__init__(*args, **kwargs)
        self.positive_weight = torch.tensor(positive_weight)
        self.scores = MetricCollection([BinaryRecall(), BinarySpecificity()])

    def train_step(self, batch):
        inputs, targets = batch
        logits = self.model(inputs).squeeze(1)
        return {
            "loss": binary_cross_entropy_with_logits(
                logits, targets, pos_weight=self.positive_weight
            )
        }

    def test_step(self, batch):
        self.scores.update(self.model(batch[0]).squeeze(1), batch[1].int())
        return self.train_step(batch)

    def metric_on_epoch_end(self):
        if self.mode == "train":
            return {}
        # Of the whole set, not a mean over batches.
        recall, specificity = self.scores.compute().values()
        self.scores.reset()
        return {"balanced_accuracy": (recall + specificity) / 2, "recall": recall}


def network():
    return nn.Sequential(
        nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)
    )


def load():
    """The set to train on has one malignant tumour for 14 benign ones; those to
    validate and test have all of them."""
    inputs, is_benign = load_breast_cancer(return_X_y=True)
    rest, test = train_test_split(
        range(len(inputs)), test_size=0.3, stratify=is_benign, random_state=0
    )
    train, valid = train_test_split(
        rest, test_size=0.3, stratify=is_benign[rest], random_state=0
    )
    left_out = [each for each in train if not is_benign[each]][12:]
    train = [each for each in train if each not in left_out]
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    return [
        (inputs[part].astype("float32"), 1 - is_benign[part].astype("float32"))
        for part in (train, valid, test)
    ]


def fit(sets, positive_weight, folder):
    train, valid, test = (TensorDataset(*map(torch.tensor, each)) for each in sets)
    optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
    options = {
        "monitor": "balanced_accuracy",
        "positive_weight": positive_weight,
        "patience": 10,
        "seed": 0,
    }
    options |= {
        "save_path": folder,
        "jsonl_path": f"{folder}/log.jsonl",
        "optimizer": optimizer,
    }
    trainer = Tumours.add_on(EarlyStoppingAddon, StateManagerAddon, JSONLLoggerAddon)(
        network, "cpu", **options
    )
    trainer.run(60, DataLoader(train, 16, shuffle=True), DataLoader(valid, 200))
    trainer.restore_best()
    return trainer.evaluate(DataLoader(test, 200))


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    (x, y), _, (test_x, test_y) = sets = load()
    for weight in (1.0, 14.0):
        found = fit(sets, weight, f"runs/weight-{weight:g}")
        print(
            f"weight {weight:g}: balanced accuracy {found['balanced_accuracy']:.3f}, "
            f"recall {found['recall']:.3f}"
        )
    guessed = LogisticRegression(max_iter=1000).fit(x, y).predict(test_x)
    print(
        "logistic regression: balanced accuracy "
        f"{balanced_accuracy_score(test_y, guessed):.3f}"
    )


if __name__ == "__main__":
    main()
