"""Digits on two processes, which end with the weights of one process that is given
batches of twice the size.

The batch size is that of each process, and each sample counts once. `examples/ddp.py`
is for torchrun as well.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from zae import Trainer
from zae.addons import JSONLLoggerAddon, MultiGPUAddon


class Digits(Trainer):
    def train_step(self, batch):
        images, labels = batch
        return {"loss": nn.functional.cross_entropy(self.model(images), labels)}

    def test_step(self, batch):
        images, labels = batch
        logits = self.model(images)
        loss, right = (
            nn.functional.cross_entropy(logits, labels),
            logits.argmax(1) == labels,
        )
        return {"loss": loss, "accuracy": right.float().mean()}

    def on_run_begin(self):
        super().on_run_begin()
        if self.is_main and self.world_size > 1:
            print(f"world size {self.world_size}", flush=True)


def network():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(Task, devices, batch_size, folder):  # noqa: N803
    """Train; the batch size is that of each process, so a step has 32 samples for each
    of them."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    sets = random_split(data, [1137, 300, 360], torch.Generator().manual_seed(0))
    train, valid, test = (
        DataLoader(each, batch_size, shuffle=each is sets[0]) for each in sets
    )
    trainer = Task(
        # The other process makes its own model and optimizer, of the same seed.
        network,
        devices,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        seed=0,
        jsonl_path=f"runs/{folder}.jsonl",
    )
    trainer.run(10, train, valid)
    return trainer, trainer.evaluate(test)


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    count = torch.cuda.device_count()
    devices = (
        [f"cuda:{index}" for index in range(count)] if count > 1 else ["cpu", "cpu"]
    )
    two, metrics = train(
        Digits.add_on(MultiGPUAddon, JSONLLoggerAddon), devices, 32, "two"
    )
    print(f"test accuracy {metrics['accuracy']:.4f}")
    one, metrics = train(
        Digits.add_on(JSONLLoggerAddon), devices[0], 32 * len(devices), "one"
    )
    both = zip(one.model.parameters(), two.model.parameters())
    furthest = max((a.cpu() - b.cpu()).abs().max().item() for a, b in both)
    print(
        f"one process: accuracy {metrics['accuracy']:.4f}, and no weight is further "
        f"away than {furthest:.0e}"
    )


if __name__ == "__main__":
    main()
