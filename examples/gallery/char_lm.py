"""A recurrent language model of characters learns the text of Python's help pages in
one pass over it, and passes its hidden state from batch to batch.

The text is read in sixteen places at once: a row of a batch continues the same row of
the batch before. An optimizer step accumulates two batches, its rate follows a cosine,
and the score is in bits per character.
"""

import math
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import nn

from zae import Every, Trainer
from zae.addons import GradientAccumulationAddon, JSONLLoggerAddon
from zae.schedulers import cosine

ROWS, LENGTH, WIDTH = 16, 96, 128


class Network(nn.Module):
    def __init__(self, n_characters):
        super().__init__()
        self.embed, self.gru = (
            nn.Embedding(n_characters, 64),
            nn.GRU(64, WIDTH, batch_first=True),
        )
        self.head = nn.Linear(WIDTH, n_characters)

    def forward(self, characters, hidden):
        outputs, hidden = self.gru(self.embed(characters), hidden)
        return self.head(outputs), hidden


class LanguageModel(Trainer):
    def on_epoch_begin(self):
        super().on_epoch_begin()
        self.hidden = torch.zeros(1, ROWS, WIDTH)

    def train_step(self, rows):
        loss, hidden = self.loss_of(rows, self.hidden)
        self.hidden = hidden.detach()  # Saved in a checkpoint; gradients end here.
        return {"loss": loss, "bits": loss / math.log(2)}

    def on_validation_begin(self):
        super().on_validation_begin()
        self.held_out = torch.zeros(1, ROWS, WIDTH)

    def test_step(self, rows):
        loss, self.held_out = self.loss_of(rows, self.held_out)
        return {"loss": loss, "bits": loss / math.log(2)}

    def loss_of(self, rows, hidden):
        logits, hidden = self.model(rows[:, :-1], hidden)
        targets = rows[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets), hidden


def batches(text):
    """Cut a text into rows, and these into batches that overlap by a character."""
    length = len(text) // ROWS
    rows = text[: ROWS * length].view(ROWS, length)
    return [
        rows[:, start : start + LENGTH + 1]
        for start in range(0, length - LENGTH, LENGTH)
    ]


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
    train, valid, test = map(batches, parts)
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
