"""An add-on of your own: adaptive gradient clipping (Brock et al. 2021), where a large
learning rate needs it."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import AddOnBase, Trainer
from zae.addons import AMPAddon


class AdaptiveClipAddon(AddOnBase):
    """Clip each gradient to a fraction of the norm of its own weights.

    Parameters
    ----------
    clip_ratio : float
        The largest norm of a gradient, in units of the norm of its weights; 0 does not
        clip.
    """

    layer = "loop"

    def __init__(self, *args, clip_ratio: float = 0.0, **kwargs):
        super().__init__(*args, **kwargs)  # Store the options, and do nothing else.
        self.clip_ratio = clip_ratio

    def clip(self):
        super().clip()
        for weight in self.parameters:
            if self.clip_ratio and weight.grad is not None:
                limit = self.clip_ratio * weight.detach().norm().clamp(min=1e-3)
                weight.grad.mul_(
                    (limit / weight.grad.norm().clamp(min=1e-12)).clamp(max=1.0)
                )


class Digits(Trainer):
    def train_step(self, batch):
        images, labels = batch
        logits = self.model(images)
        return {
            "loss": F.cross_entropy(logits, labels),
            "accuracy": (logits.argmax(1) == labels).float().mean(),
        }

    test_step = train_step


def train(clip_ratio):
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    )
    train_set, test_set = torch.utils.data.random_split(data, [0.8, 0.2])
    model = nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    trainer = Digits.add_on(AdaptiveClipAddon, AMPAddon)(
        model, optimizer=optimizer, seed=0, precision="auto", clip_ratio=clip_ratio
    )
    trainer.run(10, DataLoader(train_set, batch_size=64, shuffle=True))
    return trainer.evaluate(DataLoader(test_set, batch_size=256))["accuracy"]


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    for clip_ratio in (0.0, 0.01):
        print(
            f"learning rate 3, clip_ratio {clip_ratio}: test accuracy "
            f"{train(clip_ratio):.3f}"
        )


if __name__ == "__main__":
    main()
