"""A character-level transformer on long sequences, each divided over two devices, with the losses of one device.

python examples/long_sequences.py
"""

from functools import partial
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import ContextParallelAddon

LENGTH, WIDTH, HEADS = 512, 64, 4
TEXT = "".join(topics[name] for name in sorted(topics))[: 121 * (LENGTH + 1)]
CHARACTERS = sorted(set(TEXT))


class Transformer(nn.Module):
    """Two layers of causal attention; return the loss of each position, so that a device has the logits of its part."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.ins, self.outs = (nn.ModuleList(nn.Linear(WIDTH, n * WIDTH) for _ in range(2)) for n in (3, 1))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, tokens, targets, positions):
        x = self.embed(tokens) + self.place(positions)
        for into, out, mlp in zip(self.ins, self.outs, self.mlps):
            parts = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in into(self.norm(x)).chunk(3, -1))
            x = x + out(functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
            x = x + mlp(self.norm(x))
        return functional.cross_entropy(self.head(x).transpose(1, 2), targets, reduction="none")


class Characters(Trainer):
    def train_step(self, batch):
        (tokens,) = batch
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
        return {"loss": self.model(tokens[:, :-1], tokens[:, 1:], positions).mean()}

    test_step = train_step


if __name__ == "__main__":
    rows = torch.tensor([CHARACTERS.index(each) for each in TEXT]).view(-1, LENGTH + 1)
    two = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
    for devices, add_ons in ((two, [ContextParallelAddon]), (two[0], [])):
        options = {"context_inputs": ["tokens", "targets", "positions"]} if add_ons else {}
        trainer = Characters.add_on(*add_ons)(
            *(Transformer, devices), optimizer=partial(torch.optim.AdamW, lr=3e-3), gradient_clip=1.0, seed=0, **options
        )
        losses = trainer.run(2, DataLoader(TensorDataset(rows), 8, shuffle=True))["train_metrics_history"]
        print(f"{len(trainer.devices)} device(s): loss", *(f"{each['train_loss']:.4f}" for each in losses), flush=True)
