"""Train an LSTM whose state goes on from batch to batch, and divide its rate by four
where a validation is no better: the program of pytorch/examples/word_language_model,
written anew for the licence of Python, by hand and with zae."""

import math
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from zae import Trainer
from zae.addons import StateManagerAddon

EPOCHS, LENGTH = 6, 20


def make_batches():
    import site

    words = str(site.__doc__).split() * 12
    numbers = {word: index for index, word in enumerate(sorted({*words}))}
    tokens = torch.tensor([numbers[word] for word in words])
    columns = tokens[: len(tokens) // 8 * 8].view(8, -1).t().contiguous()
    pairs = [
        (columns[at : at + LENGTH], columns[at + 1 : at + LENGTH + 1])
        for at in range(0, len(columns) - LENGTH - 1, LENGTH)
    ]
    return pairs[:-4], pairs[-4:], len(numbers)


class Words(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.embed, self.drop = nn.Embedding(count, 64), nn.Dropout(0.2)
        self.lstm, self.head = nn.LSTM(64, 64, 2, dropout=0.2), nn.Linear(64, count)

    def forward(self, tokens, state):
        hidden, state = self.lstm(self.drop(self.embed(tokens)), state)
        return self.head(self.drop(hidden)).flatten(0, 1), state


def make_model(count):
    torch.manual_seed(1)
    return Words(count)


def first_state():
    return torch.zeros(2, 8, 64), torch.zeros(2, 8, 64)


def by_hand():
    train, held_out, count = make_batches()
    model = make_model(count)
    rate, best = 20.0, None
    for epoch in range(EPOCHS):
        model.train()
        state = first_state()
        for tokens, targets in train:
            model.zero_grad()
            scores, state = model(tokens, state)
            state = tuple(part.detach() for part in state)
            cross_entropy(scores, targets.flatten()).backward()
            clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(weight.grad, alpha=-rate)
        model.eval()
        state, total = first_state(), 0.0
        with torch.no_grad():
            for tokens, targets in held_out:
                scores, state = model(tokens, state)
                total += cross_entropy(scores, targets.flatten()).item()
        loss = total / len(held_out)
        print(f"epoch {epoch}: loss {loss:.4f}, perplexity {math.exp(loss):.2f}")
        if best is None or loss < best:
            best = loss
        else:
            rate /= 4.0
    return model


class LanguageModel(Trainer):
    lowest = math.inf

    def on_epoch_begin(self):
        super().on_epoch_begin()
        self.state = first_state()

    def on_validation_begin(self):
        super().on_validation_begin()
        self.state = first_state()

    def train_step(self, batch):
        tokens, targets = batch
        scores, state = self.model(tokens, self.state)
        self.state = tuple(part.detach() for part in state)
        return {"loss": cross_entropy(scores, targets.flatten())}

    test_step = train_step

    def on_validation_end(self, metrics):
        super().on_validation_end(metrics)
        if metrics["loss"] < self.lowest:
            self.lowest = metrics["loss"]
        else:
            self.optimizer.param_groups[0]["lr"] /= 4.0


def with_zae(folder):
    train, held_out, count = make_batches()
    model = make_model(count)
    trainer = LanguageModel.add_on(StateManagerAddon)(
        model,
        "cpu",
        optimizer=torch.optim.SGD(model.parameters(), lr=20.0),
        gradient_clip=0.25,
        save_path=folder,
        save_every=5,
        resume="auto",
    )
    trainer.run(EPOCHS, train, held_out)
    return model


if __name__ == "__main__":
    torch.save(with_zae(sys.argv[1]).state_dict(), sys.argv[2])
