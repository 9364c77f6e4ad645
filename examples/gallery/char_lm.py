"""A recurrent language model of characters learns the text of Python's help pages in
one pass over it.

An optimizer step accumulates two batches, its rate follows a cosine, and the score is
in bits per character.
"""

import math
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Every, Trainer
from zae.addons import GradientAccumulationAddon, JSONLLoggerAddon
from zae.schedulers import cosine

LENGTH, WIDTH = 96, 128


class Network(nn.Module):
    def __init__(self, n_characters):
        super().__init__()
        self.embed, self.gru = (
            nn.Embedding(n_characters, 64),
            nn.GRU(64, WIDTH, batch_first=True),
        )
        self.head = nn.Linear(WIDTH, n_characters)

    def forward(self, characters):
        return self.head(self.gru(self.embed(characters))[0])


class LanguageModel(Trainer):
    def train_step(self, batch):
        (rows,) = batch
        logits = self.model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        return {"loss": loss, "bits": loss / math.log(2)}

    test_step = train_step


def bigram_bits(train, test, n):
    """The baseline: how often a character follows another one, with one added to each
    count."""
    counts = torch.ones(n, n).index_put(
        (train[:-1], train[1:]), torch.tensor(1.0), accumulate=True
    )
    return (
        -(counts / counts.sum(1, keepdim=True))
        .log2()[test[:-1], test[1:]]
        .mean()
        .item()
    )


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    text = "".join(topics[name] for name in sorted(topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    parts = torch.tensor([alphabet[each] for each in text]).tensor_split(
        [len(text) * 8 // 10, len(text) * 9 // 10]
    )
    rows = [
        TensorDataset(
            part[: len(part) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        )
        for part in parts
    ]
    train, valid, test = (
        DataLoader(each, 16, shuffle=each is rows[0]) for each in rows
    )
    trainer = LanguageModel.add_on(GradientAccumulationAddon, JSONLLoggerAddon)(
        lambda: Network(len(alphabet)),
        "cpu",
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        scheduler=cosine(warmup=0.1),
        seed=0,
        gradient_clip=1.0,
        gradient_accumulation_steps=2,
        jsonl_path="runs/char_lm.jsonl",
        log_every=10,
    )
    trainer.run(1, train, valid, valid_every=Every(steps=30))
    bits = trainer.evaluate(test)["bits"]
    print(f"{len(text)} characters, {len(alphabet)} of them distinct")
    print(
        f"test: {bits:.3f} bits per character; bigrams: "
        f"{bigram_bits(parts[0], parts[2], len(alphabet)):.3f}"
    )


if __name__ == "__main__":
    main()
