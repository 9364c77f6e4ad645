"""A character-level transformer on the text of Python's help pages: sharded on two
ranks, resumed on one and on three.

python examples/fsdp.py
"""

from __future__ import annotations

from functools import partial
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import FSDPAddon, StateManagerAddon

LENGTH, WIDTH = 64, 64
TEXT = "".join(topics[name] for name in sorted(topics))[:60_000]
CHARACTERS = sorted(set(TEXT))


class Transformer(nn.Module):
    """Predict the next character; each layer is a block that is gathered when it
    computes."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = (
            nn.Embedding(len(CHARACTERS), WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device
        )
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x.flatten(0, 1))


class Characters(Trainer):
    def train_step(self, batch):
        (tokens,) = batch
        return {
            "loss": nn.functional.cross_entropy(
                self.model(tokens[:, :-1]), tokens[:, 1:].flatten()
            )
        }

    test_step = train_step


def train(n_ranks, n_epoch, **options):
    """Train until this epoch, on so many GPUs if they are there; a step has 48 rows,
    whatever the number of ranks."""
    numbers = torch.tensor([CHARACTERS.index(each) for each in TEXT])
    rows = numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    data, test = TensorDataset(rows[:-150]), TensorDataset(rows[-150:])
    has_gpus = torch.cuda.device_count() >= n_ranks
    trainer = Characters.add_on(FSDPAddon, StateManagerAddon)(
        Transformer,
        [f"cuda:{index}" for index in range(n_ranks)]
        if has_gpus
        else ["cpu"] * n_ranks,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        gradient_clip=1.0,
        seed=0,
        save_path="runs/fsdp",
        save_format="sharded",
        **options,
    )
    metrics = trainer.run(
        n_epoch, DataLoader(data, 48 // n_ranks, shuffle=True), DataLoader(test, 48)
    )
    loss = metrics["valid_metrics_history"][-1]["valid_loss"]
    print(
        f"epoch {n_epoch} on {n_ranks} ranks: validation loss {loss:.3f}, saved in "
        f"{trainer.last_path}",
        flush=True,
    )


if __name__ == "__main__":
    train(2, 1, overwrite=True)
    train(1, 2, resume=True, reshard=True)
    train(3, 3, resume=True, reshard=True)
