"""A conditional GAN draws the digit that it is asked for: two optimizers, one loss for
each, and no manual mode.

A classifier that has seen only drawn digits has to read real ones, nearly as well as
one that has seen real ones.
"""

import torch
import torch.nn.functional as F
from matplotlib.image import imsave
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import EMAAddon, JSONLLoggerAddon


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(32 + 10, 256), nn.BatchNorm1d(256), nn.ReLU()),
            *(
                nn.Linear(256, 256),
                nn.BatchNorm1d(256),
                nn.ReLU(),
                nn.Linear(256, 64),
                nn.Sigmoid(),
            ),
        )
        self.critic = nn.Sequential(
            *(nn.Linear(64 + 10, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(
                nn.Linear(256, 256),
                nn.LeakyReLU(0.2),
                nn.Dropout(0.3),
                nn.Linear(256, 1),
            ),
        )

    def draw(self, labels):
        noise = torch.randn(len(labels), 32, device=labels.device)
        return self.generator(torch.cat([noise, F.one_hot(labels, 10)], dim=1))

    def judge(self, images, labels):
        return self.critic(torch.cat([images, F.one_hot(labels, 10)], dim=1))


class GanTask(Trainer):
    def train_step(self, batch):
        images, labels = batch
        drawn = self.model.draw(labels)
        real, fake = self.model.judge(images, labels), self.model.judge(drawn, labels)
        # Each loss is differentiated by the parameters of the optimizer of its name,
        # and by no others.
        critic = F.softplus(-real).mean() + F.softplus(fake).mean()
        return {"loss": {"critic": critic, "generator": F.softplus(-fake).mean()}}

    def test_step(self, batch):
        return {"images": self.model.draw(batch)}


def main():
    # In models this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, targets = (
        torch.tensor(pixels / 16, dtype=torch.float32),
        torch.tensor(labels),
    )
    train, held_out = slice(0, 1300), slice(1300, None)
    loader = DataLoader(
        TensorDataset(images[train], targets[train]), batch_size=50, shuffle=True
    )
    model = Gan()
    parts = {"critic": model.critic, "generator": model.generator}
    optimizers = {
        name: torch.optim.Adam(parts[name].parameters(), lr=5e-4, betas=(0.5, 0.99))
        for name in parts
    }
    # It draws with the average of its weights.
    options = {"seed": 0, "decay": 0.99, "jsonl_path": "runs/gan.jsonl"}
    trainer = GanTask.add_on(EMAAddon, JSONLLoggerAddon)(
        model, "cpu", optimizer=optimizers, **options
    )
    metrics = trainer.run(40, loader)
    asked = torch.arange(2000) % 10
    drawn = torch.cat([out["images"] for out in trainer.inference(asked.split(500))])
    reader = LogisticRegression(max_iter=500)
    print(f"{metrics['step']} steps of {len(optimizers)} optimizers")
    for name, x, y in (
        ("real", images[train], targets[train]),
        ("drawn", drawn, asked),
    ):
        accuracy = reader.fit(x.numpy(), y.numpy()).score(
            images[held_out].numpy(), targets[held_out].numpy()
        )
        print(
            f"a classifier trained on {name} digits reads {accuracy:.3f} of the "
            "held-out real ones"
        )
    sheet = (
        F.pad(drawn[:100].view(10, 10, 8, 8), (1, 1, 1, 1))
        .transpose(1, 2)
        .reshape(100, 100)
    )
    imsave("runs/gan.png", sheet.kron(torch.ones(4, 4)).numpy(), cmap="gray_r")
    print("100 drawn digits are in runs/gan.png")


if __name__ == "__main__":
    main()
