"""One body and two heads learn which digit an image shows and how much ink it was drawn
with.

Each image is scaled to mean 0 and variance 1 first, so that the ink has to be read from
the shape of the strokes.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from zae import Trainer
from zae.addons import EMAAddon, JSONLLoggerAddon
from zae.schedulers import cosine


class MultiTask(Trainer):
    # An option of this task, beside those of the add-ons.
    def __init__(self, *args, task_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.task_weights = task_weights

    def train_step(self, batch):
        images, digits, ink = batch
        features = self.model["body"](images)
        logits, guess = (
            self.model["digit"](features),
            self.model["ink"](features).squeeze(1),
        )
        losses = {
            "digit": nn.functional.cross_entropy(logits, digits),
            "ink": nn.functional.mse_loss(guess, ink),
        }
        loss = sum(self.task_weights[task] * losses[task] for task in losses)
        accuracy = (logits.argmax(1) == digits).float().mean()
        return {
            "loss": loss,
            "digit_loss": losses["digit"],
            "ink_loss": losses["ink"],
            "accuracy": accuracy,
        }

    test_step = train_step


def network():
    convolutions = (
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.GELU(),
    )
    body = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *convolutions,
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.GELU(),
    )
    return nn.ModuleDict(
        {"body": body, "digit": nn.Linear(128, 10), "ink": nn.Linear(128, 1)}
    )


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    pixels, digits = map(torch.tensor, load_digits(return_X_y=True))
    ink = pixels.float().mean(1)
    images = (
        (pixels - pixels.mean(1, keepdim=True)) / pixels.std(1, keepdim=True)
    ).float()
    data = TensorDataset(images, digits, (ink - ink.mean()) / ink.std())
    sets = random_split(data, [1100, 300, 397], torch.Generator().manual_seed(0))
    train, valid, test = (
        DataLoader(each, 64, shuffle=each is sets[0]) for each in sets
    )
    trainer = MultiTask.add_on(EMAAddon, JSONLLoggerAddon)(
        network,
        "cpu",
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        scheduler=cosine(warmup=0.1),
        seed=0,
        task_weights={"digit": 1.0, "ink": 3.0},
        decay=0.98,
        jsonl_path="runs/multitask.jsonl",
    )
    trainer.run(25, train, valid)
    metrics = trainer.evaluate(test)
    # The baselines have one task each.
    (x, y, z), (tx, ty, tz) = data[sets[0].indices], data[sets[2].indices]
    by_class, by_ink = LogisticRegression(max_iter=500).fit(x, y), Ridge(1.0).fit(x, z)
    print(
        f"digit: test accuracy {metrics['accuracy']:.3f}; logistic regression "
        f"{by_class.score(tx, ty):.3f}"
    )
    r2 = 1 - metrics["ink_loss"] / tz.var(correction=0).item()
    print(f"ink: test R2 {r2:.3f}; ridge regression {by_ink.score(tx, tz):.3f}")


if __name__ == "__main__":
    main()
