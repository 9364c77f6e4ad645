"""A character-level transformer on the text of Python's help pages, in shards on two ranks.

python examples/fsdp.py
torchrun --nproc_per_node 2 examples/fsdp.py
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import FSDPAddon

LENGTH, WIDTH = 64, 64
TEXT = "".join(topics[name] for name in sorted(topics))[:60_000]
CHARACTERS = sorted(set(TEXT))


class Transformer(nn.Module):
    """Predict the next character; each layer is a block that is gathered when it computes."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x.flatten(0, 1))


class Characters(Trainer):
    def train_step(self, batch):
        (tokens,) = batch
        return {"loss": nn.functional.cross_entropy(self.model(tokens[:, :-1]), tokens[:, 1:].flatten())}

    test_step = train_step


def main():
    numbers = torch.tensor([CHARACTERS.index(each) for each in TEXT])
    rows = numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    train, test = TensorDataset(rows[:-150]), TensorDataset(rows[-150:])
    count = torch.cuda.device_count()
    devices = [f"cuda:{index}" for index in range(count)] if count > 1 else ["cpu", "cpu"]
    trainer = Characters.add_on(FSDPAddon)(Transformer, devices, optimizer=torch.optim.AdamW, gradient_clip=1.0, seed=0)
    metrics = trainer.run(3, DataLoader(train, 16, shuffle=True), DataLoader(test, 32))
    if trainer.is_main:
        print(f"validation loss {metrics['valid_metrics_history'][-1]['valid_loss']:.3f}")


if __name__ == "__main__":
    main()
