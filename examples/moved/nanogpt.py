"""Train a GPT of characters on random crops, with accumulation, a warm-up and a cosine:
the loop of nanoGPT's train.py, written anew, by hand and with zae."""

import argparse
import math
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from zae import Trainer
from zae.addons import GradientAccumulationAddon, StateManagerAddon

STEPS, ACCUMULATION, LENGTH, WIDTH = 60, 2, 32, 64


class Crops:
    """Batches of random crops of a text, without an end."""

    def __init__(self, text, seed):
        self.text, self.stream = text, torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            last = len(self.text) - LENGTH
            starts = torch.randint(last, (8,), generator=self.stream)
            rows = torch.stack([self.text[at : at + LENGTH + 1] for at in starts])
            yield rows[:, :-1], rows[:, 1:]


def make_text():
    text = str(argparse.__doc__) * 4
    letters = sorted({*text})
    return torch.tensor([letters.index(letter) for letter in text]), len(letters)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.words = nn.Embedding(count, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, count)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))


def make_model(count):
    torch.manual_seed(1337)
    return GPT(count)


def make_optimizer(model):
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def factor(step):
    if step < 10:
        return (step + 1) / 11
    share = (step - 10) / (STEPS - 10)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * share))


def loss_of(model, batch):
    tokens, targets = batch
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def by_hand():
    text, count = make_text()
    model = make_model(count)
    optimizer = make_optimizer(model)
    crops = iter(Crops(text, seed=0))
    held_out = [batch for batch, _ in zip(Crops(text, seed=1), range(5))]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factor(step)
        for _ in range(ACCUMULATION):
            loss = loss_of(model, next(crops)) / ACCUMULATION
            loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 20 == 0:
            model.eval()
            with torch.no_grad():
                losses = [loss_of(model, batch) for batch in held_out]
            print(f"step {step}: valid loss {torch.stack(losses).mean():.4f}")
            model.train()
    return model


class NanoGpt(Trainer):
    def train_step(self, batch):
        return {"loss": loss_of(self.model, batch)}

    test_step = train_step


def with_zae(folder):
    text, count = make_text()
    model = make_model(count)
    optimizer = make_optimizer(model)
    held_out = [batch for batch, _ in zip(Crops(text, seed=1), range(5))]
    trainer = NanoGpt.add_on(GradientAccumulationAddon, StateManagerAddon)(
        model,
        "cpu",
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, factor),
        scheduler_step_on_batch=True,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_clip=1.0,
        save_path=folder,
        save_every=5,
        resume="auto",
    )
    trainer.run(
        None,
        Crops(text, seed=0),
        held_out,
        max_steps=STEPS,
        steps_per_epoch=STEPS,
        valid_every=20,
    )
    return model


if __name__ == "__main__":
    torch.save(with_zae(sys.argv[1]).state_dict(), sys.argv[2])
